"""Worker processes that crash, hang and fail: no answer is lost or of another text."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest

from qdqbench.quantize.core.errors import MissingDevice, UserError
from qdqbench.quantize.serve.buckets import Buckets
from qdqbench.quantize.serve.metrics import Metrics
from qdqbench.quantize.serve.pool import Pool, Unavailable, order_of, shared_cores

from ...support.fake_served import COMMAND, PAD, fake_served
from ...support.http_client import finished


def rows(*texts):
    return [(each.input_ids, each.token_type_ids) for each in fake_served().encoded({"text": [*texts]})]


@asynccontextmanager
async def started(workers=1, timeout=30.0, queue=64, command=COMMAND, **order):
    served = fake_served(**order)
    orders = [order_of(served.engine | {"warm": []}, []) for _ in range(workers)]
    buckets = Buckets(served.sizes(8), queue, 0.0)
    pool = Pool("engine", orders, buckets, pad_id=PAD, timeout=timeout, metrics=Metrics(), command=command)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def pids(pool):
    return [worker.process.pid for worker in pool._workers]


async def alive(pool, count):
    for _ in range(1000):
        if pool.alive == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{pool.alive} workers, not {count}")


def test_answers_are_those_of_their_texts_though_workers_are_killed(capsys):
    async def main():
        async with started(workers=2, per_batch=0.005) as pool:
            before = pids(pool)

            async def one(number):
                (answer,) = await pool.answers(rows(str(number)))
                assert answer.tolist() == [number]

            async def all_of_them():
                for start in range(0, 320, 32):
                    await asyncio.gather(*(one(7 * n) for n in range(start, start + 32)))

            asked = asyncio.create_task(all_of_them())
            await asyncio.sleep(0.03)
            os.kill(before[0], signal.SIGKILL)
            await asyncio.sleep(0.03)
            os.kill(before[1], signal.SIGKILL)
            await asked
            await alive(pool, 2)
            assert {*before}.isdisjoint(pids(pool))

    finished(main())
    assert capsys.readouterr().err.count("a worker of engine is replaced: it ended") == 2


def test_a_text_that_ends_workers_is_told_so_and_others_are_answered(capsys):
    async def main():
        async with started(timeout=30.0) as pool:
            with pytest.raises(Unavailable, match="3 workers ended without an answer"):
                await pool.answers(rows("crash"))
            assert [a.tolist() for a in await pool.answers(rows("12", "345"))] == [[12], [345]]
            with pytest.raises(Unavailable, match="3 workers ended"):
                await pool.answers(rows("fail"))

    finished(main())
    assert "the device is lost" in capsys.readouterr().err


def test_a_hung_worker_is_replaced_and_what_waits_too_long_is_told(capsys):
    async def main():
        async with started(timeout=0.3) as pool:
            (before,) = pids(pool)
            with pytest.raises(Unavailable, match=r"no answer within 0\.3 s"):
                await pool.answers(rows("hang"))
            await alive(pool, 0)
            await alive(pool, 1)
            assert [before] != pids(pool)
            assert [a.tolist() for a in await pool.answers(rows("9"))] == [[9]]

    finished(main())


def test_a_full_queue_says_when_to_come_again():
    async def main():
        async with started(per_batch=0.1, queue=8) as pool:
            asked = [asyncio.create_task(pool.answers(rows(str(n)))) for n in range(30)]
            done = await asyncio.gather(*asked, return_exceptions=True)
            refused = [each for each in done if isinstance(each, Unavailable)]
            assert 1 <= len(refused) < 30
            assert all(each.retry_after >= 1 for each in refused)
            kept = {n: each for n, each in enumerate(done) if not isinstance(each, Unavailable)}
            assert all(each[0].tolist() == [n] for n, each in kept.items())

    finished(main())


def test_a_worker_that_cannot_open_its_model_says_why():
    async def refusing(**options):
        async with started(**options):
            pass

    with pytest.raises(MissingDevice, match="there is no such device"):
        finished(refusing(refuses=True))
    with pytest.raises(UserError, match="did not start: it ended"):
        finished(refusing(command=("false",)))


def test_closing_leaves_nobody_waiting():
    async def main():
        async with started(per_batch=5.0) as pool:
            asked = [asyncio.create_task(pool.answers(rows(str(n)))) for n in range(20)]
            await asyncio.sleep(0.05)
        done = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 2)
        assert all(isinstance(each, Unavailable) for each in done)

    finished(main())


def test_workers_share_the_cores():
    assert shared_cores(1, [0, 1, 2]) == [[0, 1, 2]]
    assert shared_cores(2, [0, 1, 2]) == [[0, 2], [1]]
    assert shared_cores(3, [4]) == [[4], [4], [4]]
