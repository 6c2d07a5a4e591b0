"""What this process is doing, told where it is done; a display of whoever started it listens.

Without one this costs a call. What is timed is not to be disturbed: displays hold still while it is.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[str, float, float], None]  # phase, steps done, steps in all (0: not known; 1: a share)

_listeners: list[Listener] = []  # the innermost display is the last
_timed: list[float] = []  # when what is being timed began


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hear what is being done."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def doing(phase: str, done: float = 0, total: float = 0) -> None:
    """Say what is done now, and how many steps of it are."""
    if _listeners:
        _listeners[-1](phase, done, total)


def counted(phase: str, items: Collection[T]) -> Iterator[T]:
    """Items, one by one, each of them a step of a phase."""
    steps = len(items) if len(items) > 1 else 0
    for done, item in enumerate(items):
        doing(phase, done, steps)
        yield item


@contextmanager
def timed() -> Iterator[None]:
    """What happens inside is measured."""
    _timed.append(time.monotonic())
    try:
        yield
    finally:
        _timed.pop()


def timed_since() -> float | None:
    """When what is being timed now began, by `time.monotonic`; None: nothing is."""
    return _timed[-1] if _timed else None
