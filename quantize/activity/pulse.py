"""How far something is, how long it will take, and a sign of life while nothing is told.

A thread draws, because most phases are one call into a library that says nothing while it works.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from qdqbench.quantize.activity import told

EVERY_S = 25.0  # between lines of a log: with `HOLD_S` and a beat never more than half a minute
HOLD_S = 4.0  # a display waits so long for what is timed: one launch that takes longer is not moved by a line
BEAT_S = 0.5
LEAST_S = 2.0  # before a rate is worth something


@dataclass
class Count:
    """Steps that are done, and the time that the others will take at this pace."""

    done: float = 0
    total: float = 0  # 0: not known
    _first: float = 0  # done when counting began: what an earlier call did says nothing of the pace
    _since: float = field(default_factory=time.monotonic)
    _told: float = field(default_factory=time.monotonic)

    def tell(self, done: float, total: float, *, anew: bool = False) -> None:
        """How many steps are done, of how many."""
        now = time.monotonic()
        if anew or total != self.total or done < self.done:
            self._first, self._since = done, now
        self.done, self.total, self._told = done, total, now

    def left(self) -> float | None:
        """Seconds; None where that is not known yet, or no more."""
        gained, spent = self.done - self._first, self._told - self._since
        if gained <= 0 or spent < LEAST_S or self.done >= self.total:
            return None
        left = spent / gained * (self.total - self.done) - (time.monotonic() - self._told)
        return left if left >= 0.5 else None

    @property
    def silent_s(self) -> float:
        """Since something was told."""
        return time.monotonic() - self._told


@dataclass
class Now:
    """What is being done: the whole, and the phase that it is in."""

    what: str = ""
    whole: Count = field(default_factory=Count)
    phase: str = ""
    part: Count = field(default_factory=Count)

    def begin(self, what: str) -> None:
        """Something else begins."""
        if what != self.what:
            self.what = what
            self.hear("")

    def hear(self, phase: str, done: float = 0, total: float = 0) -> None:
        """What `told.doing` says; without a phase its name stays, and this is a step of it."""
        anew = phase not in ("", self.phase) or not total
        self.phase = phase if phase or not total else self.phase
        self.part.tell(done, total, anew=anew)

    def details(self) -> str:
        """The phase with its steps, and the time that is left of it, or for how long nothing was told."""
        parts = [self.phase] if self.phase else []
        if self.part.total:
            share = self.part.total == 1  # a part of the whole, not a count
            done = f"{self.part.done:.0%}" if share else f"{self.part.done:g} of {self.part.total:g}"
            parts.append(done)
        left, silent = self.part.left(), self.part.silent_s
        if silent >= EVERY_S:
            parts.append(f"nothing new for {duration(silent)}")
        elif left is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

    def line(self) -> str:
        """All of it as one line."""
        whole = self.whole
        parts = [f"{whole.done / whole.total:.0%}"] if whole.total else []
        if (left := whole.left()) is not None:
            parts.append(f"{duration(left)} left")
        said = [", ".join(parts)] if parts else []
        return ": ".join([*said, *(text for text in (self.what, self.details()) if text)])


class Pulse:
    """Draws again and again, though not while something is timed."""

    def __init__(self, draw: Callable[[], None], every_s: float) -> None:
        self.draw, self.every_s = draw, every_s
        self.last, self._lock = time.monotonic(), threading.Lock()

    def beat(self) -> None:
        """Draw, if it is time to."""
        with self._lock:
            now, since = time.monotonic(), told.timed_since()
            holding = since is not None and now - max(since, self.last) < HOLD_S
            if now - self.last >= self.every_s and not holding:
                self.last = now
                self.draw()


_said = [time.monotonic()]  # when this process began, or the last line of any log was written


def anew() -> None:
    """A command begins: what it loads before it shows anything counts too."""
    _said[0] = time.monotonic()


def log(line: Callable[[], str]) -> Pulse:
    """Lines with the time on stderr, one every `EVERY_S`; what quick commands do stays silent."""

    def draw() -> None:
        if text := line():
            anew()
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            sys.stderr.flush()

    made = Pulse(draw, EVERY_S)
    made.last = _said[0]
    return made


@contextmanager
def beating(beat: Callable[[], None], every_s: float = BEAT_S) -> Iterator[None]:
    """Call `beat` from a thread, again and again."""
    done = threading.Event()

    def go() -> None:
        while not done.wait(every_s):
            with suppress(OSError, ValueError):  # nobody reads any more
                beat()

    thread = threading.Thread(target=go, name="sign of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def duration(seconds: float) -> str:
    """About how long: 40 s, 12 min, 3.4 h."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5940 else f"{seconds / 3600:.1f} h"
