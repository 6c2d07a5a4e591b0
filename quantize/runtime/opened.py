"""Engines by what their sidecars say: on a GPU, or on this CPU."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from qdqbench.quantize.core.arrays import Float32, Int64
from qdqbench.quantize.core.limits import CPU_BACKENDS, BackendName
from qdqbench.quantize.cpu.runtimes import compiled
from qdqbench.quantize.engine.sidecar import read_sidecar
from qdqbench.quantize.kinds.kind import LOGITS, joined
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


def open_twin(
    path: Path, backend: BackendName, outputs: Iterable[str] = LOGITS
) -> Callable[[Mapping[str, Int64]], Float32]:
    """A runner of an FP32 graph on this CPU, optimized as its runtime does; batches of any shape.

    Raises:
        UserError: the runtime refuses the graph.
    """
    model, names = compiled(backend, path.read_bytes(), blob=False, compute="fp32"), [*outputs]

    def run(batch: Mapping[str, Int64]) -> Float32:
        made = model.run({name: np.ascontiguousarray(batch[name]) for name in model.inputs})
        return np.asarray(joined(made, names), dtype=np.float32)

    return run


def on_cpu(path: Path) -> bool:
    """Whether an engine is for a CPU; errors are those of its sidecar."""
    return read_sidecar(path).backend in CPU_BACKENDS
