"""Batches of one model: rows wait in buckets by length, and one thread runs the engine."""

import asyncio
import contextlib
import functools
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from qdqbench.quantize.standalone.texts import pad_batch
from qdqbench.quantize.tasks.types.encoded import pad
from qdqbench.quantize.utils.arrays import Batch, Float32, Int64
from qdqbench.quantize.utils.errors import UserError

Run = Callable[[Mapping[str, Int64]], Float32]
Sizes = Sequence[tuple[int, int]]  # longest length of each bucket, ascending, and most rows of its batch
TOKENS = 64  # between two numbers of tokens that are prepared
HANG = 5  # times the slowest batch of the warm-up
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # folder of values; read when prometheus_client is imported
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one process; label values are our own names, never what a client sent."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        histogram = functools.partial(Histogram, registry=registry)
        gauge = functools.partial(Gauge, registry=registry, multiprocess_mode="livesum")
        counter = functools.partial(Counter, registry=registry)
        self.requests = counter("qdqbench_requests", "Answered requests.", ["endpoint", "status"])
        self.seconds = histogram(
            "qdqbench_request_seconds", "Seconds to an answer.", ["endpoint"], buckets=SECONDS
        )
        self.waited = histogram(
            "qdqbench_queue_seconds", "Seconds that a row waits.", ["model"], buckets=SECONDS
        )
        self.ran = histogram("qdqbench_engine_seconds", "Seconds of a batch.", ["model"], buckets=SECONDS)
        self.rows = histogram("qdqbench_batch_rows", "Rows of a batch.", ["model"], buckets=ROWS)
        self.tokens = counter("qdqbench_tokens", "Tokens of batches.", ["model", "kind"])
        self.replaced = counter("qdqbench_workers_lost", "Worker processes that ended or hung.")
        self.queued = gauge("qdqbench_queue_rows", "Rows from arrival to answer.")
        self.workers = gauge("qdqbench_workers", "Worker processes that answer.")

    def text(self) -> bytes:
        if SHARED not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class Model(NamedTuple):
    run: Run
    sizes: Sizes
    slowest_s: float


@dataclass
class Row:
    """One row without padding, and the future of its answer."""

    input_ids: Int64  # [length]
    token_type_ids: Int64  # [length]
    answer: "asyncio.Future[Float32 | None]"  # [width] or [length or more, width]; None: the engine failed
    since: float = field(default_factory=time.monotonic)  # s

    def resolve(self, answer: Float32 | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


def list_rows(most: int) -> list[int]:
    """Return the sizes of batches up to `most` rows: powers of two, and `most`.

    An engine prepares each shape when it first meets it. Few shapes, all met before the first request, keep
    the slowest answers near the others.
    """
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def pad_to_shape(batch: Batch, sizes: Sizes, pad_id: int) -> Batch:
    """Return a batch in the smallest shape that holds it: masked positions, and copies of its last row."""
    rows, length = batch["attention_mask"].shape
    longest, most = next(size for size in sizes if length <= size[0])
    return pad_batch(batch, longest, pad_id, next(power for power in list_rows(most) if rows <= power))


def warm_up(run: Run, sizes: Sizes, timeout_s: float) -> Model:
    """Run each shape, and return the model with only as many rows in each size as take half of `timeout_s`.

    No request then waits for what an engine prepares when it first meets a shape.
    """

    def measure(rows: int, length: int) -> float:
        ids = np.zeros((rows, length), dtype=np.int64)
        start = time.monotonic()
        run({"input_ids": ids, "attention_mask": ids + 1, "token_type_ids": ids})
        return time.monotonic() - start

    fitting, slowest = [], 0.0
    for length, most in sizes:
        fits = 0
        for rows in list_rows(most):
            most_s = timeout_s if rows == 1 else timeout_s / 2
            if (seconds := measure(rows, length)) > most_s and (seconds := measure(rows, length)) > most_s:
                break
            fits, slowest = rows, max(slowest, seconds)
        if not fits:
            raise UserError(
                f"one row of {length} tokens takes {seconds:.1f} s, more than --timeout {timeout_s:g}; "
                "raise it"
            )
        fitting.append((length, fits))
    if prepare := getattr(run, "prepare", None):
        _prepare_totals(prepare, fitting)
    return Model(run, fitting, slowest)


def _prepare_totals(prepare: Callable[[int, int, int], None], sizes: Sizes) -> None:
    """Prepare an engine that packs tokens for every batch of these sizes.

    Each of its CUDA graphs is for a number of tokens, of rows, and a longest row by powers of two.
    """
    shortest = 1
    for length, most in sizes:
        powers = sorted({1 << (each - 1).bit_length() for each in range(shortest, length + 1)})
        for rows, longest in itertools.product(list_rows(most), powers):
            full = rows * min(longest, length)
            for total in (*range(rows * shortest, full, TOKENS), full):
                prepare(total, rows, longest)
        shortest = length + 1


@dataclass
class Batcher:
    """The queue of one model and the thread of its engine.

    The bucket whose first row has waited longest becomes the next batch, when it is full or that row has
    waited `max_wait_s`. So batches grow with the load by themselves.
    """

    name: str  # label in metrics
    model: Model
    pad_id: int
    max_wait_s: float
    timeout_s: float  # a hang is no matter of a client's patience, yet no batch may take less
    metrics: Metrics
    give_up: Callable[[str], None]  # called with the reason when a batch hangs or the engine fails
    rate: float = 0.0  # rows a second

    def __post_init__(self) -> None:
        self._buckets: list[deque[Row]] = [deque() for _ in self.model.sizes]
        self._arrival = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.name)

    async def answer(self, rows: Sequence[tuple[Int64, Int64]]) -> list[Float32 | None]:
        """Return the answers of rows (input_ids, token_type_ids); None where the engine failed."""
        loop = asyncio.get_running_loop()
        queued = [Row(ids, types, loop.create_future()) for ids, types in rows]
        for row in queued:
            length = len(row.input_ids)
            place = next(n for n, (longest, _) in enumerate(self.model.sizes) if length <= longest)
            self._buckets[place].append(row)
        self._arrival.set()
        try:
            return [await row.answer for row in queued]
        finally:
            for row in queued:
                row.answer.cancel()  # a request that timed out no longer needs the others

    def fail(self) -> None:
        for bucket in self._buckets:
            while bucket:
                bucket.popleft().resolve(None)

    async def work(self) -> None:
        loop, hang_s = asyncio.get_running_loop(), max(HANG * self.model.slowest_s, self.timeout_s)
        while True:
            rows, start = await self._next_batch(), time.monotonic()

            def stop(reason: str, rows: list[Row] = rows) -> None:
                for row in rows:
                    row.resolve(None)
                self.give_up(reason)

            alarm = loop.call_later(hang_s, stop, f"a batch takes more than {hang_s:.1f} s")
            try:
                answers, real, padded = await loop.run_in_executor(self._thread, self._run_rows, rows)
            except Exception as error:
                stop(f"the engine failed, {type(error).__name__}: {' '.join(str(error).split())[:300]}")
                return
            finally:
                alarm.cancel()
            for row, answer in zip(rows, answers, strict=True):
                row.resolve(answer)
            self._count(rows, start, real, padded)

    async def _next_batch(self) -> list[Row]:
        while True:
            self._arrival.clear()
            for bucket in self._buckets:
                while bucket and bucket[0].answer.done():
                    bucket.popleft()
            wait, now = math.inf, time.monotonic()
            for since, place in sorted((rows[0].since, n) for n, rows in enumerate(self._buckets) if rows):
                bucket, most = self._buckets[place], self.model.sizes[place][1]
                left = since + self.max_wait_s - now
                if left <= 0 or len(bucket) >= most:
                    rows = list[Row]()
                    while bucket and len(rows) < most:
                        if not (row := bucket.popleft()).answer.done():
                            rows.append(row)
                    return rows
                wait = min(wait, left)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), None if wait == math.inf else wait)

    def _run_rows(self, rows: list[Row]) -> tuple[Float32, int, int]:
        parts = [(place, row.input_ids, row.token_type_ids) for place, row in enumerate(rows)]
        _, batch = pad(parts, self.pad_id)
        padded = pad_to_shape(batch, self.model.sizes, self.pad_id)
        answers = self.model.run(padded)[: len(rows)]
        return answers, int(batch["attention_mask"].sum()), padded["attention_mask"].size

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
