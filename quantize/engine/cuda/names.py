"""Names of the kernels that a plan launches, and the sizes that they are compiled for."""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from qdqbench.quantize.engine.cuda.plan import Attention, Embed, Head, Linear, Norm, Operation, Plan, Quantize
from qdqbench.quantize.utils.errors import UserError


class Tile(NamedTuple):
    """Part of a GEMM that a block makes at once, the stages of its loads, and whether its weights stay.

    Those of mma.sync have more: channels of K of a stage, warps down and across, and the blocks of a
    multiprocessor. If a tile `splits`, different blocks may sum `parts` of K. On Hopper two groups of a block
    make tiles by turns, or `together`.
    """

    m: int
    n: int
    stages: int
    stationary: bool = False
    k: int = 128
    warps: tuple[int, int] = (1, 1)
    blocks: int = 1
    splits: bool = False
    parts: int = 1
    together: bool = False

    def __str__(self) -> str:
        return f"{self.m}_{self.n}" + ("_stationary" if self.stationary else "")

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a block of mma.sync takes."""
        return self.stages * (self.m + self.n) * self.k + (16 if self.splits else 0)


class Target(NamedTuple):
    """GPUs that kernels are compiled for, and what differs between them."""

    name: str  # compute capability; of PTX, which the driver compiles where no other fits, with a suffix
    code: str  # what NVRTC compiles for
    tiles: tuple[Tile, ...]
    shared: int  # bytes of shared memory that a block can have
    wgmma: bool = False  # the GEMM of gemm.cu, else that of gemm_mma.cu
    early: bool = False  # a kernel may start before the previous one ends
    half_attention: bool = True  # PyTorch has FP16 attention of packed rows there


TILES = Tile(128, 128, 5), Tile(64, 128, 8), Tile(64, 64, 12)
STATIONARY = Tile(128, 128, 5, stationary=True)
NARROW, SLIM = Tile(64, 96, 10), Tile(64, 32, 16)  # of FP16; columns of codes come in 64
BROAD = Tile(128, 192, 5, together=True)  # with a residual of codes; four cover 768 columns
_MOST_STATIONARY = 1024  # channels of K: their weights and the stages fill the shared memory
_KB = 1024


_SMALL = (
    Tile(64, 64, 3, warps=(2, 1), blocks=2, splits=True),
    Tile(32, 64, 4, warps=(2, 1), blocks=2, splits=True),
)
# Measured on one H200; those of 100 KB are the best of what fits there
_OF_164_KB = (
    Tile(128, 128, 2, warps=(2, 2), blocks=2),
    Tile(64, 128, 4, k=64, warps=(2, 2), blocks=3),
    *(tile._replace(blocks=3) for tile in _SMALL),
)
_OF_100_KB = (
    Tile(128, 256, 4, k=64, warps=(2, 4)),
    Tile(128, 128, 3, k=64, warps=(2, 2), blocks=2),
    Tile(64, 128, 4, k=64, warps=(2, 2), blocks=2),
    *_SMALL,
)
_OF_TURING = (
    Tile(128, 128, 2, k=64, warps=(4, 2)),
    Tile(64, 64, 2, k=64, warps=(4, 1), blocks=2, splits=True),
)
TARGETS = (
    Target("7.5", "sm_75", _OF_TURING, 64 * _KB, half_attention=False),
    Target("8.0", "sm_80", _OF_164_KB, 163 * _KB),
    Target("8.6", "sm_86", _OF_100_KB, 99 * _KB),
    Target("8.9", "sm_89", _OF_100_KB, 99 * _KB),
    Target("9.0", "sm_90a", TILES, 227 * _KB, wgmma=True, early=True),
    Target("12.0", "sm_120", _OF_100_KB, 99 * _KB, early=True),
    Target("8.0+PTX", "compute_80", _OF_164_KB, 163 * _KB),  # Blackwell for data centers, mostly
)
NAMES = tuple(target.name for target in TARGETS)
_REFUSED = {"10.3": "it has few INT8 units (0.15 POPS), so FP16 is faster there"}
_RESIDUALS = {None: "NO_RESIDUAL", "fp16": "HALVES", "int8": "RESIDUAL_CODES"}
_MOST_CODES = 3  # that a kernel of norm.cu writes
NORM_PARTS = 3, 6, 8, 16, 32  # of 128 channels each
_IN_REGISTERS = 6  # parts whose gamma, beta and multipliers are not in shared memory
ATTENTION_SIZES = (32, 64, 128)  # of heads in INT8; smaller ones are padded
MOST_MULTIPLIER = 127.49  # of probabilities; beyond it that of 1 could round to a code beyond 127
ROW_MAX_CODE = 255  # of the largest probability of a row, where the others are over it
LINEAR_STEP = 16  # channels of INT8 linears are a multiple of it, by padding
CHANNEL_STEP = 4  # channels of the model are a multiple of it


def count_columns(operation: Linear, plan: Plan) -> int:
    """Return the columns of a linear's product: a gate has as many as its input."""
    return plan.tensors[operation.output].width * (2 if operation.gated else 1)


def gemm_form(operation: Linear) -> str:
    """Return what an epilogue does, as epilogue.cuh names it."""
    if operation.rotary:
        return "ROTARY"
    return ("GATED_" if operation.gated else "") + (operation.activation or "none").upper()


def gemm_name(operation: Linear, plan: Plan) -> str:
    residual = None if operation.residual is None else plan.tensors[operation.residual].kind
    output = plan.tensors[operation.output].kind
    return f"{gemm_form(operation).lower()}_{residual or 'none'}_{output}"


def list_tiles(operation: Linear, plan: Plan, target: Target) -> tuple[Tile, ...]:
    """Return the tiles that a GEMM has kernels for. With a residual, weights that stay save nothing."""
    if not target.wgmma:
        return target.tiles
    tiles = target.tiles
    if plan.tensors[operation.output].kind == "fp16":
        tiles += NARROW, SLIM
    if operation.residual is None:
        return (*tiles, STATIONARY)
    # no GPU has run the broad tile with other kinds
    kinds = plan.tensors[operation.residual].kind, plan.tensors[operation.output].kind
    return (*tiles, BROAD) if kinds == ("int8", "fp16") else tiles


def fits_stationary(k: int) -> bool:
    """Return whether a block can keep weights of K channels."""
    # gemm.cu counts on no more stages than blocks of K
    return 128 * (STATIONARY.stages - 1) < k <= _MOST_STATIONARY


def attention_form(operation: Attention) -> str:
    """Return how a kernel makes the codes of probabilities, as attention.cu names it."""
    if operation.row_max:
        return "ROW_MAX"
    return "CLAMPED" if (operation.probability_multiplier or 0) > MOST_MULTIPLIER else "PLAIN"


def attention_name(operation: Attention, plan: Plan) -> str:
    form = attention_form(operation).lower() + ("_biased" if operation.biased else "")
    return f"{operation.head_size}_{plan.tensors[operation.output].kind}_{form}"


def count_parts(width: int) -> int:
    """Return the parts of the kernel that takes a LayerNorm; 0: there is none."""
    return next((parts for parts in NORM_PARTS if width <= 128 * parts), 0)


def most_codes(width: int) -> int:
    """Return how many codes the kernel of a LayerNorm writes: 48 KB hold what all its tokens share."""
    parts = count_parts(width)
    room = 48 * _KB // (4 * 128 * parts) - 2 if parts > _IN_REGISTERS else _MOST_CODES
    return min(room, _MOST_CODES)


def norm_name(operation: Embed | Norm, width: int) -> str:
    return f"{count_parts(width)}_{len(operation.codes)}"


def has_dense(operation: Head) -> bool:
    """Return whether a head has dense steps of rows; those of tokens are PyTorch's."""
    return operation.pooling != "tokens" and any(step.kind == "dense" for step in operation.steps)


def list_kernels(plan: Plan, target: Target) -> set[str]:
    """Return the names of all kernels that a plan may launch: GEMMs have one for each tile."""
    made = (each for operation in plan.operations for each in list_instances(operation, plan, target))
    return {name for *_, names in made for name in names}


def list_instances(
    operation: Operation, plan: Plan, target: Target
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the source files of an operation, lines that make its kernels of their templates, and these."""
    match operation:
        case Linear(weight="int8"):
            residual = None if operation.residual is None else plan.tensors[operation.residual].kind
            coded = plan.tensors[operation.output].kind == "int8"
            flags = f"{gemm_form(operation)}, {_RESIDUALS[residual]}, {str(coded).lower()}"
            for tile in list_tiles(operation, plan, target):
                kernel = f"gemm_{tile}_{gemm_name(operation, plan)}"
                source = "gemm" if target.wgmma else "gemm_mma"
                yield source, f"GEMM_OF({kernel}, {_template_of(tile, target)}, {flags})", (kernel,)
        case Attention(probability_multiplier=float()):
            name, coded = attention_name(operation, plan), plan.tensors[operation.output].kind == "int8"
            flags = f"{operation.head_size}, {str(coded).lower()}, {attention_form(operation)}"
            line = f"ATTENTION({name}, {flags}, {str(operation.biased).lower()})"
            yield "attention", line, (f"attention_{name}_short", f"attention_{name}_long")
        case Embed() | Norm():
            name = norm_name(operation, plan.tensors[operation.writes[0]].width)
            yield "norm", f"{operation.op.upper()}({name.replace('_', ', ')})", (f"{operation.op}_{name}",)
        case Head():
            if has_dense(operation):
                yield "head", "", ("head",)
        case _:  # codes of FP16 tensors
            quantizes = isinstance(operation, Quantize) or plan.tensors[operation.output].kind == "int8"
            yield "norm", "", ("quantize",) if quantizes else ()


def _template_of(tile: Tile, target: Target) -> str:
    """Return the arguments of a tile's template; on Hopper rows in 64 of a group come first."""
    if target.wgmma:
        numbers: tuple[int, ...] = tile.m // (128 if tile.together else 64), tile.n, tile.stages
        flags: tuple[bool, ...] = tile.stationary, tile.together
    else:
        numbers = tile.m, tile.n, tile.k, *tile.warps, tile.stages, tile.blocks
        flags = (tile.splits,)
    return ", ".join([*map(str, numbers), *(str(flag).lower() for flag in flags)])


def find_symbols(code: bytes) -> set[str]:
    """Return the kernels of a cubin, whose ELF file has a section for the code of each, or of PTX."""
    return {name.decode() for name in re.findall(rb"(?:\0\.text\.|\.entry )(\w+)(?=[\0(])", code)}


def find_target(capability: str, built: Collection[str] = NAMES) -> Target | None:
    """Return what a GPU takes of targets: the newest of its major version that it has, else PTX, or None."""
    here = _parse(capability) if capability not in _REFUSED else (0, 0)
    targets = [target for target in TARGETS if target.name in built and _parse(target.name) <= here]
    own = [target for target in targets if not is_ptx(target) and _parse(target.name)[0] == here[0]]
    return own[-1] if own else next(filter(is_ptx, targets), None)


def explain_misfit(capability: str, built: Collection[str] = NAMES) -> str:
    """Return why a GPU takes none of these targets, and what would do."""
    if why := _REFUSED.get(capability):
        return f"backend cuda does not run on compute capability {capability}: {why}; take tensorrt"
    if find_target(capability) is None:
        return f"backend cuda runs on compute capability {NAMES[0]} and newer, not on {capability}"
    return (
        f"the engine is for compute capability {', '.join(built)}, and this GPU has {capability}; build it "
        f"with --target {capability}"
    )


def choose_targets(wanted: Sequence[str], here: str | None, plan: Plan) -> tuple[Target, ...]:
    """Return what an engine is built for: what is wanted, else for the GPU that is here, else all.

    Raises:
        UserError: a target that there is not, or one that lacks what the plan needs.
    """
    halves = [each.name for each in plan.attentions if each.probability_multiplier is None]
    own = [here] if here is not None and (find_target(here) or here in _REFUSED) else []
    found = [read_target(name) for name in wanted or own]
    if halves and (lacking := [target.name for target in found if not target.half_attention]):
        raise UserError(
            f"PyTorch has no kernel for {halves[0]}, which is FP16 attention, on compute capability "
            f"{', '.join(lacking)}; take a recipe with INT8 attention, or tensorrt"
        )
    return tuple(
        target
        for target in TARGETS
        if target in found or (not found and (target.half_attention or not halves))
    )


def read_target(name: str) -> Target:
    """Return the target of a name or compute capability; UserError where there is none."""
    known = next((target for target in TARGETS if target.name == name), None)
    if known is not None:
        return known
    if not re.fullmatch(r"\d+\.\d", name):
        raise UserError(f"backend cuda builds for compute capability {', '.join(NAMES)}, not {name[:20]!r}")
    if (known := find_target(name)) is None:
        raise UserError(explain_misfit(name))
    return known


def _parse(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.partition("+")[0].split(".")))


def is_ptx(target: Target) -> bool:
    return target.code.startswith("compute")
