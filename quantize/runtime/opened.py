"""Engines by what their sidecars say: on a GPU, or on this CPU."""

from collections.abc import Iterable
from pathlib import Path

from qdqbench.quantize.core.limits import CPU_BACKENDS
from qdqbench.quantize.engine.sidecar import read_sidecar
from qdqbench.quantize.kinds.kind import LOGITS
from qdqbench.quantize.runtime.cpu import CpuEngine, CpuRunner
from qdqbench.quantize.runtime.engine import Engine
from qdqbench.quantize.runtime.runner import EngineRunner


def open_engine(path: Path, onnx_path: Path) -> Engine | CpuEngine:
    """Load an engine; errors are those of both."""
    return CpuEngine(path, onnx_path) if on_cpu(path) else Engine(path, onnx_path)


def open_runner(
    path: Path,
    onnx_path: Path,
    *,
    pad_id: int,
    runtime_cache: Path | None = None,
    outputs: Iterable[str] = LOGITS,
) -> EngineRunner | CpuRunner:
    """A runner of an engine; arguments and errors are those of both."""
    if on_cpu(path):
        return CpuRunner(path, onnx_path, pad_id=pad_id, outputs=outputs)
    return EngineRunner(path, onnx_path, pad_id=pad_id, runtime_cache=runtime_cache, outputs=outputs)


def on_cpu(path: Path) -> bool:
    """Whether an engine is for a CPU; errors are those of its sidecar."""
    return read_sidecar(path).backend in CPU_BACKENDS
