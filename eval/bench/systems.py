"""Configs and systems of a bench: one table for GPUs and CPUs, each in the best form that it has."""

import functools
import importlib.metadata
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from pydantic import ConfigDict

from qdqbench.eval.bench import peers
from qdqbench.eval.bench.measure import SystemRun, Timer, random_sets, text_sets
from qdqbench.eval.bench.results import BenchRow, BenchSettings, BenchSystem, Device, Precision, Shape
from qdqbench.eval.bench.target import BatchedSplit, Target
from qdqbench.quantize.engine.backend import choose_backend, find_best, gpu_backend
from qdqbench.quantize.engine.cuda.compile import get_version
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.pipeline.data_profiles import engine_profiles
from qdqbench.quantize.report.formats import label
from qdqbench.quantize.utils.arrays import Batch
from qdqbench.quantize.utils.errors import MissingDevice, QdqError
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendChoice, BackendName
from qdqbench.quantize.utils.names import install_command
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.system.cpu import find_cpu
from qdqbench.quantize.utils.system.gpu import Gpu


class BenchPlan(BenchSettings):
    """Options of a bench; `BenchSettings` of it are recorded."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    device: Device
    splits: tuple[BatchedSplit, ...] = ()  # of the data set, one for each batch size
    baselines: bool
    fp32: bool  # the FP32 engine too
    compile_seconds: float = 90.0  # for each shape and mode of torch.compile on a GPU
    keep_engines: bool = False
    exclude: tuple[str, ...] = ()  # names of systems
    build_only: bool = False


@dataclass(frozen=True)
class Config:
    batch: int
    length: int | None
    split: BatchedSplit | None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return self.split.shapes if self.split else [(self.batch, self.length or 0)]

    @property
    def sequences(self) -> int:
        return self.split.sequences if self.split else self.batch


def configs_of(options: BenchPlan) -> list[Config]:
    every = [(batch, length) for length in options.lengths for batch in options.batches]
    fixed = [Config(*shape, None) for shape in options.shapes or every]
    return fixed + [Config(split.batch, None, split) for split in options.splits]


EXACT = ", exact shape"
# int8: our INT8 graph; export: the float ONNX export; dynamic, nncf: the export by other quantizers;
# torch, compile: PyTorch; unpadded: packed tokens in PyTorch
Kind = Literal["int8", "export", "dynamic", "nncf", "torch", "compile", "unpadded"]
ENGINES: tuple[Kind, ...] = ("int8", "export")  # the others are baselines that may be left out
READERS: tuple[Kind, ...] = ("export", "dynamic", "nncf")  # of the graphs in FP32 and FP16


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
    System("gpu", "int8-cuda", "INT8 CUDA kernels", "int8", "int8", "cuda"),
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
    System("gpu", "unpadded-fp8", "unpadded FP8, CUDA graph", "unpadded", "fp8"),
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
    """Return the systems to measure by their names in results; without a target the baselines alone."""
    systems = [
        system
        for system in TABLE
        if system.device == options.device
        and (options.baselines or system.is_engine)
        and (options.fp32 or not (system.is_engine and system.precision == "fp32"))
        and not (system.is_engine and target is None)
        and not (system.kind == "int8" and target and not target.session.recipe.quantizes)
        and (system.shapes != "exact" or options.engine_shapes == "both")
    ]
    if target is not None and options.device == "cpu":
        own = f"int8-{own_backend(target.session.recipe.engine.backend)}"
        systems.sort(key=lambda system: system.name != own)
        systems = [replace(system, name="int8") if system.name == own else system for system in systems]
        systems += [
            replace(base, name=f"int8-{name}", label=f"{base.label}, {name}", recipe=name)
            for base in (system for system in TABLE if system.name == own)
            for name in target.extra
        ]
    elif target is not None:
        if target.runs_kernels:
            other = gpu_backend()
            names = {"int8-cuda": "int8", "int8": f"int8-{other}", "int8-exact": f"int8-{other}-exact"}
            said = "INT8 engine", f"INT8 {label(other)}"
            systems.sort(key=lambda system: system.library != "cuda")
            systems = [
                replace(each, name=names.get(each.name, each.name), label=each.label.replace(*said))
                for each in systems
            ]
        for name, extra in target.extra.items():
            system = System(
                "gpu", f"int8-{name}", f"INT8 engine, {name}", "int8", "int8", "cuda", recipe=name
            )
            tensorrt = replace(system, library="", shapes="recipe")
            systems.append(system if extra.runs_kernels else tensorrt)
    if options.engine_shapes == "exact":
        systems = [
            replace(system, shapes="exact", label=system.label + EXACT) if system.shapes else system
            for system in systems
        ]
    return {system.name: system for system in systems if system.name not in options.exclude}


def reads_floats(options: BenchPlan) -> bool:
    """Return whether a system takes the graph in FP32 or FP16."""
    readers = (each for each in TABLE if each.device == options.device and each.kind in READERS)
    left = {each.name for each in readers if each.shapes != "exact" or options.engine_shapes == "both"}
    return bool(left - {*options.exclude} - ({"fp32"} if not options.fp32 else set()))


def describe_systems(target: Target, options: BenchPlan, backend: str) -> list[BenchSystem]:
    """Return who takes part, in the order of tables; `backend` is the TensorRT of engines on a GPU."""
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
    """Return the CPU runtime of a bench's INT8 engine: the recipe's, else what `auto` takes on a CPU."""
    return choose_backend(choice if choice in CPU_BACKENDS else find_best(CPU_BACKENDS)).name


def why_absent(system: System) -> str | None:
    for library in filter(None, (system.library, system.needs)):
        if not _version(library):
            command = install_command(library) if library == "openvino" else f"pip install {library}"
            return f"{library} is not installed: {command}"
    if system.precision == "bf16" and not find_cpu().bf16:
        return "this CPU multiplies no BF16"
    if system.mode and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        return "torch.compile needs a C++ compiler, such as g++"
    return None


def _version(library: str) -> str:
    if library == "cuda":
        return get_version()
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass
class Work:
    """A device, and what all configs of a bench share there."""

    prepare: "Callable[[Preparation], list[SystemRun]]"
    backend: tuple[str, str] = ("", "")  # TensorRT and its version, on a GPU
    gpu: Gpu | None = None
    monitor: Any = None  # a `GpuMonitor`
    background: Any = None  # a `Background`, on a GPU
    models: dict[str, Any] = field(default_factory=dict)  # by precision, or by who quantized
    compiles: dict[tuple[str, Shape], str] = field(default_factory=dict)  # tasks by mode and shape


@dataclass(frozen=True)
class Preparation:
    target: Target
    options: BenchPlan
    config: Config
    work: Work
    stack: ExitStack  # frees what the config holds
    compiled: dict[str, Any] = field(default_factory=dict)  # functions of PyTorch by precision and mode

    @functools.cached_property
    def batches(self) -> list[Batch]:
        config, target, options = self.config, self.target, self.options
        if config.split:
            return config.split.batches
        asked = target.family.inputs, config.shapes[0]
        if texts := target.texts:
            return text_sets(*asked, texts, options.input_sets, options.seed)
        return random_sets(*asked, target.about.shape["vocabulary"], options.input_sets, options.seed)

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what all configs share, made once."""
        models = self.work.models
        if name not in models:
            models[name] = make()
        return models[name]

    def forward(self, system: System) -> Callable[..., Any]:
        """Return the model in PyTorch with SDPA attention, eager or compiled; on a GPU for each shape."""
        on_cpu, precision, new = system.device == "cpu", system.precision, self.target.session.new_model
        where = "cpu" if on_cpu else "cuda"
        model = self.shared(precision, lambda: peers.sdpa_model(new(), precision, where))
        if not system.mode:
            return peers.eager_forward(model)
        key = f"{precision} {system.mode}"
        if key not in self.compiled:
            dynamic = on_cpu and self.config.split is not None
            self.compiled[key] = peers.compiled_forward(model, system.mode, dynamic=dynamic)
        return cast("Callable[..., Any]", self.compiled[key])


def prepare_each(
    here: Preparation, timer: Timer, prepare: Callable[[System, SystemRun], None]
) -> list[SystemRun]:
    """Prepare every system; an engine of the bench that fails is an error, all else is skipped."""
    runs, systems = [], systems_of(here.target, here.options)
    if any(system.mode for system in systems.values()):
        import torch

        # past a limit of shapes dynamo silently falls back to eager
        here.stack.callback(torch.compiler.reset)
    for name, system in systems.items():
        report_phase(f"preparing {name}")
        other_backend = system.device == "gpu" and (system.library == "cuda") != here.target.runs_kernels
        may_skip = not system.is_engine or bool(system.recipe) or other_backend
        absent = why_absent(system) if system.device == "cpu" else None
        row = BenchRow(system=name, status="skipped" if absent else "done", reason=absent)
        run = SystemRun(row, system.precision, timer)
        try:
            if not absent:
                prepare(system, run)
        except Exception as error:
            # compilers fail in a hundred ways, and a missing baseline is a gap in the table; a missing engine
            # of ours is an error, whatever else is measured
            explained = isinstance(error, (QdqError, RuntimeError)) and not isinstance(error, MissingDevice)
            if not (may_skip or explained):
                raise
            reason = " ".join(f"{error}".split())[:300] or type(error).__name__
            row = BenchRow(system=name, status="skipped" if may_skip else "error", reason=reason)
            run = SystemRun(row, system.precision, timer)
        runs.append(run)
    return runs


def profiles_of(
    target: Target, shapes: str, config: Config, backend: BackendName | None = None
) -> list[Profile]:
    if shapes == "recipe":
        return engine_profiles(target.session, backend)
    if config.split is None or config.split.bucketed:
        return [Profile(min=pair, opt=pair, max=pair) for pair in config.shapes]
    rows, lengths = ([pair[axis] for pair in config.shapes] for axis in (0, 1))
    middle = sorted(batch["input_ids"].shape[1] for batch in config.split.batches)
    opt = (max(rows), middle[len(middle) // 2])
    return [Profile(min=(min(rows), min(lengths)), opt=opt, max=(max(rows), max(lengths)))]
