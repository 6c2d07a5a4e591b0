"""Rules of `check` on INT8 weights: how they are stored, the axis of their scales, and FP16 overflow."""

from collections.abc import Iterator

import onnx
from onnx import TensorProto

from qdqbench.quantize.check.codes import finding, finding_label
from qdqbench.quantize.check.view import CheckGraph, Operand, is_quantize
from qdqbench.quantize.core.limits import FP16_MAX
from qdqbench.quantize.core.names import name_list
from qdqbench.quantize.core.results import FindingRow
from qdqbench.quantize.graph.index import attribute


def check_weights(graph: CheckGraph) -> Iterator[FindingRow]:
    """The quantized weight of every matmul, and the order in which they are stored."""
    for node in graph.matmuls:
        pair = graph.operands[node.output[0]]
        for position, operand in enumerate(pair):
            if operand.dq is not None and operand.constant:
                yield from _check_weight(graph, node, position, operand)
                yield from _check_overflow(graph, node, operand, pair[1 - position])
    yield from _check_order(graph)


def _check_weight(
    graph: CheckGraph, node: onnx.NodeProto, position: int, weight: Operand
) -> Iterator[FindingRow]:
    dq = weight.dq
    assert dq is not None
    source = graph.index.producers.get(dq.input[0])
    if source is not None and is_quantize(source):
        why = "its weight is stored in floating point with Q/DQ, so the file is 2 to 4 times larger"
        yield finding("float-weight", source, why)
    scale, shape = graph.value(dq.input[1]), graph.shape(dq.input[0])
    if scale is None or scale.size < 2 or scale.ndim > 1 or not shape:
        return
    rank = len(shape)
    axis = attribute(dq, "axis", 1)
    axis += rank if axis < 0 else 0
    sizes = f"weight {shape}, {scale.size} scales along axis {axis}"
    if not 0 <= axis < rank or shape[axis] != scale.size:
        yield finding("wrong-weight-axis", dq, f"{sizes}: they do not fit")
        return
    if weight.reshaped or rank < 2:
        return
    wanted = _channel_axis(node, position, weight, rank)
    if wanted is None:
        why = f"{sizes}: a Transpose between it and {finding_label(node)!r} does not fit these axes"
        yield finding("wrong-weight-axis", dq, why)
    elif wanted != axis:
        why = f"{sizes}, but the output channels of {finding_label(node)!r} are axis {wanted}"
        yield finding("wrong-weight-axis", dq, f"{why}; it is accepted and does not run in INT8")


def _channel_axis(node: onnx.NodeProto, position: int, weight: Operand, rank: int) -> int | None:
    """Axis of the output channels of a weight in the frame of its DequantizeLinear.

    None: a Transpose on the way permutes other axes than these.
    """
    axis = rank - 1 if position == 1 else rank - 2
    if node.op_type == "Gemm" and attribute(node, "transB" if position == 1 else "transA"):
        axis = rank - 1 - axis
    for permutation in weight.permutations:
        if permutation is not None and sorted(permutation) != list(range(rank)):
            return None
        axis = rank - 1 - axis if permutation is None else permutation[axis]
    return axis


def _check_overflow(
    graph: CheckGraph, node: onnx.NodeProto, weight: Operand, other: Operand
) -> Iterator[FindingRow]:
    assert weight.dq is not None
    scale = graph.value(weight.dq.input[1])
    if scale is None or scale.size < 2 or other.dq is None:
        return
    types = [graph.types.get(dq.input[1], 0) for dq in (weight.dq, other.dq)]
    if TensorProto.FLOAT16 in types:
        which = "weight" if types[0] == TensorProto.FLOAT16 else "activation"
        why = (
            f"its {which} scale is FP16 and the weight has {scale.size} scales: TensorRT-RTX stores the "
            f"INT32 sums as FP16 before scaling, and sums over {FP16_MAX:.0f} become infinite"
        )
        yield finding("fp16-overflow", node, why)


def _check_order(graph: CheckGraph) -> Iterator[FindingRow]:
    """One finding for all weights stored [K, N]: an exporter writes all of a model in one order."""
    linears, slow = 0, []
    for node in graph.matmuls:
        pair = graph.operands[node.output[0]]
        if pair[1].constant and all(map(graph.is_int8, pair)):
            linears += 1
            slow += [finding_label(node)] if is_stored_kn(graph, node) else []
    if not slow:
        return
    if len(slow) == 1:
        which = "its INT8 weight is"
    elif len(slow) == linears:
        which = f"all {linears} INT8 weights are"
    else:
        which = f"{len(slow)} of {linears} INT8 weights ({name_list(slow)}) are"
    why = (
        f"{which} stored [K, N]: INT8 tensor cores read both operands along K, so a kernel can be in INT8 "
        "and slower than in FP16, which shows in its time alone"
    )
    yield finding("slow-weight-order", slow[0], why)


def is_stored_kn(graph: CheckGraph, node: onnx.NodeProto) -> bool:
    """Are the INT8 codes of its second operand contiguous along N? False where the graph does not tell."""
    operands = graph.operands.get(node.output[0])  # none of another domain's MatMul
    if operands is None:
        return False
    weight = operands[1]
    shape = graph.shape(weight.dq.input[0]) if weight.dq is not None and weight.constant else None
    if shape is None or len(shape) != 2 or min(shape) < 2 or weight.reshaped:
        return False  # with a single channel both orders are one
    return _channel_axis(node, 1, weight, len(shape)) == 1
