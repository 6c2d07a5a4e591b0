"""The file of finished trials: what resumes, and what starts from scratch."""

import json
from pathlib import Path

import pytest

from qdqbench.eval.selection.trials.results import Trial, failure_of
from qdqbench.eval.selection.trials.store import RECIPE_FILE, Store, named_by, write_recipe
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError


def trial(seconds: float = 1.0) -> Trial:
    return Trial(recipe=None, origin="candidate", seconds=seconds)


def opened(path: Path, samples: int = 8) -> Store[Trial]:
    return Store(path, Trial, {"samples": samples})


def test_finished_trials_are_resumed(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    first = opened(path)
    assert first.resume_note is None
    first.add("a", trial(2.0))
    first.add("b", trial())
    again = opened(path)
    assert (again.is_stale, again.resumed, again.seconds) == (False, 2, 3.0)
    assert again.trials == first.trials
    assert again.resume_note == f"{path}: resuming after 2 finished trials"


@pytest.mark.parametrize(
    "tail",
    ['{"key": "c", "tri', '{"key": "c"}\n', "[]\n", '{"key": "c", "trial": {}}\n', "LINE"],
)
def test_torn_line_is_dropped(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "trials.jsonl"
    opened(path).add("a", trial())
    line = path.read_text().splitlines()[1]
    with path.open("a") as stream:
        stream.write(line.replace('"a"', '"c"') if tail == "LINE" else tail)  # whole, but without its end
    again = opened(path)
    assert [*again.trials] == ["a"]
    again.add("c", trial())
    assert [*opened(path).trials] == ["a", "c"]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 3


def test_other_settings_start_from_scratch(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    opened(path).add("a", trial())
    other = opened(path, samples=9)
    assert (other.is_stale, other.trials) == (True, {})
    assert "starting from scratch" in str(other.resume_note)
    assert opened(path).is_stale  # what was there is gone


def test_torn_header_is_an_empty_store(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text('{"setti')
    assert opened(path).trials == {}


def test_store_that_cannot_be_written(tmp_path: Path) -> None:
    store = opened(tmp_path / "trials.jsonl")
    store.path.unlink()
    store.path.mkdir()
    with pytest.raises(UserError, match="cannot write"):
        store.add("a", trial())


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (UserError("no data"), "input", True),
        (MissingDevice("no GPU"), "device", True),
        (CheckFailed("NaN"), "check", False),
        (RuntimeError("two\nlines"), "error", False),
    ],
)
def test_failures_are_data(error: Exception, code: str, retryable: bool) -> None:
    failure = failure_of(error)
    assert (failure.code, failure.is_retryable) == (code, retryable)
    assert "\n" not in failure.text


@pytest.mark.parametrize("name", ["bert-int8-linears", "bert-int8-attention-qat", "bert-fp16"])
def test_the_chosen_recipe_parses_back(name: str, tmp_path: Path) -> None:
    section = Calibration(method="percentile/99.99", smoothing=0.5, weights_method="mse")
    renamed = {"name": named_by(named_by(name, "calibrated"), "calibrated"), "calibration": section}
    recipe = load_recipe(name).model_copy(update=renamed)
    assert recipe.name == f"{name}-calibrated"  # not twice
    write_recipe(recipe, tmp_path)
    assert load_recipe(str(tmp_path / RECIPE_FILE)) == recipe
