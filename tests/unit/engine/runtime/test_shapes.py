"""Which profile takes a shape, what a batch is padded to, the best lengths, and whether they fit the data."""

from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.engine import profiles as shapes
from qdqbench.quantize.engine.runtime.runners import EngineRunner
from qdqbench.quantize.utils.errors import CheckFailed

ONE = shapes.Profile((1, 16), (32, 128), (128, 128))
SMALL, LARGE = shapes.Profile((1, 16), (1, 32), (8, 128)), shapes.Profile((8, 16), (64, 128), (128, 128))


@st.composite
def bounds(draw):
    axes = [sorted(draw(st.lists(st.integers(1, 200), min_size=3, max_size=3))) for _ in range(2)]
    return shapes.Profile(*zip(*axes, strict=True))


@pytest.mark.parametrize(
    ("batch", "length", "index"),
    [(1, 16, 0), (8, 128, 1), (8, 20, 0), (9, 16, 1), (128, 128, 1), (7, 128, 0)],
)
def test_the_nearest_opt_of_those_that_hold_the_shape(batch, length, index):
    assert shapes.choose_profile([SMALL, LARGE], batch, length) == index


@pytest.mark.parametrize("size", [(129, 16), (1, 129), (1, 15)])
def test_no_profile_holds_it(size):
    with pytest.raises(CheckFailed, match=r"no profile .* it takes .*8, 64, 128.*engine.shapes"):
        shapes.choose_profile([SMALL, LARGE], *size)


def test_a_gap_between_profiles_is_padded_over():
    single, many = shapes.Profile((1, 16), (1, 64), (1, 100)), shapes.Profile((8, 16), (32, 128), (64, 128))
    assert shapes.fit_batch([single, many], 3, 20, 16) == (1, 8, 32)
    assert shapes.fit_batch([single, many], 1, 97, 16) == (0, 1, 100)  # not beyond the profile
    assert shapes.fit_batch([single, many], 1, 101, 16) == (1, 8, 112)
    with pytest.raises(CheckFailed, match=r"takes batch 65, length 16; it takes .*build again"):
        shapes.fit_batch([single, many], 65, 16)


@given(
    st.lists(bounds(), min_size=1, max_size=3), st.integers(1, 200), st.integers(1, 200), st.integers(1, 32)
)
def test_a_fitted_shape_is_held_and_not_smaller(profiles, batch, length, step):
    if not any(batch <= p.max[0] and length <= p.max[1] for p in profiles):
        with pytest.raises(CheckFailed):
            shapes.fit_batch(profiles, batch, length, step)
        return
    index, rows, columns = shapes.fit_batch(profiles, batch, length, step)
    low, high = profiles[index].min, profiles[index].max
    assert max(batch, low[0]) == rows <= high[0]
    assert max(length, low[1]) <= columns <= high[1]
    assert columns in (high[1], low[1]) or columns % step == 0
    assert columns < max(length + step, low[1] + 1)
    assert shapes.choose_profile(profiles, rows, columns) in range(len(profiles))


@pytest.mark.parametrize(
    ("shape", "made"),
    [
        ((-1, -1), (2, 5)),
        ((-1, -1, 64), (2, 5, 64)),
        ((-1, 1, 1, -1), (2, 1, 1, 5)),
        ((-1, 1, -1, -1), (2, 1, 5, 5)),
        ((1, -1), (1, 5)),
        ((4, 8), (4, 8)),
    ],
)
def test_dynamic_axes_are_batch_and_length(shape, made):
    assert shapes.fill_shape(shape, (2, 5)) == made


@pytest.mark.parametrize(
    ("profiles", "lengths", "batch", "parts"),
    [
        ([ONE], [100] * 320, 32, None),
        ([ONE], [60] * 320, 32, None),  # run at 64, a factor of 2
        ([ONE], [20] * 320, 32, ["length 32 where it is tuned for 128", "--shapes auto"]),
        ([ONE], [100] * 320, 8, ["batch 8 where it is tuned for 32", "{batch: [1, 8, 128], length"]),
        ([ONE], [100] * 320, 500, ["batch 128 where it is tuned for 32"]),
        ([ONE], [100] * 10, 500, ["batch 10 where"]),
        # a tenth of the batches is long, and the 90th percentile sees them
        ([ONE], [20] * 288 + [120] * 64, 32, None),
        ([ONE], [20] * 1000 + [120] * 32, 32, ["length 32 where", "the longest has 120 tokens"]),
        ([SMALL, LARGE], [128] * 320, 64, None),
        ([SMALL, LARGE], [30] * 320, 1, None),
        ([SMALL, LARGE], [30] * 320, 64, ["length 32", "in place of that profile"]),
        ([ONE], [], 32, None),
        ([ONE], [500] * 32, 32, None),  # running it says that no profile takes it
    ],
)
def test_data_far_from_opt_is_noted_with_figures_and_better_shapes(profiles, lengths, batch, parts):
    notes = shapes.note_distant_data(profiles, np.array(lengths, dtype=np.int64), batch)
    assert len(notes) == (parts is not None)
    assert all(part in notes[0] for part in parts or ())


@given(bounds(), st.lists(st.integers(1, 200), min_size=1, max_size=50), st.integers(1, 60))
def test_the_shapes_of_the_note_draw_no_further_note(profile, lengths, batch):
    notes = shapes.note_distant_data([profile], np.array(lengths, dtype=np.int64), batch)
    if notes:
        inside = notes[0].partition("engine.shapes {batch: [")[2].partition("}")[0]
        first, second = inside.split("], length: [")
        low, opt, high = zip(
            *([int(n) for n in part.rstrip("]").split(", ")] for part in (first, second)), strict=True
        )
        assert (low, high) == (profile.min, profile.max)
        assert shapes.note_distant_data([shapes.Profile(low, opt, high)], np.array(lengths), batch) == []


@pytest.mark.parametrize(("pads", "shape"), [(True, (4, 16)), (False, (2, 5))])
def test_a_batch_runs_as_it_is_where_nothing_is_padded(pads, shape):
    seen = []

    def run(feeds):
        seen.append(feeds["input_ids"].shape)
        return {"logits": np.zeros((len(feeds["input_ids"]), 2))}

    profiles = [shapes.Profile((4, 16), (4, 16), (8, 32))]
    engine = SimpleNamespace(name="e", inputs=["input_ids"], outputs=["logits"], profiles=profiles, run=run)
    runner = EngineRunner(engine, pad_id=0)
    runner.pads = pads
    assert runner({"input_ids": np.ones((2, 5), dtype=np.int64)}).shape == (2, 2)
    assert seen == [shape]


LENGTHS = st.lists(st.integers(1, 75), min_size=1, max_size=40)


def padded(lengths, edges):
    """Tokens where every row is padded to the first edge that holds it."""
    return sum(min(edge for edge in edges if edge >= length) for length in lengths)


def best(lengths, count, longest):
    """The fewest tokens with at most so many edges, by trying all."""
    *inner, last = sorted({min(-(-length // shapes.STEP) * shapes.STEP, longest) for length in lengths})
    sets = (tried for more in range(count) for tried in combinations(inner, more))
    return min(padded(lengths, [*tried, last]) for tried in sets)


@given(LENGTHS, st.integers(1, 5), st.sampled_from([75, 80, 128]))
def test_no_other_edges_pad_less(lengths, most, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "LEAST_SAVING", 0.0)
        edges = shapes.choose_edges(np.array(lengths), longest, most)
    assert edges == sorted(set(edges))
    assert len(edges) <= most
    assert all(edge % shapes.STEP == 0 or edge == longest for edge in edges)
    assert padded(lengths, edges) == best(lengths, most, longest)


@given(LENGTHS)
def test_each_bucket_more_saves_enough(lengths):
    edges = shapes.choose_edges(np.array(lengths), 128)
    costs = [best(lengths, count, 128) for count in range(1, len(edges) + 2)]
    assert padded(lengths, edges) == costs[len(edges) - 1]
    for fewer, more in pairwise(costs[: len(edges)]):
        assert more <= (1 - shapes.LEAST_SAVING) * fewer
    assert len(edges) == shapes.MOST or costs[-1] > (1 - shapes.LEAST_SAVING) * costs[-2]


@given(LENGTHS, st.sampled_from([75, 128]), st.integers(1, 300))
def test_every_row_runs_at_its_edge_which_is_what_kernels_are_chosen_for(lengths, longest, batch):
    edges = shapes.choose_edges(np.array(lengths), longest)
    buckets = shapes.bucket_profiles(edges, longest, batch)
    for length in range(1, longest + 1):
        index, _, to = shapes.fit_batch(buckets, batch, length, shapes.LENGTH_STEP)
        if length <= edges[-1]:
            assert to == edges[index] == min(edge for edge in edges if edge >= length)
            assert buckets[index].opt == (batch, to)
        else:
            assert length <= to <= longest
    notes = shapes.note_distant_data(buckets, np.array(lengths), batch)
    assert not any("length" in note.partition("(")[0] for note in notes)
