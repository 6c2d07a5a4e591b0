"""Element types of every tensor, the mixes that a strongly typed parser refuses, and constants in FP16.

Types come from the operator schemas of ONNX: inputs that share a type variable must have one type. This
names the node, where onnx.shape_inference raises at the first mix or leaves the rest of the graph untyped.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from qdqbench.quantize.graph.check.codes import finding, type_name
from qdqbench.quantize.graph.check.view import MOVES, CheckGraph, is_dequantize, is_quantize, operator
from qdqbench.quantize.graph.index import ONNX_DOMAINS, attribute
from qdqbench.quantize.utils.limits import FP16_MAX
from qdqbench.quantize.utils.results import FindingRow

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
# Operators through which a large constant stays as large.
_CARRIES = (*MOVES, "Add", "Sub", "Mul", "Div", "Where", "Concat", "Neg", "Max", "Sum")


def walk_types(model: onnx.ModelProto, opset: int) -> tuple[dict[str, int], list[FindingRow]]:
    """Return the known element type (TensorProto.DataType) of every tensor, and what does not fit.

    Args:
        model: a model that onnx.checker accepts.
        opset: version of the default operator domain.
    """
    graph = model.graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    types.update({tensor.name: tensor.data_type for tensor in graph.initializer})
    declared = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    findings = []
    for node in graph.node:
        if why := _type_node(node, opset, types):  # TensorRT casts what a Q reads itself
            findings.append(
                finding("mixed-types", node, why, None, "not portable" if is_quantize(node) else None)
            )
        elif why := _declared_otherwise(node, types, declared):
            findings.append(finding("mixed-types", node, why, None, "not portable"))
    return types, findings


def _type_node(node: onnx.NodeProto, opset: int, types: dict[str, int]) -> str:
    """Set the types of a node's outputs; say what is wrong with the types of its inputs, or ''."""
    if is_quantize(node):
        return _type_quantize(node, opset, types)
    if is_dequantize(node):
        types[node.output[0]] = attribute(node, "output_dtype") or types.get(node.input[1], 0)
        return ""
    schema = _schema(node.op_type, opset) if node.domain in ONNX_DOMAINS else None
    if schema is None:
        return ""
    bound: dict[str, tuple[int, str]] = {}
    why = ""
    for name, parameter in zip(node.input, _stretch(schema.inputs, len(node.input)), strict=False):
        known = types.get(name, 0)
        if not known or not parameter.is_homogeneous or why:
            continue
        fixed = _fixed_type(parameter.type_str)
        default = (fixed, "the operator") if fixed else (known, repr(name))
        expected, source = bound.setdefault(parameter.type_str, default)
        if expected != known:
            why = f"{name!r} is {type_name(known)}, but {source} has {type_name(expected)}"
            why += "; a strongly typed parser or ONNX Runtime refuses the mix"
            bound[parameter.type_str] = (0, "")  # unknown from here on, or every node behind would be named
    for name, parameter in zip(node.output, _stretch(schema.outputs, len(node.output)), strict=False):
        own = _own_type(node, schema, parameter.type_str)
        types[name] = bound.get(parameter.type_str, (own, ""))[0]
    return why


def _type_quantize(node: onnx.NodeProto, opset: int, types: dict[str, int]) -> str:
    zero_point = node.input[2] if len(node.input) > 2 else ""
    default = attribute(node, "output_dtype") or TensorProto.UINT8  # as ONNX says
    types[node.output[0]] = types.get(zero_point, default) if zero_point else default
    data, scale = types.get(node.input[0], 0), types.get(node.input[1], 0)
    if opset < 23 and data and scale and data != scale and node.domain != "com.microsoft":
        return (
            f"its input {node.input[0]!r} is {type_name(data)}, but its scale is {type_name(scale)}; "
            f"opset {opset} and ONNX Runtime refuse the mix"
        )
    return ""


def _declared_otherwise(node: onnx.NodeProto, types: dict[str, int], declared: dict[str, int]) -> str:
    for name in node.output:
        makes, says = types.get(name, 0), declared.get(name, 0)
        if makes and says and makes != says:
            return (
                f"the file declares its output {name!r} as {type_name(says)}, but the node makes "
                f"{type_name(makes)}; ONNX Runtime refuses the file"
            )
    return ""


@cache
def _schema(operator: str, opset: int) -> Any:
    try:
        return onnx.defs.get_schema(operator, opset, "")
    except onnx.defs.SchemaError:  # an operator that this onnx does not know has outputs of unknown type
        return None


def _stretch(parameters: Any, count: int) -> list[Any]:
    """Return the formal parameters for `count` actual ones: the last may stand for many."""
    formal = list(parameters)
    return formal + formal[-1:] * max(0, count - len(formal))


@cache
def _fixed_type(text: str) -> int:
    """Return the DataType of a text like `tensor(int64)`; 0 for a type variable."""
    if not text.startswith("tensor("):
        return 0
    name = text[len("tensor(") : -1]
    return int(TensorProto.DataType.Value(name.upper()))


def _own_type(node: onnx.NodeProto, schema: Any, variable: str) -> int:
    """Type of an output that no input decides; 0: unknown."""
    if node.op_type == "Cast":
        return attribute(node, "to")
    if node.op_type in ("Constant", "ConstantOfShape"):
        for item in node.attribute:
            if item.HasField("t"):
                return int(item.t.data_type)
        return TensorProto.FLOAT if node.op_type == "ConstantOfShape" else 0
    allowed: list[str] = next(
        (list(c.allowed_type_strs) for c in schema.type_constraints if c.type_param_str == variable), []
    )
    single = _fixed_type(allowed[0]) if len(allowed) == 1 else 0
    return _fixed_type(variable) or single or attribute(node, "dtype")


def check_constants(graph: CheckGraph) -> list[FindingRow]:
    """Find NaN in constants, and values too large for FP16 where FP16 reads them (or may, after a cast)."""
    findings = []
    for tensor, name, node in _float_constants(graph):
        value = numpy_helper.to_array(tensor)
        value = value.astype(np.float32) if tensor.data_type == TensorProto.BFLOAT16 else value
        with np.errstate(all="ignore"):
            low, high = (float(value.min()), float(value.max())) if value.size else (0.0, 0.0)
        largest = low if -low > high else high
        if np.isnan(low) or np.isnan(high):
            findings.append(finding("nan-constant", node, f"its constant {name!r} holds NaN"))
        elif abs(largest) > FP16_MAX:
            findings += _too_large(graph, name, node, largest)
    return findings


def _float_constants(graph: CheckGraph) -> Iterator[tuple[TensorProto, str, onnx.NodeProto]]:
    """Return floating-point tensors with the first node that reads them as data (not as a Q/DQ's scale)."""
    stored = [(tensor, tensor.name, None) for tensor in graph.index.graph.initializer]
    for node in graph.nodes:
        if operator(node) in ("Constant", "ConstantOfShape"):
            maker = node if operator(node) == "ConstantOfShape" else None
            stored += [(item.t, node.output[0], maker) for item in node.attribute if item.HasField("t")]
    for tensor, name, maker in stored:
        readers = [maker] if maker else graph.index.consumers.get(name, [])
        nodes = [n for n in readers if not (is_quantize(n) or is_dequantize(n)) or n.input[0] == name]
        if nodes and tensor.data_type in _FLOATS:
            yield tensor, name, nodes[0]


def _too_large(graph: CheckGraph, name: str, node: onnx.NodeProto, largest: float) -> list[FindingRow]:
    why = f"its constant {name!r} holds {largest:g}; FP16 ends at {FP16_MAX:g}"
    if graph.types.get(name) == TensorProto.FLOAT16:
        why = f"its FP16 constant {name!r} holds {largest:g}, and -inf times 0, or a row of -inf, makes NaN"
    elif any(
        operator(n) == "Cast" and attribute(n, "to") == TensorProto.FLOAT16
        for n in graph.reach(name, _CARRIES)
    ):
        why += ", and a Cast to FP16 behind it makes it infinite"
    elif graph.has_fp16 or is_quantize(node):
        return []  # stays in FP32, or is clipped by the Q
    else:
        message = f"{why}, so a conversion to FP16 makes it infinite"
        return [finding("constant-overflows-fp16", node, message, "warning", "note")]
    return [finding("constant-overflows-fp16", node, why)]
