"""Check the shapes that kernels rely on, in a plan and its arrays, before anything runs."""

from collections.abc import Iterator, Mapping

import numpy as np

from qdqbench.quantize.engine.cuda.plan import Attention, Embed, Head, Linear, Operation, Plan, Quantize
from qdqbench.quantize.engine.cuda.tokens import MASK, TOKENS, TYPES
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import UserError

Shape = tuple[int | None, ...]  # None: any size from 1 on
HALF = np.dtype(np.float16)
_CODES, _SINGLE = "int8", "float32"


def check_arrays(plan: Plan, arrays: Mapping[str, Array]) -> None:
    """Raise UserError where a tensor is read before it is written, or an array has another shape or type."""
    written: set[str] = {*plan.given}
    expected: dict[str, tuple[str, Shape]] = {}
    for operation in plan.operations:
        if missing := {*operation.reads} - written:
            raise UserError(f"the plan reads {missing.pop()} before {operation.name} could; build it again")
        written |= {*operation.writes}
        if written - plan.tensors.keys() or not _fits(operation, plan):
            raise UserError(f"the tensors of {operation.name} do not fit each other; build it again")
        expected |= {key: (kind, shape) for key, kind, shape in list_arrays(operation, plan, arrays)}
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
    if extra := arrays.keys() - expected.keys():
        raise UserError(f"no kernel reads {min(extra)}; build the engine again")


def _fits(operation: Operation, plan: Plan) -> bool:
    """Return whether widths and kinds of an operation's tensors go together."""
    tensors = plan.tensors
    read = [tensors[name] for name in operation.reads]
    made = [tensors[name] for name in operation.writes]
    if isinstance(operation, Linear):
        residual = read[1:] if operation.residual is not None else []
        return read[0].kind == operation.weight and all(each.width == made[0].width for each in residual)
    if isinstance(operation, Attention):
        views, width = (
            (operation.query, operation.key, operation.value),
            operation.heads * operation.head_size,
        )
        kind = "fp16" if operation.probability_multiplier is None else "int8"
        inside = all(0 <= view.column <= tensors[view.tensor].width - width for view in views)
        return inside and made[0].width == width and all(each.kind == kind for each in read)
    if isinstance(operation, Head):
        return read[0].kind == "fp16"
    halves = [*read, *([tensors[operation.half]] if operation.half is not None else [])]
    codes = [tensors[name] for name in operation.codes]
    kinds = all(each.kind == "fp16" for each in halves) and all(each.kind == "int8" for each in codes)
    return kinds and bool(made) and len({each.width for each in (*made, *read)}) == 1


def list_arrays(
    operation: Operation, plan: Plan, arrays: Mapping[str, Array]
) -> Iterator[tuple[str, str, Shape]]:
    """Yield name, type and shape of the arrays of an operation."""
    name = operation.name
    if isinstance(operation, Head):
        width: int | None = plan.tensors[operation.input].width
        for number, step in enumerate(operation.steps):
            if step.kind == "dense":
                weight = arrays.get(f"{name}.{number}.weight")
                rows = len(weight) if weight is not None and weight.ndim else 0
                yield f"{name}.{number}.weight", _SINGLE, (rows, width)
                yield f"{name}.{number}.bias", _SINGLE, (rows,)
                width = rows
        return
    tensor = plan.tensors[operation.writes[0]]
    width = tensor.width
    if isinstance(operation, Linear):
        int8 = operation.weight == "int8"
        yield f"{name}.weight", _CODES if int8 else HALF.name, (width, plan.tensors[operation.input].width)
        yield f"{name}.bias", _SINGLE if int8 else HALF.name, (width,)
        if int8:
            yield f"{name}.scale", _SINGLE, (width,)
        if operation.residual is not None and plan.tensors[operation.residual].kind == "int8":
            yield f"{name}.residual", _SINGLE, (width,)
        if tensor.kind == "int8" and (operation.activation or not int8):
            yield f"{operation.output}.multiplier", _SINGLE, (width,)
    elif isinstance(operation, Attention):
        yield f"{name}.scale", _SINGLE, (width,)
    else:
        yield from ((f"{codes}.multiplier", _SINGLE, (width,)) for codes in operation.codes)
        if not isinstance(operation, Quantize):
            yield from ((f"{name}.{part}", _SINGLE, (width,)) for part in ("gamma", "beta"))
        if isinstance(operation, Embed):
            yield from (
                (f"{name}.{table}", HALF.name, (None, width)) for table in ("word", "position", "type")
            )
