"""Progress, reported by the code that works; the display pauses while time is measured."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
Listener = Callable[[str, float, float], None]  # phase, steps done, steps in all (0: not known; 1: a share)
Progress = Callable[[float, float, str], None]  # steps done, steps in all, the next one

_listeners: list[Listener] = []  # the innermost display is the last
_measuring: list[float] = []  # when each measurement began


def silent(*now: Any) -> None:
    """No progress is shown."""


@contextmanager
def subscribe(listener: Listener) -> Iterator[None]:
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report_phase(phase: str, done: float = 0, total: float = 0) -> None:
    if _listeners:
        _listeners[-1](phase, done, total)


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
