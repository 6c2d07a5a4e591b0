"""What an engine builder says while it works: its log, its progress and why it refuses a file.

The classes below derive from those of the backend, which is passed in; see engine/backend.py.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

BuildProgress = Callable[[str, float], None]  # phase of the builder, fraction of it done in [0, 1]

_HINTS = {  # part of a message: what to do
    "same input types": "a strongly typed network takes one type per operator, so export without mixes",
    "cale coefficient": "scales must be finite and positive, so calibrate again",
    "Plugin not found": "the operator is not supported, so export with standard ONNX operators",
    "Failed to parse": "the file is truncated or not ONNX, so export it again",
    "no graph outputs": "the file is empty or not ONNX, so export it again",
    "not support this compute capability": "name another target, such as compute capability 8.9",
    "Cuda Runtime": "this version builds only where a GPU is, so upgrade TensorRT-RTX or build there",
}


@dataclass
class BuildLog:
    """The part of a build log that is kept: the layer table, warnings and errors."""

    table: list[str] = field(default_factory=list)
    messages: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=200))

    def add(self, severity: str, text: str) -> None:
        if severity in ("WARNING", "ERROR", "INTERNAL_ERROR"):
            self.messages.append((severity, text))
        elif "LayerType: " in text:  # TensorRT-RTX prints the whole table as one message
            self.table += [line for line in text.split("\n") if "LayerType: " in line]

    def errors(self) -> str:
        return one_line(text for severity, text in self.messages if severity != "WARNING")


@cache
def _logger(trt: Any) -> Any:
    """Return the one logger of this process for a backend; its `sink` is the running build's log."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        sink: BuildLog | None = None

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if self.sink is not None:
                self.sink.add(severity.name, msg)

    return Logger()


@contextmanager
def capture(trt: Any) -> Iterator[tuple[Any, BuildLog]]:
    """Send the backend's log to a new `BuildLog` for the length of one build."""
    logger, log = _logger(trt), BuildLog()
    logger.sink = log
    try:
        yield logger, log
    finally:
        logger.sink = None


def progress_monitor(trt: Any, progress: BuildProgress) -> Any:
    """Return a progress monitor that hands each step to `progress` and cancels the build when that raises."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.error: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = max(num_steps, 1)

        def step_complete(self, phase_name: str, step: int) -> bool:
            try:
                progress(phase_name, min(1.0, (step + 1) / self.steps.get(phase_name, 1)))
            except BaseException as error:  # an exception must not cross the library's frames
                self.error = error
            return self.error is None

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

    return Monitor()


def one_line(messages: Iterable[str]) -> str:
    """Join messages in one line, without what the library says about the missing GPU after each of them."""
    lines = (line.strip() for message in messages for line in message.split("\n"))
    return "; ".join(line for line in lines if line and "catchCudaError" not in line)


def hint_for(text: str) -> str:
    return next((hint for sign, hint in _HINTS.items() if sign in text), "run `qdqbench check` on the file")
