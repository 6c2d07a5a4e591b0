"""Divergence of answers from FP32's, by sample, and what commands make of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.eval.metrics.compare import compare_with_divergence, divergence
from qdqbench.quantize.tasks.task import GLUE
from qdqbench.quantize.utils.errors import CheckFailed

SST2, STSB = GLUE["sst2"], GLUE["stsb"]
ROWS = st.integers(0, 2**16).map(lambda seed: np.random.default_rng(seed).normal(0, 2, (20, 2)))


@given(ROWS, ROWS, st.floats(-5, 5))
def test_divergence_of_classes_is_kl(first, second, shift):
    # softmax does not see a shift
    assert divergence(SST2, first, first + shift, None) == pytest.approx(0, abs=1e-9)
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (first, second))
    expected = (p * np.log(p / q)).sum(axis=1)
    assert divergence(SST2, first, second, None) == pytest.approx(expected, abs=1e-9)


@given(ROWS, st.floats(0.01, 3))
def test_divergence_of_scores_is_relative_to_their_spread(rows, offset):
    scores = rows[:, :1]
    expected = np.full(20, offset**2 / scores.var())
    assert (divergence(STSB, scores, scores, None) == 0).all()
    assert divergence(STSB, scores, scores + offset, None) == pytest.approx(expected)
    assert divergence(STSB, 10 * scores, 10 * (scores + offset), None) == pytest.approx(expected)


def test_a_choice_takes_the_mean_and_refuses_constant_scores():
    random = np.random.default_rng(0)
    labels, scores = random.normal(size=30).astype(np.float32), random.normal(size=(30, 1)).astype(np.float32)
    other = scores + random.normal(size=(30, 1)).astype(np.float32)
    found, each = compare_with_divergence(STSB, scores, other, labels, seed=0)
    assert (each == divergence(STSB, scores, other, labels)).all()
    assert found.divergence == each.mean()
    with pytest.raises(CheckFailed, match="the same output for every sample"):
        compare_with_divergence(STSB, np.ones_like(scores), other, labels, seed=0)
