"""Worker processes of one model: they take batches from its queue, and one that ends is replaced."""

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from qdqbench.quantize.core.arrays import Array, Float32, Int64
from qdqbench.quantize.core.errors import MissingDevice, QdqError, UserError
from qdqbench.quantize.kinds.encoded import pad
from qdqbench.quantize.serve.buckets import Buckets, Full, Row, shape_of, shaped
from qdqbench.quantize.serve.frames import SIZES, Head, packed, unpacked
from qdqbench.quantize.serve.metrics import Metrics

COMMAND = (sys.executable, "-m", "qdqbench.quantize.serve.worker")
TRIES = 3  # of a row, before the batches that it is in count as what ends workers
LOAD_S = 600.0  # that a worker may take to open its model
PAUSES = (0.1, 30.0)  # s, first and longest, before a worker that did not start is started again
MOST_RETRY_S = 60


class Unavailable(Exception):
    """No answer now; the caller may come again after `retry_after` seconds."""

    def __init__(self, why: str, retry_after: int = 1) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class _Lost(Exception):
    """A worker ended, or its engine failed."""


class _Worker:
    """One process, that answers one batch at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self._sent = process, 0

    async def ask(self, head: Head, arrays: Mapping[str, Array] | None = None) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(packed(head, arrays))
            await self.process.stdin.drain()
        except OSError as error:
            raise _Lost("it ended") from error

    async def told(self) -> tuple[Head, dict[str, Array]]:
        assert self.process.stdout is not None
        try:
            first, behind = SIZES.unpack(await self.process.stdout.readexactly(SIZES.size))
            head = await self.process.stdout.readexactly(first)
            return unpacked(head, await self.process.stdout.readexactly(behind))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise _Lost("it ended") from error

    async def run(self, batch: Mapping[str, Int64]) -> tuple[Float32, float]:
        """Answers of a batch, and the seconds that its engine took."""
        self._sent += 1
        await self.ask({"id": self._sent}, batch)
        head, arrays = await self.told()
        if "error" in head or head["id"] != self._sent:
            raise _Lost(head.get("error", "it answered something else"))
        return arrays["answers"], float(head["seconds"])

    async def end(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(
                ProcessLookupError
            ):  # its own `kill` would race with asyncio for its end
                os.kill(self.process.pid, signal.SIGKILL)
        await self.process.wait()


class Pool:
    """The workers of one model.

    Args:
        name: of the model, in metrics and messages.
        orders: for each worker, what it opens (`worker.open_model`).
        buckets: its queue.
        pad_id: token id of padding.
        timeout: s that a batch may take before its worker counts as hung.
        command: that starts a worker.
    """

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        orders: Sequence[Head],
        buckets: Buckets,
        *,
        pad_id: int,
        timeout: float,
        metrics: Metrics,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.name, self.alive = name, 0
        self._orders, self._buckets, self._command = orders, buckets, command
        self._pad_id, self._timeout, self._metrics = pad_id, timeout, metrics
        self._taking = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: set[_Worker] = set()
        self._running, self._rate = 0, 0.0  # rows; rows a second
        metrics.watch(name, lambda: len(buckets), lambda: self.alive)

    async def start(self) -> None:
        """Start all workers and wait until they are ready.

        Raises:
            QdqError: one cannot open its model.
        """
        started = await asyncio.gather(*map(self._start, self._orders), return_exceptions=True)
        for each in started:
            if isinstance(each, _Lost):
                raise UserError(f"a worker of {self.name} did not start: {each}; look at what it printed")
            if isinstance(each, BaseException):
                raise each
        for order, worker in zip(self._orders, started, strict=True):
            assert isinstance(worker, _Worker)
            self._tasks.append(asyncio.create_task(self._keep(order, worker)))

    @property
    def capacity(self) -> int:
        """Most rows that wait."""
        return self._buckets.capacity

    def require_room(self) -> None:
        """Say so before any work where not a row more can wait.

        Raises:
            Unavailable: the queue is full.
        """
        if not self._buckets.has_room(1):
            raise self.unavailable("the queue is full")

    async def answers(self, rows: Sequence[tuple[Int64, Int64]]) -> list[Float32]:
        """Answers of rows (input_ids, token_type_ids), in their order.

        Raises:
            Unavailable: the queue is full, or no worker could answer in time.
        """
        loop = asyncio.get_running_loop()
        queued = [Row(ids, types, loop.create_future()) for ids, types in rows]
        try:
            self._buckets.put(queued)
        except Full:
            raise self.unavailable("the queue is full") from None
        waited = asyncio.gather(*(row.answer for row in queued))
        try:
            return await asyncio.wait_for(waited, self._timeout)
        except asyncio.TimeoutError:
            raise self.unavailable(f"there was no answer within {self._timeout:g} s") from None
        finally:
            for row in queued:
                row.answer.cancel()  # nobody waits for the others where one failed

    def unavailable(self, why: str) -> Unavailable:
        """An error with the time after which what waits now may be done."""
        waiting = len(self._buckets) + self._running
        seconds = math.ceil(waiting / self._rate) if self._rate else 1
        return Unavailable(f"{why}; come again later", min(max(seconds, 1), MOST_RETRY_S))

    async def close(self) -> None:
        """End all workers; what still waits gets no answer."""
        open_tasks = {*self._tasks}
        while open_tasks:  # again, where `wait_for` swallowed it
            for task in open_tasks:
                task.cancel()
            _, open_tasks = await asyncio.wait(open_tasks, timeout=0.2)
        await asyncio.gather(*(worker.end() for worker in self._workers))
        self._buckets.drain(lambda: Unavailable("the server stops; come again later"))

    async def _start(self, order: Head) -> _Worker:
        pipe = asyncio.subprocess.PIPE
        worker = _Worker(await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe))
        self._workers.add(worker)
        try:
            await worker.ask(order)
            head, _ = await asyncio.wait_for(worker.told(), LOAD_S)
            if "error" in head:
                raise (MissingDevice if head["exit"] == MissingDevice.exit_code else UserError)(head["error"])
        except BaseException:
            await self._end(worker)
            raise
        return worker

    async def _end(self, worker: _Worker) -> None:
        await worker.end()
        self._workers.discard(worker)

    async def _keep(self, order: Head, worker: _Worker | None) -> None:
        """Let a worker work, and start another in its place whenever it ends."""
        pause = PAUSES[0]
        while True:
            try:
                worker = worker or await self._start(order)
                pause = PAUSES[0]
                why = await self._work(worker)
            except (QdqError, _Lost, OSError, asyncio.TimeoutError) as error:
                why = str(error) or "it did not get ready"
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
            self._metrics.lost.labels(self.name).inc()
            sys.stderr.write(f"qdqbench: a worker of {self.name} is replaced: {why}\n")
            if worker is not None:
                await self._end(worker)
                worker = None

    async def _work(self, worker: _Worker) -> str:
        """Run batches until the worker is of no more use; why that is."""
        gone = asyncio.create_task(worker.process.wait())
        self.alive += 1
        try:
            while (rows := await self._next(gone)) is not None:
                if why := await self._run(worker, rows):
                    return why
            return f"it ended with {gone.result()}"
        finally:
            self.alive -= 1
            gone.cancel()

    async def _next(self, gone: "asyncio.Task[int]") -> list[Row] | None:
        """The next batch; None where the worker ended meanwhile."""
        take, free = asyncio.create_task(self._take()), False
        try:
            await asyncio.wait({take, gone}, return_when=asyncio.FIRST_COMPLETED)
            free = not gone.done()
        finally:
            take.cancel()
            (rows,) = await asyncio.gather(take, return_exceptions=True)
            if isinstance(rows, list) and not free:
                self._buckets.put_back(rows)
        return rows if free and isinstance(rows, list) else None

    async def _take(self) -> list[Row]:
        async with self._taking:
            return await self._buckets.take()

    async def _run(self, worker: _Worker, rows: list[Row]) -> str:
        """Answer rows, or queue them again and say why."""
        _, batch = pad(
            [(place, row.input_ids, row.token_type_ids) for place, row in enumerate(rows)], self._pad_id
        )
        mask = batch["attention_mask"]
        shape = shape_of(self._buckets.sizes, *mask.shape)
        batch = shaped(batch, shape, self._pad_id)
        self._running += len(rows)
        start = time.monotonic()
        try:
            made, seconds = await asyncio.wait_for(worker.run(batch), self._timeout)
        except asyncio.CancelledError:  # the pool closes
            self._buckets.put_back(rows)
            raise
        except (_Lost, asyncio.TimeoutError) as error:
            self._again(rows)
            return str(error) or f"a batch took more than {self._timeout:g} s"
        finally:
            self._running -= len(rows)
        for row, answer in zip(rows, made[: len(rows)], strict=True):
            if not row.answer.done():
                row.answer.set_result(answer)
        self._count(rows, int(mask.sum()), shape[0] * shape[1], start, seconds)
        return ""

    def _again(self, rows: list[Row]) -> None:
        for row in rows:
            row.tries += 1
            if row.tries >= TRIES and not row.answer.done():
                row.answer.set_exception(self.unavailable(f"{TRIES} workers ended without an answer"))
        self._buckets.put_back(row for row in rows if not row.answer.done())

    def _count(self, rows: list[Row], real: int, padded: int, start: float, seconds: float) -> None:
        metrics, taken = self._metrics, max(time.monotonic() - start, 1e-6)
        self._rate = 0.8 * (self._rate or len(rows) / taken) + 0.2 * len(rows) / taken
        waited = metrics.waited.labels(self.name)
        for row in rows:
            waited.observe(start - row.since)
        metrics.ran.labels(self.name).observe(seconds)
        metrics.rows.labels(self.name).observe(len(rows))
        metrics.tokens.labels(self.name, "text").inc(real)
        metrics.tokens.labels(self.name, "padding").inc(padded - real)


def shared_cores(workers: int, cores: Sequence[int]) -> list[list[int]]:
    """The cores of each worker: all of them where there is one worker, else a part for each."""
    return [list(cores[place::workers] or cores) for place in range(workers)]


def order_of(base: Mapping[str, Any], cores: Sequence[int]) -> Head:
    """What one worker is ordered to open, and where to run."""
    return {**base, "cores": list(cores)}
