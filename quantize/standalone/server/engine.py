"""The process of an engine: all rows that wait are the next batch, and an idle engine waits for nothing."""

import select
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ..runtimes import Infer, Launched, launch, pad_length
from .metrics import Counts
from .slots import RECORD, Array, Board, Slots, read_records, send, split_records

DEPTH = 2  # least launches under way: the host prepares one while the device computes the other
WINDOW = 8  # batches of rows that are sorted by length together, where a batch is padded
SHORTER = 0.75  # of the longest row of a batch: such a row begins another
FEW_ROWS = 8  # are one batch; more are a multiple of it: a runtime prepares each new shape
LENGTHS = (24, 50, 100, 200, 400)  # tokens of rows that an engine without padding is prepared for
PREPARE_S = 10.0  # from the start, in which it does so while it is idle
AWAKE_S = 0.002  # after a batch that an engine with a core of its own looks for the next one without sleeping


def split_lengths(lengths: Sequence[int], most: int) -> list[int]:
    """Return where batches of descending lengths begin, and the end: a much shorter row begins another."""
    bounds = [0]
    while (start := bounds[-1]) < len(lengths):
        shorter = (length < SHORTER * lengths[start] for length in lengths[start + FEW_ROWS :])
        rows = FEW_ROWS + next((place for place, each in enumerate(shorter) if each), len(lengths))
        rows = min(rows, most, len(lengths) - start)
        bounds.append(start + (rows if rows in (most, *range(FEW_ROWS)) else rows // FEW_ROWS * FEW_ROWS))
    return bounds


def run_once(infer: Infer, told: Mapping[str, Any], rows: int, length: int, *, alone: bool = False) -> Array:
    ids = np.zeros(rows * length, np.int32)
    return launch(infer, told, ids, ids, np.full(rows, length, np.int32), alone=alone).read()


def warm_up(infer: Infer, told: Mapping[str, Any], timeout_s: float, tokens: int) -> tuple[int, float, int]:
    """Return the most rows that half of `timeout_s` is enough for, their seconds, and the width.

    An engine that needs no padding runs at its budget of `tokens` and at one row. SystemExit: one row takes
    too long.
    """
    if getattr(infer, "launch", None):
        return _warm_up_packed(infer, told, tokens)
    length, fits, slowest, rows = told["max_length"], 0, 0.0, 1
    made = run_once(infer, told, 1, length, alone=True)  # opens what answers a lone batch, too
    while True:
        most_s = timeout_s if rows == 1 else timeout_s / 2
        for _ in range(2):  # what is slow once may only be new
            start = time.monotonic()
            made = run_once(infer, told, rows, length)
            if (seconds := time.monotonic() - start) <= most_s:
                break
        else:
            if fits:
                break
            why = f"one row of {length} tokens takes {seconds:.1f} s, more than --timeout {timeout_s:g}"
            raise SystemExit(f"{why}; raise it")
        fits, slowest = rows, max(slowest, seconds)
        if rows == told["batch"]:
            break
        rows = min(2 * rows, told["batch"])
    return fits, slowest, made.shape[1] * (length if told["over_tokens"] else 1)


def list_packed(longest: int, tokens: int) -> Iterator[tuple[int, int]]:
    """Yield rows and their length, for which an engine that needs no padding is prepared: the largest first.

    Steps of a thirtieth are finer than the engine's: a size that it knows takes it no time.
    """
    for length in (longest, *(each for each in LENGTHS if each < longest)):
        rows = max(1, tokens // length)
        while rows:
            yield rows, length
            rows = min(rows - 1, 31 * rows // 32)


def _warm_up_packed(infer: Infer, told: Mapping[str, Any], tokens: int) -> tuple[int, float, int]:
    longest, slowest, width = told["max_length"], 0.0, 1
    for rows in (max(1, tokens // longest), 1):
        start = time.monotonic()
        made = run_once(infer, told, rows, longest)
        slowest, width = max(slowest, time.monotonic() - start), int(np.prod(made.shape[1:]))
    return tokens, slowest, width * (longest if told["over_tokens"] else 1)


@dataclass(eq=False)
class Worker:
    """Answers the rows of slots with one engine, until no front is left that could write to its pipe."""

    infer: Infer
    told: Mapping[str, Any]
    model: str
    number: int
    rows: int
    tokens: int
    slots: Slots
    board: Board
    counts: Counts
    pipe: Connection
    fronts: Sequence[Connection]
    awake_s: float = 0.0
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.packed = bool(getattr(self.infer, "launch", None))
        self.depth = max(DEPTH, getattr(self.infer, "streams", 1))
        self.waiting = np.empty(0, RECORD)
        self.sorted = deque[Array]()  # batches of one window
        self.flying = deque[tuple[Array, Launched, float]]()
        self.unprepared = list_packed(self.told["max_length"], self.tokens) if self.packed else iter(())

    def work(self) -> None:
        poll = select.poll()
        poll.register(self.pipe.fileno(), select.POLLIN)
        until = time.monotonic() + PREPARE_S
        while True:
            idle = not (len(self.waiting) or self.sorted or self.flying)
            quiet = idle and time.monotonic() < until and not poll.poll(0)
            if quiet and (size := next(self.unprepared, None)):
                run_once(self.infer, self.told, *size)  # now: with a request it would take the request's time
                continue
            if poll.poll(self.patience() if idle else self.pause_ms()):
                try:
                    self.receive()
                except EOFError:
                    return
            if self.may_begin():
                self.begin()
            elif self.flying and (len(self.flying) == self.depth or self.flying[0][1].query()):
                self.finish()

    def patience(self) -> int | None:
        """Return how long an idle engine sleeps; None: until there are rows."""
        return None if time.monotonic() > self.ended + self.awake_s else 0

    def may_begin(self) -> bool:
        return len(self.flying) < self.depth and bool(len(self.waiting) or self.sorted)

    def pause_ms(self) -> int:
        """Return how long to wait for rows while batches fly: on a CPU the streams need the core."""
        return int(not (self.packed or self.may_begin() or self.flying[0][1].query()))

    def receive(self) -> None:
        came = read_records(self.pipe)
        self.waiting = np.concatenate([self.waiting, came]) if len(self.waiting) else came

    def take(self) -> Array:
        """Return the records of the next batch, of those that somebody still awaits."""
        if self.sorted:
            return self.sorted.popleft()
        records: Array = self.waiting
        records = records[self.slots.epochs[records["slot"]] == records["epoch"]]
        lengths = self.slots.lengths[records["slot"]]
        if self.packed:
            count = max(1, int(np.searchsorted(lengths.cumsum(), self.tokens, "right")))
            self.waiting = records[count:]
            return records[:count]
        window = records[: WINDOW * self.rows]
        self.waiting = records[len(window) :]
        order = np.argsort(-lengths[: len(window)], kind="stable")
        bounds = split_lengths(lengths[order].tolist(), self.rows)
        self.sorted.extend(window[order[start:end]] for start, end in pairwise(bounds))
        return self.sorted.popleft() if self.sorted else window

    def begin(self) -> None:
        records = self.take()
        if not len(records):
            return
        now = time.monotonic()
        self.board.busy[self.number] = self.board.busy[self.number] or now
        slots, lengths = records["slot"], self.slots.lengths[records["slot"]]
        at, total, longest = self.slots.places(slots, lengths), int(lengths.sum()), int(lengths.max())
        ids, types = self.slots.flat_ids[at], self.slots.flat_types[at]
        alone = not (self.flying or self.sorted or len(self.waiting))
        launched = launch(self.infer, self.told, ids, types, lengths, alone=alone)
        padded = 0 if self.packed else len(lengths) * pad_length(longest, self.told["max_length"]) - total
        self.counts.observe_all("qdqbench_queue_seconds", self.model, now - self.slots.since[slots])
        self.counts.observe("qdqbench_batch_rows", self.model, len(records))
        self.counts.add("qdqbench_text_tokens_total", self.model, total)
        self.counts.add("qdqbench_padding_tokens_total", self.model, padded)
        self.flying.append((records, launched, now))

    def finish(self) -> None:
        """Write the answers of the oldest batch and tell the fronts."""
        records, launched, begun = self.flying.popleft()
        made, slots = launched.read(), records["slot"]
        if self.told["over_tokens"]:
            ends = self.slots.lengths[slots].cumsum()
            for slot, part in zip(slots, np.split(made, ends[:-1]), strict=True):
                self.slots.answers[slot, : part.size] = part.ravel()
        else:
            self.slots.answers[slots] = made
        fronts = self.slots.front_of(slots)
        for front in {*fronts.tolist()}:
            for data in split_records(records[fronts == front]):
                send(self.fronts[front], data)
        self.ended = now = time.monotonic()
        self.board.busy[self.number] = now if self.flying else 0.0
        rate, before = len(records) / max(now - begun, 1e-6), self.board.rate[self.number]
        self.board.rate[self.number] = 0.8 * (before or rate) + 0.2 * rate
        self.counts.observe("qdqbench_engine_seconds", self.model, now - begun)
