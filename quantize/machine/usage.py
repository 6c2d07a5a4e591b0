"""Wall time, CPU time and peak memory of a block of code."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MEMORY_INTERVAL_S = 0.05  # every 10 ms it took 2.6 % of a core
Progress = Callable[[float, float, str], None]  # what is done, what there is in all, what is next


@dataclass
class Usage:
    """Filled when the measured block ends."""

    wall_s: float = 0.0
    cpu_s: float = 0.0  # of all threads, and of processes that ended in the block
    peak_rss_bytes: int = 0


@contextmanager
def measured() -> Iterator[Usage]:
    """Measure a block: wall and CPU seconds, and the largest resident set of this process, every 50 ms."""
    import psutil

    process, cost, done = psutil.Process(), Usage(), threading.Event()

    def sample() -> None:
        while not done.wait(MEMORY_INTERVAL_S):
            cost.peak_rss_bytes = max(cost.peak_rss_bytes, process.memory_info().rss)

    thread = threading.Thread(target=sample, daemon=True)
    start, cpu = time.perf_counter(), _cpu_s()
    thread.start()
    try:
        yield cost
    finally:
        done.set()
        thread.join()
        cost.wall_s, cost.cpu_s = time.perf_counter() - start, _cpu_s() - cpu
        cost.peak_rss_bytes = max(cost.peak_rss_bytes, process.memory_info().rss)


def _cpu_s() -> float:
    """User and system time of this process so far, and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
