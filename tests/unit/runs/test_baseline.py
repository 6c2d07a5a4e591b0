from types import SimpleNamespace

import numpy as np
import pytest

from qdqbench.eval.runs.gate import find_label_order, judge_baseline
from qdqbench.quantize.tasks.metrics import Baseline, find_baseline, reads_its_input
from qdqbench.quantize.tasks.task import get_task


def test_the_best_constant_answer_by_the_metric_of_the_task():
    labels = np.array([1] * 7 + [0] * 3)
    logits = np.zeros((10, 2), dtype=np.float32)
    assert find_baseline(get_task("sst2"), logits, labels) == Baseline(1, 0.7)
    found = find_baseline(get_task("mrpc"), logits, labels)  # F1 of class 1
    assert found.answer == 1
    assert found.value == pytest.approx(2 * 7 / (7 + 10))
    scores = np.arange(10, dtype=np.float32)
    assert find_baseline(get_task("stsb"), logits[:, :1], scores) == Baseline(None, 0.0)


@pytest.mark.parametrize(("value", "reads"), [(0.1, False), (0.52, None), (0.9, True)])
def test_inverted_labels_are_below_and_random_weights_at_the_majority(value, reads):
    assert reads_its_input(value, 0.017, Baseline(1, 0.51)) is reads


RIGHT = np.array([0, 1, 2] * 40)


def test_no_order_mends_a_model_that_does_not_know_the_task():
    guessed = np.random.default_rng(0).integers(0, 3, len(RIGHT))
    task = get_task("mnli")
    assert find_label_order(task, np.eye(3, dtype=np.float32)[guessed], RIGHT, Baseline(0, 1 / 3), 0.04) == ""
    scores = RIGHT.astype(np.float32)
    assert find_label_order(get_task("stsb"), -scores[:, None], scores, Baseline(None, 0.0), 0.1) == ""


@pytest.mark.parametrize(
    ("texts", "rows", "state"),
    [(96, 96, "failed"), (1, 96, "inconclusive"), (1, 1, "inconclusive"), (4, 96, "inconclusive")],
)
def test_rows_of_few_texts_do_not_say_that_a_model_knows_nothing(texts, rows, state, tmp_path):
    """All answers are wrong, and a wrong answer to one text repeated is one wrong answer."""
    drawn = np.random.default_rng(0).uniform(1, 2, texts)[np.arange(rows) % texts]
    logits = np.stack([drawn, -drawn], axis=1).astype(np.float32)
    logits[1::2] *= 1 + 1e-6  # of another batch
    (tmp_path / "logits").mkdir()
    labels = np.ones(rows, np.int64)
    np.savez(tmp_path / "logits" / "fp32.npz", **{"validation.logits": logits, "validation.labels": labels})
    session = SimpleNamespace(
        config=SimpleNamespace(task=get_task("sst2")), folder=tmp_path, gold={"validation": labels}
    )
    row = SimpleNamespace(metrics={"accuracy": 0.0}, stderr={"accuracy": 0.0}, n=rows)
    assert judge_baseline(session, row).state == state
