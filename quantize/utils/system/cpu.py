"""The CPU and memory of this process, and the CPU's support for INT8 and BF16."""

import math
import os
import platform
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CGROUPS = Path("/sys/fs/cgroup")
INT8_DOT = ("avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm")  # sums of INT8 products in one step
BF16 = ("avx512_bf16", "amx_bf16", "bf16")
FEATURES = ("avx2", "avx512f", *INT8_DOT, *BF16)  # as Linux names them


@dataclass(frozen=True)
class Cpu:
    """A CPU; `features` are those of FEATURES that it has, none where the system does not say."""

    name: str
    cores: int  # that this process may use
    features: tuple[str, ...]

    @property
    def bf16(self) -> bool:
        return not {*BF16}.isdisjoint(self.features)

    @property
    def int8_dot(self) -> bool:
        """Return whether the CPU sums INT8 products in one step; true where the system does not say."""
        return not self.features or not {*INT8_DOT}.isdisjoint(self.features)

    def __str__(self) -> str:
        told = ", ".join(self.features) or "instruction sets unknown"
        return f"{self.name} ({self.cores} {'core' if self.cores == 1 else 'cores'}; {told})"


@cache
def find_cpu() -> Cpu:
    info: dict[str, str] = {}
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip().lower(), value.strip())
    flags = f"{info.get('flags', '')} {info.get('features', '')}".split()
    name = info.get("model name") or platform.processor() or platform.machine()
    return Cpu(name, quota() or len(usable_cores()), tuple(each for each in FEATURES if each in flags))


def usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def quota() -> int | None:
    """Return the cores that a container (cgroup v2 or v1) gives this process, if fewer than it sees.

    With a thread for each core that it sees, a library would be stopped by the kernel again and again.
    """
    v2, v1 = _CGROUPS / "cpu.max", [_CGROUPS / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
    paths = [v2] if v2.is_file() else v1
    if not all(path.is_file() for path in paths):
        return None
    given, period = " ".join(path.read_text(encoding="ascii") for path in paths).split()
    if not given.isdecimal():  # "max", or -1
        return None
    most = max(1, math.ceil(int(given) / int(period)))
    return most if most < len(usable_cores()) else None


def find_memory() -> int:
    """Return the bytes of memory that this process may take: a container's (cgroup v2 or v1) or all."""
    import psutil

    paths = (_CGROUPS / "memory.max", _CGROUPS / "memory" / "memory.limit_in_bytes")
    given = (path.read_text(encoding="ascii").strip() for path in paths if path.is_file())
    return min([psutil.virtual_memory().total, *(int(text) for text in given if text.isdecimal())])


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds since the system and this process started."""

    clock: float
    busy: float | None  # of all processes, and of other guests of the host; None where it is not known
    own: float

    @classmethod
    def read(cls) -> "CpuUse":
        import psutil

        idle = {"idle", "iowait", "guest", "guest_nice"}  # guest time is user time too
        try:
            every = psutil.cpu_times(percpu=True)
            cores = [every[core]._asdict() for core in usable_cores()]
            busy = sum(sum(times.values()) - sum(times[name] for name in idle & {*times}) for times in cores)
        except (OSError, IndexError):  # a container may hide them
            return cls(time.monotonic(), None, time.process_time())
        return cls(time.monotonic(), busy, time.process_time())

    def others_since(self, before: "CpuUse") -> float | None:
        """Return the mean number of cores that others took from this process since then."""
        if self.busy is None or before.busy is None or self.clock <= before.clock:
            return None
        others = (self.busy - before.busy - (self.own - before.own)) / (self.clock - before.clock)
        spare = len(usable_cores()) - find_cpu().cores  # a container's quota leaves some to others
        return round(max(0.0, others - spare), 2)


def cpu_hazards(cpu: Cpu) -> list[str]:
    """Return the INT8 instructions that a CPU lacks and what that costs, one sentence each.

    Source: onnxruntime.ai, "Quantize ONNX models", on U8S8 and CPUs without VNNI.
    """
    told = (
        f"{cpu.name} has no INT8 dot product ({', '.join(INT8_DOT)}): INT8 kernels take about as long as "
        "FP32 ones here, and those of OpenVINO saturate, which changes answers; those of ONNX Runtime do not"
    )
    return [] if cpu.int8_dot else [told]
