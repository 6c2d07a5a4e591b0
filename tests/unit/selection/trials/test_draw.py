"""The draw that choices are measured on."""

from types import SimpleNamespace

import pytest

from qdqbench.eval.selection.search.workspace import LEAST_SAMPLES, Workspace
from qdqbench.eval.selection.trials import store
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.tasks.task import GLUE
from qdqbench.quantize.utils.errors import UserError


@pytest.fixture
def session(tmp_path, monkeypatch):
    """One of a train split of 100 rows, whose texts are not tokenized; `calibration.samples` is 40."""
    rows = "".join(f"text {number},{number % 2}\n" for number in range(100))
    (tmp_path / "train.csv").write_text(f"sentence,label\n{rows}")
    monkeypatch.setattr(store, "encode", lambda split, *_: SimpleNamespace(split=split, truncated=0))
    found = SimpleNamespace(
        config=SimpleNamespace(task=GLUE["sst2"]),
        recipe=load_recipe("bert-int8-linears"),
        data_source=str(tmp_path),
        folder=tmp_path,
        tokenizer=None,
        notes=[],
        warnings=[],
    )
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
