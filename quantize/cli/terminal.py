"""The commands `check` and `profile`, and what all commands share. Heavy libraries are imported inside."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from qdqbench.quantize.machine.secrets import hide_credentials

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunFolder = Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]


def plain(text: str) -> str:
    """Text without markup, and with nothing in it that a terminal would obey."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text))


def print_json(value: Any) -> None:
    """Strict JSON on stdout."""
    import json

    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def console() -> Any:
    """Rich console on stdout."""
    from rich.console import Console

    return Console()


def command_line() -> str:
    """What was typed, as a shell takes it, without the passwords in URLs."""
    import shlex

    return shlex.join(["qdqbench", *(hide_credentials(word) for word in sys.argv[1:])])
