"""torch.compile ahead of the measurement, in processes that can be ended: compiling may take minutes.

A process per mode compiles one shape after the other into Inductor's cache on disk, from which the process
that measures takes them in seconds. Modes go side by side with each other, the export and the builds of
engines. A shape that is not compiled in time is left out of the measurement.
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from qdqbench.eval.bench import peers
from qdqbench.quantize.families.known import family_named
from qdqbench.quantize.rundir.session import Session, read_config

COMMAND = (sys.executable, "-m", "qdqbench.eval.gpubench.compiling")
ANSWER = '{"error":'  # how lines that are for us begin
START_S = 60.0  # imports and the model, before the first shape
Shapes = tuple[tuple[int, int], ...]  # (batch, length) of one cell; several share one compilation
Late = dict[tuple[str, Shapes], str]  # mode and cell that were not compiled, and why


class Compiling:
    """Compilations that are under way; end them with `stop`."""

    def __init__(self, command: Sequence[str], cells: Sequence[Shapes], seconds: float) -> None:
        self.command, self.cells, self.seconds = tuple(command), list(cells), seconds
        self.late: Late = {}
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def compile(self, mode: str) -> None:
        """Compile every cell in a mode, in order; one that takes too long ends its process, not the rest."""
        left = list(self.cells)
        while left and not self._stopped:
            for cell, error in zip(left, self._answers(mode, left), strict=False):
                left = left[1:]
                if error:
                    self.late[mode, cell] = error

    def _answers(self, mode: str, cells: list[Shapes]) -> Iterator[str]:
        """Of each cell "" or why it was not compiled; ends behind the first that took too long."""
        process = subprocess.Popen(  # noqa: S603  (this module)
            [*self.command, mode, json.dumps(cells)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._running.add(process)
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        try:
            for number in range(len(cells)):
                limit = self.seconds * len(cells[number]) + (0 if number else START_S)
                try:
                    line = lines.get(timeout=limit)
                except queue.Empty:
                    yield f"torch.compile took over {self.seconds:g} s a shape (--compile-seconds)"
                    return
                if not line.startswith(ANSWER):
                    yield f"the process that compiles it ended{f': {line}' if line else ''}"
                    return
                yield str(json.loads(line)["error"])
        finally:
            _end(process)
            self._running.discard(process)

    def stop(self) -> None:
        """End all processes."""
        self._stopped = True
        for process in list(self._running):
            _end(process)


@contextmanager
def compiling(
    folder: Path, modes: Sequence[str], cells: Sequence[Shapes], seconds: float
) -> Iterator[Callable[[], Late]]:
    """Start to compile; gives a function that waits, and says what was not compiled and why.

    Args:
        folder: of a run; its model is compiled in FP16.
        seconds: for each mode and shape of a cell.
    """
    work = Compiling([*COMMAND, str(folder)], cells, seconds)
    with ThreadPoolExecutor(max(1, len(modes))) as pool:
        waiting: list[Future[None]] = [pool.submit(work.compile, mode) for mode in modes]

        def wait() -> Late:
            for each in waiting:
                each.result()
            return work.late

        try:
            yield wait
        finally:
            work.stop()


def _read(process: "subprocess.Popen[str]", lines: "queue.Queue[str]") -> None:
    """Answers, and behind them the last line of whatever else was printed."""
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        if line.startswith(ANSWER):
            lines.put(line)
        else:
            last = line.strip()[:200] or last
    lines.put(last)


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process and the compilers that it started."""
    with suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def main(arguments: Sequence[str]) -> None:
    """Compile cells for a run's model; a line of JSON for each."""
    import torch

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("mode", choices=peers.COMPILE_MODES)
    parser.add_argument("cells", type=json.loads)
    given = parser.parse_args(arguments)
    session = Session(read_config(given.folder), given.folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = family_named(session.recipe.model.family).inputs
    model = peers.sdpa_model(session.new_model(), "fp16", device)
    with peers.tf32_allowed():
        for cell in given.cells:
            error = ""
            try:
                forward = peers.compiled_forward(model, given.mode, dynamic=False)
                for batch, length in cell:
                    with torch.inference_mode():
                        forward(**peers.example(inputs, batch, length, device))
            except Exception as caught:  # compilers fail in a hundred ways; the bench says which
                error = " ".join(f"{caught}".split())[:300] or type(caught).__name__
            torch.compiler.reset()
            print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
