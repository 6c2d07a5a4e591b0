"""Rows that wait for an engine: a bounded queue, from which batches of similar length are taken."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from qdqbench.quantize.core.arrays import Batch, Float32, Int64
from qdqbench.quantize.encoders.inputs import widened


class Full(Exception):
    """No room; the caller may come again."""


@dataclass
class Row:
    """One row, without padding, and where its answer is awaited."""

    input_ids: Int64  # [length]
    token_type_ids: Int64  # [length]
    answer: "asyncio.Future[Float32]"  # [width], or [length or more, width]
    tries: int = 0  # that ended without an answer
    since: float = field(default_factory=time.monotonic)  # s


def shapes_of(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Every shape (batch, length) that batches have: powers of two of rows, and the longest of each bucket.

    An engine makes ready for a shape when it first meets it, which takes longer than a batch: few shapes, all
    met before the first request, keep the slowest answers near the others.
    """
    return [shape_of(sizes, rows, length) for length, most in sizes for rows in _powers(most)]


def _powers(most: int) -> list[int]:
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def shape_of(sizes: Sequence[tuple[int, int]], rows: int, length: int) -> tuple[int, int]:
    """The least of these shapes that holds so many rows of so many tokens."""
    longest, most = next(size for size in sizes if length <= size[0])
    return next(power for power in _powers(most) if rows <= power), longest


def shaped(batch: Batch, shape: tuple[int, int], pad_id: int) -> Batch:
    """A batch in that shape: masked positions, and copies of its last row."""
    rows, length = batch["attention_mask"].shape
    wide = widened(batch, shape[1] - length, pad_id)
    return {name: np.pad(each, ((0, shape[0] - rows), (0, 0)), mode="edge") for name, each in wide.items()}


class Buckets:
    """Rows by length, first come, first served.

    A batch is taken when somebody can run one: of the bucket whose first row has waited longest, as soon as
    it is full or that row has waited `max_wait`. So batches grow with the load by themselves.

    Args:
        sizes: longest length of each bucket, ascending, and its most rows in a batch.
        capacity: most rows that wait.
        max_wait: s that a row waits for others at most, where an engine is free.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], capacity: int, max_wait: float) -> None:
        self.sizes, self.capacity, self.max_wait = list(sizes), capacity, max_wait
        self._rows: list[deque[Row]] = [deque() for _ in sizes]
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return sum(map(len, self._rows))

    def has_room(self, rows: int) -> bool:
        """Whether so many rows more can wait now."""
        if len(self) + rows > self.capacity:
            self._forget()
        return len(self) + rows <= self.capacity

    def put(self, rows: Sequence[Row]) -> None:
        """Queue all of a request's rows, or none.

        Raises:
            Full: there is no room for them now.
        """
        if not self.has_room(len(rows)):
            raise Full
        for row in rows:
            self._bucket(row).append(row)
        self._changed.set()

    def put_back(self, rows: Iterable[Row]) -> None:
        """Queue rows again, before all others, whose batch was lost."""
        for row in reversed([*rows]):
            self._bucket(row).appendleft(row)
        self._changed.set()

    async def take(self) -> list[Row]:
        """The next batch; for one caller at a time."""
        loop = asyncio.get_running_loop()
        while True:
            self._forget(heads_only=True)
            self._changed.clear()
            wait = math.inf
            waiting = [(rows[0].since, place) for place, rows in enumerate(self._rows) if rows]
            for since, place in sorted(waiting):
                left = since + self.max_wait - time.monotonic()
                if left <= 0 or len(self._rows[place]) >= self.sizes[place][1]:
                    return self._batch(place)
                wait = min(wait, left)
            # no `wait_for`: before Python 3.12 it may swallow a cancellation
            alarm = loop.call_later(wait, self._changed.set) if wait < math.inf else None
            try:
                await self._changed.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()

    def drain(self, why: Callable[[], Exception]) -> None:
        """Let all rows go with an error."""
        for rows in self._rows:
            while rows:
                if not (row := rows.popleft()).answer.done():
                    row.answer.set_exception(why())

    def _batch(self, place: int) -> list[Row]:
        rows, most = self._rows[place], self.sizes[place][1]
        taken: list[Row] = []
        while rows and len(taken) < most:
            if not (row := rows.popleft()).answer.done():
                taken.append(row)
        return taken

    def _bucket(self, row: Row) -> deque[Row]:
        length = len(row.input_ids)
        return next(rows for rows, (most, _) in zip(self._rows, self.sizes, strict=True) if length <= most)

    def _forget(self, heads_only: bool = False) -> None:
        """Drop rows that nobody awaits any longer."""
        for place, rows in enumerate(self._rows):
            while rows and rows[0].answer.done():
                rows.popleft()
            if not heads_only:
                self._rows[place] = deque(row for row in rows if not row.answer.done())
