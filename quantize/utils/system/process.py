"""This process on its machine: how threads wait, which memory it keeps, what it costs, how it exits.

An OpenMP thread that is done spins until the others are. Where another process is busy, one of them has no
core, and the others spin away the time that it needs. Threads that sleep cost a wake-up of microseconds.

glibc gives large arrays back to the kernel when they are freed, and each page of the next ones is a fault.
"""

import atexit
import ctypes
import gc
import os
import platform
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqbench.quantize.utils.system.cpu import quota
from qdqbench.quantize.utils.system.early import BEGINS, end_at_once

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
PR_SET_PDEATHSIG = 1
KEPT_BYTES = 2**28
GRACE_S = 3.0  # until a child is killed
AGAIN_S = 0.05  # until a signal that Python dropped comes again
NEW_OBJECTS = 100_000  # before Python looks for cycles among them; it comes with 700
IMPORTED = 10 * NEW_OBJECTS  # the same until stages run: of imports nothing is garbage
MEMORY_INTERVAL_S = 0.05  # every 10 ms it took 2.6 % of a core


def find_python() -> str:
    """Return how a user calls this Python: by its path where the environment is not activated."""
    found = shutil.which("python")
    own = found is not None and Path(found).parent == Path(sys.executable).parent
    return "python" if own else shlex.quote(sys.executable)


def end_with_parent() -> None:
    """Have Linux kill this process when the one that started it ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def open_streams() -> None:
    """Open /dev/null for each standard stream that is closed: the next file would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def use_passive_wait(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP threads sleep while they wait, no more than a container may use; what is set already stays.

    Call it before torch is imported: libraries read these variables once. Not for what measures PyTorch.
    """
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if (most := quota()) is not None:
        environ.setdefault("OMP_NUM_THREADS", str(most))


def disable_malloc_trim() -> None:
    """Let glibc keep freed memory for the next arrays; the peak stays the same. Not with another libc."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for parameter in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            libc.mallopt(parameter, KEPT_BYTES)


def relax_gc() -> None:
    """Let Python look for cycles seldom: a million objects of imports would be looked at again and again."""
    gc.set_threshold(IMPORTED, *gc.get_threshold()[1:])


def freeze_gc() -> None:
    """Never look at the objects of now again; after `relax_gc`, once the imports are done."""
    if gc.get_threshold()[0] == IMPORTED:
        gc.freeze()
        gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


def is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


_invocations: list[str] = []


@contextmanager
def invoked_as(words: str) -> Iterator[None]:
    """Say what was called, a command line or a function, for the records of what is done inside."""
    _invocations.append(words)
    try:
        yield
    finally:
        _invocations.pop()


def invocation() -> str:
    """Return what was called first."""
    return _invocations[0] if _invocations else "qdqbench"


@dataclass
class Usage:
    wall_s: float = 0.0
    cpu_s: float = 0.0  # of all threads, and of processes that ended in the block
    peak_rss_bytes: int = 0


@contextmanager
def ticking(tick: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `tick` from a thread, again and again, until the block ends."""
    done = threading.Event()

    def go() -> None:
        while not done.wait(every_s):
            with suppress(OSError, ValueError):  # nobody reads any more
                tick()

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def measure_cost() -> Iterator[Usage]:
    import psutil

    process, cost = psutil.Process(), Usage()

    def sample() -> None:
        cost.peak_rss_bytes = max(cost.peak_rss_bytes, process.memory_info().rss)

    start, cpu = time.perf_counter(), sum(os.times()[:4])
    try:
        with ticking(sample, MEMORY_INTERVAL_S):
            yield cost
    finally:
        cost.wall_s, cost.cpu_s = time.perf_counter() - start, sum(os.times()[:4]) - cpu
        sample()


class Interruption:
    """Ctrl-C and SIGTERM that hold though a library swallows the exception, as imports do."""

    def __init__(self) -> None:
        self.number, self._pending = signal.SIGINT, False

    @property
    def status(self) -> int:
        return 128 + self.number

    def watch(self) -> None:
        """Remember the signals from now on; in the main thread, unless one is ignored or taken."""
        for number, handler in BEGINS.items():
            if signal.getsignal(number) in (handler, end_at_once):
                signal.signal(number, self.receive)
        if signal.getsignal(signal.SIGINT) == self.receive:
            sys.unraisablehook = self._repeat

    def receive(self, number: int, frame: Any) -> None:
        self.number, self._pending = signal.Signals(number), True
        raise KeyboardInterrupt

    def raise_if_pending(self) -> None:
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _repeat(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Send a signal again: Python drops and prints what is raised while an object is destroyed."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            main = threading.main_thread().ident
            timer = threading.Timer(AGAIN_S, signal.pthread_kill, (main, self.number))
            timer.daemon = True
            timer.start()
        else:
            sys.__unraisablehook__(unraisable)


interruption = Interruption()  # of this process


def end_interrupted() -> None:
    """End the process after a signal: its children first, then what Python does at its end."""
    import psutil

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.Error):
            child.terminate()
    for child in psutil.wait_procs(children, timeout=GRACE_S)[1]:
        with suppress(psutil.Error):
            child.kill()
    exit_fast(interruption.status)


def exit_fast(status: int) -> None:
    """End the process with this status and what Python does at its end, without destructors of libraries.

    To free each object of torch and of models takes seconds, and some destructors fail: CONTRIBUTING.md.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # `qdqbench ... | head`: what is still buffered has no reader
            stream.flush()
    os._exit(status)
