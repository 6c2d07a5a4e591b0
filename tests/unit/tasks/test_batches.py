"""Rows of evaluation batches: each once, the longest first, buckets apart and shared out evenly."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.tasks.rows import sorted_rows

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=60).map(np.array)


@given(LENGTHS, st.integers(1, 20))
def test_without_edges_a_batch_is_as_long_as_its_longest_row(lengths, size):
    made = sorted_rows(lengths, size)
    assert sorted(np.concatenate([rows for _, rows in made])) == list(range(len(lengths)))
    assert [length for length, _ in made] == [lengths[rows].max() for _, rows in made]
    assert [len(rows) for _, rows in made[:-1]] == [size] * (len(made) - 1)
    assert (np.diff(lengths[np.concatenate([rows for _, rows in made])]) <= 0).all()


@given(LENGTHS, st.integers(1, 20), st.sets(st.integers(1, 63), max_size=4))
def test_no_batch_has_rows_of_two_buckets(lengths, size, inner):
    edges = [*sorted(inner), 64]
    made = sorted_rows(lengths, size, edges)
    assert sorted(np.concatenate([rows for _, rows in made])) == list(range(len(lengths)))
    for length, rows in made:
        assert {min(edge for edge in edges if edge >= own) for own in lengths[rows]} == {length}
    for edge in edges:
        counts = [len(rows) for length, rows in made if length == edge]
        assert not counts or (max(counts) <= size and max(counts) - min(counts) <= 1)
        assert len(counts) == -(-sum(counts) // size)
