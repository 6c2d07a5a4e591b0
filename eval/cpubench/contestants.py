"""Who takes part on a CPU: one table of contestants, and why some cannot."""

import importlib.metadata
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from qdqbench.eval.bench.cell import TORCH_FP32, BenchOptions
from qdqbench.eval.bench.results import BenchContestant
from qdqbench.eval.bench.target import Target
from qdqbench.eval.cpubench import made
from qdqbench.eval.cpubench.made import Made, Work
from qdqbench.quantize.core.limits import CPU_BACKENDS, BackendChoice, BackendName
from qdqbench.quantize.engine.backend import choose_backend, preferred_backend
from qdqbench.quantize.machine.cpu import find_cpu

OWN = "int8"  # name of the INT8 engine that the bench is about


@dataclass(frozen=True)
class Kind:
    """A contestant of the table."""

    name: str
    label: str
    precision: str
    library: str  # that runs it, as pip names it
    make: Callable[[Work], Made]
    twin: bool = True  # an engine of ours or a twin of it; else a peer
    needs: str = ""  # another library
    compiler: bool = False


TABLE = [
    Kind("int8-openvino", "INT8 OpenVINO", "int8", "openvino", partial(made.engine, "openvino")),
    Kind("int8-onnxruntime", "INT8 ONNX Runtime", "int8", "onnxruntime", partial(made.engine, "onnxruntime")),
    Kind("bf16-openvino", "OpenVINO BF16", "bf16", "openvino", partial(made.twin, "openvino", "bf16")),
    Kind("fp32-openvino", "OpenVINO FP32", "fp32", "openvino", partial(made.twin, "openvino", "fp32")),
    Kind("fp32-onnxruntime", "ONNX Runtime FP32", "fp32", "onnxruntime",
         partial(made.twin, "onnxruntime", "fp32")),
    Kind("dynamic-onnxruntime", "ONNX Runtime dynamic INT8", "int8", "onnxruntime", made.dynamic, twin=False),
    Kind("nncf-openvino", "NNCF INT8 in OpenVINO", "int8", "openvino", made.nncf, twin=False, needs="nncf"),
    Kind(TORCH_FP32, "PyTorch FP32", "fp32", "torch", partial(made.torch_eager, "fp32"), twin=False),
    Kind("torch-bf16", "PyTorch BF16", "bf16", "torch", partial(made.torch_eager, "bf16"), twin=False),
    Kind("compile-fp32", "torch.compile FP32", "fp32", "torch", partial(made.torch_compiled, "fp32"),
         twin=False, compiler=True),
    Kind("compile-bf16", "torch.compile BF16", "bf16", "torch", partial(made.torch_compiled, "bf16"),
         twin=False, compiler=True),
]  # fmt: skip


def own_backend(choice: BackendChoice) -> BackendName:
    """The CPU runtime whose INT8 engine a bench is about: the recipe's, else the first that is installed.

    Raises:
        MissingDevice: the recipe's is not installed; says how to.
    """
    if choice not in CPU_BACKENDS:
        choice = next(name for name in CPU_BACKENDS if find_spec(name))  # ONNX Runtime is always there
    return choose_backend(choice).name


def runs_on_cpu(choice: BackendChoice) -> bool:
    """Whether a recipe's engine runs on the CPU of this machine."""
    return preferred_backend(choice) in CPU_BACKENDS


def table_of(target: Target, options: BenchOptions) -> dict[str, Kind]:
    """The kinds that were asked for by their names in results, the bench's own INT8 engine first."""
    own = f"{OWN}-{own_backend(target.session.recipe.engine.backend)}"
    return {
        OWN if kind.name == own else kind.name: kind
        for kind in sorted(TABLE, key=lambda kind: kind.name != own)
        if (options.peers or kind.twin)
        and (options.fp32 or not (kind.twin and kind.precision == "fp32"))
        and (target.session.recipe.quantizes or not (kind.twin and kind.precision == "int8"))
    }


def contestants(target: Target, options: BenchOptions) -> list[BenchContestant]:
    """Who takes part, in the order of tables and charts."""
    return [
        BenchContestant(
            name=name,
            label=kind.label,
            precision=kind.precision,  # type: ignore[arg-type]
            backend=f"{kind.library} {_version(kind.library)}".strip(),
        )
        for name, kind in table_of(target, options).items()
    ]


def why_absent(kind: Kind) -> str | None:
    """Why a contestant cannot take part here, and what would mend it."""
    for library in filter(None, (kind.library, kind.needs)):
        if not _version(library):
            extra = "'qdqbench[openvino]'" if library == "openvino" else library
            return f"{library} is not installed: pip install {extra}"
    if kind.precision == "bf16" and not find_cpu().bf16:
        return "this CPU multiplies no BF16"
    if kind.compiler and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        return "torch.compile needs a C++ compiler, such as g++"
    return None


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
