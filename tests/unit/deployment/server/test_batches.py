"""Batches: of similar length, in shapes that the warm-up met, with each answer for its row."""

import asyncio
import functools
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.deployment.server.batches import (
    Batcher,
    Metrics,
    Model,
    _prepare_totals,
    list_rows,
    pad_to_shape,
    warm_up,
)
from qdqbench.quantize.engine.cuda.runtime import _MOST_GRAPHS, choose_bucket

from ....support.fake_served import PAD, Engine
from ....support.http_client import finished

SIZES = [(16, 32), (64, 12), (128, 1)]


def test_batches_have_powers_of_two_of_rows_and_the_most_of_their_bucket():
    assert list_rows(32) == [1, 2, 4, 8, 16, 32]
    assert list_rows(12) == [1, 2, 4, 8, 12]
    assert list_rows(1) == [1]


@given(st.sampled_from(SIZES), st.data())
def test_every_batch_gets_the_smallest_shape_that_was_warmed_up(size, data):
    length = data.draw(st.integers(1, size[0]))
    longest, most = next(size for size in SIZES if length <= size[0])
    rows = data.draw(st.integers(1, most))
    ids = np.arange(1, 1 + rows * length).reshape(rows, length)
    made = pad_to_shape({"input_ids": ids, "attention_mask": np.ones_like(ids)}, SIZES, pad_id=0)
    shape = made["input_ids"].shape
    assert shape[1] == longest
    assert shape[0] in list_rows(most)
    assert shape[0] < 2 * rows or shape[0] == most
    assert (made["input_ids"][:rows, :length] == ids).all()
    assert (made["attention_mask"][:rows, length:] == 0).all()
    assert (made["attention_mask"].sum(1) == length).all()  # copies of rows are whole, none is empty


PACKED_SIZES = [(16, 8), (32, 32), (64, 12), (100, 4)]


@functools.cache
def met_keys():
    """What an engine that packs tokens captures graphs for in the warm-up."""
    met = set()

    def run(batch):
        return np.zeros((len(batch["attention_mask"]), 2))

    run.prepare = lambda total, rows, longest: met.add((choose_bucket(total), rows, longest))
    warm_up(run, PACKED_SIZES, 60.0)
    return met


@given(st.sampled_from([1, 2, 3, 4]), st.data())
def test_packed_batches_meet_no_new_number_of_tokens(place, data):
    (before, _), (longest, most) = [(0, 0), *PACKED_SIZES][place - 1 : place + 1]
    lengths = data.draw(st.lists(st.integers(before + 1, longest), min_size=1, max_size=most))
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    made = pad_to_shape({"input_ids": mask, "attention_mask": mask}, PACKED_SIZES, pad_id=0)["attention_mask"]
    key = choose_bucket(int(made.sum())), len(made), 1 << int(made.sum(axis=1).max() - 1).bit_length()
    assert key in met_keys()
    assert len(met_keys()) < 200  # graphs are few enough to be kept


def test_graphs_of_large_batches_are_all_kept():
    met, sizes = set(), [(1 << power, 128) for power in range(4, 10)]
    _prepare_totals(lambda total, rows, longest: met.add((choose_bucket(total), rows, longest)), sizes)
    exact = len(sizes) * len(list_rows(128))  # whole shapes, which the warm-up runs before
    assert 500 < len(met) + exact < _MOST_GRAPHS


class Recorded(Engine):
    """An engine that keeps the shapes of its batches."""

    def __call__(self, batch):
        shapes.append(batch["input_ids"].shape)
        return super().__call__(batch)


shapes = []


def work(main, sizes=((16, 4), (64, 2)), max_wait_s=0.0, **engine):
    """The shapes that a batcher runs while a coroutine uses it."""

    async def whole():
        options = {"pad_id": PAD, "max_wait_s": max_wait_s, "timeout_s": 9.0, "metrics": Metrics()}
        batcher = Batcher("engine", Model(Recorded(**engine), sizes, 0.0), give_up=print, **options)
        working = asyncio.create_task(batcher.work())
        await main(batcher)
        working.cancel()

    shapes.clear()
    finished(whole())
    return [*shapes]


def row(number, length):
    ids = np.full(length, 15)
    ids[: len(str(number))] = [int(digit) for digit in str(number)]
    return ids, np.zeros_like(ids)


async def answered(batcher, *rows):
    return [float(answer[0]) for answer in await batcher.answer([row(*each) for each in rows])]


def test_batches_have_rows_of_similar_length_and_answers_are_those_of_their_rows():
    async def main(batcher):
        lengths = (5, 40, 7, 16, 3, 64, 2, 17)
        assert await answered(batcher, *enumerate(lengths, 11)) == [*range(11, 19)]
        found = await asyncio.gather(*(answered(batcher, (number, 8 + number % 50)) for number in range(300)))
        assert found == [[number] for number in range(300)]

    first = work(main)[:4]
    assert first[:2] == [(4, 16), (2, 64)]  # the bucket whose first row waits longest
    assert sorted(first[2:]) == [(1, 64), (2, 16)] or sorted(first[2:]) == [(1, 16), (1, 64)]


def test_a_row_waits_for_others_only_so_long_and_a_full_batch_not_at_all():
    async def main(batcher):
        start = time.monotonic()
        first = asyncio.create_task(answered(batcher, (1, 5)))
        await asyncio.sleep(0.01)
        assert await answered(batcher, (2, 6)) == [2]
        assert await first == [1]
        assert time.monotonic() - start < 0.2
        assert await answered(batcher, (3, 7)) == [3]
        assert time.monotonic() - start > 0.2

    assert work(main, sizes=[(16, 2)], max_wait_s=0.2) == [(2, 16), (1, 16)]


def test_rows_that_nobody_awaits_any_longer_are_not_run():
    async def main(batcher):
        busy = asyncio.create_task(answered(batcher, (1, 5)))
        await asyncio.sleep(0.02)
        late = asyncio.create_task(answered(batcher, (2, 5), (3, 5)))
        await asyncio.sleep(0.02)
        late.cancel()
        assert await answered(batcher, (4, 5)) == [4]
        assert await busy == [1]

    assert work(main, per_batch=0.1) == [(1, 16), (1, 16)]
