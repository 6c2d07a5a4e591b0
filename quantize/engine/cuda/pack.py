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
    for each in plan.operations:
        if not isinstance(each, Linear) or not (each.gated or each.rotary):
            continue
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
    operations, tensors = list(plan.operations), dict(plan.tensors)
    for place, attention in enumerate(plan.operations):
        if not isinstance(attention, Attention) or attention.probability_multiplier is None:
            continue
        size = next((each for each in ATTENTION_SIZES if each >= attention.head_size), 0)
        made = [each for each in plan.operations if {*each.writes} & {*attention.reads}]
        readers = [each for each in plan.operations if attention.output in each.reads]
        others = [each for each in plan.operations if {*each.reads} & {*attention.reads}]
        plain = all(isinstance(each, Linear) and each.residual is None for each in made)
        plain &= all(isinstance(each, Linear) and each.residual != attention.output for each in readers)
        if size in (0, attention.head_size) or not plain or others != [attention]:
            continue
        own = attention.head_size

        def widen(name: str, tensor: str, own: int = own, size: int = size) -> None:
            """Spread the first axis of an array, the channels of heads in a tensor."""
            channels = np.arange(plan.tensors[tensor].width)
            if np.ndim(constants.get(name, 0)):
                places, count = channels // own * size + channels % own, len(channels) // own * size
                constants[name] = _spread(constants[name], places, count)

        for linear in {each.name: each for each in made if isinstance(each, Linear)}.values():
            for part in ("weight", "weight_scale", "bias"):
                widen(f"{linear.name}.{part}", linear.output)
            if linear.rotary:
                angles = f"{linear.name}.frequencies"
                constants[angles] = np.pad(constants[angles], (0, (size - own) // 2))
                operations[operations.index(linear)] = replace(linear, rotary=size)
        for name in {*attention.reads, attention.output}:
            widen(f"{name}.multiplier", name)
            tensors[name] = replace(tensors[name], width=tensors[name].width // own * size)
        for name in (f"{each.name}.weight" for each in readers):
            constants[name] = constants[name].T
            widen(name, attention.output)
            constants[name] = constants[name].T
        query, key, value = (
            replace(view, column=view.column // own * size)
            for view in (attention.query, attention.key, attention.value)
        )
        operations[place] = replace(attention, head_size=size, query=query, key=key, value=value)
    return replace(plan, operations=tuple(operations), tensors=tensors), constants


def widen_channels(plan: Plan, constants: Numbers) -> tuple[Plan, Numbers]:
    """Give tensors next to INT8 linears the widths that these take, with channels behind the model's own.

    What linears make there is of rows of zeros, and linears that read them have columns of zeros.
    """
    attended = {
        name for each in plan.operations if isinstance(each, Attention) for name in (*each.reads, each.output)
    }
    wide = {
        name: -(-tensor.width // LINEAR_STEP) * LINEAR_STEP
        for name, tensor in plan.tensors.items()
        if tensor.width % LINEAR_STEP and tensor.width % CHANNEL_STEP == 0 and name not in attended
    }
    if not any(isinstance(each, Linear) and each.weight == "int8" for each in plan.operations):
        return plan, constants

    def widen(name: str, *tensors: str, times: int = 1) -> None:
        """Put zeros behind the last axes of an array: channels of tensors, `times` those of the first."""
        array = constants.get(name)
        if array is not None and array.ndim:
            sizes = array.shape[-len(tensors) :]
            widths = [wide.get(each) for each in tensors]
            widths[0] = widths[0] and times * widths[0]
            spare = [(0, (width or size) - size) for width, size in zip(widths, sizes, strict=True)]
            constants[name] = np.pad(array, [(0, 0)] * (array.ndim - len(tensors)) + spare)

    for each in plan.operations:
        if isinstance(each, Linear):
            times = 2 if each.gated else 1
            widen(f"{each.name}.weight", each.output, each.input, times=times)
            for part in ("weight_scale", "bias", "residual"):
                widen(f"{each.name}.{part}", each.output, times=times)
        elif isinstance(each, Embed | Norm):
            for part in ("gamma", "beta", "word", "position", "type"):
                widen(f"{each.name}.{part}", each.writes[0])
    for name in wide:
        widen(f"{name}.multiplier", name)
    tensors = {
        name: replace(tensor, width=wide[name], channels=tensor.width) if name in wide else tensor
        for name, tensor in plan.tensors.items()
    }
    return replace(plan, tensors=tensors), constants


def _spread(rows: Array, places: Array, count: int) -> Array:
    """Return rows at these places of `count`, and zeros between."""
    wide = np.zeros((count, *rows.shape[1:]), rows.dtype)
    wide[places] = rows
    return wide


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
