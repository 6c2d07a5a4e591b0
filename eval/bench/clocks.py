"""Clock, power and temperature of the GPU while it is measured, read from NVML by a thread; load of a CPU.

A reading takes 0.07 ms: on an H100 a CUDA graph of 0.27 ms ran as long with it as without.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pynvml

from qdqbench.eval.bench.results import BenchCpu
from qdqbench.quantize.utils.system.cpu import find_cpu

CLOCK_INTERVAL_S = 0.1
BUSY = 0.5  # load average of a machine on which something else runs


@dataclass(frozen=True)
class Reading:
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


def medians(samples: Iterable[Reading], windows: Sequence[tuple[float, float]]) -> Clocks:
    """Medians of the samples that fall into any window (start, end), in seconds of time.time()."""
    inside = [s for s in samples if any(start <= s.time <= end for start, end in windows)]

    def median(name: str) -> float | None:
        values = [value for sample in inside if (value := getattr(sample, name)) is not None]
        return float(statistics.median(values)) if values else None

    return Clocks(median("clock_mhz"), median("power_w"), median("temperature_c"))


class GpuMonitor:
    """Reads the GPU ten times a second while the context is open; `reason` says why nothing was read.

    Args:
        gpu_uuid: NVML does not heed CUDA_VISIBLE_DEVICES; None takes its first GPU.
    """

    def __init__(self, gpu_uuid: str | None) -> None:
        self.samples: list[Reading] = []
        self.reason: str | None = None
        self._uuid = gpu_uuid
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "GpuMonitor":
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.reason = f"NVML does not start ({error})"
            return self
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        if self.samples:
            self.reason = None

    def during(self, windows: Sequence[tuple[float, float]]) -> Clocks:
        """Medians of what was read inside these windows."""
        return medians(list(self.samples), windows)

    def _read(self) -> None:
        self.reason = "NVML gave no reading"
        uuid = self._uuid
        try:
            gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError as error:
            self.reason = f"NVML gave no reading: {error}"
            return
        while not self._ended.is_set():
            now = time.time()
            clock = self._number(lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))
            power = self._number(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000)  # of milliwatts
            heat = self._number(lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))
            if (clock, power, heat) != (None, None, None):
                self.samples.append(Reading(now, clock, power, heat))
            self._ended.wait(CLOCK_INTERVAL_S)

    def _number(self, ask: Callable[[], float]) -> float | None:
        """None is what this GPU does not tell."""
        try:
            return float(ask())
        except pynvml.NVMLError as error:
            self.reason = f"NVML gave no reading: {error}"
            return None


def gpu_uuid() -> str | None:
    """Of the GPU that CUDA shows first; NVML counts otherwise."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return f"GPU-{uuid}" if uuid else None


def cpu_now() -> BenchCpu:
    """The CPU of this machine and its load."""
    cpu, load = find_cpu(), load_average()
    return BenchCpu(
        name=cpu.name, cores=cpu.cores, features=list(cpu.features), load_before=load, load_after=load
    )


def load_average() -> float | None:
    """Load average of the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def busy_notes() -> list[str]:
    """That something else runs on this machine, if it does."""
    if (load := load_average() or 0.0) < BUSY:
        return []
    return [
        f"load average {load:g} before it began: something else ran here, which wall times hold too; "
        "CPU times with --threads 1 are steadier, because no thread waits for another"
    ]
