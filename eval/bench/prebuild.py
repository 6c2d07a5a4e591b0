"""Work before a measurement, in several processes: torch.compile, and engines with their kernels.

Each takes long for each shape, on one core. Processes do it at once, and leave files from which the process
that measures takes it in seconds: Inductor's cache, engines, runtime caches. What takes too long is ended.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

COMMAND = (sys.executable, "-m", "qdqbench.eval.bench.prebuild_worker")
START_S = 60.0  # imports and the model
ANSWER = '{"error":'  # how the line that is for us begins
THREADS = 4  # compilers of a process that compiles


class Background:
    """Processes that are under way; one failing ends no other."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.failed: dict[str, str] = {}  # by task, why
        self._pool, self._lock, self._stopped = pool, threading.Lock(), False
        self._running: set[subprocess.Popen[str]] = set()
        self._waiting: dict[str, object] = {}

    def add(self, task: str, arguments: Sequence[str], seconds: float) -> None:
        """Start a task, once by its name; it may take `seconds` and the start of a process."""
        if task not in self._waiting:
            self._waiting[task] = self._pool.submit(self._run, task, arguments, seconds)

    def wait_for(self, task: str) -> None:
        """Wait until one task has ended."""
        self._waiting[task].result()  # type: ignore[attr-defined]

    def wait(self) -> None:
        """Wait until all tasks have ended."""
        for each in list(self._waiting.values()):
            each.result()  # type: ignore[attr-defined]

    @property
    def left(self) -> int:
        """Return how many tasks have not ended."""
        return sum(not each.done() for each in self._waiting.values())  # type: ignore[attr-defined]

    def stop(self) -> None:
        """End all processes."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _end(process)

    def _run(self, task: str, arguments: Sequence[str], seconds: float) -> None:
        with self._lock:
            if self._stopped:
                return
            process = subprocess.Popen(  # noqa: S603  (this module's own)
                [*COMMAND, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(THREADS)},
            )
            self._running.add(process)
        try:
            printed, _ = process.communicate(timeout=seconds + START_S)
        except subprocess.TimeoutExpired:
            self.failed[task] = f"it took over {seconds:g} s"
        else:
            if error := _answer(printed):
                self.failed[task] = error
        finally:
            _end(process)
            if process.stdout is not None:
                process.stdout.close()
            with self._lock:
                self._running.discard(process)


@contextmanager
def background(workers: int) -> Iterator[Background]:
    """Tasks run until the context ends, at most so many at once."""
    with ThreadPoolExecutor(workers) as pool:
        work = Background(pool)
        try:
            yield work
        finally:
            work.stop()
            pool.shutdown(wait=True, cancel_futures=True)


def _answer(printed: str) -> str:
    """What a process says went wrong; of one that says nothing, its last line."""
    lines = [line for line in printed.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith(ANSWER):
            return str(json.loads(line)["error"])
    return f"its process ended{f': {lines[-1].strip()[:200]}' if lines else ''}"


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process and the compilers that it started."""
    with suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
