"""Stages are scored from their files of logits."""

import numpy as np
import pytest

from qdqbench.eval.metrics.compare import compare
from qdqbench.eval.metrics.logits import read_logits, score
from qdqbench.quantize.tasks.task import GLUE
from qdqbench.quantize.utils.errors import UserError


@pytest.fixture
def written(tmp_path):
    """Logits of two stages on both splits of MNLI, 60 and 90 samples, and a function that reads them."""
    random = np.random.default_rng(0)
    counts = {"validation_matched": 60, "validation_mismatched": 90}
    labels = {f"{name}.labels": random.integers(0, 3, count) for name, count in counts.items()}
    for stage in ("fp32", "engine"):
        drawn = {name: random.normal(size=(n, 3)).astype(np.float32) for name, n in counts.items()}
        logits = {f"{name}.logits": values for name, values in drawn.items()}
        np.savez(tmp_path / f"{stage}.npz", **logits, **labels)
    return tmp_path


def test_n_is_of_the_split_that_the_metric_is_of(written):
    task = GLUE["mnli"]
    engine, fp32 = np.load(written / "engine.npz"), np.load(written / "fp32.npz")
    gold = {name: engine[f"{name}.labels"] for name in ("validation_matched", "validation_mismatched")}
    found = score(task, written / "engine.npz", written / "fp32.npz", gold, 0, "")
    versus = {
        name: compare(task, fp32[f"{name}.logits"], engine[f"{name}.logits"], labels, seed=0)
        for name, labels in gold.items()
    }
    right = engine["validation_matched.logits"].argmax(1) == engine["validation_matched.labels"]
    assert found.metrics["accuracy"] == right.mean()
    assert (found.n, found.vs_fp32.n) == (60, 60)
    assert [*found.metrics] == [*found.stderr] == ["accuracy", "accuracy_mm"]
    for field in ("delta", "delta_stderr"):
        pairs = zip(("accuracy", "accuracy_mm"), versus.values(), strict=True)
        assert getattr(found.vs_fp32, field) == {name: getattr(c, field)["accuracy"] for name, c in pairs}
    assert found.vs_fp32.disagreements == versus["validation_matched"].disagreements


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"a.logits": np.array(["abc"]), "a.labels": np.zeros(1)}, "no logits and labels of a"),
        ({"a.logits": np.zeros((2, 2))}, "no logits and labels of a"),
        ({"a.logits": np.array(1.0), "a.labels": np.zeros(1)}, "no logits and labels of a"),
        ({"other": np.zeros(3)}, "no answers"),
        (None, "cannot read"),
    ],
)
def test_answers_that_are_none_are_one_sentence(arrays, said, tmp_path):
    path = tmp_path / "run" / "logits" / "fp32.npz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PK")
    if arrays is not None:
        np.savez(path, **arrays)
    with pytest.raises(UserError, match=rf"{said}.*; run `qdqbench evaluate .*run` again"):
        read_logits(path)
