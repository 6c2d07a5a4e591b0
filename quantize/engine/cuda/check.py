"""Check the shapes that kernels rely on, in a plan and its arrays, before anything runs."""

from collections.abc import Iterator, Mapping

import numpy as np

from qdqbench.quantize.engine.cuda.names import (
    ATTENTION_SIZES,
    CHANNEL_STEP,
    LINEAR_STEP,
    NORM_PARTS,
    ROW_MAX_CODE,
    count_columns,
    most_codes,
)
from qdqbench.quantize.engine.cuda.plan import (
    Attention,
    Embed,
    Head,
    Linear,
    Norm,
    Operation,
    Plan,
    Quantize,
)
from qdqbench.quantize.engine.cuda.tokens import MASK, TOKENS, TYPES
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import UserError

Shape = tuple[int | None, ...]  # None: any size from 1 on
HALF = np.dtype(np.float16)
_CODES, _SINGLE = "int8", "float32"
_SIZES = " or ".join([", ".join(map(str, ATTENTION_SIZES[:-1])), str(ATTENTION_SIZES[-1])])
_MOST_HALVES = 256  # channels of a head in PyTorch's FP16 attention
SMALLEST, LARGEST = 2.0**-126, 2.0**127  # of FP32, without what kernels may flush to zero


def require_kernels(plan: Plan) -> None:
    """Raise UserError where sizes are none that a kernel takes."""
    for operation in plan.operations:
        if wrong := _find_misfit(operation, plan):
            raise UserError(
                f"backend cuda has no kernel for {operation.name}: {wrong}; take tensorrt_rtx or tensorrt"
            )


def _find_misfit(operation: Operation, plan: Plan) -> str:  # noqa: PLR0911
    size = operation.head_size if isinstance(operation, Attention) else 0
    widths = [plan.tensors[tensor].width for tensor in (*operation.reads, *operation.writes)]
    match operation:
        case Linear(weight="int8") if any(width % LINEAR_STEP for width in widths):
            found = " and ".join(map(str, widths))
            return (
                f"INT8 linears have multiples of {CHANNEL_STEP} channels, and next to FP16 attention of "
                f"{LINEAR_STEP}, not {found}"
            )
        case Linear(weight="int8", activation=str(), residual=str()):
            return "an INT8 linear has an activation or a residual, not both"
        case Linear(rotary=int(head)) if head % 4 or widths[-1] % (3 * head):
            return f"rotated heads have a multiple of 4 channels, not {head} of {widths[-1]}"
        case Attention(probability_multiplier=float()) if size not in ATTENTION_SIZES:
            return f"heads of INT8 attention are padded to {_SIZES} channels, not {size}"
        case Attention(window=int(), biased=True):
            return "no attention has both a window and a bias by distance"
        case Attention(probability_multiplier=None, biased=True):
            return "FP16 attention adds no bias by distance, INT8 attention does (recipe int8-attention)"
        case Attention(probability_multiplier=None) if size % 8 or size > _MOST_HALVES:
            return f"heads of FP16 attention have a multiple of 8 channels up to {_MOST_HALVES}, not {size}"
        case Attention():
            columns = [view.column for view in operation.views]
            if any(each % LINEAR_STEP for each in (*widths[:3], *columns)) or len({*widths[:3]}) > 1:
                return (
                    f"query, key and value begin at multiples of {LINEAR_STEP} in tensors of one width, "
                    f"not at {columns} of {widths[:3]}"
                )
        case Embed() | Norm() if widths[0] % 8 or widths[0] > 128 * NORM_PARTS[-1]:
            return f"a LayerNorm has up to {128 * NORM_PARTS[-1]} channels, a multiple of 8, not {widths[0]}"
        case Embed() | Norm() if len(operation.codes) > (most := most_codes(widths[0])):
            return (
                f"a LayerNorm of {widths[0]} channels writes codes of up to {most} quantizers, "
                f"not {len(operation.codes)}"
            )
        case Quantize() | Linear(weight="fp16") if (
            widths[-1] % 4 and plan.tensors[operation.writes[0]].kind == "int8"
        ):
            return f"codes of FP16 have a multiple of 4 channels, not {widths[-1]}"
    return ""


def check_arrays(plan: Plan, arrays: Mapping[str, Array]) -> None:
    """Raise UserError where a plan and its arrays are not what kernels count on.

    Names are of one operation, tensor or array each; a tensor is written before it is read; arrays have the
    shapes and types that kernels read; all numbers are finite.
    """
    if wrong := [name for name, tensor in plan.tensors.items() if tensor.own > tensor.width]:
        raise UserError(f"{wrong[0]} is narrower than its channels; build the engine again")
    written, expected = _list_expected(plan, arrays)
    embeds, heads = ([each for each in plan.operations if isinstance(each, kind)] for kind in (Embed, Head))
    if len(embeds) != 1 or len(heads) != 1 or embeds[0].name != "embed":
        raise UserError("the plan has not one embedding and one head; build it again")
    needed = {TOKENS, MASK, *([TYPES] if plan.embed.typed else []), *plan.given}
    if not needed <= {*plan.inputs} <= needed | {TYPES}:
        raise UserError(f"the plan needs the inputs {', '.join(sorted(needed))}; build it again")
    for name in (*plan.given, *plan.states):
        if name not in written & plan.tensors.keys() or plan.tensors[name].kind != "fp16":
            raise UserError(f"the plan gives {name} as codes, or never; build it again")
    for key, (kind, shape) in expected.items():
        found = arrays.get(key)
        sizes = None if found is None else (str(found.dtype), found.shape)
        right = found is not None and found.dtype == kind and found.ndim == len(shape) and found.size
        if (
            found is None
            or not right
            or any(a not in (b, None) for a, b in zip(shape, found.shape, strict=True))
        ):
            raise UserError(f"{key} is {sizes}, and its kernel reads {kind} {shape}; build the engine again")
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            raise UserError(f"{key} has numbers that are not finite; build the engine again")
    if extra := arrays.keys() - expected.keys():
        raise UserError(f"no kernel reads {min(extra)}; build the engine again")
    columns = [each.column for each in plan.head.answers if each.column is not None]
    dense = (number for number, step in enumerate(plan.head.steps) if step.kind == "dense")
    widths = [len(arrays[f"{plan.head.name}.{number}.bias"]) for number in dense]
    *_, width = plan.tensors[plan.head.input].own, *widths
    answers = {each.name for each in plan.head.answers}
    if not answers or len(answers) < len(plan.head.answers) or not all(0 <= c < width for c in columns):
        raise UserError(f"the answers are none of the head's {width} columns; build it again")


def _list_expected(plan: Plan, arrays: Mapping[str, Array]) -> tuple[set[str], dict[str, tuple[str, Shape]]]:
    """Return the tensors that operations write, and type and shape of every array that they read."""
    written: set[str] = {*plan.given}
    names: set[str] = set()
    expected: dict[str, tuple[str, Shape]] = {}
    for operation in plan.operations:
        if missing := [name for name in operation.reads if name not in written]:
            raise UserError(f"the plan reads {missing[0]} before {operation.name} could; build it again")
        made = [*operation.writes]
        if operation.name in names or len({*made} - written) < len(made):
            raise UserError(f"the plan has two of {operation.name} or of its tensors; build it again")
        names.add(operation.name)
        written |= {*made}
        if not all(name in plan.tensors for name in made) or not _fits(operation, plan):
            raise UserError(f"the tensors of {operation.name} do not fit each other; build it again")
        if not _has_sound_numbers(operation, plan):
            raise UserError(f"a number of {operation.name} is none that a kernel takes; build it again")
        for key, kind, shape in list_arrays(operation, plan, arrays):
            if key in expected:
                raise UserError(f"{key} is an array of two operations; build it again")
            expected[key] = kind, shape
    return written, expected


def _has_sound_numbers(operation: Operation, plan: Plan) -> bool:
    """Return whether the numbers of an operation are finite in FP32, and positive where they divide."""
    positive: list[float | None] = []
    match operation:
        case Embed() | Norm():
            positive = [operation.epsilon]
        case Attention():
            positive = [operation.score_scale, operation.probability_multiplier]
            if operation.row_max and round(operation.probability_multiplier or 0, 3) != ROW_MAX_CODE:
                return False
        case Linear() if (operation.gated and (operation.activation is None or operation.residual)) or (
            operation.rotary and (operation.activation or operation.residual or operation.gated)
        ):
            return False
        case Linear() if operation.activation is None or plan.tensors[operation.output].kind == "fp16":
            return operation.center == 0
        case Linear():
            return abs(operation.center) <= LARGEST
        case Head():
            positive = [step.epsilon if step.kind == "norm" else None for step in operation.steps]
            if any((step.kind == "norm") != (step.epsilon is not None) for step in operation.steps):
                return False
    return all(each is None or SMALLEST <= each <= LARGEST for each in positive)


def _fits(operation: Operation, plan: Plan) -> bool:
    """Return whether widths and kinds of an operation's tensors go together."""
    tensors = plan.tensors
    read = [tensors[name] for name in operation.reads]
    made = [tensors[name] for name in operation.writes]
    if isinstance(operation, Linear):
        residual = read[1:] if operation.residual is not None else []
        return read[0].kind == operation.weight and all(each.width == made[0].width for each in residual)
    if isinstance(operation, Attention):
        width = operation.heads * operation.head_size
        kind = "fp16" if operation.probability_multiplier is None else "int8"
        if operation.biased and plan.embed.span is None:
            return False
        inside = all(0 <= view.column <= tensors[view.tensor].width - width for view in operation.views)
        return inside and made[0].width == width and all(each.kind == kind for each in read)
    if isinstance(operation, Head):
        return read[0].kind == "fp16"
    if isinstance(operation, Quantize) and operation.half is not None:
        return False  # no kernel writes it
    halves = [*read, *([tensors[operation.half]] if operation.half is not None else [])]
    codes = [tensors[name] for name in operation.codes]
    kinds = all(each.kind == "fp16" for each in halves) and all(each.kind == "int8" for each in codes)
    return kinds and bool(made) and len({each.width for each in (*made, *read)}) == 1


def list_arrays(  # noqa: PLR0912
    operation: Operation, plan: Plan, arrays: Mapping[str, Array]
) -> Iterator[tuple[str, str, Shape]]:
    """Yield name, type and shape of the arrays of an operation."""
    name = operation.name
    if isinstance(operation, Head):
        width: int | None = plan.tensors[operation.input].own
        for number, step in enumerate(operation.steps):
            if step.kind == "dense":
                weight = arrays.get(f"{name}.{number}.weight")
                rows = len(weight) if weight is not None and weight.ndim else 0
                yield f"{name}.{number}.weight", _SINGLE, (rows, width)
                yield f"{name}.{number}.bias", _SINGLE, (rows,)
                width = rows
            elif step.kind == "norm":
                yield from ((f"{name}.{number}.{part}", _SINGLE, (width,)) for part in ("gamma", "beta"))
        return
    tensor = plan.tensors[operation.writes[0]]
    width = tensor.width
    if isinstance(operation, Linear):
        int8, rows = operation.weight == "int8", count_columns(operation, plan)
        yield f"{name}.weight", _CODES if int8 else HALF.name, (rows, plan.tensors[operation.input].width)
        yield f"{name}.bias", _SINGLE if int8 else HALF.name, (rows,)
        if int8:
            yield f"{name}.scale", _SINGLE, (rows,)
        if operation.rotary:
            yield f"{name}.frequencies", _SINGLE, (operation.rotary // 2,)
        if operation.residual is not None and plan.tensors[operation.residual].kind == "int8":
            yield f"{name}.residual", _SINGLE, (width,)
        if tensor.kind == "int8" and (operation.activation or not int8):
            yield f"{operation.output}.multiplier", _SINGLE, (width,)
    elif isinstance(operation, Attention):
        yield f"{name}.scale", _SINGLE, (width,)
        if operation.biased:
            yield f"{name}.bias", _SINGLE, (operation.heads, 2 * (plan.embed.span or 0) - 1)
    else:
        yield from ((f"{codes}.multiplier", _SINGLE, (width,)) for codes in operation.codes)
        if not isinstance(operation, Quantize):
            yield from ((f"{name}.{part}", _SINGLE, (width,)) for part in ("gamma", "beta"))
        if isinstance(operation, Embed):
            tables = ("word", "position", "type") if operation.placed else ("word", "type")
            yield from ((f"{name}.{table}", HALF.name, (None, width)) for table in tables)
