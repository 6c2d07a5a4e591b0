"""Clock, power and temperature of the GPU while it is measured, from one nvidia-smi in the background.

A process per sample would take the driver's locks again and again; NVML's own Python binding is not needed.
"""

import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType

INTERVAL_MS = 100
QUERY = "timestamp,clocks.sm,power.draw,temperature.gpu"
FORMAT = "csv,noheader,nounits"


@dataclass(frozen=True)
class Sample:
    """One reading; what the GPU does not tell is None."""

    time: float  # time.time()
    clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None


@dataclass(frozen=True)
class Clocks:
    """Medians over some time."""

    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


def parse(line: str) -> Sample | None:
    """A line of nvidia-smi's answer to QUERY; None if it is something else."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 4:
        return None
    try:
        time = datetime.strptime(parts[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()  # local time
    except ValueError:
        return None
    return Sample(time, *(_number(part) for part in parts[1:]))


def medians(samples: Iterable[Sample], windows: Sequence[tuple[float, float]]) -> Clocks:
    """Medians of the samples that fall into any window (start, end), in seconds of time.time()."""
    inside = [s for s in samples if any(start <= s.time <= end for start, end in windows)]

    def median(name: str) -> float | None:
        values = [value for sample in inside if (value := getattr(sample, name)) is not None]
        return float(statistics.median(values)) if values else None

    return Clocks(median("clock_mhz"), median("power_w"), median("temperature_c"))


class GpuMonitor:
    """Reads the GPU ten times a second while the context is open; `reason` says why nothing was read."""

    def __init__(self, gpu_uuid: str | None, command: Sequence[str] = ("nvidia-smi",)) -> None:
        self.samples: list[Sample] = []
        self.reason: str | None = None
        self._errors: list[str] = []
        chosen = [f"--id={gpu_uuid}"] if gpu_uuid else []  # nvidia-smi does not heed CUDA_VISIBLE_DEVICES
        self._command = [
            *command,
            *chosen,
            f"--query-gpu={QUERY}",
            f"--format={FORMAT}",
            f"--loop-ms={INTERVAL_MS}",
        ]
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "GpuMonitor":
        if shutil.which(self._command[0]) is None:
            self.reason = f"{self._command[0]} is not installed"
            return self
        try:
            self._process = subprocess.Popen(  # noqa: S603
                self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
            )
        except OSError as error:
            self.reason = f"{self._command[0]} does not start ({error.strerror})"
            return self
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None or self._thread is None:
            return
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if not self.samples:
            said = f": {' '.join(self._errors)[:200]}" if self._errors else ""
            self.reason = f"{self._command[0]} gave no reading{said}"

    def during(self, windows: Sequence[tuple[float, float]]) -> Clocks:
        """Medians of what was read inside these windows."""
        return medians(list(self.samples), windows)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if (sample := parse(line)) is not None:
                self.samples.append(sample)
            elif line.strip() and len(self._errors) < 3:
                self._errors.append(line.strip())


def _number(text: str) -> float | None:
    """`[N/A]` and the like are None."""
    try:
        return float(text)
    except ValueError:
        return None


def gpu_uuid() -> str | None:
    """Of the GPU that CUDA shows first; nvidia-smi counts otherwise."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return f"GPU-{uuid}" if uuid else None
