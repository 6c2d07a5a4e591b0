"""The kernels of a plan, compiled by NVRTC for compute capability 9.0: ahead of time, without a GPU."""

import ctypes as c
import site
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from qdqbench.quantize.engine.cuda.plan import Attention, Embed, Linear, Norm, Operation, Plan
from qdqbench.quantize.utils.errors import QdqError, UserError

TILES = (128, 128), (64, 128), (64, 64)  # M and N of a block's tile
STAGES = {(128, 128): 6, (64, 128): 8, (64, 64): 12}
_NORM_PARTS = 3, 6, 8  # of 128 channels each
_ACTIVATIONS = {None: "NONE", "gelu": "GELU", "gelu_tanh": "GELU_TANH"}
_RESIDUALS = {None: "NO_RESIDUAL", "fp16": "HALVES", "int8": "RESIDUAL_CODES"}
_OPTIONS = "--gpu-architecture=sm_90a", "--std=c++17"


def gemm_name(operation: Linear, plan: Plan) -> str:
    residual = None if operation.residual is None else plan.tensors[operation.residual].kind
    output = plan.tensors[operation.output].kind
    return f"{operation.activation or 'none'}_{residual or 'none'}_{output}"


def needs_clamp(operation: Attention) -> bool:
    """Return whether a probability of 1 could round to a code beyond 127."""
    return (operation.probability_multiplier or 0) > 127.49


def attention_name(operation: Attention, plan: Plan) -> str:
    clamp = "_clamped" if needs_clamp(operation) else ""
    return f"{operation.head_size}_{plan.tensors[operation.output].kind}{clamp}"


def norm_name(operation: Embed | Norm, width: int) -> str:
    parts = next(parts for parts in _NORM_PARTS if width <= 128 * parts)
    return f"{parts}_{len(operation.codes)}"


def compile_kernels(plan: Plan) -> dict[str, bytes]:
    """Return the cubin of each source file that the plan needs. Raises UserError without NVRTC."""
    lines: dict[str, set[str]] = {}
    for operation in plan.operations:
        for source, line in _instances(operation, plan):
            lines.setdefault(source, set()).add(line)
    return {source: compile_source(source, sorted(made)) for source, made in sorted(lines.items())}


def _instances(operation: Operation, plan: Plan) -> list[tuple[str, str]]:
    width = plan.tensors[plan.head.input].width
    match operation:
        case Linear(weight="int8"):
            residual = None if operation.residual is None else plan.tensors[operation.residual].kind
            coded = plan.tensors[operation.output].kind == "int8"
            flags = f"{_ACTIVATIONS[operation.activation]}, {_RESIDUALS[residual]}, {str(coded).lower()}"
            return [("gemm", f"GEMM({gemm_name(operation, plan)}, {flags})")]
        case Attention(probability_multiplier=float()):
            coded = plan.tensors[operation.output].kind == "int8"
            flags = f"{operation.head_size}, {str(coded).lower()}, {str(needs_clamp(operation)).lower()}"
            return [("attention", f"ATTENTION({attention_name(operation, plan)}, {flags})")]
        case Embed() | Norm():
            macro, name = operation.op.upper(), norm_name(operation, width)
            return [("norm", f"{macro}({name.replace('_', ', ')})")]
    return [("norm", "")]  # codes of FP16 tensors


def compile_source(name: str, instances: list[str]) -> bytes:
    """Return the cubin of kernels/NAME.cu with such instances of its templates."""
    folder = files(__package__) / "kernels"
    text, header = ((folder / file).read_text() for file in (f"{name}.cu", "ptx.cuh"))
    source = "\n".join([text, *instances]).encode()
    nvrtc, program = _nvrtc(), c.c_void_p()
    headers, names = (c.c_char_p * 1)(header.encode()), (c.c_char_p * 1)(b"ptx.cuh")
    _check(nvrtc.nvrtcCreateProgram(c.byref(program), source, f"{name}.cu".encode(), 1, headers, names))
    options = (c.c_char_p * len(_OPTIONS))(*[option.encode() for option in _OPTIONS])
    failed = nvrtc.nvrtcCompileProgram(program, len(_OPTIONS), options)
    if failed:
        raise QdqError(f"kernels/{name}.cu does not compile:\n{_read(program, 'ProgramLog').decode()}")
    cubin = _read(program, "CUBIN")
    _check(nvrtc.nvrtcDestroyProgram(c.byref(program)))
    return cubin


def _read(program: c.c_void_p, what: str) -> bytes:
    size = c.c_size_t()
    _check(getattr(_nvrtc(), f"nvrtcGet{what}Size")(program, c.byref(size)))
    text = c.create_string_buffer(size.value)
    _check(getattr(_nvrtc(), f"nvrtcGet{what}")(program, text))
    return text.raw


@cache
def _nvrtc() -> Any:
    """Load NVRTC: of the package `nvidia-cuda-nvrtc`, which CUDA builds of torch bring, or of the system."""
    folders = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    found = [
        path for folder in folders for path in Path(folder or ".").glob("nvidia/*/lib/libnvrtc.so.1[23]")
    ]
    for path in (*found, Path("libnvrtc.so.13"), Path("libnvrtc.so.12")):
        try:
            for part in path.parent.glob("libnvrtc-builtins.so.*"):
                c.CDLL(str(part))  # NVRTC looks for it by name alone
            return c.CDLL(str(path))
        except OSError:
            continue
    raise UserError("backend cuda compiles by NVRTC, which is not here: pip install nvidia-cuda-nvrtc")


def _check(status: int) -> None:
    if status:
        raise QdqError(f"NVRTC failed with status {status}")
