import numpy as np
import pytest

from qdqbench.eval.gate.baseline import Baseline, baseline_of, reads_its_input
from qdqbench.quantize.tasks.task import get_task


def test_the_best_constant_answer_by_the_metric_of_the_task():
    labels = np.array([1] * 7 + [0] * 3)
    logits = np.zeros((10, 2), dtype=np.float32)
    assert baseline_of(get_task("sst2"), logits, labels) == Baseline(1, 0.7)
    found = baseline_of(get_task("mrpc"), logits, labels)  # F1 of class 1
    assert found.answer == 1
    assert found.value == pytest.approx(2 * 7 / (7 + 10))
    scores = np.arange(10, dtype=np.float32)
    assert baseline_of(get_task("stsb"), logits[:, :1], scores) == Baseline(None, 0.0)


@pytest.mark.parametrize(("value", "reads"), [(0.1, False), (0.52, None), (0.9, True)])
def test_inverted_labels_are_below_and_random_weights_at_the_majority(value, reads):
    assert reads_its_input(value, 0.017, Baseline(1, 0.51)) is reads
