"""Cosine and nearest neighbours: the definitions, by loops; ties; blocks; resamples."""

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from qdqbench.quantize.tasks.types import embedding
from qdqbench.quantize.tasks.types.embedding import cosines, overlap, unit, weighted_percentile


def nearest(vectors, count):
    """By the definition: the largest cosine, of equal ones the first."""
    similar = (unit(vectors.astype(np.float32)) @ unit(vectors.astype(np.float32)).T).round(6)
    found = []
    for row in range(len(vectors)):
        others = [other for other in range(len(vectors)) if other != row]
        found.append(set(sorted(others, key=lambda other: (-similar[row, other], other))[:count]))
    return found


small = st.integers(-2, 2).map(float)


@given(arrays.arrays(np.float32, (7, 3), elements=small), arrays.arrays(np.float32, (7, 3), elements=small))
def test_overlap_is_that_of_sorted_lists(a, b):
    wanted = [len(mine & other) / 3 for mine, other in zip(nearest(a, 3), nearest(b, 3), strict=True)]
    np.testing.assert_allclose(overlap(a, b, 3), wanted)


@pytest.mark.parametrize("block", [1, 7, 40, 1 << 20])
def test_blocks_change_nothing(monkeypatch, block):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(40, 8)).astype(np.float32)
    b = a + 0.4 * rng.normal(size=a.shape).astype(np.float32)
    whole = overlap(a, b)
    assert 0.3 < whole.mean() < 0.9
    monkeypatch.setattr(embedding, "BLOCK", block)
    np.testing.assert_array_equal(overlap(a, b), whole)


def test_neighbours_do_not_depend_on_length():
    a = np.random.default_rng(0).normal(size=(30, 8)).astype(np.float32)
    np.testing.assert_array_equal(overlap(a, a * np.linspace(0.5, 9, 30)[:, None]), 1)


def test_equal_texts_are_neighbours_in_their_order():
    a = np.ones((6, 2), dtype=np.float32)
    assert nearest(a, 2)[5] == {0, 1}
    b = a.copy()
    b[0] = [1, -1]  # now 1 and 2 are the first
    assert overlap(a, b, 2)[5] == 0.5


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_texts_have_fewer_neighbours(count):
    a = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)
    np.testing.assert_array_equal(overlap(a, a), np.ones(count))


def test_cosines():
    a = np.array([[1, 0], [1, 1], [0, 0], [0, 0], [3, 4]], dtype=np.float32)
    b = np.array([[2, 0], [0, 5], [0, 0], [1, 0], [-3, -4]], dtype=np.float32)
    np.testing.assert_allclose(cosines(a, b), [1, 0.5**0.5, 1, 0, -1])


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.floats(0.01, 0.99))
def test_a_percentile_of_resamples_is_that_of_repeated_samples(values, share):
    values = np.array(values, dtype=np.float64)
    weights = np.random.default_rng(len(values)).multinomial(
        len(values), np.full(len(values), 1 / len(values)), size=5
    )
    wanted = [np.quantile(np.repeat(values, counts), share, method="inverted_cdf") for counts in weights]
    np.testing.assert_array_equal(weighted_percentile(weights.astype(float), values, share), wanted)
