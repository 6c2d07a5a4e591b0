"""What all commands share. Heavy libraries are imported inside."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from qdqbench.quantize.utils.names import clean, hide_credentials

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page of the findings to this file.")]


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
