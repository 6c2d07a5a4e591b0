import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.eval.metrics.answers import answered, differing
from qdqbench.quantize.tasks.task import get_task


@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=20))
def test_margin_is_the_distance_of_the_two_probabilities(rows):
    logits = np.array(rows, dtype=np.float32)
    found = answered(get_task("sst2"), logits, np.zeros(len(rows), dtype=np.int64), ["no", "yes"])
    assert found.margin == pytest.approx(np.tanh(np.abs(np.diff(logits.astype(np.float64))[:, 0]) / 2))
    assert [found.word(n) for n in range(len(rows))] == ["yes" if b > a else "no" for a, b in logits]


def test_answers_that_flipped():
    task, labels = get_task("sst2"), np.array([0, 1, 1])
    before = answered(task, np.array([[2, 1], [0, 1], [5, 1]], dtype=np.float32), labels, ["no", "yes"])
    after = answered(task, np.array([[1, 2], [0, 9], [5, 1]], dtype=np.float32), labels, ["no", "yes"])
    assert differing(before, after).tolist() == [0]
    assert before.right.tolist() == [True, True, False]


def test_scores_are_words_and_never_flip():
    task, labels = get_task("stsb"), np.array([1.0, 2.0], dtype=np.float32)
    before = answered(task, np.array([[1.25], [2]], dtype=np.float32), labels, ["LABEL_0"])
    after = answered(task, np.array([[3], [4]], dtype=np.float32), labels, ["LABEL_0"])
    assert (before.word(0), before.margin, before.right) == ("1.25", None, None)
    assert not len(differing(before, after))
