"""Facts that `check` reads from a graph: the Q/DQ before each matmul input, attentions, element types."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from qdqbench.quantize.graph.index import (
    MATMULS,
    MAX_STEPS,
    MOVES,
    ONNX_DOMAINS,
    QDQ,
    QDQ_DOMAINS,
    GraphIndex,
    argument,
    attribute,
    is_qdq,
    operator,
    opset_of,
    permutation_of,
    read_constant,
    type_name,
)
from qdqbench.quantize.lint.findings import Effect, FindingRow, find_at, finding_label
from qdqbench.quantize.utils.arrays import Array

# Products of all ways to quantize, and the input that holds the weight.
PRODUCTS = {
    "MatMul": 1, "Gemm": 1, "MatMulInteger": 1, "MatMulIntegerToFloat": 1, "DynamicQuantizeMatMul": 1,
    "QLinearMatMul": 3, "QGemm": 3, "QAttention": 1, "MatMulNBits": 1, "FusedMatMul": 1,
    "Attention": 1, "MultiHeadAttention": 1, "Einsum": 1,
}  # fmt: skip


class PlainForm(NamedTuple):
    """Inputs of an operator: where each operand (codes, scale, zero point) and the result's scale start."""

    plain: str
    least: int  # inputs that it needs
    operands: tuple[int, ...]
    result: int
    kept: tuple[str, ...] = ()  # attributes


# What `qdqbench fix` writes as Q, DQ and the plain operator.
PLAIN_FORMS = {
    "QLinearMatMul": PlainForm("MatMul", 8, (0, 3), 6),
    "QLinearAdd": PlainForm("Add", 7, (0, 3), 6),
    "QLinearMul": PlainForm("Mul", 7, (0, 3), 6),
    "QLinearSigmoid": PlainForm("Sigmoid", 4, (0,), 3),
    "QLinearLeakyRelu": PlainForm("LeakyRelu", 4, (0,), 3, ("alpha",)),
    "QLinearSoftmax": PlainForm("Softmax", 4, (0,), 3, ("axis",)),
    "QLinearReduceMean": PlainForm("ReduceMean", 4, (0,), 3, ("axes", "keepdims")),
    "QGemm": PlainForm("Gemm", 6, (0, 3), 7, ("alpha", "transA", "transB")),
}
_INTEGER = {
    "DynamicQuantizeLinear", "MatMulInteger", "MatMulIntegerToFloat", "ConvInteger", "QAttention", "QGemm",
    "DynamicQuantizeMatMul", "MatMulNBits", "DynamicQuantizeLSTM", "QEmbedLayerNormalization",
}  # fmt: skip
# Between a DequantizeLinear and a matmul MOVES leave the INT8 GEMM in place, as does a Mul or Div by a
# scalar. An Add, a ReLU or a Mul by a vector does not [measured].
_RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Gather", "Split", "Expand", "Tile")
# What lies between q·kᵀ and softmax: scaling, masks, casts, Q/DQ.
_SCORES = (*MOVES, *QDQ, "Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "Clip", "Tanh")


def is_integer(node: onnx.NodeProto) -> bool:
    """Return whether the node computes on INT8 codes itself: it has a finding of its own."""
    return node.domain in QDQ_DOMAINS and (node.op_type in _INTEGER or node.op_type.startswith("QLinear"))


def missing_arguments(node: onnx.NodeProto) -> str:
    """Return what an integer operator lacks, or ''; onnx.checker knows the operators of ONNX only."""
    form = PLAIN_FORMS.get(node.op_type)
    least = form.least if form else PRODUCTS.get(node.op_type, 0) + 1
    if not is_integer(node) or (len(node.input) >= least and node.output):
        return ""
    return f"{node.op_type} has {len(node.input)} inputs of {least} and {len(node.output)} outputs"


def has_plain_form(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Return whether `qdqbench fix` rewrites the node: `quantize_static` and `quantize_dynamic` write it."""
    if node.op_type == "MatMulInteger":
        source = index.producers.get(node.input[0])
        return source is not None and source.op_type == "DynamicQuantizeLinear"
    if node.op_type == "DynamicQuantizeLinear":
        readers = index.consumers.get(node.output[0], [])
        return all(reader.op_type == "MatMulInteger" for reader in readers)
    return node.op_type in PLAIN_FORMS


def list_constants(index: GraphIndex) -> Iterator[tuple[str, TensorProto, onnx.NodeProto | None]]:
    """Return the tensors that a file stores, each with its name and the node that makes it."""
    yield from ((tensor.name, tensor, None) for tensor in index.graph.initializer)
    for node in index.graph.node:
        made = read_constant(node) if operator(node) in ("Constant", "ConstantOfShape") else None
        if made is not None:
            yield node.output[0], made, node


def is_quantize(node: onnx.NodeProto) -> bool:
    return node.op_type == "QuantizeLinear" and is_qdq(node)


def is_dequantize(node: onnx.NodeProto) -> bool:
    return node.op_type == "DequantizeLinear" and is_qdq(node)


@dataclass(frozen=True)
class Operand:
    dq: onnx.NodeProto | None
    stop: str  # without a dq: where the search ended
    constant: bool = False  # the DQ reads a constant (or the Q of one): a weight
    permutations: tuple[tuple[int, ...] | None, ...] = ()  # from the operand back to the DQ; None: reversed
    reshaped: bool = False  # an axis of the DQ cannot be told from an axis of the operand
    factor: float = 1.0  # of the scalars between the DQ and the operand, without its sign


@dataclass(frozen=True)
class Attention:
    """softmax(q·kᵀ)·v: the nodes and their four operands."""

    softmax: onnx.NodeProto
    scores: onnx.NodeProto  # q·kᵀ
    context: onnx.NodeProto  # softmax·v
    operands: dict[str, Operand]  # q, k, softmax output, v
    output_quantized: bool

    @property
    def is_whole(self) -> bool:
        return self.output_quantized and all(part.dq is not None for part in self.operands.values())


class CheckGraph:
    def __init__(self, model: onnx.ModelProto, *, unsigned: bool = False) -> None:
        self.index = GraphIndex(model)
        self.int8_types = (TensorProto.INT8, TensorProto.UINT8) if unsigned else (TensorProto.INT8,)
        self.nodes = list(model.graph.node)
        self.types, self.mixes = walk_types(model)
        self.matmuls = [node for node in self.nodes if operator(node) in MATMULS]
        self.operands = {
            node.output[0]: (self.operand(node.input[0]), self.operand(node.input[1]))
            for node in self.nodes
            if operator(node) in (*MATMULS, "Attention", "Einsum") and len(node.input) > 1
        }
        attentions = (self._attention(node) for node in self.nodes if operator(node) == "Softmax")
        self.attentions = [attention for attention in attentions if attention]

    @cached_property
    def has_fp16(self) -> bool:
        return any(kind == TensorProto.FLOAT16 for kind in self.types.values())

    @cached_property
    def weight_only(self) -> set[str]:
        """Return the outputs of DequantizeLinear of weights whose activation has none."""
        pairs = (self.operands[node.output[0]] for node in self.matmuls)
        return {w.dq.output[0] for x, w in pairs if w.dq is not None and w.constant and x.dq is None}

    def is_int8(self, operand: Operand) -> bool:
        return operand.dq is not None and self.types.get(operand.dq.input[0]) in self.int8_types

    def value(self, name: str) -> Array | None:
        """Return the numeric value of an initializer, a Constant or a Cast of one; None if computed."""
        return self.index.constant(name, ("Cast",))

    def zero_point(self, node: onnx.NodeProto) -> Array | None:
        """Return the zero point of a Q or DQ; None where it is left out or computed."""
        name = argument(node, 2)
        return self.value(name) if name else None

    def operand(self, name: str) -> Operand:
        """Follow a tensor back to its DequantizeLinear through data movement and scalar factors."""
        *passed, (name, node) = self.index.back(name, self._data_of)
        if node is None:
            return Operand(None, f"{name!r}, which has none")
        if not is_dequantize(node):
            long = f"a chain of over {MAX_STEPS} nodes" if self._data_of(node) else ""
            return Operand(None, long or f"{node.op_type} {finding_label(node)!r}")
        nodes = [maker for _, maker in passed if maker is not None]
        turns = tuple(permutation_of(maker) for maker in nodes if operator(maker) == "Transpose")
        reshaped = any(operator(maker) in _RESHAPES for maker in nodes)
        scaled = [(maker.op_type, pair[1]) for maker in nodes if (pair := self.index.scaled(maker))]
        values = [(kind, abs(float(numpy_helper.to_array(value).reshape(())))) for kind, value in scaled]
        with np.errstate(all="ignore"):
            factor = np.prod([value if kind == "Mul" else np.divide(1, value) for kind, value in values])
        return Operand(node, "", self.is_constant(node.input[0]), turns, reshaped, float(factor))

    def is_constant(self, name: str) -> bool:
        """Return whether a tensor is stored in the file, directly, moved, or through a QuantizeLinear."""
        return self.index.stored(self.index.origin(name, (*MOVES, "QuantizeLinear"))[1]) is not None

    def shape(self, name: str) -> list[int] | None:
        node = self.index.producers.get(name)
        tensor = self.index.stored(node.input[0] if node is not None and is_quantize(node) else name)
        return None if tensor is None else list(tensor.dims)

    def head_size(self, attention: Attention) -> int | None:
        """Return the last size of the Reshape that splits q into heads, where it is a constant."""

        def unsplit(node: onnx.NodeProto) -> Iterable[str]:
            turn = permutation_of(node) if operator(node) == "Transpose" else (0,)
            if operator(node) in _RESHAPES or turn is None or turn[-1:] != (len(turn) - 1,):
                return ()
            return [*node.input[:1]] if is_qdq(node) else self._data_of(node)

        node, _ = self.index.origin(attention.scores.input[0], unsplit)
        if node is None or operator(node) != "Reshape":
            return None
        shape = self.index.producers.get(node.input[1])
        concat = shape is not None and operator(shape) == "Concat"
        value = self.value(shape.input[-1] if shape is not None and concat else node.input[1])
        if value is None or not value.size or value.dtype.kind not in "iu":
            return None
        last = int(value.reshape(-1)[-1])
        return last if last > 0 else None

    def _data_of(self, node: onnx.NodeProto) -> Iterable[str]:
        """Return the input that a node moves, or scales by a constant scalar; nothing for other nodes."""
        if operator(node) in MOVES:
            return [*node.input[:1]]
        pair = self.index.scaled(node)
        return pair[:1] if pair is not None and all(size == 1 for size in pair[1].dims) else ()

    def _attention(self, softmax: onnx.NodeProto) -> Attention | None:
        readers = self.index.forward(softmax.output[0], (*MOVES, *QDQ, "Where", "Mul", "Div"))
        context = next((node for node in readers if operator(node) == "MatMul"), None)
        scores, _ = self.find_before(softmax.input[0])
        if context is None or scores is None or scores.output[0] == context.output[0]:
            return None
        if any(self.is_constant(name) for node in (scores, context) for name in node.input[:2]):
            return None  # a linear layer before the softmax or behind it
        side = 0 if self.find_before(context.input[0], softmax.output[0])[0] is not None else 1
        q, k = self.operands[scores.output[0]]
        pair = self.operands[context.output[0]]
        operands = {"q": q, "k": k, "softmax output": pair[side], "v": pair[1 - side]}
        output = any(map(is_quantize, self.index.forward(context.output[0], (*MOVES, "Div"))))
        return Attention(softmax, scores, context, operands, output)

    def find_before(self, start: str, target: str = "") -> tuple[onnx.NodeProto | None, bool]:
        """Return the nearest matmul (or maker of `target`) before a tensor, and whether Q/DQ came between."""

        def inputs(node: onnx.NodeProto) -> Iterable[str]:
            return filter(None, node.input[:3]) if operator(node) in _SCORES else ()

        quantized = False
        for _, node in self.index.back(start, inputs):
            if node is not None and (node.output[0] == target if target else operator(node) in MATMULS):
                return node, quantized
            if node is not None and is_dequantize(node):
                quantized = quantized or not self.is_constant(node.input[0])
        return None, quantized


def walk_types(model: onnx.ModelProto) -> tuple[dict[str, int], list[FindingRow]]:
    """Return the element type (TensorProto.DataType) of every tensor where known, and what does not fit.

    Types come from the operator schemas of ONNX: inputs that share a type variable must have one type. This
    names the node, where onnx.shape_inference raises at the first mix or leaves the rest untyped.
    """
    graph, opset = model.graph, opset_of(model)
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    types.update({tensor.name: tensor.data_type for tensor in graph.initializer})
    declared = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    findings = []
    for node in graph.node:
        if why := _type_node(node, opset, types):  # TensorRT casts what a Q reads itself
            effect: Effect | None = "not portable" if is_quantize(node) else None
            findings.append(find_at("mixed-types", node, why, None, effect))
            continue
        for name in node.output:
            makes, says = types.get(name, 0), declared.get(name, 0)
            if makes and says and makes != says:
                why = (
                    f"the file declares its output {name!r} as {type_name(says)}, but the node makes "
                    f"{type_name(makes)}; ONNX Runtime refuses the file"
                )
                findings.append(find_at("mixed-types", node, why, None, "not portable"))
                break
    return types, findings


def _type_node(node: onnx.NodeProto, opset: int, types: dict[str, int]) -> str:
    """Set the types of a node's outputs; return what is wrong with the types of its inputs, or ''."""
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
    zero_point = argument(node, 2)
    default = attribute(node, "output_dtype") or TensorProto.UINT8  # as ONNX says
    types[node.output[0]] = types.get(zero_point, default) if zero_point else default
    data, scale = types.get(node.input[0], 0), types.get(node.input[1], 0)
    if opset < 23 and data and scale and data != scale and node.domain != "com.microsoft":
        return (
            f"its input {node.input[0]!r} is {type_name(data)}, but its scale is {type_name(scale)}; "
            f"opset {opset} and ONNX Runtime refuse the mix"
        )
    return ""


@cache
def _schema(kind: str, opset: int) -> Any:
    try:
        return onnx.defs.get_schema(kind, opset, "")
    except onnx.defs.SchemaError:  # an operator that this onnx does not know has outputs of unknown type
        return None


def _stretch(parameters: Any, count: int) -> list[Any]:
    """Return the formal parameters for `count` actual ones: the last may stand for many."""
    formal = list(parameters)
    return formal + formal[-1:] * max(0, count - len(formal))


@cache
def _fixed_type(text: str) -> int:
    """Return the DataType of a text like `tensor(int64)`; 0 for a type variable."""
    plain = text.startswith("tensor(")
    return int(TensorProto.DataType.Value(text[len("tensor(") : -1].upper())) if plain else 0


def _own_type(node: onnx.NodeProto, schema: Any, variable: str) -> int:
    if node.op_type == "Cast":
        return attribute(node, "to")
    if node.op_type in ("Constant", "ConstantOfShape"):
        default = TensorProto.FLOAT if node.op_type == "ConstantOfShape" else 0
        return default if (stored := read_constant(node)) is None else int(stored.data_type)
    allowed = [[*c.allowed_type_strs] for c in schema.type_constraints if c.type_param_str == variable]
    single = _fixed_type(allowed[0][0]) if allowed and len(allowed[0]) == 1 else 0
    return _fixed_type(variable) or single or attribute(node, "dtype")
