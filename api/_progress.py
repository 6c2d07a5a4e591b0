"""Progress: bars on a terminal and in a notebook, in a log a line every half minute."""

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import clean
from qdqbench.quantize.utils.progress import Reporter, duration, measuring_since, reporting_to
from qdqbench.quantize.utils.system.process import is_main_process, ticking
from qdqbench.quantize.utils.trackers import LogRow

REDRAWN_S = 0.25
EVERY_S = 25.0  # between lines of a log: with `HOLD_S` and a beat never more than half a minute
HOLD_S = 4.0  # a display waits so long for what is timed: one launch that takes longer is not moved by a line
BEAT_S = 0.5
LEAST_S = 2.0  # before a rate is worth something
COLUMNS = 100  # of a notebook
_last_line = [time.monotonic()]  # when this process began, or the last line of any log was written


def reset_clock() -> None:
    """Begin a command: what it loads before it shows anything counts too."""
    _last_line[0] = time.monotonic()


@dataclass(frozen=True)
class StageProgress:
    """Progress of a function, as callbacks get it."""

    stage: str  # of a run; of another function what it does
    done: float = 0
    total: float = 0  # 0: the stage starts; 1: `done` is a part of it, no number of steps
    reused: bool = False  # what is there is used again
    row: LogRow | None = None  # of a training's log
    alarm: str = ""  # what makes the rest of the run worth nothing
    said: str = ""  # what is to know before it begins
    number: int = 1  # of the stage, among
    of: int = 1  # those that are gone through


class Callback(Reporter):
    """A function of the caller."""

    def __init__(self, call: Callable[[StageProgress], object]) -> None:
        self.call, self.now = call, StageProgress("")

    def begin(self, step: str, done: float = 0, of: float = 0, *, reused: bool = False) -> None:
        self.now = StageProgress(step, reused=reused, number=int(done) + 1, of=max(int(of), 1))
        self.call(self.now)

    def advance(self, done: float = 0, total: float = 0, phase: str = "", row: Any = None) -> None:
        if total:
            self.call(replace(self.now, done=done, total=total, row=row))

    def log(self, text: str, *, alarm: bool = False) -> None:
        self.call(StageProgress("", alarm=text) if alarm else StageProgress("", said=text))


@dataclass
class Eta:
    """Steps that are done, and the time that the others will take at this pace."""

    done: float = 0
    total: float = 0  # 0: not known
    _first: float = 0  # done when counting began: what an earlier call did says nothing of the pace
    _since: float = field(default_factory=time.monotonic)
    updated: float = field(default_factory=time.monotonic)

    def tell(self, done: float, total: float, *, anew: bool = False) -> None:
        now = time.monotonic()
        if anew or total != self.total or done < self.done:
            self._first, self._since = done, now
        self.done, self.total, self.updated = done, total, now

    def left(self) -> float | None:
        """Return seconds; None where that is not known yet, or no more."""
        gained, spent = self.done - self._first, self.updated - self._since
        if gained <= 0 or spent < LEAST_S or self.done >= self.total:
            return None
        left = spent / gained * (self.total - self.done) - (time.monotonic() - self.updated)
        return left if left >= 0.5 else None


class Display(Reporter):
    """A log: a line for what takes long. It is drawn again and again, though not while something is timed."""

    step = phase = note = ""

    def __init__(self, noun: str = "") -> None:
        self.noun, self.every_s, self.last = noun, EVERY_S, _last_line[0]
        self.whole, self.part, self._lock = Eta(), Eta(), threading.Lock()

    def begin(self, step: str, done: float = 0, of: float = 0, *, reused: bool = False) -> None:
        if self.noun and of:
            step = f"{self.noun} {done + 1:g} of {of:g}: {step}"
        else:
            self.whole.tell(done, of)
        if step != self.step:
            self.step, self.phase, self.note = step, "", ""
            self.part.tell(0, 0, anew=True)
        self.tick()

    def advance(self, done: float = 0, total: float = 0, phase: str = "", row: Any = None) -> None:
        if row is not None and row.score is not None:
            self.note = f"held out: {', '.join(f'{name} {value:.4f}' for name, value in row.values.items())}"
        elif row is not None and row.loss is not None:
            self.note = f"loss {row.loss:.4g}"
        self.part.tell(done, total, anew=phase not in ("", self.phase) or not total)
        self.phase = phase if phase or not total else self.phase
        self.tick()

    def log(self, text: str, *, alarm: bool = False) -> None:
        self.write(f"✗ {text}. The run continues; Ctrl-C ends it" if alarm else text, alarm)

    def tick(self) -> None:
        with self._lock:
            now, since = time.monotonic(), measuring_since()
            holding = since is not None and now - max(since, self.last) < HOLD_S
            if now - self.last >= self.every_s and not holding:
                self.last = now
                self.draw()

    def draw(self) -> None:
        said = ", ".join(filter(None, (self.head(), self.note)))
        if text := ": ".join(filter(None, (said, self.details()))):
            reset_clock()
            self.write(f"{time.strftime('%H:%M:%S')} {text}")

    def write(self, text: str, alarm: bool = False) -> None:
        sys.stderr.write(f"{clean(text)}\n")
        sys.stderr.flush()

    def head(self) -> str:
        parts = [f"{self.whole.done / self.whole.total:.0%}"] if self.whole.total else []
        if (left := self.whole.left()) is not None:
            parts.append(f"{duration(left)} left")
        return ": ".join(filter(None, (", ".join(parts), self.step)))

    def details(self) -> str:
        part, parts = self.part, [self.phase]
        if part.total:  # 1: a share of the whole, not a count
            parts.append(f"{part.done:.0%}" if part.total == 1 else f"{part.done:g} of {part.total:g}")
        if (silent := time.monotonic() - part.updated) >= EVERY_S:
            parts.append(f"nothing new for {duration(silent)}")
        elif (left := part.left()) is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(filter(None, parts))


class Bars(Display):
    """One bar for each step that has a `noun`, such as a stage; else one line, gone when it ends."""

    def __init__(self, noun: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        super().__init__(noun)
        self.every_s, self.last = REDRAWN_S, 0.0
        self.notebook = sys.modules["IPython"].display if in_notebook() else None
        self.console = Console(stderr=True)
        if self.notebook:
            self.console = Console(file=io.StringIO(), force_jupyter=False, width=COLUMNS)
            self.shown = self.notebook.display({"text/plain": ""}, raw=True, display_id=True)
        text = TextColumn("{task.description:<28}" if noun else "{task.description}", markup=False)
        bar = [BarColumn(bar_width=20)] if noun else []
        columns = SpinnerColumn(), text, *bar, TimeElapsedColumn()
        self.bars = Progress(*columns, console=self.console, auto_refresh=False)
        self.live = Live(
            console=self.console, auto_refresh=False, get_renderable=self.renderable, transient=not noun
        )
        self.bar: Any = None if noun else self.bars.add_task("", total=None)

    def begin(self, step: str, done: float = 0, of: float = 0, *, reused: bool = False) -> None:
        self.finish()
        super().begin(step, done, of)
        if self.noun:
            text = f"{self.step}{' (unchanged)' * reused}"
            self.bar = self.bars.add_task(clean(text), total=1 if reused else None)

    def advance(self, done: float = 0, total: float = 0, phase: str = "", row: Any = None) -> None:
        if self.noun and total and self.bar is not None:
            self.bars.update(self.bar, completed=done, total=total)
        super().advance(done, total, phase, row)

    def finish(self) -> None:
        if self.noun and self.bar is not None:
            self.bars.update(self.bar, total=1, completed=1)

    def write(self, text: str, alarm: bool = False) -> None:
        from rich.text import Text

        if self.notebook:
            super().write(text)
        else:
            self.console.print(Text(clean(text), "bold red" if alarm else ""))

    def draw(self) -> None:
        if not self.noun:
            self.bars.update(self.bar, description=clean(self.head()))
        if self.notebook:
            with self.console.capture() as drawn:
                self.console.print(self.renderable())
            self.shown.update({"text/plain": drawn.get()}, raw=True)
        else:
            self.live.refresh()

    def renderable(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        if not self.noun and not self.step:
            return Group()
        lines = (clean(line) for line in (self.details(), self.note) if line)
        return Group(self.bars, *(Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in lines))


@contextmanager
def displayed(progress: Any = True, noun: str = "") -> Iterator[None]:
    """Show what is done inside, to a function or on stderr; not with False, or None outside of notebooks.

    Args:
        noun: of its steps, such as "stage", where each has a bar of its own.
    """
    if progress not in (True, False, None) and not callable(progress):
        raise UserError(f"progress={progress!r} is no function; give one, True for bars, or False")
    if callable(progress):
        with reporting_to(Callback(progress)):
            yield
    elif not (in_notebook() if progress is None else progress) or not is_main_process():
        yield
    elif not (sys.stderr.isatty() or in_notebook()):
        with reporting_to(Display(noun)) as shown, ticking(shown.tick, BEAT_S):
            yield
    else:
        bars = Bars(noun)
        if not bars.notebook:
            bars.live.start(refresh=True)
        try:
            with reporting_to(bars), ticking(bars.tick, REDRAWN_S):
                yield
            bars.finish()
        finally:
            bars.step = bars.phase = bars.note = ""  # nothing is done any more
            bars.part = Eta()
            bars.draw()
            bars.live.stop()


def in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"
