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
from typing import Any

import numpy as np

from qdqbench.quantize.engine.cuda import check
from qdqbench.quantize.engine.cuda.match import Match
from qdqbench.quantize.engine.cuda.plan import (
    Attention,
    Head,
    Linear,
    Operation,
    Plan,
    Quantized,
    Tensor,
    View,
)
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import FP16_MAX

_TABLES = ("word", "position", "type")
Numbers = dict[str, Array]


def pack(match: Match) -> tuple[Plan, Numbers]:
    """Return the plan with merged GEMMs, and its arrays by name."""
    plan, constants = merge_qkv(match.plan, dict(match.constants))
    listed = (pair for operation in plan.operations for pair in _arrays(operation, plan, constants))
    arrays = {name: np.ascontiguousarray(array) for name, array in listed}
    check.check_arrays(plan, arrays)
    return plan, arrays


def merge_qkv(plan: Plan, constants: Numbers) -> tuple[Plan, Numbers]:
    """Make one linear of q, k and v that read one tensor, and whose outputs only their attention reads."""
    linears = {each.output: each for each in plan.operations if isinstance(each, Linear)}
    reads = Counter(name for each in plan.operations for name in each.reads)
    tensors, replaced = dict(plan.tensors), dict[str, Operation | None]()
    for attention in plan.operations:
        if not isinstance(attention, Attention):
            continue
        outputs = attention.reads
        parts = [linears[output] for output in outputs if output in linears and reads[output] == 1]
        kinds = {(each.input, each.weight, each.activation, tensors[each.output].kind) for each in parts}
        if len(parts) != 3 or len(kinds) != 1 or parts[0].activation or any(each.residual for each in parts):
            continue
        name, width = f"{attention.name}.qkv", tensors[outputs[0]].width
        names = [each.name for each in parts]
        joined = [("weight", names), ("weight_scale", names), ("bias", names), ("multiplier", outputs)]
        for part, owners in joined:
            found = [constants.pop(f"{owner}.{part}", None) for owner in owners]
            shaped = ((each, (width, *each.shape[1:])) for each in found if each is not None)
            if whole := [np.broadcast_to(each, shape) for each, shape in shaped]:
                constants[f"{name}.{part}"] = np.concatenate(whole)
        constants[f"{name}.input_scale"] = constants[f"{names[0]}.input_scale"]
        tensors[name] = Tensor(kind=tensors[outputs[0]].kind, width=3 * width)
        for output in outputs:
            del tensors[output]
        nodes = tuple(node for each in parts for node in each.nodes)
        first = min(parts, key=plan.operations.index)
        merged = {"name": name, "nodes": nodes, "output": name, "parts": outputs}
        replaced |= dict.fromkeys(names) | {first.name: first.model_copy(update=merged)}
        views = (View(tensor=name, column=number * width) for number in range(3))
        fields = dict(zip(("query", "key", "value"), views, strict=True))
        replaced[attention.name] = attention.model_copy(update=fields)
    operations = (replaced.get(each.name, each) for each in plan.operations)
    kept = tuple(each for each in operations if each is not None)
    return plan.model_copy(update={"operations": kept, "tensors": tensors}), constants


def _arrays(operation: Operation, plan: Plan, constants: Numbers) -> Iterator[tuple[str, Array]]:
    name = operation.name
    if isinstance(operation, Linear):
        yield from _linear(operation, plan, constants)
    elif isinstance(operation, Attention):
        tensor = plan.tensors[operation.output]
        folded = constants[f"{operation.output}.multiplier"] if tensor.kind == "int8" else np.float64(1)
        yield f"{name}.scale", _single(name, constants[f"{name}.factor"] * folded, tensor.width)
    elif isinstance(operation, Head):
        dense = [number for number, step in enumerate(operation.steps) if step.kind == "dense"]
        for key in (f"{name}.{number}.{part}" for number in dense for part in ("weight", "bias")):
            yield key, _single(name, constants[key])
    elif isinstance(operation, Quantized):
        for table in _TABLES if operation.op == "embed" else ():
            yield f"{name}.{table}", _half(name, constants[f"{name}.{table}"])
        for part in ("gamma", "beta") if operation.op != "quantize" else ():
            yield f"{name}.{part}", _single(name, constants[f"{name}.{part}"])
        for codes in operation.codes:
            key = f"{codes}.multiplier"
            yield key, _single(name, constants[key], plan.tensors[codes].width)


def _linear(operation: Linear, plan: Plan, constants: Numbers) -> Iterator[tuple[str, Array]]:
    name, output = operation.name, operation.output
    weight, bias = (constants[f"{name}.{part}"] for part in ("weight", "bias"))
    width, multiplier, key = len(weight), constants.get(f"{output}.multiplier"), f"{output}.multiplier"
    if plan.tensors[output].kind == "int8" and (operation.activation or operation.weight == "fp16"):
        yield key, _single(name, multiplier, width)
        multiplier = None
    if operation.weight == "int8":
        folded = np.float64(1) if multiplier is None else multiplier
        scale = constants[f"{name}.weight_scale"].astype(np.float64) * constants[f"{name}.input_scale"]
        yield f"{name}.weight", weight
        yield f"{name}.scale", _single(name, scale * folded, width)
        yield f"{name}.bias", _single(name, bias * folded, width)
    else:
        yield f"{name}.weight", _half(name, weight)
        yield f"{name}.bias", _half(name, bias)
    if operation.residual is not None and plan.tensors[operation.residual].kind == "int8":
        yield f"{name}.residual", _single(name, constants[f"{name}.residual"], width)


def _single(name: str, array: Any, width: int | None = None) -> Array:
    """Return numbers as FP32, one for each of `width` channels."""
    with np.errstate(over="ignore"):
        single = np.asarray(array, np.float32)
    if not np.isfinite(single).all():
        raise UserError(f"backend cuda: scales of {name} do not fit FP32; calibrate again with more samples")
    return single if width is None else np.broadcast_to(single, (width,))


def _half(name: str, array: Array) -> Array:
    if np.abs(array).max(initial=0) > FP16_MAX:
        raise UserError(f"backend cuda: weights of {name} do not fit FP16; take tensorrt_rtx or tensorrt")
    return np.asarray(array, check.HALF)
