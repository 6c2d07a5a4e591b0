"""A front: admits requests, makes rows of their texts, gives them to an engine, and answers.

All runs in one thread without a task for each request. Texts that came in one turn of the event loop are
tokenized together, and answers are made together.
"""

import asyncio
import math
import os
import random
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..answers import ANSWERS, Rows
from ..fast import FastTokenizer
from ..texts import Coded, Encoder, Refused, make_encoder
from .interfaces import Interfaces, Refusal, Samples
from .metrics import Counts
from .settings import ENGINE, FP32, Served, Settings
from .slots import ENGINE_GONE, RECORD, WRAP, Array, Board, Slots, read_records, send, split_records

INLINE = 10_000  # characters of a request that are tokenized at once; more would keep other requests waiting
FASTER = 10  # times, at least, of a faster tokenizer
MOST_RETRY_S = 60
SWEEP_S = 0.05
FEW_ROWS = 8  # with no more under way a front does not sleep; with more, new ones wait until they are as many
TOGETHER_S = 0.001  # at most: they share the cost of a turn of the loop, which is most of a lone request's
FAREWELL_S = 0.5  # from the last answers of a front that gives up to its end
Reply = Callable[[int, bytes, Mapping[str, str]], None]  # of a connection: status, body, headers
FAILED = Refusal(500, "the server failed at this request; its log says why")  # without internals


def log(text: str) -> None:
    """Write a line to stderr; a full disk, a full pipe or one without a reader stops nothing."""
    line = f"qdqbench: {' '.join(text.split())[:400]}\n".encode(errors="backslashreplace")
    try:
        if select.select([], [2], [], 0)[1]:
            os.write(2, line)
    except (OSError, ValueError):
        pass


@dataclass(slots=True, eq=False)
class Asked:
    reply: Reply
    about: Samples
    model: str
    path: str
    begun: float  # s
    coded: Coded | None = None
    slots: list[int] = field(default_factory=list)
    engine: int = 0
    left: int = 0  # rows without an answer
    open: bool = True
    known: Any = None  # answers of the engine, where FP32 only watches


@dataclass(eq=False)
class Front:
    """One process that clients talk to."""

    served: Served
    settings: Settings
    place: int
    models: Sequence[str]
    slots: Slots
    board: Board
    counts: Counts
    pipe: Connection
    engines: Sequence[Connection]
    fast: FastTokenizer | None = None
    awake_s: float = 0.0
    leave: Callable[[], None] = lambda: os._exit(1)

    def __post_init__(self) -> None:
        self.interfaces = Interfaces(self.served, self.settings)
        self.encoder, self._slow_encoder = (
            make_encoder(self.served.told, Tokenizer.from_str(self.served.tokenizer), each)
            for each in (self.fast, None)
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        shape = self.slots.shape
        firsts = [shape.first(self.place, number) for number in range(len(self.models))]
        self.free = [[*range(first, first + shape.slots)] for first in firsts]
        self.base = base = firsts[0]
        self.owners: list[Asked | None] = [None] * (len(self.models) * shape.slots)
        self.slots.epochs[base : base + len(self.owners)] += 1  # nothing of a front before this one counts
        self.arrived, self.deadlines, self.waking, self.ended = list[Asked](), deque[Asked](), False, 0.0
        self.reserved, self.given_up, self.stopping = 0, False, False
        self.loop: Any = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take answers, and look at deadlines from now on."""
        self.loop = loop
        loop.add_reader(self.pipe.fileno(), self._take_answers)
        self._sweep()
        self.counts.set("qdqbench_workers", "front", 1)

    # Admission

    @property
    def under_way(self) -> int:
        """Rows that engines have."""
        return len(self.owners) - sum(map(len, self.free))

    @property
    def queued(self) -> int:
        """Rows from arrival to answer."""
        return self.reserved + self.under_way

    def unavailable(self, why: str) -> Refusal:
        """Return a refusal that says when to come again."""
        rate = sum(self.board.rate[number] for number in self._alive(ENGINE))
        seconds = math.ceil(self.queued / rate) if rate else 1
        headers = {"retry-after": str(min(max(seconds, 1), MOST_RETRY_S))}
        return Refusal(503, f"{why}; try again later", headers)

    def _alive(self, model: str) -> list[int]:
        alive = self.board.alive
        return [number for number, each in enumerate(self.models) if each == model and alive[number]]

    def room(self, model: str = ENGINE) -> int:
        """Return how many rows a model can take now."""
        return sum(len(self.free[number]) for number in self._alive(model)) - self.reserved

    def require_room(self, rows: int = 1, model: str = ENGINE) -> None:
        """Refuse a request that would wait in vain, before anything is done for it."""
        if self.given_up or not self._alive(model):
            raise self.unavailable("no engine is ready")
        if rows > self.room(model):
            raise self.unavailable("the queue is full")

    def ready(self) -> tuple[int, dict[str, bool]]:
        """Return what is told of readiness: 503 while requests are refused."""
        full = self.room() <= 0
        ready = not full and not self.given_up and not self.stopping
        return 200 if ready else 503, {"ready": ready, "full": full}

    def take(self, path: str, body: bytes, reply: Reply) -> Asked:
        """Begin to answer a request; raises a Refusal."""
        self.require_room()
        about = self.interfaces.read(path, body)
        model = about.model
        if model not in self.models:
            raise Refusal(422, "this server was started without the FP32 model; leave model out")
        count = len(about.samples)
        if count > self.settings.queue:
            raise Refusal(
                413, f"the texts make {count} rows, more than the {self.settings.queue} of the queue"
            )
        if count > 1 or model != ENGINE:
            self.require_room(count, model)
        asked = Asked(reply, about, model, path, time.monotonic())
        self.reserved += count
        self.deadlines.append(asked)
        if self._takes_long(about):
            self._encode_slowly(asked)
        else:
            self.arrived.append(asked)
            first, full = len(self.arrived) == 1, self.reserved - count < FEW_ROWS <= self.reserved
            if full or (first and self.under_way <= FEW_ROWS):
                self.loop.call_soon(self._flush)
            elif first:
                self.loop.call_later(TOGETHER_S, self._flush)
        if self.awake_s and not self.waking:
            self._stay_awake()
        return asked

    def _stay_awake(self) -> None:
        """Look for what comes without sleeping where little is under way: to wake takes longer than that."""
        few = self.under_way <= FEW_ROWS
        if few and self.queued:
            self.ended = time.monotonic()
        self.waking = few and time.monotonic() < self.ended + self.awake_s
        if self.waking:
            self.loop.call_soon(self._stay_awake)

    def drop(self, asked: Asked) -> None:
        if asked.open:
            asked.open = False
            self._release(asked)

    # Tokens

    def _takes_long(self, about: Samples) -> bool:
        """Return whether other requests would wait for the tokens of this one."""
        if about.characters <= INLINE or not self.encoder.fast:
            return about.characters > INLINE
        plain = self.encoder.fast.find(about.samples).tolist()
        lengths = zip(about.samples, plain, strict=True)
        return sum(len(text) / (FASTER if quick else 1) for text, quick in lengths) > INLINE

    def _flush(self) -> None:
        batch, self.arrived = [asked for asked in self.arrived if asked.open], []
        if not batch:
            return
        try:
            self._submit(batch, self.encode([sample for asked in batch for sample in asked.about.samples]))
        except Exception as error:
            if len(batch) == 1:
                self._fail(batch[0], error)
                return
            for asked in batch:  # one of them is to blame
                self.arrived = [asked]
                self._flush()

    def _encode_slowly(self, asked: Asked) -> None:
        """Tokenize in a thread; where that hangs, no request after this one could be answered."""
        alarms, hang_s = list[asyncio.TimerHandle](), self.settings.timeout
        reason = f"the tokenizer takes more than {hang_s:g} s"

        def begin() -> None:  # from when the thread begins: requests before this one may have kept it
            alarms.append(self.loop.call_later(hang_s, self.give_up, reason))

        def work() -> Coded:
            self.loop.call_soon_threadsafe(begin)
            return self.encode(asked.about.samples, self._slow_encoder)

        def end(future: "Future[Coded]") -> None:
            for alarm in alarms:
                alarm.cancel()
            if not asked.open:
                return
            try:
                self._submit([asked], future.result())
            except Exception as error:
                self._fail(asked, error)

        future = self._thread.submit(work)
        future.add_done_callback(lambda done: self.loop.call_soon_threadsafe(end, done))

    def encode(self, samples: Sequence[Any], encoder: Encoder | None = None) -> Coded:
        """Return the rows of samples; raises a Refusal where a context would take too many."""
        encoder = encoder or self.encoder
        if encoder.stride:
            encoder.require_few_windows(samples)
            count = sum(encoder.count_windows(samples))
            if count > (most := self.settings.queue):
                why = f"the texts make {count} rows, more than the {most} of the queue; send fewer or shorter"
                raise Refusal(413, why)
        return encoder.code(samples)

    def _submit(self, batch: Sequence[Asked], coded: Coded) -> None:
        """Write the rows of requests into slots, and tell the engines."""
        ends = [*accumulate(len(asked.about.samples) for asked in batch)]
        whole = len(coded.lengths) == ends[-1]  # a row for each sample
        bounds = [0, *(ends if whole else np.searchsorted(coded.numbers, ends).tolist())]
        taken, kept = list[int](), list[range]()
        for asked, (first, last), end in zip(batch, pairwise(bounds), ends, strict=True):
            count = len(asked.about.samples)
            self.reserved -= count
            own = slice(first, last)
            numbers = coded.numbers[own] - (end - count)
            asked.coded = coded._replace(
                numbers=numbers, rows=coded.rows[own], lengths=coded.lengths[own], cut=coded.cut[own]
            )
            if self._allocate(asked, last - first):
                taken += asked.slots
                kept.append(range(first, last))
            else:
                self._refuse(asked, self.unavailable("the queue is full"))
        if len(taken) < len(coded.lengths):
            coded = coded.pick(np.array([*chain.from_iterable(kept)], np.int64))
        if taken:
            self._write(np.array(taken), coded)

    def _allocate(self, asked: Asked, rows: int) -> bool:
        """Give a request slots of the engine that has most of them."""
        engines = self._alive(asked.model)
        engine = max(engines, key=lambda number: len(self.free[number]), default=0)
        free = self.free[engine]
        if not engines or rows > len(free):
            return False
        asked.engine, asked.left, asked.slots = engine, rows, free[-rows:]
        del free[-rows:]
        for slot in asked.slots:
            self.owners[slot - self.base] = asked
        return True

    def _write(self, taken: Array, coded: Coded) -> None:
        slots, at = self.slots, self.slots.places(taken, coded.lengths)
        slots.flat_ids[at], slots.flat_types[at], slots.lengths[taken] = coded.ids, coded.types, coded.lengths
        self._announce(taken)

    def _announce(self, taken: Array) -> None:
        """Tell engines of rows in slots."""
        slots = self.slots
        slots.since[taken] = time.monotonic()
        records = np.empty(len(taken), RECORD)
        records["slot"], records["epoch"] = taken, slots.epochs[taken]
        engines = (taken - self.base) // slots.shape.slots
        for engine in {*engines.tolist()}:
            for part in split_records(records[engines == engine]):
                send(self.engines[engine], part)

    # Answers

    def _take_answers(self) -> None:
        try:
            records = read_records(self.pipe)
        except EOFError:  # no other process is left
            self.loop.remove_reader(self.pipe.fileno())
            return
        done, epochs = list[Asked](), self.slots.all_epochs
        for slot, epoch in records.tolist():
            if slot == ENGINE_GONE:
                first = epoch * self.slots.shape.slots
                for asked in {*self.owners[first : first + self.slots.shape.slots]}:
                    if asked is not None:
                        self._refuse(asked, self.unavailable("the engine failed"))
                continue
            asked = self.owners[slot - self.base] if epochs[slot] == epoch else None
            if asked is not None:
                asked.left -= 1
                if not asked.left:
                    done.append(asked)
        done = [asked for asked in done if asked.open]
        if done:
            self._finish(done)

    def _finish(self, done: Sequence[Asked]) -> None:
        """Answer requests that have all their rows."""
        answers = self.slots.answers[[slot for asked in done for slot in asked.slots]]
        ends = accumulate((len(asked.slots) for asked in done), initial=0)
        found = [answers[start:end] for start, end in pairwise(ends)]
        if self.settings.watch:
            for asked, rows in zip(done, found, strict=True):
                if asked.known is None and asked.model == ENGINE:
                    self._watch(asked, rows)
        self._release(*done)
        try:
            made = self._make(done, answers)
        except Exception:
            made = [*map(self._make_one, done, found)]
        for asked, told in zip(done, made, strict=True):
            asked.open = False
            if isinstance(told, Exception):
                self._fail(asked, told)
            elif asked.known is not None:
                same = [a.get("label") == b.get("label") for a, b in zip(asked.known, told, strict=True)]
                for each in same:
                    self.counts.add("qdqbench_watched_total", "same" if each else "other")
            else:
                asked.reply(200, asked.about.respond(told, asked.coded), {})

    def _make(self, done: Sequence[Asked], made: Any) -> list[Any]:
        """Return the answers of requests, of the rows of all of them."""
        told, samples = self.served.told, [sample for asked in done for sample in asked.about.samples]
        all_coded = [asked.coded for asked in done if asked.coded is not None]
        if told["over_tokens"]:
            lengths = [length for coded in all_coded for length in coded.lengths.tolist()]
            shape = told["max_length"], -1
            made = [row.reshape(shape)[:length] for row, length in zip(made, lengths, strict=True)]
        if not np.isfinite(np.concatenate(made) if told["over_tokens"] else made).all():
            raise Refusal(500, "the engine gives NaN or infinite answers; see its run's verification")
        ends = [0, *accumulate(len(asked.about.samples) for asked in done)]
        starts = zip(ends, all_coded, strict=False)
        numbers = np.concatenate([start + coded.numbers for start, coded in starts])
        rows = Rows(numbers, [row for coded in all_coded for row in coded.rows], made)
        answered = ANSWERS[told["kind"]](samples, rows, told["labels"])
        return [answered[start:end] for start, end in pairwise(ends)]

    def _make_one(self, asked: Asked, found: Array) -> Any:
        try:
            return self._make([asked], found)[0]
        except Exception as error:
            return error

    def _watch(self, asked: Asked, found: Array) -> None:
        """Have FP32 answer the same rows, for a share of the requests."""
        if random.random() >= self.settings.watch or asked.coded is None:  # noqa: S311
            return
        shadow = Asked(lambda *_: None, asked.about, FP32, asked.path, time.monotonic(), asked.coded)
        if self._allocate(shadow, len(asked.slots)):
            shadow.known = self._make_one(asked, found)
            ours, theirs = np.array(asked.slots), np.array(shadow.slots)
            for part in (self.slots.ids, self.slots.types, self.slots.lengths):
                part[theirs] = part[ours]
            self._announce(theirs)

    # Ends

    def _release(self, *given: Asked) -> None:
        epochs = self.slots.all_epochs
        for asked in given:
            if asked.coded is None:
                self.reserved -= len(asked.about.samples)
            for slot in asked.slots:
                self.owners[slot - self.base] = None
                epochs[slot] = (epochs[slot] + 1) % WRAP  # what still comes of it is dropped
            self.free[asked.engine] += asked.slots
            asked.slots = []

    def _refuse(self, asked: Asked, error: Refusal) -> None:
        self.drop(asked)
        asked.reply(error.status, self.interfaces.tell(error, asked.path), error.headers)

    def _fail(self, asked: Asked, error: Exception) -> None:
        if isinstance(error, Refused):
            error = Refusal(422, str(error))
        if not isinstance(error, Refusal):
            log(f"unexpected failure of a request, {type(error).__name__}: {error}")
            error = FAILED
        self._refuse(asked, error)

    def _sweep(self) -> None:
        now, most = time.monotonic(), self.settings.timeout
        while self.deadlines and (not self.deadlines[0].open or self.deadlines[0].begun + most < now):
            asked = self.deadlines.popleft()
            if asked.open:
                self._refuse(asked, self.unavailable(f"there was no answer within {most:g} s"))
        self.board.beat[self.place] = now
        self.counts.set("qdqbench_queue_rows", "", self.queued)
        self.loop.call_later(SWEEP_S, self._sweep)

    def give_up(self, reason: str) -> None:
        """Answer all requests 503, and end this process: another one takes its place."""
        if self.given_up:
            return
        self.given_up = True
        log(f"a front gives up: {reason}")
        for asked in self.deadlines:
            if asked.open:
                self._refuse(asked, self.unavailable(reason))
        self.loop.call_later(FAREWELL_S, self.leave)
