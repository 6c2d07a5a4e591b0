"""How this process uses the machine: how threads wait, how many there are, and what memory is kept.

An OpenMP thread that is done spins until the others are, which is quick where every core is free. Beside
another busy process one of them has no core, and the others spin away the time that it needs: several times
the CPU time for the same work, when it is scarce. Threads that sleep cost a wake-up of some microseconds.

glibc gives large arrays back to the kernel when they are freed, and gets new pages, filled with zeros, for
the next ones. Models and graphs are copied and freed all the time, and each of these pages is a fault.
"""

import atexit
import ctypes
import gc
import os
import platform
import sys
from collections.abc import MutableMapping
from contextlib import suppress

from qdqbench.quantize.machine.cpu import quota

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES = 2**28
GRACE_S = 3.0  # until a child is killed
NEW_OBJECTS = 100_000  # before Python looks for cycles among them; it comes with 700
IMPORTED = 10 * NEW_OBJECTS  # the same until stages run: of imports nothing is garbage


def share_cores(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP threads of this process and its children sleep while they wait; what is set already stays.

    They are as many as the library chooses, one a core, but no more than a container may use at once. Call it
    before torch is imported: libraries read these variables once. Not for what measures how fast PyTorch is.
    """
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if (most := quota()) is not None:
        environ.setdefault("OMP_NUM_THREADS", str(most))


def end_children() -> None:
    """End what this process has started, and what that has; those that do not end in time are killed."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.Error):
            child.terminate()
    for child in psutil.wait_procs(children, timeout=GRACE_S)[1]:
        with suppress(psutil.Error):
            child.kill()


def keep_memory() -> None:
    """Let glibc keep freed memory for the next arrays; the peak stays what it is. Not with another libc."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for parameter in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            libc.mallopt(parameter, KEPT_BYTES)


def collect_seldom() -> None:
    """Let Python look for cycles seldom: a million objects of imports would be looked at again and again."""
    gc.set_threshold(IMPORTED, *gc.get_threshold()[1:])


def keep_imported() -> None:
    """After `collect_seldom`, where the imports are done: what there is now is never looked at again."""
    if gc.get_threshold()[0] == IMPORTED:
        gc.freeze()
        gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


def leads() -> bool:
    """Whether this is the first process of its launcher; true where there is no other."""
    return os.environ.get("RANK", "0") == "0"


def end(status: int) -> None:
    """End the process with this status and what Python does at its end, without destructors of libraries.

    To free each object of torch and of models takes seconds, and some destructors fail: CONTRIBUTING.md.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # `qdqbench ... | head`: what is still buffered has no reader
            stream.flush()
    os._exit(status)
