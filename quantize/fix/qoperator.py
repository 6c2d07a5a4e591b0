"""Operators that compute on codes themselves (ONNX Runtime's formats) as Q, DQ and the plain operator."""

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qdqbench.quantize.check.codes import finding_label
from qdqbench.quantize.check.view import QDQ_DOMAINS, is_integer
from qdqbench.quantize.core.arrays import Array
from qdqbench.quantize.graph.index import GraphIndex, replace_nodes


@dataclass(frozen=True)
class _Form:
    """Inputs of one operator: where each operand (codes, scale, zero point) and the result's scale start."""

    plain: str
    operands: tuple[int, ...]
    result: int | None  # None: the result is floating point
    kept: tuple[str, ...] = ()  # attributes


_FORMS = {
    "QLinearMatMul": _Form("MatMul", (0, 3), 6),
    "QLinearAdd": _Form("Add", (0, 3), 6),
    "QLinearMul": _Form("Mul", (0, 3), 6),
    "QLinearSigmoid": _Form("Sigmoid", (0,), 3),
    "QLinearLeakyRelu": _Form("LeakyRelu", (0,), 3, ("alpha",)),
    "QLinearSoftmax": _Form("Softmax", (0,), 3, ("axis",)),
    "QLinearReduceMean": _Form("ReduceMean", (0,), 3, ("axes", "keepdims")),
    "QGemm": _Form("Gemm", (0, 3), 7, ("alpha", "transA", "transB")),
}


def qoperator_to_qdq(model: onnx.ModelProto) -> tuple[int, list[str]]:
    """Write integer operators as Q/DQ around plain ones, in place.

    A dynamically quantized product becomes one with a DQ at its weight alone: its activation has no scale
    before it runs.

    Returns:
        Nodes that were rewritten, and those that compute on codes and could not be.
    """
    index = GraphIndex(model)
    made: dict[int, list[onnx.NodeProto]] = {}
    left: list[str] = []
    count = 0
    for node in model.graph.node:
        if node.domain not in QDQ_DOMAINS:
            continue
        new = None
        if node.op_type in _FORMS:
            new = _lifted(model, index, node, _FORMS[node.op_type])
        elif node.op_type == "MatMulInteger":
            new = _dynamic(model, index, node, made)
        if new is not None:
            made[id(node)] = new
            count += 1
        elif is_integer(node) and node.op_type != "DynamicQuantizeLinear":
            left.append(finding_label(node))
    nodes = (new for node in model.graph.node for new in made.get(id(node), [node]))
    replace_nodes(model, list(nodes))
    return count, left


def _lifted(
    model: onnx.ModelProto, index: GraphIndex, node: onnx.NodeProto, form: _Form
) -> list[onnx.NodeProto] | None:
    inputs = [*node.input]
    if len(inputs) <= max(form.operands, default=0) + 1:
        return None
    name = node.name.removesuffix("_quant") or node.output[0]
    plain: list[str] = []
    new = []
    for number, start in enumerate(form.operands):
        codes, scale, *zero = inputs[start : start + 3]
        new.append(_dq([codes, scale, *zero], f"{name}_operand_{number}", index))
        plain.append(new[-1].output[0])
    if node.op_type == "QGemm" and len(inputs) > 6 and inputs[6]:
        bias = _bias(model, index, node, name)
        if bias is None:
            return None
        plain.append(bias)
    kept = [item for item in node.attribute if item.name in form.kept]
    quantized = form.result is not None and len(inputs) > form.result and inputs[form.result]
    result = f"{node.output[0]}_plain" if quantized else node.output[0]
    made = helper.make_node(form.plain, plain, [result], name=name)
    made.attribute.extend(kept)
    new.append(made)
    if quantized and form.result is not None:
        scales = [name for name in inputs[form.result : form.result + 2] if name]
        new.append(helper.make_node("QuantizeLinear", [result, *scales], [node.output[0]], name=f"{name}_Q"))
    return new


def _dq(inputs: list[str], name: str, index: GraphIndex) -> onnx.NodeProto:
    """A DQ whose scales, where it has several, are along the last axis, as for a weight [K, N]."""
    node = helper.make_node(
        "DequantizeLinear", [each for each in inputs if each], [f"{name}_float"], name=f"{name}_DQ"
    )
    scale, codes = index.constant(inputs[1]), index.stored(inputs[0])
    if scale is not None and scale.size > 1 and codes is not None:
        node.attribute.append(helper.make_attribute("axis", len(codes.dims) - 1))
    return node


def _bias(model: onnx.ModelProto, index: GraphIndex, node: onnx.NodeProto, name: str) -> str | None:
    """The INT32 bias of a QGemm as floating point; None where it is not constant."""
    parts = [index.constant(node.input[position]) for position in (6, 1, 4)]
    bias, first, second = parts
    if bias is None or first is None or second is None:
        return None
    value = bias.astype(np.float32) * first.astype(np.float32) * second.astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), f"{name}_bias_float"))
    return f"{name}_bias_float"


def _dynamic(
    model: onnx.ModelProto, index: GraphIndex, node: onnx.NodeProto, made: dict[int, list[onnx.NodeProto]]
) -> list[onnx.NodeProto] | None:
    """What `quantize_dynamic` writes: DynamicQuantizeLinear, MatMulInteger, Cast, Mul by both scales."""
    source = index.producers.get(node.input[0])
    cast = _only(index, node.output[0], "Cast")
    rescale = _only(index, cast.output[0], "Mul") if cast is not None else None
    codes = index.constant(node.input[1])
    if (
        source is None
        or source.op_type != "DynamicQuantizeLinear"
        or cast is None
        or rescale is None
        or codes is None
    ):
        return None
    scales = index.producers.get(next((name for name in rescale.input if name != cast.output[0]), ""))
    if scales is None or scales.op_type != "Mul":
        return None
    weight_scale = next((value for name in scales.input if (value := index.constant(name)) is not None), None)
    zero = index.constant(node.input[3]) if len(node.input) > 3 and node.input[3] else None
    if weight_scale is None:
        return None
    name = node.name.removesuffix("_quant") or node.output[0]
    weight = _float_weight(codes, weight_scale, zero)
    scale = np.atleast_1d(np.asarray(weight_scale, np.float32))
    signed, factors = _signed(codes, zero), scale if scale.size > 1 else scale.reshape(())
    tensors: dict[str, Array] = {f"{name}_codes": signed, f"{name}_scale": factors}
    if signed.dtype != np.int8:  # asymmetric: rounded again, by channel
        factors = np.maximum(np.abs(weight).max(0), np.float32(1e-12)) / np.float32(127)
        tensors = {
            f"{name}_codes": np.clip(np.rint(weight / factors), -127, 127).astype(np.int8),
            f"{name}_scale": factors.astype(np.float32),
        }
    model.graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in tensors.items())
    dq = helper.make_node("DequantizeLinear", [*tensors], [f"{name}_weight"], name=f"{name}_weight_DQ")
    if tensors[f"{name}_scale"].ndim:
        dq.attribute.append(helper.make_attribute("axis", codes.ndim - 1))
    made[id(cast)], made[id(rescale)] = [], []
    product = helper.make_node("MatMul", [source.input[0], f"{name}_weight"], [rescale.output[0]], name=name)
    return [dq, product]


def _float_weight(codes: Array, scale: Array, zero: Array | None) -> Array:
    shift = np.zeros((), np.float32) if zero is None else zero.astype(np.float32)
    value: Array = (codes.astype(np.float32) - shift) * np.asarray(scale, np.float32)
    return value


def _signed(codes: Array, zero: Array | None) -> Array:
    """INT8 codes where the zero point allows that exactly; else the codes as they are."""
    shift = np.zeros((), np.int32) if zero is None else zero.astype(np.int32)
    moved = codes.astype(np.int32) - shift
    fits = moved.min(initial=0) >= -128 and moved.max(initial=0) <= 127
    return moved.astype(np.int8) if fits else moved


def _only(index: GraphIndex, tensor: str, operator: str) -> onnx.NodeProto | None:
    readers = index.consumers.get(tensor, [])
    return readers[0] if len(readers) == 1 and readers[0].op_type == operator else None
