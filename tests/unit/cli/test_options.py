"""Options in models: the command line and Python show the fields, the function gets the checked object."""

import inspect
from typing import Annotated

import pytest
import typer
from pydantic import Field, PositiveInt
from typer.testing import CliRunner

import qdqbench
from qdqbench._options import AutoOptions, RunOptions, TaskOptions
from qdqbench.cli.options import take_typed
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.options import Duration, Options, parse_options, take_options

calls = []


class Point(Options):
    x: int = Field(default=1, ge=1, description="Distance to the right.")
    names: list[PositiveInt] | None = Field(default=None, description="Numbers of it.")
    fast: bool = Field(default=False, description="Without a way to switch it off.")
    wait: Duration = Field(default="30m", validate_default=True, description="Time, such as 90s.")


def move(*, word: str = "none", options: Point, flag: bool = False) -> None:
    """Move it."""
    calls.append((word, options, flag))


def typed():
    word = {"word": (Annotated[str, typer.Argument()], "none")}
    return take_typed(move, Point, word, {"flag": (bool, False)})


def invoke(*arguments):
    app = typer.Typer()
    app.command(help="Move it.")(typed())
    calls.clear()
    return CliRunner().invoke(app, list(arguments))


def test_fields_become_options_in_their_place():
    assert [*inspect.signature(typed()).parameters] == ["word", "x", "names", "fast", "wait", "flag"]
    assert invoke("w", "--x", "3", "--names", "1", "--names", "2", "--wait", "90s").exit_code == 0
    assert calls == [("w", Point(x=3, names=[1, 2], wait=90), False)]
    assert invoke("--fast").exit_code == 0
    assert calls == [("none", Point(fast=True, wait=1800), False)]
    shown = " ".join(invoke("--help").stdout.replace("│", " ").split())
    for text in ("Distance to the right", "Move it.", "30m"):
        assert text in shown
    assert "--no-fast" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--x", "0"), "equal to 1"), (("--names", "0"), "--names 0"), (("--wait", "x"), "90s")],
)
def test_what_a_field_demands_holds_on_the_command_line_and_in_python(arguments, message):
    done = invoke(*arguments)
    assert done.exit_code
    assert message in done.output + str(done.exception)
    assert calls == []
    name, value = arguments
    with pytest.raises(UserError, match=f"^{name.strip('-')}="):
        take_options(move)(**{name.strip("-"): [value] if name == "--names" else value})


def test_a_function_shows_its_options():
    assert "limit: Evaluate on this many samples" in inspect.getdoc(qdqbench.run)
    assert [*inspect.signature(qdqbench.run).parameters][:4] == ["recipe", "model", "task", "data"]
    with pytest.raises(TypeError, match=r"^run\(\) has no argument 'modle'; the nearest is 'model'$"):
        qdqbench.run(modle="m")
    with pytest.raises(TypeError, match=r"^bench\(\): too many positional"):
        qdqbench.bench("run", "more")
    with pytest.raises(UserError, match=r"^pooling=most: should be 'mean', 'cls' or 'last'"):
        qdqbench.auto("m", "sst2", pooling="most")


def test_a_subject_is_a_task_or_one_sentence():
    assert TaskOptions().find_task().name == "embedded"
    assert TaskOptions(model="m", task="sst2").find_task().name == "sst2"
    with pytest.raises(UserError, match="--model and --task belong together"):
        TaskOptions(model="m").find_task()
    for given in ({"metric": ["f1"]}, {"num_labels": 5}, {"label_column": "y"}, {"pooling": "mean"}):
        with pytest.raises(UserError, match="belongs to --model"):
            RunOptions(**given).find_task()


@pytest.mark.parametrize("fields", [{"calibration.samples": 64}, ["calibration.samples=64"]])
def test_any_field_of_a_recipe_can_be_set(fields):
    recipe = parse_options(AutoOptions, {"set": fields}).adapt(load_recipe("bert-int8-linears"))
    assert recipe.calibration.samples == 64
    fields = {"rules.0.type": "Linear", "qat.max_steps": 5, "gate.max_drop": 0.5}
    recipe = RunOptions(set=fields).adapt(load_recipe("bert-int8-attention-qat"))
    assert (recipe.qat.max_steps, recipe.gate.max_drop) == (5, 0.5)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("calibration.smaples=1", "unknown key 'calibration.smaples', did you mean 'samples'"),
        ("calibratoin.samples=1", "did you mean 'calibration'"),
        ("calibration.samples=many", "calibration.samples: "),
        ("rules.99.type=Linear", "--set rules.99.type: a recipe has no such path"),
        ("name.first=x", "--set name.first: a recipe has no such path"),
        ("calibration.samples", "set=.*: calibration.samples has no value"),
        ("gate.max_drop=[", "set=.*: no YAML value"),
    ],
)
def test_a_field_that_cannot_be_set_is_one_sentence(field, message):
    with pytest.raises(UserError, match=message):
        parse_options(RunOptions, {"set": [field]}).adapt(load_recipe("bert-int8-linears"))
