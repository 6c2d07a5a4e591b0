"""Show on stderr what a command does: bars on a terminal; in a log file a line every half minute."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qdqbench.cli.terminal import clean
from qdqbench.quantize.utils import progress
from qdqbench.quantize.utils.progress import duration
from qdqbench.quantize.utils.system.process import ticking

if TYPE_CHECKING:
    from rich.progress import Progress

    from qdqbench.eval.runs.run import StageProgress
    from qdqbench.quantize.utils.trackers import LogRow

Show = Callable[[int, "LogRow", int], None]
REDRAWN_S = 0.25
EVERY_S = 25.0  # between lines of a log: with `HOLD_S` and a beat never more than half a minute
HOLD_S = 4.0  # a display waits so long for what is timed: one launch that takes longer is not moved by a line
BEAT_S = 0.5
LEAST_S = 2.0  # before a rate is worth something


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


@dataclass
class Status:
    what: str = ""
    whole: Eta = field(default_factory=Eta)
    phase: str = ""
    part: Eta = field(default_factory=Eta)

    def begin(self, what: str) -> None:
        if what != self.what:
            self.what = what
            self.hear("")

    def hear(self, phase: str, done: float = 0, total: float = 0) -> None:
        anew = phase not in ("", self.phase) or not total
        self.phase = phase if phase or not total else self.phase
        self.part.tell(done, total, anew=anew)

    def details(self) -> str:
        part, parts = self.part, [self.phase]
        if part.total:  # 1: a share of the whole, not a count
            parts.append(f"{part.done:.0%}" if part.total == 1 else f"{part.done:g} of {part.total:g}")
        if (silent := time.monotonic() - part.updated) >= EVERY_S:
            parts.append(f"nothing new for {duration(silent)}")
        elif (left := part.left()) is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(filter(None, parts))

    def line(self) -> str:
        whole = self.whole
        parts = [f"{whole.done / whole.total:.0%}"] if whole.total else []
        if (left := whole.left()) is not None:
            parts.append(f"{duration(left)} left")
        return ": ".join(filter(None, (", ".join(parts), self.what, self.details())))


class Heartbeat:
    """Draws again and again, though not while something is timed."""

    def __init__(self, draw: Callable[[], None], every_s: float, last: float) -> None:
        self.draw, self.every_s, self.last = draw, every_s, last
        self._lock = threading.Lock()

    def tick(self) -> None:
        with self._lock:
            now, since = time.monotonic(), progress.measuring_since()
            holding = since is not None and now - max(since, self.last) < HOLD_S
            if now - self.last >= self.every_s and not holding:
                self.last = now
                self.draw()


_last_line = [time.monotonic()]  # when this process began, or the last line of any log was written


def reset_clock() -> None:
    """Begin a command: what it loads before it shows anything counts too."""
    _last_line[0] = time.monotonic()


def log_heartbeat(line: Callable[[], str]) -> Heartbeat:
    """Write lines with the time to stderr, one every `EVERY_S`; what quick commands do stays silent."""

    def draw() -> None:
        if text := line():
            reset_clock()
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            sys.stderr.flush()

    return Heartbeat(draw, EVERY_S, _last_line[0])


class Display:
    def __init__(self, bars: "Progress | None", *, quiet: bool = False) -> None:
        self.bars, self.now = bars, Status()
        self.step = self.note = ""  # what a terminal shows below the bars: what is done, what came of it
        if bars is None:
            self.heartbeat = log_heartbeat(lambda: "" if quiet else clean(self.now.line()))
        else:
            self.heartbeat = Heartbeat(lambda: None, REDRAWN_S, time.monotonic())

    def hear(self, phase: str, done: float = 0, total: float = 0) -> None:
        self.now.hear(phase, done, total)
        self.heartbeat.tick()

    def begin(self, what: str) -> None:
        self.now.begin(what)
        self.heartbeat.tick()

    def whole(self, done: float, total: float) -> str:
        self.now.whole.tell(done, total)
        left = self.now.whole.left()
        return "" if left is None else f"{duration(left)} left, "

    def add(self, text: str, total: float | None = None, **fields: Any) -> Any:
        return None if self.bars is None else self.bars.add_task(clean(text), total=total, **fields)

    def update(self, bar: Any, **fields: Any) -> None:
        if self.bars is not None:
            texts = {name: clean(text) for name, text in fields.items() if isinstance(text, str)}
            self.bars.update(bar, **(fields | texts))

    def say(self, text: str, style: str = "") -> None:
        if self.bars is None:
            sys.stderr.write(f"{clean(text)}\n")
        else:
            from rich.text import Text

            self.bars.console.print(Text(clean(text), style))

    def renderable(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        lines = filter(None, (": ".join(filter(None, (self.step, self.now.details()))), self.note))
        below = (Text(clean(line), "dim", no_wrap=True, overflow="ellipsis") for line in lines)
        return Group(*filter(None, (self.bars,)), *below)


@contextmanager
def _display(*columns: str | int, quiet: bool = False, stays: bool = True) -> Iterator[Display]:
    """Yield a display that hears what is done; quiet in other processes of a launcher.

    `columns` of the bars are the width of the bar itself, "spinner", "elapsed", or templates of text.
    """
    if quiet:
        yield Display(None, quiet=True)
        return
    if not sys.stderr.isatty():
        shown = Display(None)
        with progress.subscribe(shown.hear), ticking(shown.heartbeat.tick, BEAT_S):
            yield shown
        return
    from rich.console import Console
    from rich.live import Live
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    named = {"spinner": SpinnerColumn, "elapsed": TimeElapsedColumn}
    made = [
        BarColumn(bar_width=each)
        if isinstance(each, int)
        else named[each]()
        if each in named
        else TextColumn(each, markup=False)
        for each in columns
    ]
    console = Console(stderr=True)
    shown = Display(Progress(*made, console=console, auto_refresh=False))
    with Live(
        console=console, auto_refresh=False, get_renderable=shown.renderable, transient=not stays
    ) as live:
        shown.heartbeat.draw = live.refresh
        with progress.subscribe(shown.hear), ticking(shown.heartbeat.tick, REDRAWN_S):
            yield shown
        shown.now.hear("")  # nothing is done any more


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Show one changing line, gone when it ends: what came of it is printed."""
    with _display("spinner", "{task.description}", "elapsed", stays=False) as shown:
        bar = shown.add("")

        def say(text: str) -> None:
            shown.update(bar, description=text)
            shown.begin(text)

        yield say


@contextmanager
def time_left() -> Iterator[Callable[[float, float, str], None]]:
    with _display(24, "{task.percentage:>3.0f}%", "elapsed", "{task.description}") as shown:
        bar = shown.add("")

        def tell(done: float, total: float, text: str) -> None:
            left = shown.whole(done, total)
            shown.update(bar, completed=done, total=total, description=left + text)
            shown.begin(text)

        yield tell


@contextmanager
def stages() -> Iterator[Callable[["StageProgress"], None]]:
    with _display("spinner", "{task.description:<28}", 20, "elapsed") as shown:
        bar: Any = None  # of the stage that runs

        def finish() -> None:
            if bar is not None:
                shown.update(bar, total=1, completed=1)
            shown.note = ""

        def show(now: "StageProgress") -> None:
            nonlocal bar
            if now.alarm:
                shown.say(f"✗ {now.alarm}. The run continues; Ctrl-C ends it", "bold red")
                return
            if now.said:
                shown.say(now.said)
                return
            name = f"stage {now.number} of {now.of}: {now.stage}"
            if not now.total:
                finish()
                text, total = (f"{name} (unchanged)", 1) if now.reused else (name, None)
                bar = shown.add(text, total)
                shown.begin(name)
                return
            if now.row and now.row.loss is not None:
                shown.note = f"loss {now.row.loss:.4g}"
                shown.now.what = f"{name}, {shown.note}"
            shown.update(bar, completed=now.done, total=now.total)
            shown.hear("", now.done, now.total)

        yield show
        finish()


@contextmanager
def seeds(count: int, *, quiet: bool) -> Iterator[Show]:
    """Show one bar per seed of a fine-tuning: called with the seed, the row of its log, and its steps."""
    columns = "{task.description:<10}", 24, "elapsed", "{task.fields[left]}{task.fields[loss]}"
    with _display(*columns, quiet=quiet) as shown:
        bars: dict[int, Any] = {}

        def show(seed: int, row: "LogRow", steps: int) -> None:
            from qdqbench.quantize.utils.trackers import training_line

            name = f"seed {seed}" if count > 1 else "training"
            if seed not in bars:
                bars[seed] = shown.add(name, steps, left="", loss="")
                shown.now.whole = Eta()
            shown.update(bars[seed], completed=row.step, left=shown.whole(row.step, steps))
            if row.loss is not None:
                shown.update(bars[seed], loss=f"loss {row.loss:.4f}")
            if row.score is not None:
                values = ", ".join(f"{name} {value:.4f}" for name, value in row.values.items())
                shown.note = f"held out: {values}"
            shown.begin(f"{name}: {training_line(row, steps)}")

        yield show


@contextmanager
def trials(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[int, int, str], None]]]:
    with _display("spinner", "{task.description}", 20, "elapsed", "{task.fields[left]}") as shown:
        head = "preparing"
        bar = shown.add(head, total, left="")

        def say(text: str) -> None:
            shown.step = text
            shown.begin(f"{head}: {text}")

        def trial(done: int, total: int, best: str) -> None:
            nonlocal head
            left, name = shown.whole(done, total), f"trial {min(done + 1, total)} of {total}"
            shown.update(bar, completed=done, description=name, left=left.removesuffix(", "))
            head, shown.step, shown.note = f"{done} of {total} trials; {best}", "", best
            shown.begin(head)

        yield say, trial
