"""Rows and answers in memory that processes share, and the pipes that announce them.

A front writes a row into a slot of its own, and the slot's number with an epoch into the pipe of an engine.
The engine writes the answer into the slot, and the same record into the pipe of the front. Each use of a
slot has an epoch of its own: a record of a request that was given up, or of a process that was killed, has
an old one and is dropped. A slot belongs to one front and one engine, which answers in order. So no late
answer comes after the one that is awaited.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

RECORD: Any = np.dtype([("slot", np.uint32), ("epoch", np.uint32)])
WRAP = 1 << 32  # of epochs
ENGINE_GONE = 0xFFFFFFFF  # as the slot of a record: its epoch is the number of an engine that ended
AT_ONCE = 4096 // RECORD.itemsize  # records that a pipe takes as one, among those of other writers
PIPE_BYTES = 1 << 20  # the most that Linux gives
Array = npt.NDArray[Any]


class Shape(NamedTuple):
    fronts: int
    engines: int
    slots: int  # of a front for each engine
    length: int  # tokens of a row
    width: int  # numbers of an answer

    def first(self, front: int, engine: int) -> int:
        return (front * self.engines + engine) * self.slots


class Slots:
    """Views of the shared memory, [slots] each or [slots, size]."""

    def __init__(self, memory: Connection, shape: Shape) -> None:
        self.shape, count = shape, shape.fronts * shape.engines * shape.slots
        parts: dict[str, tuple[Any, tuple[int, ...]]] = {
            "since": (np.float64, (count,)),  # s: when the row came
            "epochs": (np.uint32, (count,)),
            "lengths": (np.int32, (count,)),
            "ids": (np.int32, (count, shape.length)),
            "types": (np.int8, (count, shape.length)),
            "answers": (np.float32, (count, shape.width)),
        }
        sizes = [int(np.dtype(kind).itemsize * np.prod(form)) for kind, form in parts.values()]
        starts = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])
        if os.fstat(memory.fileno()).st_size < starts[-1]:
            os.posix_fallocate(memory.fileno(), 0, int(starts[-1]))  # now: later a lack of it would be SIGBUS
        shared = mmap.mmap(memory.fileno(), int(starts[-1]))
        views = {
            name: np.frombuffer(shared, kind, int(np.prod(form)), int(start)).reshape(form)
            for (name, (kind, form)), start in zip(parts.items(), starts, strict=False)
        }
        self.since, self.epochs, self.lengths = views["since"], views["epochs"], views["lengths"]
        self.ids, self.types, self.answers = views["ids"], views["types"], views["answers"]
        self.flat_ids, self.flat_types = self.ids.ravel(), self.types.ravel()
        self.all_epochs = self.epochs.data  # a number of it is read faster

    def front_of(self, slots: Array) -> Array:
        return slots // (self.shape.engines * self.shape.slots)

    def places(self, slots: Array, lengths: Array) -> Array | slice:
        """Return where the tokens of rows lie in `flat_ids` and `flat_types`, in a line."""
        if len(slots) == 1:
            start = int(slots[0]) * self.shape.length
            return slice(start, start + int(lengths[0]))
        ends = lengths.cumsum()
        return np.repeat(slots * np.int64(self.shape.length) - ends + lengths, lengths) + np.arange(ends[-1])


class Board:
    """State of all processes that each other one reads: numbers, each with one writer."""

    def __init__(self, memory: Connection, fronts: int, engines: int, metrics: int) -> None:
        counts = [engines, engines, engines, fronts, metrics * (fronts + engines + 1)]
        ends = np.cumsum(counts).tolist()
        if os.fstat(memory.fileno()).st_size < 8 * ends[-1]:
            os.posix_fallocate(memory.fileno(), 0, 8 * ends[-1])
        whole = memoryview(mmap.mmap(memory.fileno(), 8 * ends[-1])).cast("d")
        self.alive, self.busy, self.rate, self.beat, values = (
            whole[end - count : end] for end, count in zip(ends, counts, strict=True)
        )
        # of fronts, engines, and the supervisor
        self.metrics = [values[at : at + metrics] for at in range(0, len(values), metrics)]


def make_memory(name: str) -> Connection:
    """Return memory that goes with its last process, as a connection, which can be given to a process."""
    return Connection(os.memfd_create(f"qdqbench-{name}"))


def make_pipe() -> tuple[Connection, Connection]:
    """Return both ends of a pipe of records; nobody waits who writes or reads."""
    reader, writer = Pipe(duplex=False)
    for end in (reader, writer):
        os.set_blocking(end.fileno(), False)
    with suppress(OSError):  # more than the user may have
        fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reader, writer


def read_records(pipe: Connection) -> Array:
    """Return the records that are there; EOFError where nobody can write any longer."""
    try:
        if not (data := os.read(pipe.fileno(), PIPE_BYTES)):
            raise EOFError
    except BlockingIOError:
        data = b""
    return np.frombuffer(data, RECORD)


def send(pipe: Connection, data: bytes) -> bool:
    """Write records; False where the pipe is full, which is larger than all slots need."""
    try:
        os.write(pipe.fileno(), data)
    except BlockingIOError:
        return False
    return True


def split_records(records: Array) -> Iterator[bytes]:
    """Yield records as the bytes of single writes."""
    for start in range(0, len(records), AT_ONCE):
        yield records[start : start + AT_ONCE].tobytes()
