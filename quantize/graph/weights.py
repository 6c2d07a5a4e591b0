"""INT8 weights in the file: Q of a constant becomes INT8 codes with a DQ, per-channel or factored.

Codes are stored [N, K], as `nn.Linear` has them, with a Transpose behind the DQ: INT8 tensor cores read both
operands along K. Stored [K, N] they still run in INT8, and slower than FP16 (docs/performance.md).
"""

from collections import defaultdict
from collections.abc import Collection

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qdqbench.quantize.graph.index import MATMULS, GraphIndex, attribute, module_of, replace_nodes, run_of
from qdqbench.quantize.utils.arrays import Array, Float32, Int8
from qdqbench.quantize.utils.errors import CheckFailed


def quantize_weights(weight: Float32, scale: Float32, axis: int) -> Int8:
    """Return the INT8 codes of a weight, as QuantizeLinear computes them: divide, round half to even, clip.

    ModelOpt multiplies by the reciprocal, so a quotient on a rounding border may differ by one code there.

    Args:
        weight: float32 array.
        scale: float32 scalar, or [channels] along `axis`.
        axis: channel axis of `weight`.
    """
    shape = [1] * weight.ndim
    if scale.ndim:
        shape[axis] = -1
    codes: Int8 = np.clip(np.rint(weight / scale.reshape(shape)), -128, 127).astype(np.int8)
    return codes


def fold_weights(model: onnx.ModelProto) -> list[str]:
    """Store quantized weights as INT8 [N, K] with a DQ only, in place; the file shrinks 2-4 times.

    The exporter writes FP32 weight -> Q -> DQ -> Transpose -> MatMul, or for 2-D inputs -> Gemm; a Gemm
    becomes MatMul and Add so that both have one form.

    Returns:
        Module paths whose weight was folded, in graph order.

    Raises:
        CheckFailed: a weight Q/DQ that is not followed by one MatMul or Gemm.
    """
    index = GraphIndex(model)
    folded = []
    replaced: dict[int, list[onnx.NodeProto]] = {}
    for dq in model.graph.node:
        if dq.op_type != "DequantizeLinear":
            continue
        q = index.producers.get(dq.input[0])
        weight = index.constant(q.input[0]) if q is not None and q.op_type == "QuantizeLinear" else None
        if q is None or weight is None:
            continue
        consumers = index.consumers[dq.output[0]]
        step = consumers[0] if len(consumers) == 1 else None
        transposed = step is not None and step.op_type == "Transpose"
        gemm = index.consumers[step.output[0]][0] if step is not None and transposed else step
        if gemm is None or gemm.op_type not in MATMULS:
            raise CheckFailed(
                f"quantized weight {q.input[0]} feeds {len(consumers)} nodes instead of one MatMul or Gemm"
            )
        new, transpose = _int8_weight(model, index, q, gemm, weight, transposed)
        replaced[id(dq)] = [new, transpose]
        if transposed and step is not None:
            replaced[id(step)] = []
        replaced[id(gemm)] = _as_matmul(gemm, transpose.output[0])
        folded.append(module_of(gemm.name))
    replace_nodes(model, (new for node in model.graph.node for new in replaced.get(id(node), [node])))
    return folded


def _int8_weight(  # noqa: PLR0913, PLR0917
    model: onnx.ModelProto,
    index: GraphIndex,
    q: onnx.NodeProto,
    gemm: onnx.NodeProto,
    weight: Array,
    transposed: bool,
) -> tuple[onnx.NodeProto, onnx.NodeProto]:
    """Return the DQ of INT8 codes in [N, K] order and its Transpose; add the initializers."""
    scale = np.asarray(index.constant(q.input[1]), dtype=np.float32)
    codes = quantize_weights(np.asarray(weight, dtype=np.float32), scale, attribute(q, "axis", 1))
    if not (transposed or attribute(gemm, "transB")):
        codes = codes.T
    name, run = index.origin(q.input[0], ("Identity",))[1], run_of(q.name)
    stored: dict[str, Array] = {
        f"{name}_int8": np.ascontiguousarray(codes),
        f"{name}_scale": scale,
        f"{name}_zero_point": np.zeros(scale.shape, np.int8),
    }
    _store(model, stored)
    inputs = [f"{name}_int8", f"{name}_scale", f"{name}_zero_point"]
    module = q.name.rpartition("/")[0]
    node = helper.make_node(
        "DequantizeLinear", inputs, [f"{name}_dequantized{run}"], name=f"{module}/DequantizeLinear{run}"
    )
    if scale.ndim:
        node.attribute.append(helper.make_attribute("axis", 0))
    transpose = helper.make_node(
        "Transpose",
        [node.output[0]],
        [f"{name}_transposed{run}"],
        name=f"{module}/Transpose{run}",
        perm=[1, 0],
    )
    return node, transpose


def _store(model: onnx.ModelProto, arrays: dict[str, Array]) -> None:
    """Add initializers, those of a shared layer once: each of its runs makes the same ones."""
    known = {tensor.name for tensor in model.graph.initializer}
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in arrays.items() if name not in known
    )


def _as_matmul(gemm: onnx.NodeProto, weight: str) -> list[onnx.NodeProto]:
    """Return the MatMul with the new weight; a Gemm keeps its node name and gets its bias from an Add."""
    if gemm.op_type == "MatMul":
        new = onnx.NodeProto()
        new.CopyFrom(gemm)
        new.input[1] = weight
        return [new]
    has_bias = len(gemm.input) > 2
    product = f"{gemm.output[0]}_product" if has_bias else gemm.output[0]
    nodes = [helper.make_node("MatMul", [gemm.input[0], weight], [product], name=gemm.name)]
    if has_bias:
        nodes.append(
            helper.make_node("Add", [product, gemm.input[2]], [gemm.output[0]], name=f"{gemm.name}_bias")
        )
    return nodes


def factor_scales(model: onnx.ModelProto, *, merge: bool = True) -> None:
    """Split weight scales s: one scalar S in the DQ, a Mul by s/S behind the MatMul; in place.

    The INT8 codes stay, so the result is the per-channel recipe exactly; S is free. Linears with the same
    input share one S, so that an engine can merge them into one GEMM. S is the power of two nearest to the
    geometric mean of the extreme scales: the unscaled product stays near the final one, so neither overflows
    FP16, and codes times S are exact in FP16, as is s/S for the scales that calibration makes. A per-tensor
    linear with an input of its own stays as it is: its scalar is in the GEMM already.

    Args:
        model: graph after `fold_weights`.
        merge: linears with the same input share one S. Without it each has another one, which keeps an engine
            from merging them: one large GEMM is faster for small batches, three for large ones
            (docs/performance.md).
    """
    index = GraphIndex(model)
    groups: dict[str, list[tuple[onnx.NodeProto, onnx.NodeProto, Float32]]] = defaultdict(list)
    for node in model.graph.node:
        dq = weight_dq(index, node) if node.op_type == "MatMul" else None
        if dq is None or dq.op_type != "DequantizeLinear" or index.constant(dq.input[0]) is None:
            continue
        scale = np.asarray(index.constant(dq.input[1]), dtype=np.float32)
        groups[input_key(index, node)].append((node, dq, scale))
    behind: dict[int, onnx.NodeProto] = {}
    for members in groups.values():
        if len(members) == 1 and not members[0][2].ndim:
            continue
        if merge and _one_scale(index, members):
            continue  # nor here: an engine makes one GEMM of them as they are
        shared = _middle(np.concatenate([np.atleast_1d(scale) for _, _, scale in members]))
        taken: set[np.float32] = set()
        for node, dq, scale in members:
            if not merge and not scale.ndim and not _has_bias(index, node):
                continue  # nothing needs to stand behind this GEMM
            scalar = shared if merge else _middle(np.atleast_1d(scale))
            while not merge and scalar in taken:
                scalar *= np.float32(2)
            taken.add(scalar)
            behind[id(node)] = _factor(model, node, dq, scale, scalar)
    nodes = (n for node in model.graph.node for n in (node, behind.get(id(node))) if n is not None)
    replace_nodes(model, nodes)


def _one_scale(index: GraphIndex, members: list[tuple[onnx.NodeProto, onnx.NodeProto, Float32]]) -> bool:
    """Return whether linears without a bias have one and the same scalar scale."""
    scales = [scale for _, _, scale in members]
    same = not any(scale.ndim for scale in scales) and len({float(scale) for scale in scales}) == 1
    return same and not any(_has_bias(index, node) for node, _, _ in members)


def _middle(scales: Float32) -> np.float32:
    """Return the power of two nearest to the geometric mean of the extreme scales."""
    extremes = np.log2(scales.astype(np.float64).min()) + np.log2(scales.astype(np.float64).max())
    return np.float32(np.exp2(np.rint(extremes / 2)))


def drop_zero_biases(model: onnx.ModelProto, linears: Collection[str]) -> int:
    """Remove the Adds of biases that are zero, in place.

    Args:
        model: graph after `fold_weights`.
        linears: modules whose biases calibration has moved elsewhere. Others stay as they are: a model with
            random weights, whose biases are all zero, is measured with the kernels of a trained one.

    Returns:
        Adds that were removed.
    """
    index = GraphIndex(model)
    replaced: dict[str, str] = {}
    for node in model.graph.node:
        product = _biased(index, node) if module_of(node.name) in linears else ""
        bias = index.constant(node.input[1 - list(node.input).index(product)]) if product else None
        if product and bias is not None and bias.ndim == 1 and not bias.any():
            replaced[node.output[0]] = product
    kept = [node for node in model.graph.node if node.output[0] not in replaced]
    for node in kept:
        for position, name in enumerate(node.input):
            node.input[position] = replaced.get(name, name)
    replace_nodes(model, kept)
    return len(replaced)


def _biased(index: GraphIndex, add: onnx.NodeProto) -> str:
    """Return the product of INT8 weights that an Add gives a bias; empty for any other node."""
    for name in add.input if add.op_type == "Add" else ():
        matmul = index.producers.get(name)
        dq = weight_dq(index, matmul) if matmul is not None and matmul.op_type == "MatMul" else None
        if dq is not None and dq.op_type == "DequantizeLinear" and index.constant(dq.input[0]) is not None:
            return str(name)
    return ""


def _has_bias(index: GraphIndex, matmul: onnx.NodeProto) -> bool:
    return any(node.op_type == "Add" for node in index.consumers.get(matmul.output[0], []))


def weight_dq(index: GraphIndex, matmul: onnx.NodeProto) -> onnx.NodeProto | None:
    """Return the DQ of a MatMul's weight, before the Transpose that `fold_weights` writes."""
    node = index.producers.get(matmul.input[1])
    return index.producers.get(node.input[0]) if node is not None and node.op_type == "Transpose" else node


def _factor(
    model: onnx.ModelProto, node: onnx.NodeProto, dq: onnx.NodeProto, scale: Float32, shared: np.float32
) -> onnx.NodeProto:
    """Give one DQ the scalar scale and return the Mul for behind its MatMul."""
    name = dq.input[0].removesuffix("_int8")
    stored: dict[str, Array] = {
        f"{name}_scalar": np.array(shared, np.float32),
        f"{name}_scalar_zero_point": np.array(0, np.int8),
        f"{name}_factor": (scale.astype(np.float64) / shared).astype(np.float32),
    }
    _store(model, stored)
    dq.input[1], dq.input[2] = f"{name}_scalar", f"{name}_scalar_zero_point"
    del dq.attribute[:]  # a scalar scale has no axis
    final = node.output[0]
    node.output[0] = f"{final}_unscaled"
    return helper.make_node("Mul", [node.output[0], f"{name}_factor"], [final], name=f"{node.name}_factor")


def input_key(index: GraphIndex, node: onnx.NodeProto) -> str:
    """Return a key that is equal for linears of the same codes: one tensor quantized with one scale."""
    dq = index.producers.get(node.input[0])
    q = index.producers.get(dq.input[0]) if dq is not None and dq.op_type == "DequantizeLinear" else None
    if q is None or q.op_type != "QuantizeLinear":
        return node.name
    return f"{q.input[0]} {index.constant(q.input[1])}"
