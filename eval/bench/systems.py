"""Systems of a bench: one table for GPUs and CPUs, each in the best form that it has."""

import importlib.metadata
import os
import shutil
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

from qdqbench.eval.bench.config import BenchPlan
from qdqbench.eval.bench.results import BenchSystem, Device, Precision
from qdqbench.eval.bench.target import Target
from qdqbench.quantize.engine.backend import choose_backend, preferred_backend
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendChoice, BackendName
from qdqbench.quantize.utils.system.cpu import find_cpu

EXACT = ", exact shape"
# int8: our INT8 graph; export: the float ONNX export; dynamic, nncf: the export by other quantizers;
# torch, compile: PyTorch; unpadded: packed tokens in PyTorch
Kind = Literal["int8", "export", "dynamic", "nncf", "torch", "compile", "unpadded"]
ENGINES: tuple[Kind, ...] = ("int8", "export")  # the others are baselines that may be left out


@dataclass(frozen=True)
class System:
    device: Device
    name: str
    label: str
    kind: Kind
    precision: Precision
    library: str = "torch"  # that runs it, as pip names it; empty: the backend of the bench
    shapes: Literal["recipe", "exact", ""] = ""  # that an engine for a GPU is built for
    mode: str = ""  # of torch.compile
    graph: bool = True  # in a CUDA graph
    needs: str = ""  # another library
    recipe: str = ""  # another than the bench's

    @property
    def is_engine(self) -> bool:
        return self.kind in ENGINES


TABLE = (
    System("gpu", "int8", "INT8 engine", "int8", "int8", "", "recipe"),
    System("gpu", "int8-exact", f"INT8 engine{EXACT}", "int8", "int8", "", "exact"),
    System("gpu", "fp16", "FP16 engine", "export", "fp16", "", "recipe"),
    System("gpu", "fp16-exact", f"FP16 engine{EXACT}", "export", "fp16", "", "exact"),
    System("gpu", "fp32", "FP32 engine", "export", "fp32", "", "recipe"),
    System("gpu", "torch-fp32", "PyTorch FP32, CUDA graph", "torch", "fp32"),
    System("gpu", "torch-fp16-eager", "PyTorch FP16", "torch", "fp16", graph=False),
    System("gpu", "torch-fp16", "PyTorch FP16, CUDA graph", "torch", "fp16"),
    System("gpu", "compile-fp16-eager", "torch.compile FP16", "compile", "fp16", mode="default", graph=False),
    System("gpu", "compile-fp16", "torch.compile FP16, CUDA graph", "compile", "fp16", mode="default"),
    System("gpu", "autotune-fp16", "max-autotune FP16, CUDA graph", "compile", "fp16",
           mode="max-autotune-no-cudagraphs"),
    System("gpu", "unpadded-fp16", "unpadded FP16, CUDA graph", "unpadded", "fp16"),
    System("cpu", "int8-openvino", "INT8 OpenVINO", "int8", "int8", "openvino"),
    System("cpu", "int8-onnxruntime", "INT8 ONNX Runtime", "int8", "int8", "onnxruntime"),
    System("cpu", "bf16-openvino", "OpenVINO BF16", "export", "bf16", "openvino"),
    System("cpu", "fp32-openvino", "OpenVINO FP32", "export", "fp32", "openvino"),
    System("cpu", "fp32-onnxruntime", "ONNX Runtime FP32", "export", "fp32", "onnxruntime"),
    System("cpu", "dynamic-onnxruntime", "ONNX Runtime dynamic INT8", "dynamic", "int8", "onnxruntime"),
    System("cpu", "nncf-openvino", "NNCF INT8 in OpenVINO", "nncf", "int8", "openvino", needs="nncf"),
    System("cpu", "torch-fp32", "PyTorch FP32", "torch", "fp32"),
    System("cpu", "torch-bf16", "PyTorch BF16", "torch", "bf16"),
    System("cpu", "compile-fp32", "torch.compile FP32", "compile", "fp32", mode="default"),
    System("cpu", "compile-bf16", "torch.compile BF16", "compile", "bf16", mode="default"),
)  # fmt: skip


def systems_of(target: Target | None, options: BenchPlan) -> dict[str, System]:
    """Return the systems to measure by their names in results; without a target the baselines alone.

    On a CPU the bench's own INT8 engine is first and called "int8". On a GPU other recipes' engines are last.
    """
    systems = [
        system
        for system in TABLE
        if system.device == options.device
        and (options.baselines or system.is_engine)
        and (options.fp32 or not (system.is_engine and system.precision == "fp32"))
        and not (system.is_engine and target is None)
        and not (system.kind == "int8" and target and not target.session.recipe.quantizes)
    ]
    if options.device == "cpu":
        if target is not None:
            own = f"int8-{own_backend(target.session.recipe.engine.backend)}"
            systems.sort(key=lambda system: system.name != own)
            systems = [replace(system, name="int8") if system.name == own else system for system in systems]
    else:
        systems += [
            System("gpu", f"int8-{name}", f"INT8 engine, {name}", "int8", "int8", "", "recipe", recipe=name)
            for name in (target.extra if target else ())
        ]
    if options.engine_shapes != "both":
        systems = [system for system in systems if system.shapes != "exact"]
    if options.engine_shapes == "exact":
        systems = [
            replace(system, shapes="exact", label=system.label + EXACT) if system.shapes else system
            for system in systems
        ]
    return {system.name: system for system in systems if system.name not in options.exclude}


def describe_systems(target: Target, options: BenchPlan, backend: str) -> list[BenchSystem]:
    """Return who takes part, in the order of tables and charts.

    Args:
        backend: on a GPU the builder of engines and its version.
    """
    recipes = {name: extra.session.recipe.model_dump(mode="json") for name, extra in target.extra.items()}
    return [
        BenchSystem(
            name=name,
            label=system.label,
            precision=system.precision,
            backend=f"{system.library} {_version(system.library)}".strip() if system.library else backend,
            recipe=recipes.get(system.recipe),
        )
        for name, system in systems_of(target, options).items()
    ]


def own_backend(choice: BackendChoice) -> BackendName:
    """Return the CPU runtime of a bench's INT8 engine: the recipe's, else the first that is installed.

    Raises:
        MissingDevice: the recipe's is not installed; says how to.
    """
    if choice not in CPU_BACKENDS:
        choice = next(name for name in CPU_BACKENDS if find_spec(name))  # ONNX Runtime is always there
    return choose_backend(choice).name


def runs_on_cpu(choice: BackendChoice) -> bool:
    return preferred_backend(choice) in CPU_BACKENDS


def why_absent(system: System) -> str | None:
    """Return why a system cannot take part on this CPU, and how to fix it."""
    for library in filter(None, (system.library, system.needs)):
        if not _version(library):
            extra = "'qdqbench[openvino]'" if library == "openvino" else library
            return f"{library} is not installed: pip install {extra}"
    if system.precision == "bf16" and not find_cpu().bf16:
        return "this CPU multiplies no BF16"
    if system.mode and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        return "torch.compile needs a C++ compiler, such as g++"
    return None


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
