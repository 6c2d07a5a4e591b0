"""Target of a recipe: backend and precisions of its engine, decided once and carried by the session."""

from dataclasses import dataclass

from qdqbench.quantize.engine.backend import preferred_backend
from qdqbench.quantize.engine.cpu_runtimes import Compute, choose_compute
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName, takes_fp32_graph
from qdqbench.quantize.utils.system.cpu import find_cpu


def computes_fp16(recipe: Recipe, backend: str) -> bool:
    """Return whether a backend gets the graph of a recipe in FP16."""
    return recipe.precision.compute == "fp16" and not takes_fp32_graph(backend)


@dataclass(frozen=True)
class EngineTarget:
    """Backend and precisions of an engine."""

    backend: BackendName
    compute: Compute  # on a CPU: datatype of tensors that are not quantized
    baseline: str  # precision of the same backend's engine without INT8
    half: bool  # whether its graph is in FP16
    proves_for_gpu: bool  # whether an engine for GPUs is built ahead of time besides the one for this CPU

    @property
    def on_cpu(self) -> bool:
        return self.backend in CPU_BACKENDS


def choose_target(recipe: Recipe) -> EngineTarget:
    backend, precision = preferred_backend(recipe.engine.backend), recipe.precision.compute
    on_cpu = backend in CPU_BACKENDS
    compute = choose_compute(backend, find_cpu(), precision)
    return EngineTarget(
        backend=backend,
        compute=compute,
        baseline=compute if on_cpu else "fp16" if backend == "cuda" else precision,
        half=computes_fp16(recipe, backend),
        proves_for_gpu=recipe.quantizes and recipe.engine.backend == "auto" and on_cpu,
    )
