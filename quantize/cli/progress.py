"""What a command shows while it works: bars on a terminal; in a log file a line every half minute.

All of it goes to stderr. Heavy libraries are imported inside.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from qdqbench.quantize.cli.terminal import plain

if TYPE_CHECKING:
    from rich.progress import Progress

    from qdqbench.eval.runs.run import StageProgress
    from qdqbench.quantize.core.training_results import LogRow

EVERY_S = 30.0
Show = Callable[[int, "LogRow", int], None]


class Log:
    """Lines with the time, one in half a minute at most: what quick commands do stays silent."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet, self.last = quiet, time.monotonic()

    def __call__(self, text: str) -> None:
        """What is being done."""
        if not self.quiet and time.monotonic() - self.last >= EVERY_S:
            self.last = time.monotonic()
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            sys.stderr.flush()


def hidden(quiet: bool) -> bool:
    """Whether no bar is shown: unwanted, or not a terminal."""
    return quiet or not sys.stderr.isatty()


@contextmanager
def status(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """One changing line."""
    if hidden(quiet):
        yield Log(quiet=quiet)
        return
    from rich.console import Console

    with Console(stderr=True).status("") as shown:
        yield lambda text: shown.update(plain(text))


@contextmanager
def time_left(*, quiet: bool) -> Iterator[Callable[[float, float, str], None]]:
    """A bar with the time that is left: called with what is done, all, and what is done now."""
    if hidden(quiet):
        log = Log(quiet=quiet)
        yield lambda done, total, text: log(f"{done / total if total else 0:.0%} {text}")
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with _bars(*columns) as bars:
        bar = bars.add_task("", total=None)
        yield lambda done, total, text: bars.update(bar, completed=done, total=total, description=text)


@contextmanager
def stages(*, quiet: bool) -> Iterator[Callable[["StageProgress"], None]]:
    """One bar per stage."""
    if hidden(quiet):
        log = Log(quiet=quiet)
        yield lambda now: log(_stage_text(now))
        return
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with _bars(*columns) as bars:
        current: list[Any] = []

        def finish() -> None:
            if current:
                bars.update(current[-1], total=1, completed=1)

        def show(now: "StageProgress") -> None:
            if not now.total:
                finish()
                label = f"{now.stage} (unchanged)" if now.reused else now.stage
                current.append(bars.add_task(label, total=1 if now.reused else None))
                return
            loss = now.row.loss if now.row else None
            description = None if loss is None else f"{now.stage} {now.done}/{now.total} loss {loss:.4g}"
            bars.update(current[-1], completed=now.done, total=now.total, description=description)

        yield show
        finish()


def _stage_text(now: "StageProgress") -> str:
    """A line of a log."""
    if not now.total:
        return now.stage
    from qdqbench.quantize.core.training_results import training_line

    done = training_line(now.row, now.total) if now.row else f"{now.done} of {now.total}"
    return f"{now.stage}: {done}"


@contextmanager
def seeds(count: int, *, quiet: bool) -> Iterator[Show]:
    """One bar per seed of a fine-tuning: called with the seed, the row of its log, and its steps."""
    if hidden(quiet):
        from qdqbench.quantize.core.training_results import training_line

        log = Log(quiet=quiet)
        yield lambda seed, row, steps: log(f"seed {seed}: {training_line(row, steps)}")
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}  {task.fields[judged]}"),
    )
    with _bars(*columns) as bars:
        tasks: dict[int, Any] = {}

        def show(seed: int, row: "LogRow", steps: int) -> None:
            if seed not in tasks:
                name = f"seed {seed}" if count > 1 else "training"
                tasks[seed] = bars.add_task(name, total=steps, loss="", judged="")
            fields: dict[str, Any] = {"completed": row.step}
            if row.loss is not None:
                fields["loss"] = f"loss {row.loss:.4f}"
            if row.score is not None:
                values = ", ".join(f"{name} {value:.4f}" for name, value in row.values.items())
                fields["judged"] = plain(f"held out: {values}")
            bars.update(tasks[seed], **fields)

        yield show


class Trials(NamedTuple):
    """Progress of a search: what is being done, and the trials so far, all and the best."""

    say: Callable[[str], None]
    trial: Callable[[int, int, str], None]


@contextmanager
def trials(total: int, *, quiet: bool) -> Iterator[Trials]:
    """One bar over the trials of a search."""
    if hidden(quiet):
        log = Log(quiet=quiet)
        yield Trials(log, lambda done, total, best: log(f"{done} of {total} trials; {best}"))
        return
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<28}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[best]}"),
    )
    with _bars(*columns) as bars:
        bar = bars.add_task("preparing", total=total, best="")

        def trial(done: int, total: int, best: str) -> None:
            name = f"trial {min(done + 1, total)} of {total}"
            bars.update(bar, completed=done, description=name, best=plain(best))

        yield Trials(lambda text: bars.update(bar, description=plain(text)), trial)


def _bars(*columns: Any) -> "Progress":
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True))
