"""Progress bars of the Python API, by tqdm: with `progress=True`, and in notebooks unless it is False."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.progress import measuring_since, silent, subscribe

if TYPE_CHECKING:
    from qdqbench.eval.runs.run import StageProgress
    from qdqbench.quantize.utils.trackers import LogRow

REDRAWN_S = 0.25
WITHOUT_TOTAL = "{desc} [{elapsed}{postfix}]"


class Bars:
    """One bar after the other; what is done inside of a step stands behind it."""

    def __init__(self) -> None:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]

        self._new: Any = tqdm
        self._bar: Any = None
        self._drawn = 0.0

    def begin(self, text: str, total: float | None = None) -> None:
        self.close()
        self._bar = self._new(desc=text, total=total, bar_format=None if total else WITHOUT_TOTAL)

    def rename(self, text: str) -> None:
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._draw()

    def move(self, done: float, total: float | None = None) -> None:
        if self._bar is not None:
            self._bar.n, self._bar.total = done, total
            self._bar.bar_format = None
            self._draw()

    def hear(self, phase: str, done: float = 0, total: float = 0) -> None:
        if self._bar is not None:
            count = f" {done:.0%}" if total == 1 else f" {done:g} of {total:g}" if total else ""
            self._bar.set_postfix_str(f"{phase}{count}", refresh=False)
            self._draw()

    def say(self, text: str) -> None:
        self._new.write(text, file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str("", refresh=False)
            self._bar.close()
            self._bar = None

    def _draw(self) -> None:
        if time.monotonic() - self._drawn >= REDRAWN_S and measuring_since() is None:
            self._drawn = time.monotonic()
            self._bar.refresh()


@contextmanager
def shown(progress: Any, draw: Callable[[Bars], Callable[..., None]]) -> Iterator[Callable[..., None]]:
    """Yield what is told of progress: the caller's function, or bars as `draw` has them, or nothing."""
    if callable(progress):
        yield progress
        return
    if progress not in (True, False, None):
        raise UserError(f"progress={progress!r} is no function; give one, True for bars, or False")
    if not (in_notebook() if progress is None else progress):
        yield silent
        return
    bars = Bars()
    try:
        with subscribe(bars.hear):
            yield draw(bars)
    finally:
        bars.close()


def in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def draw_stages(bars: Bars) -> "Callable[[StageProgress], None]":
    def show(now: "StageProgress") -> None:
        if text := now.alarm or now.said:
            bars.say(text)
        elif now.total:
            bars.move(now.done, now.total)
        else:
            bars.begin(f"{now.number} of {now.of}: {now.stage}{' (unchanged)' * now.reused}")

    return show


def draw_samples(bars: Bars) -> Callable[[int], None]:
    done = 0
    bars.begin("calibration samples")

    def show(count: int) -> None:
        nonlocal done
        done += count
        bars.move(done)

    return show


def draw_seeds(bars: Bars) -> "Callable[[int, LogRow, int], None]":
    known: list[int] = []

    def show(seed: int, row: "LogRow", steps: int) -> None:
        if known[-1:] != [seed]:
            known.append(seed)
            bars.begin(f"training, seed {seed}", steps)
        bars.move(row.step, steps)
        if row.loss is not None:
            bars.hear(f"loss {row.loss:.4g}")

    return show


def draw_texts(bars: Bars) -> Callable[[str], None]:
    bars.begin("")  # one bar: a bench tells of every round
    return bars.rename
