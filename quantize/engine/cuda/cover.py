"""A graph that is read pattern by pattern: each node is covered by one kernel, with all its attributes."""

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import onnx
from onnx import TensorProto

from qdqbench.quantize.engine.cuda.tokens import MASK, TOKENS, TYPES
from qdqbench.quantize.graph.index import ONNX_DOMAINS, GraphIndex, opset_of
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list

SHARED = ""  # owner of constants, which many kernels read
OLDEST = 20  # opset with Gelu
_RANK = 8  # axes of a shape, at most
_RANKS = range(_RANK)
_NUMBERS = (np.float32, np.int8, np.uint8, np.int32, np.int64)
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Div": operator.floordiv,
    "Equal": operator.eq,
    "Where": lambda condition, one, other: one if condition else other,
}
_OF_SHAPES = ("Shape", "Gather", "Unsqueeze", "Concat", "Reshape", "ConstantOfShape", "Cast", *_ELEMENTWISE)


def name_node(node: onnx.NodeProto) -> str:
    return f"{node.name or node.output[0]} ({node.op_type})"


def refuse(why: str, *nodes: onnx.NodeProto | str) -> NoReturn:
    named = name_list(node if isinstance(node, str) else name_node(node) for node in nodes)
    raise UserError(f"backend cuda has no kernel for {named}: {why}; take tensorrt_rtx or tensorrt")


def read_attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    found = (item for item in node.attribute if item.name == name)
    return next(map(onnx.helper.get_attribute_value, found), default)


class Cover:
    """Reads a graph backwards; `owner` is the tensor whose kernel covers the nodes that are taken."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.index, self.graph, self.opset = GraphIndex(model), model.graph, opset_of(model)
        names = [name for node in model.graph.node for name in node.output]
        self.order = {name: number for number, name in enumerate(names)}
        self.owner, self.node_owner = SHARED, dict[str, str]()  # of nodes, by their first outputs
        self.shaped: dict[str, str] = {}  # tensors whose shape is read, and a node that reads it
        self.shapes: dict[str, list[Any]] = {}  # of tensors that are no [batch, length, width]
        self._sizes_of: dict[str, list[Any]] = {}
        if not OLDEST <= self.opset <= onnx.defs.onnx_opset_version() or len(self.order) < len(names):
            raise UserError(f"backend cuda takes valid ONNX of opset {OLDEST} or newer, not {self.opset}")
        floats = [each for each in self.graph.input if each.type.tensor_type.elem_type == TensorProto.FLOAT]
        self.given = {value.name: [*value.type.tensor_type.shape.dim] for value in floats}
        inputs = [value for value in self.graph.input if value.name not in self.given]
        if unknown := {value.name for value in inputs} - {TOKENS, MASK, TYPES}:
            raise UserError(f"backend cuda takes no input {name_list(sorted(unknown))}")
        for values, kind in ((inputs, TensorProto.INT64), (self.graph.output, TensorProto.FLOAT)):
            if other := [value.name for value in values if value.type.tensor_type.elem_type != kind]:
                raise UserError(
                    f"backend cuda takes int64 inputs and float32 outputs, unlike {name_list(other)}"
                )

    def kind(self, name: str) -> str:
        """Return the operator that computes a tensor; empty for an input and for foreign operators."""
        node = self.index.producers.get(name)
        return str(node.op_type) if node is not None and node.domain in ONNX_DOMAINS else ""

    def take(
        self, name: str, *kinds: str, shared: bool = False, free: tuple[str, ...] = (), **attributes: Any
    ) -> onnx.NodeProto:
        """Cover a tensor's maker, of one of `kinds`; its attributes are these, `free` ones and defaults."""
        node = self.index.producers.get(name)
        if node is None or self.kind(name) not in kinds:
            refuse(f"expected {' or '.join(kinds)}", name if node is None else node)
        known = onnx.defs.get_schema(node.op_type, self.opset, "")
        schema = known.attributes
        if not known.min_input <= len(node.input) <= known.max_input:
            refuse(f"it has {len(node.input)} inputs", node)
        given = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        for key, value in [*given.items()]:
            default = schema[key].default_value if key in schema else onnx.AttributeProto()
            if key in free or (default.type and onnx.helper.get_attribute_value(default) == value):
                del given[key]
        if given != attributes:
            refuse(f"its attributes are {given}, expected {attributes}", node)
        if self.node_owner.setdefault(node.output[0], self.owner) != self.owner and not shared:
            refuse("two kernels would need it", node)
        return node

    def number(self, name: str) -> Array | None:
        """Return a constant, and cover the nodes that it comes from; None: computed."""
        value = self.index.constant(name)
        while value is not None and (node := self.index.producers.get(name)) is not None:
            self.node_owner[node.output[0]] = SHARED
            name = node.input[0] if node.input else ""
        return value

    def constant(self, node: onnx.NodeProto, position: int, *ranks: int) -> Array:
        """Return an input that is a finite constant of one of these ranks; without ranks a scalar."""
        value = self.number(node.input[position]) if position < len(node.input) else None
        if value is None or value.dtype not in _NUMBERS or value.ndim not in (ranks or (0,)):
            refuse(f"its input {position} is no float32 or integer constant of rank {ranks or 0}", node)
        if not np.isfinite(value).all():
            refuse(f"its input {position} is not finite", node)
        return value

    def vector(self, node: onnx.NodeProto, position: int = 1) -> list[Any]:
        """Return a constant of rank 1, such as axes, as a list."""
        return self.constant(node, position, 1).tolist()  # type: ignore[no-any-return]

    def operands(self, node: onnx.NodeProto, *ranks: int) -> tuple[str, Array]:
        """Return the tensor and the constant that an Add, Mul or Equal is of."""
        constant = self.index.constant(node.input[1]) is not None
        return node.input[1 - constant], self.constant(node, int(constant), *ranks)

    def sizes(self, name: str) -> Any:
        """Return what a computed shape or one axis of it holds: integers, "batch", "length" and "width"."""
        if name not in self._sizes_of:
            value = self.number(name)
            found = self._compute_sizes(name) if value is None else value.tolist()
            if isinstance(found, list) and len(found) > _RANK:
                refuse(f"a shape of {len(found)} axes", name)
            self._sizes_of[name] = found
        return self._sizes_of[name]

    def _compute_sizes(self, name: str) -> Any:  # noqa: PLR0911, PLR0912
        node = self.take(name, *_OF_SHAPES, free=("axis", "value", "to"), shared=True)
        first = node.input[0]
        if node.op_type == "Shape" and first in self.shapes:
            return self.shapes[first]
        if node.op_type == "Shape" and self.kind(first) not in ("Concat", "Reshape"):  # of no shape itself
            while self.kind(first) == "Cast":
                first = self.take(first, "Cast", free=("to",), shared=True).input[0]
            if first not in (TOKENS, MASK, TYPES):
                self.shaped.setdefault(first, name_node(node))
            return ["batch", "length", "width"]
        operands = [self.sizes(part) for part in node.input]
        vectors = [isinstance(each, list) for each in operands]
        match node.op_type, vectors:
            case "Shape", [True]:
                return [len(operands[0])]
            case "Cast", _ if read_attribute(node, "to", 0) == TensorProto.INT64:
                return operands[0]
            case "Gather", [True, False] if read_attribute(node, "axis", 0) == 0 and operands[1] in _RANKS:
                return [*operands[0], *[None] * _RANK][operands[1]]
            case "Gather", [True, True] if read_attribute(node, "axis", 0) == 0 and operands[1] == [-1]:
                return operands[0][-1:]
            case "Unsqueeze", [False, True] if operands[1] == [0]:
                return operands[:1]
            case "Reshape", [True, True] if operands[1] == [-1]:
                return operands[0]
            case "ConstantOfShape", [True] if operands[0][0] in _RANKS and len(operands[0]) == 1:
                return (
                    onnx.numpy_helper.to_array(read_attribute(node, "value", None)).tolist() * operands[0][0]
                )
            case "Concat", _ if all(vectors) and read_attribute(node, "axis", 1) == 0:
                return [size for part in operands for size in part]
            case (("Add" | "Div"), _) if _are_numbers(operands):
                return self._broadcast(node.op_type, operands, any(vectors))
            case (("Mul" | "Equal" | "Where"), _) if any(vectors):
                return self._broadcast(node.op_type, operands, True)
        refuse("it computes no shape that is known here", node)

    @staticmethod
    def _broadcast(kind: str, operands: list[Any], vectors: bool) -> Any:
        """Compute sizes one by one."""
        most = max(len(each) if isinstance(each, list) else 1 for each in operands)
        spread = (each if isinstance(each, list) else [each] * most for each in operands)
        made = [_ELEMENTWISE[kind](*each) for each in zip(*spread, strict=False)]
        return made if vectors else made[0]


def _are_numbers(operands: list[Any]) -> bool:
    """Return whether sizes are integers over 0, which can be added and divided."""
    numbers = (each for part in operands for each in (part if isinstance(part, list) else [part]))
    return all(type(each) is int and each > 0 for each in numbers)
