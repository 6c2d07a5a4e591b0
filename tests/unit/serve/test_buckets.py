import asyncio
import time

import numpy as np
import pytest

from qdqbench.quantize.serve.buckets import Buckets, Full, Row
from qdqbench.quantize.serve.frames import SIZES, packed, unpacked

from ...support.http_client import finished


def row(length: int) -> Row:
    return Row(
        np.zeros(length, np.int64), np.zeros(length, np.int64), asyncio.get_running_loop().create_future()
    )


def lengths(rows):
    return [len(each.input_ids) for each in rows]


def test_batches_are_of_similar_length_and_no_larger_than_the_engine_takes():
    async def main():
        buckets = Buckets([(16, 4), (64, 2)], 100, 0)
        buckets.put([row(n) for n in (5, 40, 7, 16, 3, 64, 2, 17)])
        assert lengths(await buckets.take()) == [5, 7, 16, 3]  # the one that waits longest, and its like
        assert lengths(await buckets.take()) == [40, 64]
        assert sorted(lengths(await buckets.take()) + lengths(await buckets.take())) == [2, 17]
        assert len(buckets) == 0

    finished(main())


def test_the_first_row_waits_for_others_only_so_long_and_a_full_batch_not_at_all():
    async def main():
        buckets = Buckets([(16, 2)], 100, 0.05)
        start = time.monotonic()
        buckets.put([row(5)])
        asyncio.get_running_loop().call_later(0.01, buckets.put, [row(6)])
        assert lengths(await buckets.take()) == [5, 6]
        assert time.monotonic() - start < 0.05
        buckets.put([row(7)])
        assert lengths(await buckets.take()) == [7]
        assert time.monotonic() - start > 0.05

    finished(main())


def test_a_request_that_does_not_fit_leaves_nothing_and_rows_that_nobody_awaits_make_room():
    async def main():
        buckets = Buckets([(16, 2)], 3, 0)
        first = [row(1), row(2)]
        buckets.put(first)
        with pytest.raises(Full):
            buckets.put([row(3), row(4)])
        assert len(buckets) == 2
        first[1].answer.cancel()
        buckets.put([row(3), row(4)])
        assert lengths(await buckets.take()) == [1, 3]

    finished(main())


def test_rows_that_come_back_are_first_in_their_order():
    async def main():
        buckets = Buckets([(16, 8)], 100, 0)
        buckets.put([row(n) for n in (1, 2, 3)])
        taken = await buckets.take()
        buckets.put([row(4)])
        buckets.put_back(taken)
        assert lengths(await buckets.take()) == [1, 2, 3, 4]

    finished(main())


def test_a_message_is_read_as_it_was_written():
    arrays = {
        "a": np.arange(6, dtype=np.int64).reshape(2, 3),
        "b": np.float32([[0.5]]),
        "c": np.zeros((0, 4)),
    }
    data = packed({"id": 7, "text": "ü"}, arrays)
    first, behind = SIZES.unpack(data[: SIZES.size])
    head, found = unpacked(data[SIZES.size : SIZES.size + first], data[SIZES.size + first :])
    assert (head, behind) == ({"id": 7, "text": "ü"}, sum(array.nbytes for array in arrays.values()))
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
