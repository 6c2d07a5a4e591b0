"""The answer of a command, printed as JSON or for a terminal."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from qdqbench.cli.terminal import command_line, console, plain, print_json, say
from qdqbench.quantize.report.document import Report
from qdqbench.quantize.report.render import render_html, render_screen
from qdqbench.quantize.utils.files import write_text


@dataclass
class Answer:
    found: Any  # a record or a dict, what --json prints
    shown: Any = None  # a report, text as it is, or what rich prints; None: only the lines
    lines: Sequence[str] = ()  # below it
    error: Exception | None = None  # raised after all is shown: the exit status is its

    def show(self, *, json: bool, html: Path | None = None) -> None:
        """Print it, and write a page of its report where one is asked for."""
        if html is not None and isinstance(self.shown, Report):
            page = replace(self.shown.page, command=command_line())
            write_text(html, render_html(replace(self.shown, page=page)))
        if json and isinstance(self.found, BaseModel):
            sys.stdout.write(self.found.model_dump_json(indent=2) + "\n")
        elif json:
            print_json(self.found)
        elif isinstance(self.shown, str):
            sys.stdout.write(self.shown)
        elif self.shown is not None:
            console().print(render_screen(self.shown) if isinstance(self.shown, Report) else self.shown)
        for line in () if json else self.lines:
            say(plain(line))
