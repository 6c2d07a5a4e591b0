"""The environment of a result: hardware, versions, commit, code."""

import functools
import hashlib
import importlib.metadata
import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from qdqbench.quantize.utils.system.commit import find_commit
from qdqbench.quantize.utils.system.cpu import find_cpu
from qdqbench.quantize.utils.system.gpu import find_gpu

# versions that outputs depend on
VERSIONED = ("qdqbench", "torch", "transformers", "nvidia-modelopt", "onnx", "onnxruntime")
PACKAGES = (*VERSIONED, "datasets", "tensorrt", "tensorrt-rtx-cu13", "numpy", "scipy")


def describe_environment() -> dict[str, Any]:
    versions = dict.fromkeys(PACKAGES, "not installed")
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    cpu, gpu = find_cpu(), find_gpu()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu.name,
        "cores": cpu.cores,
        "gpu": gpu.name if gpu else "none",
        "driver": gpu.driver if gpu else None,
        "git": find_commit(Path(__file__).resolve().parents[3]),
        "versions": versions,
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def get_code_identity() -> dict[str, Any]:
    """Return code and library versions, as JSON: part of the identity of all that is reused or resumed."""
    return {"versions": versions(), "code": _code_hash()}


@functools.cache
def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in VERSIONED}


@functools.cache
def _code_hash() -> str:
    digest = hashlib.sha256()
    for package in ("qdqbench.quantize", "qdqbench.eval"):
        root = Path(str(resources.files(package)))
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
