"""The file of finished trials: what resumes, and what starts from scratch."""

import json
from types import SimpleNamespace

import pytest

from qdqbench.eval.selection.search.workspace import LEAST_SAMPLES, Workspace
from qdqbench.eval.selection.trials import store
from qdqbench.eval.selection.trials.results import Trial, failure_of
from qdqbench.eval.selection.trials.store import RECIPE_FILE, Store, named_by, write_recipe
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.tasks.data.load import load_split
from qdqbench.quantize.tasks.task import GLUE
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError


def trial(seconds=1.0):
    return Trial(recipe=None, origin="candidate", seconds=seconds)


def opened(path, samples=8):
    return Store(path, Trial, {"samples": samples})


def test_finished_trials_are_resumed(tmp_path):
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
    "tail", ['{"key": "c", "tri', '{"key": "c"}\n', "[]\n", '{"key": "c", "trial": {}}\n', "LINE"]
)
def test_torn_line_is_dropped(tmp_path, tail):
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


def test_other_settings_or_a_torn_header_start_from_scratch(tmp_path):
    path = tmp_path / "trials.jsonl"
    opened(path).add("a", trial())
    other = opened(path, samples=9)
    assert (other.is_stale, other.trials) == (True, {})
    assert "starting from scratch" in str(other.resume_note)
    assert opened(path).is_stale  # what was there is gone
    path.write_text('{"setti')
    assert opened(path).trials == {}


def test_store_that_cannot_be_written(tmp_path):
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
def test_failures_are_data(error, code, retryable):
    failure = failure_of(error)
    assert (failure.code, failure.is_retryable) == (code, retryable)
    assert "\n" not in failure.text


@pytest.mark.parametrize("name", ["bert-int8-linears", "bert-int8-attention-qat", "bert-fp16"])
def test_the_chosen_recipe_parses_back(name, tmp_path):
    section = Calibration(method="percentile/99.99", smoothing=0.5, weights_method="mse")
    renamed = {"name": named_by(named_by(name, "calibrated"), "calibrated"), "calibration": section}
    recipe = load_recipe(name).model_copy(update=renamed)
    assert recipe.name == f"{name}-calibrated"  # not twice
    write_recipe(recipe, tmp_path)
    assert load_recipe(str(tmp_path / RECIPE_FILE)) == recipe


@pytest.fixture
def session(tmp_path, monkeypatch):
    """One of a train split of 100 rows, whose texts are not tokenized; `calibration.samples` is 40."""
    rows = "".join(f"text {number},{number % 2}\n" for number in range(100))
    (tmp_path / "train.csv").write_text(f"sentence,label\n{rows}")
    monkeypatch.setattr(store, "encode", lambda split, *_: SimpleNamespace(split=split, truncated=0))
    about = {"data_source": str(tmp_path), "folder": tmp_path, "tokenizer": None, "notes": [], "warnings": []}
    config, recipe = SimpleNamespace(task=GLUE["sst2"]), load_recipe("bert-int8-linears")
    found = SimpleNamespace(config=config, recipe=recipe, **about)
    calibrate(found, samples=40, seed=3)
    return found


def calibrate(session, **changes):
    section = session.recipe.calibration.model_copy(update=changes)
    session.recipe = session.recipe.model_copy(update={"calibration": section})


def texts(split):
    return split.dataset["sentence"][:]


def test_search_and_sensitivity_draw_the_same_rows_beside_calibration(session):
    split, _ = store.draw_samples(session, 50)
    searched = Workspace(session, None, 50).trials.draw.split
    assert texts(split) == texts(searched)
    assert len({*texts(split)}) == 50
    calibrating = load_split(session.config.task, session.data_source, "train", limit=40, seed=3)
    assert {*texts(split)}.isdisjoint(texts(calibrating))
    longer = texts(store.draw_samples(session, 60)[0])
    assert longer[:50] == texts(split)
    assert session.notes == []


def test_fewer_rows_are_noted_and_too_few_refused(session):
    store.draw_samples(session, 61)
    assert session.notes == [
        "measured on 60 samples, not 61: split 'train' has 100 rows, and calibration takes 40"
    ]
    calibrate(session, samples=100 - LEAST_SAMPLES + 1)
    with pytest.raises(UserError, match=f"so {LEAST_SAMPLES - 1} are left to measure on"):
        Workspace(session, None, 64).trials.draw  # noqa: B018
    store.draw_samples(session, 64)
    calibrate(session, samples=100)
    with pytest.raises(UserError, match="so 0 are left to measure on"):
        store.draw_samples(session, 1)


def test_the_split_that_judges_is_refused(session):
    calibrate(session, split="validation")
    with pytest.raises(UserError, match="set calibration"):
        store.draw_samples(session, 10)
