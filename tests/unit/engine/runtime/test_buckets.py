"""Length buckets: the edges are the best there are, and profiles take every length."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.engine import profiles

LENGTHS = st.lists(st.integers(1, 75), min_size=1, max_size=40)


def padded(lengths, edges):
    """Tokens where every row is padded to the first edge that holds it."""
    return sum(min(edge for edge in edges if edge >= length) for length in lengths)


def best(lengths, count, longest):
    """The fewest tokens with at most so many edges, by trying all."""
    *inner, last = sorted({min(-(-length // profiles.STEP) * profiles.STEP, longest) for length in lengths})
    sets = (tried for more in range(count) for tried in combinations(inner, more))
    return min(padded(lengths, [*tried, last]) for tried in sets)


@given(LENGTHS, st.integers(1, 5), st.sampled_from([75, 80, 128]))
def test_no_other_edges_pad_less(lengths, most, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "LEAST_SAVING", 0.0)
        edges = profiles.choose_edges(np.array(lengths), longest, most)
    assert edges == sorted(set(edges))
    assert len(edges) <= most
    assert all(edge % profiles.STEP == 0 or edge == longest for edge in edges)
    assert padded(lengths, edges) == best(lengths, most, longest)


@given(LENGTHS)
def test_each_bucket_more_saves_enough(lengths):
    edges = profiles.choose_edges(np.array(lengths), 128)
    costs = [best(lengths, count, 128) for count in range(1, len(edges) + 2)]
    assert padded(lengths, edges) == costs[len(edges) - 1]
    for fewer, more in pairwise(costs[: len(edges)]):
        assert more <= (1 - profiles.LEAST_SAVING) * fewer
    assert len(edges) == profiles.MOST or costs[-1] > (1 - profiles.LEAST_SAVING) * costs[-2]


@given(LENGTHS, st.sampled_from([75, 128]), st.integers(1, 300))
def test_every_row_runs_at_its_edge_which_is_what_kernels_are_chosen_for(lengths, longest, batch):
    edges = profiles.choose_edges(np.array(lengths), longest)
    buckets = profiles.bucket_profiles(edges, longest, batch)
    for length in range(1, longest + 1):
        index, _, to = profiles.fit_batch(buckets, batch, length, profiles.LENGTH_STEP)
        if length <= edges[-1]:
            assert to == edges[index] == min(edge for edge in edges if edge >= length)
            assert buckets[index].opt == (batch, to)
        else:
            assert length <= to <= longest
    notes = profiles.note_distant_data(buckets, np.array(lengths), batch)
    assert not any("length" in note.partition("(")[0] for note in notes)
