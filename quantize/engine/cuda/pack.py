"""From the numbers of a file to the arrays that kernels read.

| array | type and shape | of |
|---|---|---|
| `embed.word`, `.position`, `.type` | FP16 [entries, H] | tables |
| `NAME.gamma`, `.beta` | FP32 [H] | embed and norm |
| `NAME.weight` | INT8 or FP16 [N, K] | linear; q, k and v of one input are one, N = 3 H |
| `NAME.scale` | FP32 [N] | INT8 linear: scales of input and weight, over that of codes it writes itself |
| `NAME.bias` | FP32 [N], FP16 behind FP16 weights | linear, over the same scale |
| `NAME.residual` | FP32 [N] | linear that adds INT8 codes |
| `NAME.scale` | FP32 [H] | attention: scales of softmax and v, over that of codes that it writes |
| `TENSOR.multiplier` | FP32 [width] | codes of embed, norm, quantize, activations and FP16 linears |
| `head.NUMBER.weight`, `.bias` | FP32 [N, K], [N] | dense steps |
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from qdqbench.quantize.engine.cuda.match import Match
from qdqbench.quantize.engine.cuda.plan import (
    Attention,
    Head,
    Linear,
    Operation,
    Plan,
    Tensor,
    View,
)
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import FP16_MAX

HALF = np.float16
_TABLES = ("word", "position", "type")


def pack(match: Match) -> tuple[Plan, dict[str, Array]]:
    """Return the plan with merged GEMMs, and its arrays by name."""
    plan, constants = _merge(match)
    arrays: dict[str, Array] = {}
    for operation in plan.operations:
        arrays |= dict(_arrays(operation, plan, constants))
    return plan, {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _merge(match: Match) -> tuple[Plan, dict[str, Array]]:
    """Make one linear of q, k and v where they read one tensor and nothing else reads what they write."""
    plan, constants = match.plan, dict(match.constants)
    linears = {each.output: each for each in plan.operations if isinstance(each, Linear)}
    reads = Counter(name for each in plan.operations for name in _inputs(each))
    tensors, replaced, dropped = dict(plan.tensors), {}, set()
    for attention in plan.operations:
        if not isinstance(attention, Attention):
            continue
        outputs = [view.tensor for view in (attention.query, attention.key, attention.value)]
        parts = [linears[name] for name in outputs]
        kinds = {
            (part.input, part.weight, part.activation, part.residual, tensors[part.output].kind)
            for part in parts
        }
        alike = len(kinds) == 1 and not (parts[0].activation or parts[0].residual)
        if not alike or len({*outputs}) != 3 or any(reads[name] != 1 for name in outputs):
            continue
        name, width = f"{attention.name}.qkv", tensors[outputs[0]].width
        for kind in ("weight", "weight_scale", "bias"):
            if f"{parts[0].name}.{kind}" in constants:
                found = (constants.pop(f"{part.name}.{kind}") for part in parts)
                constants[f"{name}.{kind}"] = np.concatenate(
                    [np.broadcast_to(each, (width,)) if each.ndim == 0 else each for each in found]
                )
        if parts[0].weight == "int8":
            constants[f"{name}.input_scale"] = constants[f"{parts[0].name}.input_scale"]
        if tensors[outputs[0]].kind == "int8":
            each = (np.broadcast_to(constants.pop(f"{output}.multiplier"), (width,)) for output in outputs)
            constants[f"{name}.multiplier"] = np.concatenate([*each])
        tensors[name] = Tensor(kind=tensors[outputs[0]].kind, width=3 * width)
        first = min(parts, key=plan.operations.index)
        nodes = tuple(node for part in parts for node in part.nodes)
        replaced[first.name] = first.model_copy(
            update={"name": name, "nodes": nodes, "output": name, "parts": tuple(outputs)}
        )
        views = (View(tensor=name, column=number * width) for number in range(3))
        replaced[attention.name] = attention.model_copy(
            update=dict(zip(("query", "key", "value"), views, strict=True))
        )
        dropped |= {part.name for part in parts} - {first.name}
        for output in outputs:
            del tensors[output]
    operations = (replaced.get(each.name, each) for each in plan.operations if each.name not in dropped)
    return plan.model_copy(update={"operations": tuple(operations), "tensors": tensors}), constants


def _inputs(operation: Operation) -> Iterator[str]:
    if isinstance(operation, Attention):
        yield from (view.tensor for view in (operation.query, operation.key, operation.value))
    elif operation.op != "embed":
        yield operation.input
        if isinstance(operation, Linear) and operation.residual is not None:
            yield operation.residual


def _arrays(operation: Operation, plan: Plan, constants: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    name = operation.name

    def vector(key: str, width: int) -> Array:
        return np.broadcast_to(np.asarray(constants[key], np.float64), (width,))

    def part(key: str) -> Array:
        return constants[f"{name}.{key}"]

    if isinstance(operation, Linear):
        tensor = plan.tensors[operation.output]
        width = tensor.width
        codes = vector(f"{operation.output}.multiplier", width) if tensor.kind == "int8" else None
        folded = np.ones(width)
        if operation.weight == "int8" and operation.activation is None and codes is not None:
            folded, codes = codes, None
        if codes is not None:
            yield f"{operation.output}.multiplier", _single(name, codes)
        if operation.weight == "int8":
            scale = vector(f"{name}.weight_scale", width) * part("input_scale")
            yield f"{name}.weight", part("weight")
            yield f"{name}.scale", _single(name, scale * folded)
            yield f"{name}.bias", _single(name, vector(f"{name}.bias", width) * folded)
        else:
            yield f"{name}.weight", _half(name, part("weight"))
            yield f"{name}.bias", _half(name, part("bias"))
        if operation.residual is not None and plan.tensors[operation.residual].kind == "int8":
            yield f"{name}.residual", _single(name, vector(f"{name}.residual", width))
    elif isinstance(operation, Attention):
        tensor = plan.tensors[operation.output]
        scale = vector(f"{name}.factor", tensor.width)
        if tensor.kind == "int8":
            scale = scale * vector(f"{operation.output}.multiplier", tensor.width)
        yield f"{name}.scale", _single(name, scale)
    elif isinstance(operation, Head):
        for number, step in enumerate(operation.steps):
            if step.kind == "dense":
                for key in ("weight", "bias"):
                    yield f"{name}.{number}.{key}", _single(name, part(f"{number}.{key}"))
    else:
        if operation.op == "embed":
            yield from ((f"{name}.{table}", _half(f"{name}.{table}", part(table))) for table in _TABLES)
        if operation.op != "quantize":
            yield from ((f"{name}.{key}", _single(name, part(key))) for key in ("gamma", "beta"))
        for tensor_name in operation.codes:
            width = plan.tensors[tensor_name].width
            yield f"{tensor_name}.multiplier", _single(name, vector(f"{tensor_name}.multiplier", width))


def _single(name: str, array: Array) -> Array:
    with np.errstate(over="ignore"):
        single = np.asarray(array, np.float32)
    if not np.isfinite(single).all():
        raise UserError(f"backend cuda: scales of {name} do not fit FP32; calibrate again with more samples")
    return single


def _half(name: str, array: Array) -> Array:
    if np.abs(array).max(initial=0) > FP16_MAX:
        raise UserError(f"backend cuda: weights of {name} do not fit FP16; take tensorrt_rtx or tensorrt")
    return np.asarray(array, HALF)
