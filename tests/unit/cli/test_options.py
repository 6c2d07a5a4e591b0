"""Options in dataclasses: the command line shows the fields, the command gets the objects."""

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from qdqbench.cli.options import Subject, grouped
from qdqbench.quantize.utils.errors import UserError

got = []


@dataclass(frozen=True)
class Point:
    x: Annotated[int, typer.Option(min=1, help="To the right.")]
    names: Annotated[list[str] | None, typer.Option(help="Of it.")] = None


@grouped
def command(word: Annotated[str, typer.Argument()] = "none", *, point: Point, flag: bool = False) -> None:
    """What it does."""
    got.append((word, point, flag))


def invoke(*arguments):
    app = typer.Typer()
    app.command()(command)
    got.clear()
    return CliRunner().invoke(app, list(arguments))


def test_fields_become_options_in_their_place():
    assert [*inspect.signature(command).parameters] == ["word", "x", "names", "flag"]
    assert invoke("w", "--x", "3", "--names", "a", "--names", "b", "--flag").exit_code == 0
    assert got == [("w", Point(3, ["a", "b"]), True)]
    assert invoke("--x", "2").exit_code == 0
    assert got == [("none", Point(2), False)]
    shown = invoke("--help").stdout
    assert "To the right." in shown
    assert "What it does." in shown


def test_what_a_field_demands_is_held():
    assert "Missing option '--x'" in invoke().output
    assert invoke("--x", "0").exit_code == 2
    assert got == []


def test_a_subject_is_a_task_or_one_sentence():
    assert Subject().found_task().name == "embedded"
    assert Subject(model="m", task="sst2").found_task().name == "sst2"
    with pytest.raises(UserError, match="--model and --task belong together"):
        Subject(model="m").found_task()
