"""Names of the kernels that a plan launches, and the sizes that they are compiled for."""

import re
from typing import NamedTuple

from qdqbench.quantize.engine.cuda.plan import Attention, Embed, Head, Linear, Norm, Operation, Plan, Quantize


class Tile(NamedTuple):
    """Part of a GEMM that a block makes at once, the stages of its loads, and whether its weights stay."""

    m: int
    n: int
    stages: int
    stationary: bool = False

    def __str__(self) -> str:
        return f"{self.m}_{self.n}" + ("_stationary" if self.stationary else "")


TILES = Tile(128, 128, 5), Tile(64, 128, 8), Tile(64, 64, 12)
STATIONARY = Tile(128, 128, 5, stationary=True)
_MOST_STATIONARY = 1024  # channels of K: their weights and the stages fill the shared memory
MOST_CODES = 3  # that a kernel of norm.cu writes
NORM_PARTS = 3, 6, 8  # of 128 channels each
CAPABILITY = "9.0"
ATTENTION_SIZES = (32, 64)  # of heads in INT8
LINEAR_STEP = 16  # channels of INT8 linears are a multiple of it


def gemm_name(operation: Linear, plan: Plan) -> str:
    residual = None if operation.residual is None else plan.tensors[operation.residual].kind
    output = plan.tensors[operation.output].kind
    return f"{operation.activation or 'none'}_{residual or 'none'}_{output}"


def list_tiles(operation: Linear) -> tuple[Tile, ...]:
    """Return the tiles that a GEMM has kernels for. With a residual, weights that stay save nothing."""
    return TILES if operation.residual is not None else (*TILES, STATIONARY)


def fits_stationary(k: int) -> bool:
    """Return whether a block can keep weights of K channels."""
    # gemm.cu counts on no more stages than blocks of K
    return 128 * (STATIONARY.stages - 1) < k <= _MOST_STATIONARY


def needs_clamp(operation: Attention) -> bool:
    """Return whether a probability of 1 could round to a code beyond 127."""
    return (operation.probability_multiplier or 0) > 127.49


def attention_name(operation: Attention, plan: Plan) -> str:
    clamp = "_clamped" if needs_clamp(operation) else ""
    return f"{operation.head_size}_{plan.tensors[operation.output].kind}{clamp}"


def count_parts(width: int) -> int:
    """Return the parts of the kernel that takes a LayerNorm; 0: there is none."""
    return next((parts for parts in NORM_PARTS if width <= 128 * parts), 0)


def norm_name(operation: Embed | Norm, width: int) -> str:
    return f"{count_parts(width)}_{len(operation.codes)}"


def has_dense(operation: Head) -> bool:
    """Return whether a head has dense steps of rows; those of tokens are PyTorch's."""
    return operation.pooling != "tokens" and any(step.kind == "dense" for step in operation.steps)


def list_kernels(plan: Plan) -> set[str]:
    """Return the names of all kernels that a plan may launch: GEMMs have one for each tile."""
    named = (name for operation in plan.operations for name in _list_names(operation, plan))
    return set(named)


def _list_names(operation: Operation, plan: Plan) -> list[str]:
    match operation:
        case Linear(weight="int8"):
            return [f"gemm_{tile}_{gemm_name(operation, plan)}" for tile in list_tiles(operation)]
        case Attention(probability_multiplier=float()):
            return [f"attention_{attention_name(operation, plan)}_{form}" for form in ("short", "long")]
        case Embed() | Norm():
            return [f"{operation.op}_{norm_name(operation, plan.tensors[operation.writes[0]].width)}"]
        case Head():
            return ["head"] if has_dense(operation) else []
    codes = isinstance(operation, Quantize) or plan.tensors[operation.output].kind == "int8"
    return ["quantize"] if codes else []


def find_symbols(cubin: bytes) -> set[str]:
    """Return the kernels of a cubin: an ELF file has a section for the code of each."""
    return {name.decode() for name in re.findall(rb"\0\.text\.(\w+)(?=\0)", cubin)}
