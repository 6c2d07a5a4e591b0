"""q, k and v as one MatMul, for the builder of an engine: the file keeps three, so that each stays a linear.

Three GEMMs with the same input, the same scalar scale and results that are joined are one with their codes
behind each other. An engine can see that itself, but the kernel that TensorRT-RTX 1.4 then takes is slower
than three from batch 8 on, while one MatMul of the graph gets a fast one (docs/performance.md).
"""

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from qdqbench.quantize.core.arrays import Int8
from qdqbench.quantize.graph.index import GraphIndex, attribute, prune, replace_nodes

TOGETHER = "+"  # between the names of nodes that became one, as TensorRT writes it too


@dataclass(frozen=True)
class _Linear:
    """A MatMul of INT8 activations with INT8 weights [N, K] and one scale."""

    node: onnx.NodeProto
    weight: onnx.NodeProto  # DQ
    codes: Int8
    same: tuple[str, float, float]  # tensor that is quantized, its scale, and that of the weight


def one_gemm(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """The graph with one MatMul for linears that read the same codes, have one scale and end in one Concat.

    Names of nodes are joined by `TOGETHER`; no value changes, as integer sums are exact.

    Args:
        model: graph as `export` writes it; not changed.

    Returns:
        A new model, or None where there is nothing to join.
    """
    index = GraphIndex(model)
    if not any(_group(index, node) for node in model.graph.node):
        return None
    made = onnx.ModelProto()
    made.CopyFrom(model)
    index = GraphIndex(made)
    dropped: set[int] = set()
    for concat in made.graph.node:
        if not (group := _group(index, concat)):
            continue
        first, *others = group
        codes = np.concatenate([first.codes, *(linear.codes for linear in others)])
        name = f"{first.weight.input[0]}_joined"
        made.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(codes), name))
        first.weight.input[0] = name
        first.node.name = TOGETHER.join([first.node.name, *(linear.node.name for linear in others)])
        first.node.output[0] = concat.output[0]
        dropped |= {id(concat), *(id(linear.node) for linear in others)}
    replace_nodes(made, (node for node in made.graph.node if id(node) not in dropped))
    prune(made)
    return made


def _group(index: GraphIndex, concat: onnx.NodeProto) -> list[_Linear]:
    """Linears whose results a Concat joins, if one MatMul can make them; else none."""
    if concat.op_type != "Concat" or attribute(concat, "axis") not in (2, -1):
        return []
    if any(value.name in concat.input for value in index.graph.output):  # a bisection looks at one alone
        return []
    found = [_linear(index, name) for name in concat.input]
    linears = [linear for linear in found if linear is not None]
    alike = len(linears) == len(found) > 1 and len({linear.same for linear in linears}) == 1
    return linears if alike and len({id(linear.node) for linear in linears}) == len(linears) else []


def _linear(index: GraphIndex, product: str) -> _Linear | None:
    node = index.producers.get(product)
    if node is None or node.op_type != "MatMul" or len(index.consumers.get(product, [])) != 1:
        return None
    read, _ = index.origin(node.input[0], ("Cast",))
    turned, _ = index.origin(node.input[1], ("Cast",))
    if turned is None or turned.op_type != "Transpose":  # rows of [K, N] are not those of results
        return None
    weight, _ = index.origin(turned.input[0], ("Cast",))
    if read is None or weight is None or {read.op_type, weight.op_type} != {"DequantizeLinear"}:
        return None
    quantizer, codes = index.producers.get(read.input[0]), index.constant(weight.input[0])
    scales = [index.constant(dq.input[1]) for dq in (read, weight)]
    numbers = [float(scale) for scale in scales if scale is not None and not scale.ndim]
    if quantizer is None or codes is None or codes.dtype != np.int8 or len(numbers) != len(scales):
        return None
    return _Linear(node, weight, codes, (quantizer.input[0], numbers[0], numbers[1]))
