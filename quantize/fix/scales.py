"""What is quantized in a graph, and with which scales: read out before its Q/DQ are taken off."""

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto

from qdqbench.quantize.check.codes import finding_label
from qdqbench.quantize.check.types import walk_types
from qdqbench.quantize.check.view import Attention, CheckGraph, Operand
from qdqbench.quantize.core.arrays import Float32
from qdqbench.quantize.core.limits import limits_of
from qdqbench.quantize.graph.index import attribute, opset_of

_RANGES: dict[int, tuple[int, int]] = {
    TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255), TensorProto.INT16: (-32768, 32767),
    TensorProto.UINT16: (0, 65535), TensorProto.INT4: (-8, 7), TensorProto.UINT4: (0, 15),
}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """How a weight is to be rounded; its values are those of the graph without Q/DQ."""

    scale: Float32 | None  # scalar, or one an output channel; None: from its own values
    exact: bool  # these scales give the file's own codes again


@dataclass
class Product:
    """One MatMul or Gemm that is to run in INT8."""

    node: str  # first output, which names it
    label: str
    amax: dict[int, float] = field(default_factory=dict)  # by input that is an activation
    weights: dict[int, Weight] = field(default_factory=dict)  # by input that is a constant


@dataclass
class Scales:
    """All of a graph."""

    products: list[Product] = field(default_factory=list)
    widened: list[str] = field(default_factory=list)  # ranges with a zero point, made symmetric around 0
    shifted: list[str] = field(default_factory=list)  # UINT8 with zero point 128: the same codes less 128
    completed: list[str] = field(default_factory=list)  # products that get the Q/DQ they lacked at the weight
    waiting: list[Product] = field(
        default_factory=list
    )  # linears whose activation has no scale, or a bad one
    apart: list[str] = field(default_factory=list)  # products of attentions that cannot be wholly INT8
    unusable: list[str] = field(default_factory=list)  # bad scales that samples cannot replace


def read_scales(model: onnx.ModelProto) -> Scales:
    """Decide which products can run in INT8, and with which scales. The model is valid and is not changed."""
    types, _ = walk_types(model, opset_of(model))
    graph, found = CheckGraph(model, types), Scales()
    apart = {
        node.output[0]
        for attention in graph.attentions
        if not _whole(graph, attention)
        for node in (attention.scores, attention.context)
    }
    for node in graph.matmuls:
        pair = graph.operands[node.output[0]]
        if node.output[0] not in apart:
            product = _product(graph, node, pair, found)
            found.products += [product] if product else []
        elif any(operand.dq is not None for operand in pair):
            found.apart.append(finding_label(node))
    return found


def _product(
    graph: CheckGraph, node: onnx.NodeProto, pair: tuple[Operand, Operand], found: Scales
) -> Product | None:
    label = finding_label(node)
    product = Product(node.output[0], label)
    quantized, lost = False, []
    for position, operand in enumerate(pair):
        if operand.constant or (operand.dq is None and graph.is_constant(node.input[position])):
            quantized = quantized or operand.dq is not None
            product.weights[position] = _weight(graph, node, position, operand, found)
        elif operand.dq is not None:
            amax = _amax_of(graph, operand.dq, found)
            if amax is None:
                lost.append(operand.dq)
            else:
                product.amax[position] = amax
    if len(product.weights) == 2 or (product.weights and 1 not in product.weights):
        return None  # a constant times a constant, or a weight on the left: nothing that INT8 runs
    if len(product.amax) + len(product.weights) < 2:
        if product.weights and (quantized or lost):
            found.waiting.append(product)
        else:
            found.unusable += map(finding_label, lost)
        return None
    if any(graph.operands[product.node][at].dq is None for at in product.weights):
        found.completed.append(label)
    return product


def _amax_of(graph: CheckGraph, dq: onnx.NodeProto, found: Scales) -> float | None:
    """Largest absolute value of a symmetric range that holds the one of a DQ."""
    scale = graph.value(dq.input[1])
    kind = graph.types.get(dq.input[0], 0)
    if scale is None or kind not in _RANGES or not _is_good(scale):
        return None
    zero = graph.value(dq.input[2]) if len(dq.input) > 2 and dq.input[2] else None
    low, high = _RANGES[kind]
    step = float(np.max(scale.astype(np.float64)))
    point = 0 if zero is None else int(zero.reshape(-1)[0])
    if kind == TensorProto.UINT8 and point == 128:
        found.shifted.append(finding_label(dq))
        return step * 127
    if kind == TensorProto.INT8 and point == 0:
        return step * 127
    found.widened.append(finding_label(dq))
    return step * max(high - point, point - low)


def _is_good(scale: np.ndarray) -> bool:
    number = scale.astype(np.float64)
    return bool(number.size) and bool(np.all(np.isfinite(number) & (number > 0)))


def _weight(
    graph: CheckGraph, node: onnx.NodeProto, position: int, operand: Operand, found: Scales
) -> Weight:
    """The file's own scales where they are symmetric, and by tensor or by output channel."""
    nothing = Weight(None, False)
    dq = operand.dq
    if dq is None or operand.reshaped:
        return nothing
    scale = graph.value(dq.input[1])
    zero = graph.value(dq.input[2]) if len(dq.input) > 2 and dq.input[2] else None
    kind = graph.types.get(dq.input[0], 0)
    shift = 128 if kind == TensorProto.UINT8 else 0
    symmetric = kind in (TensorProto.INT8, TensorProto.UINT8) and bool(
        np.all((zero if zero is not None else np.zeros(1)) == shift)
    )
    if scale is None or not _is_good(scale):
        found.unusable.append(finding_label(dq))
        return nothing
    if not symmetric or scale.ndim > 1 or attribute(dq, "block_size"):
        return nothing
    if scale.size == 1:
        return Weight(np.asarray(scale, np.float32).reshape(()), True)
    axis = attribute(dq, "axis", 1)
    axis += 2 if axis < 0 else 0
    wanted = 1  # of the weight as the MatMul sees it, [K, N]
    if node.op_type == "Gemm" and attribute(node, "transB"):
        wanted = 0
    for permutation in operand.permutations:
        if permutation is not None and sorted(permutation) != [0, 1]:
            return nothing
        wanted = 1 - wanted if permutation is None else permutation[wanted]
    return Weight(np.asarray(scale, np.float32), True) if wanted == axis else nothing


def _whole(graph: CheckGraph, attention: Attention) -> bool:
    """Whether all operands and the output of an attention have Q/DQ, and a kernel takes its heads."""
    known = all(operand.dq is not None for operand in attention.operands.values())
    size = graph.head_size(attention)
    return known and attention.output_quantized and (size is None or size in limits_of().int8_head_sizes)
