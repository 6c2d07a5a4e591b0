"""What `check` reads from a graph: the Q/DQ behind each input of a matmul, constants, and attentions.

Searches follow at most MAX_STEPS nodes, so that a hostile graph cannot make them long.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import onnx
from onnx import TensorProto

from qdqbench.quantize.graph.check.codes import finding_label
from qdqbench.quantize.graph.index import MATMULS, MAX_STEPS, ONNX_DOMAINS, GraphIndex
from qdqbench.quantize.utils.arrays import Array

QDQ_DOMAINS = (*ONNX_DOMAINS, "com.microsoft")

# Products of all ways to quantize, and the input that holds the weight.
PRODUCTS = {
    "MatMul": 1, "Gemm": 1, "MatMulInteger": 1, "MatMulIntegerToFloat": 1, "DynamicQuantizeMatMul": 1,
    "QLinearMatMul": 3, "QGemm": 3, "QAttention": 1, "MatMulNBits": 1, "FusedMatMul": 1,
}  # fmt: skip
# What `qdqbench fix` writes as Q, DQ and the plain operator, and the inputs that each needs.
PLAIN_FORMS = {
    "QLinearMatMul": 8, "QLinearAdd": 7, "QLinearMul": 7, "QLinearSigmoid": 4, "QLinearLeakyRelu": 4,
    "QLinearSoftmax": 4, "QLinearReduceMean": 4, "QGemm": 6,
}  # fmt: skip
_INTEGER = {
    "DynamicQuantizeLinear", "MatMulInteger", "MatMulIntegerToFloat", "ConvInteger", "QAttention", "QGemm",
    "DynamicQuantizeMatMul", "MatMulNBits", "DynamicQuantizeLSTM", "QEmbedLayerNormalization",
}  # fmt: skip


def is_integer(node: onnx.NodeProto) -> bool:
    """Return whether the node computes on INT8 codes itself: it has a finding of its own."""
    integer = node.op_type in _INTEGER or node.op_type.startswith("QLinear")
    return integer and node.domain in QDQ_DOMAINS


def missing_arguments(node: onnx.NodeProto) -> str:
    """Return what an integer operator lacks, or ''; onnx.checker knows the operators of ONNX only."""
    least = PLAIN_FORMS.get(node.op_type, PRODUCTS.get(node.op_type, 0) + 1)
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


# Between a DequantizeLinear and a matmul these leave the INT8 GEMM in place, as does a Mul or Div by a
# scalar; an Add, a ReLU or a Mul by a vector does not [measured].
_RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Gather", "Split", "Expand", "Tile")
MOVES = ("Cast", "Transpose", "Identity", "Dropout", "Slice", *_RESHAPES)

_QDQ = ("QuantizeLinear", "DequantizeLinear")
# What lies between q·kᵀ and softmax: scaling, masks, casts, Q/DQ.
_SCORES = (*MOVES, *_QDQ, "Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "Clip", "Tanh")


def operator(node: onnx.NodeProto) -> str:
    """Return the operator of a node, with its domain where that is not ONNX's own."""
    known = node.domain in ONNX_DOMAINS or is_quantize(node) or is_dequantize(node)
    return str(node.op_type) if known else f"{node.domain}.{node.op_type}"


def is_quantize(node: onnx.NodeProto) -> bool:
    """Return whether the node is a QuantizeLinear."""
    return _is_qdq(node, "QuantizeLinear")


def is_dequantize(node: onnx.NodeProto) -> bool:
    """Return whether the node is a DequantizeLinear."""
    return _is_qdq(node, "DequantizeLinear")


def _is_qdq(node: onnx.NodeProto, name: str) -> bool:
    return node.op_type == name and node.domain in QDQ_DOMAINS and len(node.input) > 1 and bool(node.output)


@dataclass(frozen=True)
class Operand:
    """One input of a matmul, followed back through data movement to the DequantizeLinear behind it."""

    dq: onnx.NodeProto | None
    stop: str  # without a dq: where the search ended
    constant: bool = False  # the DQ reads a constant (or the Q of one): a weight
    permutations: tuple[tuple[int, ...] | None, ...] = ()  # from the operand back to the DQ; None: reversed
    reshaped: bool = False  # an axis of the DQ cannot be told from an axis of the operand


@dataclass(frozen=True)
class Attention:
    """softmax(q·kᵀ)·v: the nodes and their four operands."""

    softmax: onnx.NodeProto
    scores: onnx.NodeProto  # q·kᵀ
    context: onnx.NodeProto  # softmax·v
    operands: dict[str, Operand]  # q, k, softmax output, v
    output_quantized: bool


class CheckGraph:
    """A valid graph, its element types, and searches in it."""

    def __init__(self, model: onnx.ModelProto, types: dict[str, int]) -> None:
        self.index = GraphIndex(model)
        self.nodes = list(model.graph.node)
        self.types = types
        self.matmuls = [node for node in self.nodes if operator(node) in MATMULS]
        self.operands = {
            node.output[0]: (self.operand(node.input[0]), self.operand(node.input[1]))
            for node in self.matmuls
        }
        found = (self._attention(node) for node in self.nodes if operator(node) == "Softmax")
        self.attentions = [attention for attention in found if attention]

    @cached_property
    def has_fp16(self) -> bool:
        """Return whether any tensor is FP16."""
        return any(kind == TensorProto.FLOAT16 for kind in self.types.values())

    def is_int8(self, operand: Operand) -> bool:
        """Return whether the operand comes from INT8."""
        return operand.dq is not None and self.types.get(operand.dq.input[0]) == TensorProto.INT8

    def value(self, name: str) -> Array | None:
        """Return the numeric value of an initializer, a Constant or a Cast of one; None if computed."""
        return self.index.constant(name, ("Cast",))

    def origin(self, name: str) -> tuple[onnx.NodeProto | None, str]:
        """Return the node that made a tensor before it was moved (None: not computed), and its output."""
        return self.index.origin(name, MOVES)

    def operand(self, name: str) -> Operand:
        """Follow a tensor back to its DequantizeLinear through data movement and scalar factors."""
        permutations: list[tuple[int, ...] | None] = []
        reshaped = False
        for _ in range(MAX_STEPS):
            node = self.index.producers.get(name)
            if node is None:
                return Operand(None, f"{name!r}, which has none")
            if is_dequantize(node):
                constant = self.is_constant(node.input[0])
                return Operand(node, "", constant, tuple(permutations), reshaped)
            if operator(node) == "Transpose":
                permutations.append(_permutation(node))
            reshaped = reshaped or operator(node) in _RESHAPES
            following = node.input[0] if operator(node) in MOVES else self._scaled(node)
            if following is None:
                return Operand(None, f"{node.op_type} {finding_label(node)!r}")
            name = following
        return Operand(None, f"a chain of over {MAX_STEPS} nodes")

    def is_constant(self, name: str) -> bool:
        """Return whether a tensor is stored in the file, directly, moved, or through a QuantizeLinear."""
        for _ in range(MAX_STEPS):
            node, name = self.origin(name)
            if node is None or operator(node) == "Constant":
                return self.index.stored(name) is not None
            if not is_quantize(node):
                return False
            name = node.input[0]
        return False

    def shape(self, name: str) -> list[int] | None:
        """Return the shape of a constant or of a QuantizeLinear of one."""
        node = self.index.producers.get(name)
        if node is not None and is_quantize(node):
            name = node.input[0]
        tensor = self.index.stored(name)
        return None if tensor is None else list(tensor.dims)

    def reach(self, start: str, through: tuple[str, ...]) -> Iterator[onnx.NodeProto]:
        """Return the nodes that read `start`, nearest first, across the operators in `through`."""
        todo, seen = deque([start] if start else []), {start}
        steps = 0
        while todo and steps < MAX_STEPS:
            for node in self.index.consumers.get(todo.popleft(), ())[:MAX_STEPS]:
                steps += 1
                yield node
                if operator(node) in through and node.output:
                    name = node.output[0]
                    if name and name not in seen:
                        seen.add(name)
                        todo.append(name)

    def head_size(self, attention: Attention) -> int | None:
        """Return the last size of the Reshape that splits q into heads, where it is a constant."""
        name = attention.scores.input[0]
        for _ in range(MAX_STEPS):
            node = self.index.producers.get(name)
            if node is None or (operator(node) == "Transpose" and not _keeps_last(node)):
                return None
            if operator(node) == "Reshape":
                return self._last_size(node.input[1])
            moves = ("Cast", "Transpose", "Identity", *_QDQ)
            following = node.input[0] if operator(node) in moves else self._scaled(node)
            if following is None:
                return None
            name = following
        return None

    def _last_size(self, shape_name: str) -> int | None:
        node = self.index.producers.get(shape_name)
        if node is not None and operator(node) == "Concat":
            shape_name = node.input[-1]
        value = self.value(shape_name)
        if value is None or not value.size or value.dtype.kind not in "iu":
            return None
        last = int(value.reshape(-1)[-1])
        return last if last > 0 else None

    def _scaled(self, node: onnx.NodeProto) -> str | None:
        """Return the input that a Mul or Div scales by a constant scalar; None for any other node."""
        if operator(node) not in ("Mul", "Div"):
            return None
        for factor, other in ((1, 0), (0, 1)):
            tensor = self.index.stored(node.input[factor])
            if tensor is not None and all(size == 1 for size in tensor.dims):
                return str(node.input[other]) if node.op_type == "Mul" or factor == 1 else None
        return None

    def _attention(self, softmax: onnx.NodeProto) -> Attention | None:
        readers = self.reach(softmax.output[0], (*MOVES, *_QDQ, "Where", "Mul", "Div"))
        context = next((node for node in readers if operator(node) == "MatMul"), None)
        scores, _ = self.behind_softmax(softmax)
        if context is None or scores is None or scores.output[0] == context.output[0]:
            return None
        if any(self.is_constant(name) for node in (scores, context) for name in node.input[:2]):
            return None  # a linear layer before the softmax or behind it
        side = 0 if self._behind(context.input[0], softmax.output[0])[0] is not None else 1
        q, k = self.operands[scores.output[0]]
        pair = self.operands[context.output[0]]
        operands = {"q": q, "k": k, "softmax output": pair[side], "v": pair[1 - side]}
        output = any(is_quantize(node) for node in self.reach(context.output[0], MOVES))
        return Attention(softmax, scores, context, operands, output)

    def behind_softmax(self, softmax: onnx.NodeProto) -> tuple[onnx.NodeProto | None, bool]:
        """Return the matmul whose scores a softmax normalizes, and whether Q/DQ lie between the two."""
        return self._behind(softmax.input[0], "")

    def _behind(self, start: str, target: str) -> tuple[onnx.NodeProto | None, bool]:
        """Return the nearest matmul (or maker of `target`) before a tensor, and whether Q/DQ came between."""
        todo, seen, quantized = deque([start]), {start}, False
        while todo and len(seen) < MAX_STEPS:
            node = self.index.producers.get(todo.popleft())
            if node is None:
                continue
            if node.output[0] == target if target else operator(node) in MATMULS:
                return node, quantized
            if is_dequantize(node):
                quantized = quantized or not self.is_constant(node.input[0])
            if operator(node) in _SCORES:
                fresh = [name for name in node.input[:3] if name and name not in seen]
                seen.update(fresh)
                todo.extend(fresh)
        return None, quantized


def _permutation(node: onnx.NodeProto) -> tuple[int, ...] | None:
    return next((tuple(item.ints) for item in node.attribute if item.name == "perm"), None)


def _keeps_last(node: onnx.NodeProto) -> bool:
    permutation = _permutation(node)
    return permutation is not None and permutation[-1:] == (len(permutation) - 1,)
