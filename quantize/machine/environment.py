"""Where and with what a result was made: hardware, versions, commit."""

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from qdqbench.quantize.machine.gpu import find_gpu

PACKAGES = (
    "qdqbench",
    "torch",
    "transformers",
    "nvidia-modelopt",
    "onnx",
    "onnxruntime",
    "datasets",
    "tensorrt",
    "tensorrt-rtx-cu13",
    "numpy",
    "scipy",
)


def environment() -> dict[str, Any]:
    """Versions, hardware and the code's git hash: what a number is worth nothing without."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    gpu = find_gpu()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": gpu.name if gpu else "none",
        "driver": gpu.driver if gpu else None,
        "git": _commit(Path(__file__).resolve().parents[2]),
        "versions": versions,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit(package: Path) -> str | None:
    """Commit of the checkout that runs, with "-dirty" where its files were changed since.

    None for an installed package, wherever it lies: the repository around it says nothing of it.
    """
    try:
        if Path(_git(package, "rev-parse", "--show-toplevel")) != package:
            return None
        if 'name = "qdqbench"' not in (package / "pyproject.toml").read_text(encoding="utf-8"):
            return None
        return _git(package, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)  # noqa: S603
    return done.stdout.strip()


def now() -> str:
    """The time in UTC, ISO 8601 to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
