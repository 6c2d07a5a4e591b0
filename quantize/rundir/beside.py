"""Stages that run beside those that follow them: in a thread of their own, one after another, on one core.

Most of a run is work that keeps one core busy, and evaluations in between that could as well run on another.
A thread needs no second import of torch, whose kernels let other threads run. On machines with many cores, or
a GPU, a stage alone is quicker than on one core, so everything there runs in order.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from qdqbench.quantize.activity.told import doing, ended_by, raise_if_ended, unheard
from qdqbench.quantize.machine.gpu import find_gpu
from qdqbench.quantize.machine.process import lend_core, one_core, take_back_core
from qdqbench.quantize.machine.usage import apart

T = TypeVar("T")
MOST_CORES = 4  # from more on, all of them are quicker than one beside the others


@dataclass
class Beside(Generic[T]):
    """What runs in the thread, and what is done with its results, in the thread that waits for them."""

    finish: Callable[[str, T], None]
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "stage"))
    _running: dict[str, tuple[tuple[str, ...], Future[T]]] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _cores: int = 0  # that torch has here where nothing runs there

    @property
    def busy(self) -> bool:
        """Whether stages run there, or wait to."""
        return bool(self._running)

    def start(self, name: str, others: tuple[str, ...], run: Callable[[], T]) -> None:
        """Run a stage beside others, behind those that were started before."""

        def alone() -> T:
            with unheard(), one_core(), apart(), ended_by(self._stopped):
                try:
                    return run()
                except Exception:
                    self._stopped.set()  # what follows is worth nothing, here and there
                    raise

        import torch

        self._cores = self._cores or torch.get_num_threads()
        lend_core(self._cores)
        self._running[name] = others, self._pool.submit(alone)

    def meanwhile(self, run: Callable[[], T]) -> T:
        """Run a stage in this thread; it ends soon after one beside it has failed.

        Raises:
            Ended: for that; `wait` raises what failed.
        """
        with ended_by(self._stopped):
            return run()

    def progress(self, tell: Callable[[float, float], None]) -> Callable[[float, float], None]:
        """The progress of a stage beside others: it ends with it when the run was interrupted."""

        def told(done: float, total: float) -> None:
            raise_if_ended()
            tell(done, total)

        return told

    def wait(self, before: str | None = None) -> None:
        """Finish what is done, and wait for what does not run beside the stage `before`, None: for all.

        Raises:
            Exception: what the first stage raised that failed.
        """
        names = [*self._running]
        needed = [number for number, name in enumerate(names, 1) if before not in self._running[name][0]]
        for number, name in enumerate(names, 1):
            _, found = self._running[name]
            if not found.done():
                if number > max(needed, default=0):
                    break
                doing(f"waiting for {name}")
            made = found.result()
            del self._running[name]
            self._take_back()
            self.finish(name, made)

    def stop(self) -> None:
        """Drop what has not begun, and let what runs end where it next tells its progress."""
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)
        self._running.clear()
        self._take_back()

    def _take_back(self) -> None:
        """Give torch here the core that nothing there needs any more."""
        if self._cores and not self._running:
            take_back_core(self._cores)


@contextmanager
def beside(finish: Callable[[str, T], None]) -> Iterator[Beside[T]]:
    """A thread for stages; what goes on there when the block ends is waited for, unless that was interrupted.

    A stage that fails there came before what fails in the block: its error is the one that is raised.
    """
    made = Beside(finish)
    try:
        yield made
        made.wait()
    except Exception:
        made.wait()
        raise
    finally:
        made.stop()


def has_room() -> bool:
    """Whether stages can run beside others here: there are a few cores that torch would use, and no GPU."""
    import torch

    # what a thread has used is not told on every system
    few = 2 <= torch.get_num_threads() <= MOST_CORES and hasattr(time, "pthread_getcpuclockid")
    return few and find_gpu() is None
