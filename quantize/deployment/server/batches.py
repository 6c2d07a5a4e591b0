"""Batches of one model: rows wait in buckets by length, and one thread runs the engine."""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from qdqbench.quantize.deployment.server.guard import Metrics
from qdqbench.quantize.models.inputs import pad_columns
from qdqbench.quantize.tasks.types.encoded import pad
from qdqbench.quantize.utils.arrays import Batch, Float32, Int64
from qdqbench.quantize.utils.errors import UserError

Run = Callable[[Mapping[str, Int64]], Float32]
Sizes = Sequence[tuple[int, int]]  # longest length of each bucket, ascending, and most rows of its batch
HANG = 5  # times the slowest batch of the warm-up


@dataclass
class Row:
    """One row without padding, and the future of its answer."""

    input_ids: Int64  # [length]
    token_type_ids: Int64  # [length]
    answer: "asyncio.Future[Float32 | None]"  # [width] or [length or more, width]; None: the engine failed
    since: float = field(default_factory=time.monotonic)  # s


def list_rows(most: int) -> list[int]:
    """Return the sizes of batches up to `most` rows: powers of two, and `most`.

    An engine prepares each shape when it first meets it. Few shapes, all met before the first request, keep
    the slowest answers near the others.
    """
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def choose_shape(sizes: Sizes, rows: int, length: int) -> tuple[int, int]:
    """Return the smallest shape (batch, length) that holds so many rows of so many tokens."""
    longest, most = next(size for size in sizes if length <= size[0])
    return next(power for power in list_rows(most) if rows <= power), longest


def pad_to_shape(batch: Batch, shape: tuple[int, int], pad_id: int) -> Batch:
    """Return a batch in that shape, with masked positions and copies of its last row."""
    rows, length = batch["attention_mask"].shape
    wide = pad_columns(batch, shape[1] - length, pad_id)
    return {name: np.pad(each, ((0, shape[0] - rows), (0, 0)), mode="edge") for name, each in wide.items()}


def warm_up(run: Run, sizes: Sizes, timeout_s: float) -> tuple[list[tuple[int, int]], float]:
    """Run each shape, so that no request waits for what an engine prepares when it first meets one.

    Returns:
        The sizes, with only as many rows as take half of `timeout_s`, and the seconds of the slowest shape.

    Raises:
        UserError: one row takes longer than `timeout_s`.
    """
    fitting, slowest = [], 0.0
    for length, most in sizes:
        fits = 0
        for rows in list_rows(most):
            ids = np.zeros((rows, length), dtype=np.int64)
            batch = {"input_ids": ids, "attention_mask": ids + 1, "token_type_ids": ids}
            most_s = timeout_s if rows == 1 else timeout_s / 2
            if (seconds := _time(run, batch)) > most_s and (seconds := _time(run, batch)) > most_s:
                break
            fits, slowest = rows, max(slowest, seconds)
        if not fits:
            raise UserError(
                f"one row of {length} tokens takes {seconds:.1f} s, more than --timeout {timeout_s:g}; "
                "raise it"
            )
        fitting.append((length, fits))
    return fitting, slowest


def _time(run: Run, batch: Batch) -> float:
    start = time.monotonic()
    run(batch)
    return time.monotonic() - start


@dataclass
class Batcher:
    """The queue of one model and the thread of its engine.

    The bucket whose first row has waited longest becomes the next batch, when it is full or that row has
    waited `max_wait_s`. So batches grow with the load by themselves.
    """

    name: str  # label in metrics
    run: Run
    sizes: Sizes
    pad_id: int
    max_wait_s: float
    hang_s: float  # after which a batch counts as hung
    metrics: Metrics
    give_up: Callable[[str], None]  # called with the reason when a batch hangs or the engine fails
    rate: float = 0.0  # rows a second

    def __post_init__(self) -> None:
        self._buckets: list[deque[Row]] = [deque() for _ in self.sizes]
        self._arrival = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.name)

    async def answer(self, rows: Sequence[tuple[Int64, Int64]]) -> list[Float32 | None]:
        """Return the answers of rows (input_ids, token_type_ids); None where the engine failed."""
        loop = asyncio.get_running_loop()
        queued = [Row(ids, types, loop.create_future()) for ids, types in rows]
        for row in queued:
            length = len(row.input_ids)
            self._buckets[next(n for n, (most, _) in enumerate(self.sizes) if length <= most)].append(row)
        self._arrival.set()
        try:
            return [await row.answer for row in queued]
        finally:
            for row in queued:
                row.answer.cancel()  # a request that timed out no longer needs the others

    def fail(self) -> None:
        """Answer all waiting rows with None."""
        for bucket in self._buckets:
            while bucket:
                _resolve(bucket.popleft(), None)

    async def work(self) -> None:
        """Run batches until the engine fails or hangs."""
        loop = asyncio.get_running_loop()
        while True:
            rows, start = await self._next_batch(), time.monotonic()

            def stop(reason: str, rows: list[Row] = rows) -> None:
                for row in rows:
                    _resolve(row, None)
                self.give_up(reason)

            alarm = loop.call_later(self.hang_s, stop, f"a batch takes more than {self.hang_s:.1f} s")
            try:
                answers, real, padded = await loop.run_in_executor(self._thread, self._run_rows, rows)
            except Exception as error:
                stop(f"the engine failed, {type(error).__name__}: {' '.join(str(error).split())[:300]}")
                return
            finally:
                alarm.cancel()
            for row, answer in zip(rows, answers, strict=True):
                _resolve(row, answer)
            self._count(rows, start, real, padded)

    async def _next_batch(self) -> list[Row]:
        while True:
            self._arrival.clear()
            for bucket in self._buckets:
                while bucket and bucket[0].answer.done():
                    bucket.popleft()
            wait, now = math.inf, time.monotonic()
            for since, place in sorted((rows[0].since, n) for n, rows in enumerate(self._buckets) if rows):
                left = since + self.max_wait_s - now
                if left <= 0 or len(self._buckets[place]) >= self.sizes[place][1]:
                    return self._take(place)
                wait = min(wait, left)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), None if wait == math.inf else wait)

    def _take(self, place: int) -> list[Row]:
        bucket, rows = self._buckets[place], list[Row]()
        while bucket and len(rows) < self.sizes[place][1]:
            if not (row := bucket.popleft()).answer.done():
                rows.append(row)
        return rows

    def _run_rows(self, rows: list[Row]) -> tuple[Float32, int, int]:
        """Return the answers of a batch, and its tokens of text and of the whole shape."""
        parts = [(place, row.input_ids, row.token_type_ids) for place, row in enumerate(rows)]
        _, batch = pad(parts, self.pad_id)
        real, shape = int(batch["attention_mask"].sum()), batch["attention_mask"].shape
        shape = choose_shape(self.sizes, *shape)
        return self.run(pad_to_shape(batch, shape, self.pad_id))[: len(rows)], real, shape[0] * shape[1]

    def _count(self, rows: list[Row], start: float, real: int, padded: int) -> None:
        metrics, seconds = self.metrics, max(time.monotonic() - start, 1e-6)
        self.rate = 0.8 * (self.rate or len(rows) / seconds) + 0.2 * len(rows) / seconds
        waited = metrics.waited.labels(self.name)
        for row in rows:
            waited.observe(start - row.since)
        metrics.ran.labels(self.name).observe(seconds)
        metrics.rows.labels(self.name).observe(len(rows))
        metrics.tokens.labels(self.name, "text").inc(real)
        metrics.tokens.labels(self.name, "padding").inc(padded - real)


def _resolve(row: Row, answer: Float32 | None) -> None:
    if not row.answer.done():
        row.answer.set_result(answer)
