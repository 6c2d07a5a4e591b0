"""What this process is doing, told where it is done; a display of whoever started it listens.

Without one this costs a call. What is timed is not to be disturbed: displays hold still while it is.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[str, float, float], None]  # phase, steps done, steps in all (0: not known; 1: a share)

_listeners: list[Listener] = []  # the innermost display is the last
_thread = threading.local()  # `silenced`, and `end`, an event
_timed: list[float] = []  # when what is being timed began


class Ended(Exception):
    """What a thread does is worth nothing any more."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hear what is being done."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def unheard() -> Iterator[None]:
    """What this thread does in the block is not what a display shows."""
    _thread.silenced = True
    try:
        yield
    finally:
        _thread.silenced = False


@contextmanager
def ended_by(event: threading.Event) -> Iterator[None]:
    """What this thread does in the block ends with `Ended` where it next says so, once the event is set."""
    before, _thread.end = getattr(_thread, "end", None), event
    try:
        yield
    finally:
        _thread.end = before


def raise_if_ended() -> None:
    """Where what is done can end.

    Raises:
        Ended: it is to.
    """
    end = getattr(_thread, "end", None)
    if end is not None and end.is_set():
        raise Ended


def doing(phase: str, done: float = 0, total: float = 0) -> None:
    """Say what is done now, and how many steps of it are.

    Raises:
        Ended: see `ended_by`.
    """
    raise_if_ended()
    if _listeners and not getattr(_thread, "silenced", False):
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
