"""INT8 weights in the file: Q of a constant becomes INT8 codes with a DQ, per-channel or factored.

Codes are stored [N, K], as `nn.Linear` has them, with a Transpose after the DQ: INT8 tensor cores read both
operands along K. Stored [K, N] they still run in INT8, and slower than FP16 (why-it-is-fast.md).
"""

from collections import defaultdict
from collections.abc import Collection

import numpy as np
import onnx
from onnx import helper

from qdqbench.quantize.graph.index import (
    MATMULS,
    GraphIndex,
    attribute,
    module_of,
    rename_tensors,
    replace_nodes,
    run_of,
    store_constants,
)
from qdqbench.quantize.utils.arrays import Array, Float32, Int8
from qdqbench.quantize.utils.errors import CheckFailed


def quantize_weights(weight: Float32, scale: Float32, axis: int) -> Int8:
    """Return the INT8 codes of a weight, as QuantizeLinear computes them: divide, round half to even, clip.

    ModelOpt multiplies by the reciprocal, so a quotient on a rounding border may differ by one code there;
    `use_rounded_weights` divides too.
    The scale is a scalar, or [channels] along `axis`.
    """
    shape = [1] * weight.ndim
    if scale.ndim:
        shape[axis] = -1
    codes: Int8 = np.clip(np.rint(weight / scale.reshape(shape)), -128, 127).astype(np.int8)
    return codes


def fold_weights(model: onnx.ModelProto) -> list[str]:
    """Store quantized weights as INT8 [N, K] with a DQ only, in place; return their modules in graph order.

    The exporter writes FP32 weight -> Q -> DQ -> Transpose -> MatMul, or for 2-D inputs -> Gemm; a Gemm
    becomes MatMul and Add so that both have one form. CheckFailed where anything else follows a weight's DQ.
    """
    index = GraphIndex(model)
    folded = []
    replaced: dict[int, list[onnx.NodeProto]] = {}
    for dq in model.graph.node:
        q = index.producers.get(dq.input[0]) if dq.op_type == "DequantizeLinear" else None
        weight = index.constant(q.input[0]) if q is not None and q.op_type == "QuantizeLinear" else None
        if q is None or weight is None:
            continue
        consumers = index.consumers[dq.output[0]]
        gemm = consumers[0] if len(consumers) == 1 else None
        transpose = gemm if gemm is not None and gemm.op_type == "Transpose" else None
        if transpose is not None:
            gemm = index.consumers[transpose.output[0]][0]
            replaced[id(transpose)] = []
        if gemm is None or gemm.op_type not in MATMULS:
            raise CheckFailed(
                f"quantized weight {q.input[0]} feeds {len(consumers)} nodes instead of one MatMul or Gemm"
            )
        scale = np.asarray(index.constant(q.input[1]), dtype=np.float32)
        codes = quantize_weights(np.asarray(weight, dtype=np.float32), scale, attribute(q, "axis", 1))
        if transpose is None and not attribute(gemm, "transB"):
            codes = codes.T
        name, run = index.origin(q.input[0], ("Identity",))[1], run_of(q.name)
        replaced[id(dq)] = _store_weight(model, name, run, q.name.rpartition("/")[0], codes, scale)
        replaced[id(gemm)] = as_matmul(gemm, replaced[id(dq)][-1].output[0])
        folded.append(module_of(gemm.name))
    replace_nodes(model, (new for node in model.graph.node for new in replaced.get(id(node), [node])))
    return folded


def _store_weight(  # noqa: PLR0913, PLR0917
    model: onnx.ModelProto, name: str, run: str, module: str, codes: Int8, scale: Float32
) -> list[onnx.NodeProto]:
    stored: dict[str, Array] = {
        f"{name}_int8": np.ascontiguousarray(codes),
        f"{name}_scale": scale,
        f"{name}_zero_point": np.zeros(scale.shape, np.int8),
    }
    store_constants(model, stored)
    output, turned = f"{name}_dequantized{run}", f"{name}_transposed{run}"
    dq = helper.make_node("DequantizeLinear", [*stored], [output], name=f"{module}/DequantizeLinear{run}")
    if scale.ndim:
        dq.attribute.append(helper.make_attribute("axis", 0))
    return [
        dq,
        helper.make_node("Transpose", [output], [turned], name=f"{module}/Transpose{run}", perm=[1, 0]),
    ]


def as_matmul(gemm: onnx.NodeProto, weight: str) -> list[onnx.NodeProto]:
    """Return a MatMul with another weight [K, N], and an Add where the Gemm has a bias."""
    if gemm.op_type == "MatMul":
        new = onnx.NodeProto()
        new.CopyFrom(gemm)
        new.input[1] = weight
        return [new]
    (output,), bias = gemm.output, [*filter(None, gemm.input[2:])]
    product = f"{output}_product" if bias else output
    adds = [helper.make_node("Add", [product, *bias], [output], name=f"{gemm.name}_bias")] if bias else []
    return [helper.make_node("MatMul", [gemm.input[0], weight], [product], name=gemm.name), *adds]


def factor_scales(model: onnx.ModelProto, *, merge: bool = True) -> None:
    """Split weight scales s: one scalar S in the DQ, a Mul by s/S after the MatMul; in place.

    The INT8 codes stay, so the result is the per-channel recipe exactly; S is free. Linears with the same
    input share one S, so that an engine can merge them into one GEMM; without `merge` each has another one:
    one large GEMM is faster for small batches, three for large ones (why-it-is-fast.md). S is the power of
    two nearest to the geometric mean of the extreme scales: the unscaled product stays near the final one, so
    neither overflows FP16, and codes times S are exact in FP16, as is s/S for the scales of calibration.
    """
    index = GraphIndex(model)
    groups: dict[str, list[tuple[onnx.NodeProto, onnx.NodeProto, Float32]]] = defaultdict(list)
    for node in model.graph.node:
        if (dq := _int8_weight_dq(index, node)) is not None:
            scale = np.asarray(index.constant(dq.input[1]), dtype=np.float32)
            groups[input_key(index, node)].append((node, dq, scale))
    behind: dict[int, onnx.NodeProto] = {}
    for members in groups.values():
        plain = not any(scale.ndim for _, _, scale in members)
        if plain and len(members) == 1:
            continue
        same = plain and len({float(scale) for _, _, scale in members}) == 1
        if merge and same and not any(_has_bias(index, node) for node, _, _ in members):
            continue  # nor here: an engine makes one GEMM of them as they are
        shared = _middle(np.concatenate([np.atleast_1d(scale) for _, _, scale in members]))
        taken: set[np.float32] = set()
        for node, dq, scale in members:
            if not merge and not scale.ndim and not _has_bias(index, node):
                continue  # nothing needs to stand behind this GEMM
            scalar = shared if merge else _middle(np.atleast_1d(scale))
            while not merge and scalar in taken:
                if not 0 < scalar < np.inf:  # twice it is no other
                    raise CheckFailed(f"the weight scale of {node.name} is {scalar:g}; calibrate again")
                scalar *= np.float32(2)
            taken.add(scalar)
            half = any(reader.op_type == "Cast" for reader in index.consumers[dq.output[0]])
            quotient = (scale.astype(np.float64) / scalar).astype(np.float16 if half else np.float32)
            behind[id(node)] = _factor(model, node, dq, quotient, scalar)
    nodes = (n for node in model.graph.node for n in (node, behind.get(id(node))) if n is not None)
    replace_nodes(model, nodes)


def _middle(scales: Float32) -> np.float32:
    extremes = np.log2(scales.astype(np.float64).min()) + np.log2(scales.astype(np.float64).max())
    return np.float32(np.exp2(np.rint(extremes / 2)))


def drop_zero_biases(model: onnx.ModelProto, linears: Collection[str]) -> int:
    """Remove the Adds of zero biases that calibration moved elsewhere, in place; return how many.

    Other modules than `linears` stay as they are: a model with random weights, whose biases are all zero, is
    measured with the kernels of a trained one.
    """
    index = GraphIndex(model)
    replaced: dict[str, str] = {}
    for add in model.graph.node:
        if add.op_type != "Add" or module_of(add.name) not in linears:
            continue
        for product, other in (add.input, reversed(add.input)):
            bias = index.constant(other)
            of_int8 = _int8_weight_dq(index, index.producers.get(product)) is not None
            if of_int8 and bias is not None and bias.ndim == 1 and not bias.any():
                replaced[add.output[0]] = product
    kept = [node for node in model.graph.node if node.output[0] not in replaced]
    rename_tensors(kept, replaced)
    replace_nodes(model, kept)
    return len(replaced)


def _int8_weight_dq(index: GraphIndex, matmul: onnx.NodeProto | None) -> onnx.NodeProto | None:
    """Return the DQ of a MatMul's weight where it reads stored codes; None for any other node."""
    dq = weight_dq(index, matmul) if matmul is not None and matmul.op_type == "MatMul" else None
    stored = dq is not None and dq.op_type == "DequantizeLinear" and index.constant(dq.input[0]) is not None
    return dq if stored else None


def _has_bias(index: GraphIndex, matmul: onnx.NodeProto) -> bool:
    return any(node.op_type == "Add" for node in index.consumers.get(matmul.output[0], []))


def weight_dq(index: GraphIndex, matmul: onnx.NodeProto) -> onnx.NodeProto | None:
    """Return the DQ of a MatMul's weight, before the Transpose that `fold_weights` writes, and a Cast."""
    node = index.producers.get(matmul.input[1])
    node = index.producers.get(node.input[0]) if node is not None and node.op_type == "Transpose" else node
    return index.producers.get(node.input[0]) if node is not None and node.op_type == "Cast" else node


def _factor(
    model: onnx.ModelProto, node: onnx.NodeProto, dq: onnx.NodeProto, quotient: Array, shared: np.float32
) -> onnx.NodeProto:
    name = dq.input[0].removesuffix("_int8")
    scalar, zero_point, factor = f"{name}_scalar", f"{name}_scalar_zero_point", f"{name}_factor"
    numbers: dict[str, Array] = {scalar: np.array(shared, np.float32), zero_point: np.array(0, np.int8)}
    store_constants(model, numbers | {factor: quotient})
    dq.input[1], dq.input[2] = scalar, zero_point
    del dq.attribute[:]  # a scalar scale has no axis
    final = node.output[0]
    node.output[0] = f"{final}_unscaled"
    return helper.make_node("Mul", [node.output[0], factor], [final], name=f"{node.name}_factor")


def input_key(index: GraphIndex, node: onnx.NodeProto) -> str:
    """Return a key that is equal for linears of the same codes: one tensor quantized with one scale."""
    dq, _ = index.origin(node.input[0], ("Cast",))
    q = index.producers.get(dq.input[0]) if dq is not None and dq.op_type == "DequantizeLinear" else None
    if q is None or q.op_type != "QuantizeLinear":
        return node.name
    return f"{q.input[0]} {index.constant(q.input[1])}"
