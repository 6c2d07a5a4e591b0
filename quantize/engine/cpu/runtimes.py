"""The CPU runtimes by name, and how an engine of theirs is made."""

from typing import Any

import numpy as np

from qdqbench.quantize.engine.cpu import onnxruntime, openvino
from qdqbench.quantize.engine.cpu.compiled import FREE, Compute, Sizes
from qdqbench.quantize.utils.limits import BackendName
from qdqbench.quantize.utils.system.cpu import Cpu

CompiledModel = openvino.OpenVinoModel | onnxruntime.OnnxRuntimeModel
_RUNTIMES: dict[BackendName, type[CompiledModel]] = {
    "openvino": openvino.OpenVinoModel,
    "onnxruntime": onnxruntime.OnnxRuntimeModel,
}


def compile_model(  # noqa: PLR0913
    backend: BackendName,
    data: Any,
    *,
    blob: bool,
    compute: Compute,
    fixed: Sizes = FREE,
    threads: int | None = None,
    streams: int = 1,
    profile: bool = False,
) -> CompiledModel:
    """Return a model that a CPU runtime compiled, from its ONNX file or from an engine that it made.

    Args:
        backend: one of CPU_BACKENDS.
        data: the ONNX file, or with `blob` the engine; for OpenVINO also a model in its memory.
        compute: datatype of what is not quantized; for ONNX Runtime FP32.
        fixed: batch and length where the ONNX file is for one only; each None: free.
        threads: of all streams together; None: as the runtime chooses.
        streams: inferences at once.
        profile: measure each kernel.

    Raises:
        UserError: the runtime refuses the graph.
        MissingDevice: it cannot load the engine here.
    """
    return _RUNTIMES[backend](
        data, blob=blob, compute=compute, fixed=fixed, threads=threads, streams=streams, profile=profile
    )


def choose_compute(backend: BackendName, cpu: Cpu, precision: str) -> Compute:
    """Return the datatype of what is not quantized: BF16 where recipe, runtime and CPU allow it."""
    return "bf16" if backend == "openvino" and precision == "fp16" and cpu.bf16 else "fp32"


def warm_up(model: CompiledModel, shape: tuple[int, int]) -> None:
    """Run a model once on inputs that say nothing, of (batch, length); that decides its kernels."""
    feeds = {}
    for name, takes in model.inputs.items():
        sizes = [shape[min(axis, 1)] if size is None else size for axis, size in enumerate(takes.shape)]
        feeds[name] = np.full(sizes, name == "attention_mask", takes.dtype)
    model.run(feeds)
