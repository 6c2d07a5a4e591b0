"""What all commands share. Heavy libraries are imported inside."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdqbench.quantize.utils.names import clean, hide_credentials

if TYPE_CHECKING:
    from pydantic import BaseModel

    from qdqbench.quantize.report.document import Report

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page of the findings to this file.")]
RunFolder = Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]


def plain(text: str) -> str:
    from rich.markup import escape

    return escape(clean(text))


def print_json(value: Any) -> None:
    import json

    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def console() -> Any:
    from rich.console import Console

    return Console(highlight=False)


def say(text: str) -> None:
    console().print(text, soft_wrap=True)


def show_json(found: "BaseModel") -> None:
    sys.stdout.write(found.model_dump_json(indent=2) + "\n")


def show(found: "BaseModel", json: bool, summary: Callable[[Any], Any], *lines: str) -> None:
    if json:
        show_json(found)
        return
    console().print(summary(found))
    for line in lines:
        say(plain(line))


def show_report(found: "BaseModel", json: bool, report: Callable[[Any], Any], *lines: str) -> None:
    from qdqbench.quantize.report.render import render_screen

    show(found, json, lambda each: render_screen(report(each)), *lines)


def show_found(found: "BaseModel | dict[str, Any]", json: bool, html: Path | None, report: "Report") -> None:
    """Print what a command found as JSON or for a terminal, and write its page where one is asked for."""
    from dataclasses import replace

    from qdqbench.quantize.report.render import render_html, render_screen
    from qdqbench.quantize.utils.files import write_text

    if html is not None:
        write_text(html, render_html(replace(report, page=replace(report.page, command=command_line()))))
    if json:
        print_json(found if isinstance(found, dict) else found.model_dump(mode="json"))
    else:
        console().print(render_screen(report))


def complain(sentence: str) -> None:
    """Print what stops a command: one line, on a terminal broken between words but in no `command`."""
    import re
    import shutil
    import textwrap

    text = f"qdqbench: {clean(sentence)}"
    if sys.stderr.isatty():
        whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", "\0"), text)
        width = shutil.get_terminal_size().columns
        lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(lines).replace("\0", " ")
    sys.stderr.write(f"{text}\n")


def command_line() -> str:
    import shlex

    return shlex.join(["qdqbench", *(hide_credentials(word) for word in sys.argv[1:])])
