"""Progress: the code that works reports to the innermost reporter, which pauses while time is measured."""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Reporter:
    """Is told what a command does, and passes it on; the outermost one shows nothing."""

    outer: "Reporter | None" = None

    def begin(self, step: str, done: float = 0, of: float = 0, *, reused: bool = False) -> None:
        """A step begins, after `done` of `of` (0: not known), unless its result is there and `reused`."""
        if self.outer:
            self.outer.begin(step, done, of, reused=reused)

    def advance(self, done: float = 0, total: float = 0, phase: str = "", row: Any = None) -> None:
        """The step is at `done` of `total` (0: not known; 1: a share), in a phase, or at a row of its log."""
        if self.outer:
            self.outer.advance(done, total, phase, row)

    def log(self, text: str, *, alarm: bool = False) -> None:
        """Something is to be known; an `alarm` makes the rest worth nothing."""
        if self.outer:
            self.outer.log(text, alarm=alarm)


class Prefixed(Reporter):
    """A command that runs as a step of this one: its steps have a name before them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def begin(self, step: str, done: float = 0, of: float = 0, *, reused: bool = False) -> None:
        super().begin(f"{self.name}: {step}" + (f", {done / of:.0%}" if of else ""))


class Within(Reporter):
    """A command that runs inside a step: its steps are phases of that."""

    def begin(self, step: str, done: float = 0, of: float = 0, *, reused: bool = False) -> None:
        super().advance(phase=step)


_reporters = [Reporter()]  # the innermost is the last
_measuring: list[float] = []  # when each measurement began

Inner = TypeVar("Inner", bound=Reporter)


def reporter() -> Reporter:
    return _reporters[-1]


@contextmanager
def reporting_to(inner: Inner) -> Iterator[Inner]:
    """Report to another reporter, which may pass it on to the present one."""
    inner.outer = _reporters[-1]
    _reporters.append(inner)
    try:
        yield inner
    finally:
        _reporters.remove(inner)


def report_phase(phase: str, done: float = 0, total: float = 0) -> None:
    reporter().advance(done, total, phase)


def track(phase: str, items: Collection[T]) -> Iterator[T]:
    steps = len(items) if len(items) > 1 else 0
    for done, item in enumerate(items):
        report_phase(phase, done, steps)
        yield item


@contextmanager
def measuring() -> Iterator[None]:
    _measuring.append(time.monotonic())
    try:
        yield
    finally:
        _measuring.pop()


def measuring_since() -> float | None:
    """Return when the present measurement began, by `time.monotonic`; None: nothing is measured."""
    return _measuring[-1] if _measuring else None


def duration(seconds: float) -> str:
    """Return about how long that is: 40 s, 12 min, 3.4 h."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5940 else f"{seconds / 3600:.1f} h"
