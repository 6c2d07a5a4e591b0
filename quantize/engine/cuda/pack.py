"""From the numbers of a file to the arrays that kernels read.

| array | type and shape | of |
|---|---|---|
| `embed.word`, `.position`, `.type` | FP16 [entries, H] | tables |
| `NAME.gamma`, `.beta` | FP32 [H] | embed and norm |
| `NAME.weight` | INT8 or FP16 [N, K] | linear; q, k and v of one input are one, N = 3 H; gated, N = 2 H |
| `NAME.frequencies` | FP32 [head size / 2] | linear that rotates q and k: angles of one position |
| `NAME.scale` | FP32 [N] | INT8 linear: scales of input and weight, over that of codes it writes itself |
| `NAME.bias` | FP32 [N], FP16 behind FP16 weights | linear, over the same scale |
| `NAME.residual` | FP32 [N] | linear that adds INT8 codes |
| `NAME.bias` | FP32 [heads, 2 span - 1] | attention whose scores have a bias by distance |
| `NAME.scale` | FP32 [H] | attention: scales of softmax and v, over that of codes that it writes |
| `TENSOR.multiplier` | FP32 [width] | codes of embed, norm, quantize, activations and FP16 linears |
| `head.NUMBER.weight`, `.bias` | FP32 [N, K], [N] | dense steps |
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from qdqbench.quantize.engine.cuda import check
from qdqbench.quantize.engine.cuda.match import Match
from qdqbench.quantize.engine.cuda.names import ATTENTION_SIZES, CHANNEL_STEP, LINEAR_STEP
from qdqbench.quantize.engine.cuda.plan import (
    Attention,
    Embed,
    Linear,
    Norm,
    Operation,
    Plan,
    Tensor,
    View,
)
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import UserError

Numbers = dict[str, Array]


def pack(match: Match) -> tuple[Plan, Numbers]:
    """Return the plan with merged GEMMs, and its arrays by name."""
    plan, numbers = widen_heads(match.plan, pair_columns(match.plan, dict(match.constants)))
    plan, numbers = merge_qkv(*widen_channels(plan, numbers))
    arrays: Numbers = {}
    for operation in plan.operations:
        numbers |= _fold(operation, plan, numbers)
        listed = check.list_arrays(operation, plan, numbers)
        arrays |= {name: _cast(name, numbers[name], kind, shape) for name, kind, shape in listed}
    check.check_arrays(plan, arrays)
    return plan, arrays


def pair_columns(plan: Plan, constants: Numbers) -> Numbers:
    """Put rows of an input and its gate side by side, and those of channels that are rotated together.

    Scores do not change if the channels of q and k change places alike.
    """
    for each in plan.linears:
        rows = order_rows(each, len(constants[f"{each.name}.bias"]))
        for name in (f"{each.name}.{part}" for part in ("weight", "weight_scale", "bias")):
            if np.ndim(constants.get(name, 0)):
                constants[name] = constants[name][rows]
    return constants


def order_rows(operation: Linear, count: int) -> Array:
    """Return the row of the graph's weight that each of `count` rows holds."""
    rows = np.arange(count)
    if operation.gated:
        return rows.reshape(2, -1).T.ravel()
    if operation.rotary:
        turned = rows[: 2 * count // 3].reshape(-1, 2, operation.rotary // 2)
        rows[: 2 * count // 3] = turned.transpose(0, 2, 1).ravel()
    return rows


def widen_heads(plan: Plan, constants: Numbers) -> tuple[Plan, Numbers]:
    """Give heads of INT8 attention a size that kernels have, with channels of zeros behind their own.

    Linears make these of rows of zeros, and the linears after the attention have columns of zeros for them.
    """
    operations, tensors, places = list(plan.operations), dict(plan.tensors), dict[str, Array]()
    for attention in (each for each in plan.attentions if each.probability_multiplier is not None):
        own, read = attention.head_size, {*attention.reads}
        size = next((each for each in ATTENTION_SIZES if each >= own), 0)
        made = [each for each in plan.operations if read & {*each.writes}]
        linears = [each for each in made if isinstance(each, Linear) and each.residual is None]
        readers = [each for each in plan.operations if attention.output in each.reads]
        others = [each for each in plan.operations if read & {*each.reads}]
        plain = all(isinstance(each, Linear) and each.residual != attention.output for each in readers)
        if size in (0, own) or not plain or linears != made or others != [attention]:
            continue
        for linear in linears:
            if linear.rotary:
                angles = f"{linear.name}.frequencies"
                constants[angles] = np.pad(constants[angles], (0, (size - own) // 2))
                operations[operations.index(linear)] = replace(linear, rotary=size)
        for name in {*read, attention.output}:
            channels = np.arange(tensors[name].width)
            places[name] = channels // own * size + channels % own
            tensors[name] = replace(tensors[name], width=len(channels) // own * size)
        query, key, value = (replace(view, column=view.column // own * size) for view in attention.views)
        operations[operations.index(attention)] = replace(
            attention, head_size=size, query=query, key=key, value=value
        )
    widened = replace(plan, operations=tuple(operations), tensors=tensors)
    return widened, _spread_channels(widened, constants, places)


def widen_channels(plan: Plan, constants: Numbers) -> tuple[Plan, Numbers]:
    """Give tensors next to INT8 linears the widths that these take, with channels behind the model's own.

    What linears make there is of rows of zeros, and linears that read them have columns of zeros.
    """
    if not any(each.weight == "int8" for each in plan.linears):
        return plan, constants
    attended = {name for each in plan.attentions for name in (*each.reads, each.output)}
    tensors, places = dict(plan.tensors), dict[str, Array]()
    for name, tensor in plan.tensors.items():
        own = tensor.width
        if own % LINEAR_STEP and own % CHANNEL_STEP == 0 and name not in attended:
            places[name] = np.arange(own)
            tensors[name] = replace(tensor, width=-(-own // LINEAR_STEP) * LINEAR_STEP, channels=own)
    widened = replace(plan, tensors=tensors)
    return widened, _spread_channels(widened, constants, places)


def _spread_channels(plan: Plan, constants: Numbers, places: Mapping[str, Array]) -> Numbers:
    """Put channels of tensors at these places of their widths, with zeros between, in all arrays."""

    def spread(name: str, *tensors: str) -> None:
        """Spread the last axes of an array."""
        for axis, tensor in enumerate(tensors, -len(tensors)):
            if tensor in places and np.ndim(constants.get(name, 0)):
                own, rows = len(places[tensor]), np.moveaxis(constants[name], axis, 0)
                times, rest = len(rows) // own, rows.shape[1:]  # a gate has two rows for each channel
                wide = np.zeros((plan.tensors[tensor].width, times, *rest), rows.dtype)
                wide[places[tensor]] = rows.reshape(own, times, *rest)
                constants[name] = np.moveaxis(wide.reshape(-1, *rest), 0, axis)

    for each in plan.operations:
        if isinstance(each, Linear):
            spread(f"{each.name}.weight", each.output, each.input)
            for part in ("weight_scale", "bias", "residual"):
                spread(f"{each.name}.{part}", each.output)
        elif isinstance(each, Embed | Norm):
            for part in ("gamma", "beta", "word", "position", "type"):
                spread(f"{each.name}.{part}", each.writes[0])
    for name in places:
        spread(f"{name}.multiplier", name)
    return constants


def merge_qkv(plan: Plan, constants: Numbers) -> tuple[Plan, Numbers]:
    """Make one linear of q, k and v that read one tensor, and whose outputs only their attention reads."""
    linears = {each.output: each for each in plan.linears}
    reads = Counter(name for each in plan.operations for name in each.reads)
    tensors, replaced = dict(plan.tensors), dict[str, Operation | None]()
    for attention in plan.attentions:
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
        merged = replace(first, name=name, nodes=nodes, output=name, parts=outputs)
        replaced |= dict.fromkeys(names) | {first.name: merged}
        query, key, value = (View(tensor=name, column=number * width) for number in range(3))
        replaced[attention.name] = replace(attention, query=query, key=key, value=value)
    operations = (replaced.get(each.name, each) for each in plan.operations)
    kept = tuple(each for each in operations if each is not None)
    return replace(plan, operations=kept, tensors=tensors), constants


def _fold(operation: Operation, plan: Plan, numbers: Numbers) -> Numbers:
    """Return the factors of an epilogue, with the scale of codes that it writes itself."""
    if not isinstance(operation, Linear | Attention):
        return {}
    name, output = operation.name, operation.output
    coded: Any = numbers[f"{output}.multiplier"] if plan.tensors[output].kind == "int8" else 1.0
    if isinstance(operation, Attention):
        return {f"{name}.scale": numbers[f"{name}.factor"] * coded}
    if operation.weight == "fp16":
        return {}
    folded = coded if operation.activation is None else 1.0
    scale = numbers[f"{name}.weight_scale"].astype(np.float64) * numbers[f"{name}.input_scale"]
    return {f"{name}.scale": scale * folded, f"{name}.bias": numbers[f"{name}.bias"] * folded}


def _cast(name: str, numbers: Array, kind: str, shape: check.Shape) -> Array:
    """Return numbers in the type of an array; one number is that of all channels."""
    with np.errstate(over="ignore"):
        array = np.asarray(numbers).astype(kind)
    if not np.isfinite(array).all():
        raise UserError(f"backend cuda: {name} does not fit {kind}; take tensorrt_rtx or tensorrt")
    spread = np.broadcast_to(array, [size or 1 for size in shape]) if array.ndim == 0 else array
    return np.ascontiguousarray(spread)
