"""`qdqbench compare-calibration` on a tiny model: its files, what it refuses; no validation row chooses."""

import json

import numpy as np
import pytest

from qdqbench.eval.metrics.compare import compare
from qdqbench.eval.selection import calibration_comparison
from qdqbench.eval.selection.calibration_comparison import CalibrationComparison
from qdqbench.eval.selection.trials.results import DRAW
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.utils.errors import CheckFailed

from .tiny import EVAL_ROWS, TRAIN_ROWS, fine, listing, refused, rows, write_split

FILES = [
    *("methods.html", "methods.json", "methods.md"),
    *("methods.trials.fp32.npz", "methods.trials.jsonl", "recipe.yaml"),
]
ATTENTION = "bert-int8-attention"
NARROW = ("--method", "max", "--method", "percentile/99.9", "--smoothing", "none")


def read_methods(folder):
    return CalibrationComparison.model_validate_json((folder / "methods.json").read_text())


def lasting(found):
    """What does not depend on when and where it was measured."""
    kept = json.loads(found.model_dump_json(exclude={"created", "command", "timings"}))
    for row in kept["rows"]:
        del row["trial"]["seconds"]
        row["trial"]["calibration"].pop("seconds")
    return kept


def test_every_row_is_measured_and_the_best_is_written(qdqbench, sst2, recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, path = tmp_path / "out", recipe("bert-int8-ffn")
    done = fine(qdqbench("compare-calibration", path, *sst2.options, "--out", out, "--samples", 96))
    assert listing(out) == FILES
    found = read_methods(out)
    assert not [row.trial.failure for row in found.rows if row.trial.failure]
    assert [row.is_given for row in found.rows] == [True] + [False] * (len(found.rows) - 1)
    assert {row.section.smoothing for row in found.rows} == {"none", 0.65, "gain"}
    assert {row.section.weights_method for row in found.rows} == {"max", "mse"}
    assert {row.section.bias_correction for row in found.rows} == {False, True}
    assert {row.section.outlier_channel_splitting for row in found.rows} == {0, 64}
    best = max(row.trial.scores["draw"].sqnr_db for row in found.rows)
    assert found.best.trial.scores["draw"].sqnr_db == best > 0
    below = [best - row.trial.scores["draw"].sqnr_db for row in found.rows]
    assert [row.below_best_db for row in found.rows] == pytest.approx(below)
    assert (found.data["samples"], found.data["calibration"]) == (96, 64)
    assert found.data["evaluation"] == {"validation": EVAL_ROWS}
    assert found.metric == "accuracy"
    chosen = load_recipe(str(out / "recipe.yaml"))
    assert chosen.name == "bert-int8-ffn-calibrated"
    for key in ("method", "smoothing", "weights_method", "bias_correction"):
        assert getattr(chosen.calibration, key) == getattr(found.best.section, key)
    own = load_recipe(str(path))
    assert chosen.model_copy(update={"name": own.name, "calibration": own.calibration}) == own
    for text in ("best", "the recipe", "entropy", "Validation is the judge", "recipe.yaml"):
        assert text in done.out


def test_biases_that_an_engine_folds_are_not_corrected(qdqbench, sst2, recipe, tmp_path, monkeypatch):
    """As in `run`: k and v with one weight scale have no bias behind their GEMM."""
    seen, real = [], ptq.correct_biases
    monkeypatch.setattr(
        ptq, "correct_biases", lambda model, names, data: seen.append(names) or real(model, names, data)
    )
    path = recipe("bert-int8-attention", bias_correction=True)
    path.write_text(path.read_text().replace("weights: int8/per-channel", "weights: int8/per-tensor"))
    options = (path, *sst2.options, "--out")
    assert qdqbench("compare-calibration", *options, tmp_path / "a", "--samples", 64, *NARROW).code == 0
    assert qdqbench("run", *options, tmp_path / "b", "--until", "quantize").code == 0
    assert seen[0] == seen[-1]
    assert not [name for name in seen[0] if name.endswith((".key", ".value"))]


@pytest.mark.long
def test_rows_are_those_of_a_run(qdqbench, sst2, recipe, tmp_path):
    """The fake-quant stage of `run` on the same recipe answers as the row, but for rounding flips."""
    path = recipe(ATTENTION, smoothing=0.5, bias_correction=True, method="percentile/99.99")
    options = (path, *sst2.options, "--out")
    assert qdqbench("compare-calibration", *options, tmp_path / "a", "--samples", 64, *NARROW).code == 0
    for stage in ("baseline", "fake_quant"):
        assert qdqbench("run", *options, tmp_path / "b", "--until", stage).code == 0
    logits = {name: np.load(tmp_path / "b" / "logits" / f"{name}.npz") for name in ("fp32", "fake_quant")}
    labels = logits["fp32"]["validation.labels"]
    pair = [logits[name]["validation.logits"] for name in ("fp32", "fake_quant")]
    expected = compare(get_task("sst2"), *pair, labels, seed=0)
    given = read_methods(tmp_path / "a").given
    section = given.section
    assert (section.method, section.smoothing, section.bias_correction) == ("percentile/99.99", 0.5, True)
    found = given.trial.scores["validation"]
    assert found.mean_abs_logit_diff == pytest.approx(expected.mean_abs_logit_diff, rel=0.05)
    assert found.delta["accuracy"] == pytest.approx(expected.delta["accuracy"], abs=2.5 / EVAL_ROWS)


def test_the_choice_sees_no_validation_row(qdqbench, sst2, recipe, tmp_path):
    """Other validation data: the same SQNR and the same choice; and a second run is equal."""
    path, data = recipe(ATTENTION), tmp_path / "data"
    write_split(data / "sst2" / "train.parquet", rows("sst2", TRAIN_ROWS, 0))
    write_split(data / "sst2" / "validation.parquet", rows("sst2", 32, 5))
    found = []
    for name, source in (("a", sst2.data), ("b", data), ("c", sst2.data)):
        options = ("--model", sst2.model, "--task", "sst2", "--data", source, "--out", tmp_path / name)
        assert qdqbench("compare-calibration", path, *options, "--samples", 64, *NARROW).code == 0
        found.append(read_methods(tmp_path / name))
    first, other, again = found
    assert lasting(first) == lasting(again)
    assert first.fp32 != other.fp32
    for ours, theirs in zip(first.rows, other.rows, strict=True):
        assert ours.trial.scores["draw"] == theirs.trial.scores["draw"]
    assert [row.best for row in first.rows] == [row.best for row in other.rows]


@pytest.mark.long
def test_both_splits_of_mnli(qdqbench, given, recipe, tmp_path):
    mnli, out = given("mnli"), tmp_path / "out"
    few = ("--samples", 64, "--limit", 48, *NARROW)
    fine(qdqbench("compare-calibration", recipe(ATTENTION), *mnli.options, "--out", out, *few))
    found = read_methods(out)
    assert list(found.fp32) == ["validation_matched", "validation_mismatched"]
    assert {scores.n for scores in found.fp32.values()} == {48}
    assert all(list(row.trial.scores) == [DRAW, *found.fp32] for row in found.rows)
    assert any("the first 48" in note for note in found.notes)


def test_a_row_that_fails_does_not_stop_the_others(qdqbench, sst2, recipe, tmp_path, monkeypatch):
    honest = calibration_comparison.apply_methods

    def broken(shared, plan):
        if any(scaling.method == "max" for scaling in plan.scaling.values()):
            raise CheckFailed("amax is a joke")
        return honest(shared, plan)

    monkeypatch.setattr(calibration_comparison, "apply_methods", broken)
    out = tmp_path / "out"
    options = (recipe(ATTENTION), *sst2.options, "--samples", 64, "--out")
    done = fine(qdqbench("compare-calibration", *options, out, *NARROW))
    assert "amax is a joke" in done.out
    found = read_methods(out)
    assert [row.trial.failure and row.trial.failure.text for row in found.rows] == ["amax is a joke", None]
    assert found.best.section.method == "percentile/99.9"
    nothing = tmp_path / "nothing"
    none = ("--method", "max", "--smoothing", "none")
    refused(qdqbench("compare-calibration", *options, nothing, *none), "amax is a joke")
    assert listing(nothing) == ["methods.trials.fp32.npz", "methods.trials.jsonl"]
