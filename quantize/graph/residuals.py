"""INT8 residuals in an ONNX graph: what each LayerNorm adds, and whether it comes from a DequantizeLinear."""

from dataclasses import dataclass
from typing import Any

import onnx
from onnx import numpy_helper

from qdqbench.quantize.graph.index import MAX_STEPS, GraphIndex, module_of

_NORMS = ("LayerNormalization", "RMSNormalization", "GroupNormalization")
_MOVES = ("Cast", "Identity", "Reshape", "Dropout")


@dataclass(frozen=True)
class ResidualAdd:
    """The Add that a normalization reads."""

    norm: onnx.NodeProto
    add: onnx.NodeProto
    dq: onnx.NodeProto | None  # behind one of its operands: the residual is INT8

    @property
    def module(self) -> str:
        """The module that adds, by the node's name."""
        return module_of(self.add.name)


def find_residuals(index: GraphIndex) -> list[ResidualAdd]:
    """Return every Add before a normalization, in the order of the graph."""
    added = []
    for norm in index.graph.node:
        known = norm.op_type in _NORMS and norm.input
        add = index.producers.get(_still(index, norm.input[0])) if known else None
        if add is not None and add.op_type == "Add":
            behind = (_dequantize(index, name) for name in add.input)
            added.append(ResidualAdd(norm, add, next((dq for dq in behind if dq is not None), None)))
    return added


def list_int8_norms(model: onnx.ModelProto) -> list[str]:
    """Return the names of the normalizations that add an INT8 residual, in the order of the graph."""
    return [found.norm.name for found in find_residuals(GraphIndex(model)) if found.dq is not None]


def find_other_rounding(index: GraphIndex, residual: ResidualAdd) -> onnx.NodeProto | None:
    """Return a QuantizeLinear of the same tensor with another scale or other factors than the residual's."""
    if residual.dq is None:
        return None
    own = index.producers[_still(index, residual.dq.input[0])]
    root, rounding = _rounding(index, own)
    node: onnx.NodeProto
    for node in index.graph.node:
        if node.op_type == "QuantizeLinear" and _stored(index, node.input[0]) is None:
            other, way = _rounding(index, node)
            if other == root and way != rounding:
                return node
    return None


def _rounding(index: GraphIndex, q: onnx.NodeProto) -> tuple[str, Any]:
    """Return the tensor that a Q rounds, before the factors of smoothing; its scale and these factors."""
    way: list[Any] = [_value(index, q.input[1])]
    name = _still(index, q.input[0])
    for _ in range(MAX_STEPS):
        node = index.producers.get(name)
        before = _unscaled(index, node) if node is not None else None
        if node is None or before is None:
            break
        way.append((node.op_type, _value(index, node.input[1 - list(node.input).index(before)])))
        name = _still(index, before)
    return name, way


def _dequantize(index: GraphIndex, name: str) -> onnx.NodeProto | None:
    """Return the DequantizeLinear of an activation behind a tensor, across moves and factors of smoothing."""
    for _ in range(MAX_STEPS):
        node = index.producers.get(_still(index, name))
        if node is None:
            return None
        if node.op_type == "DequantizeLinear":
            q = index.producers.get(_still(index, node.input[0]))
            activation = (
                q is not None and q.op_type == "QuantizeLinear" and _stored(index, q.input[0]) is None
            )
            return node if activation else None
        following = _unscaled(index, node)
        if following is None:
            return None
        name = following
    return None


def _unscaled(index: GraphIndex, node: onnx.NodeProto) -> str | None:
    """Return the input of a Mul or Div by a constant (factors of smoothing); None for any other node."""
    if node.op_type not in ("Mul", "Div") or len(node.input) != 2:
        return None
    first, second = (_stored(index, name) is not None for name in node.input)
    if second and not first:
        return str(node.input[0])
    return str(node.input[1]) if first and not second and node.op_type == "Mul" else None


def _value(index: GraphIndex, name: str) -> Any:
    """Return the value of a constant, or the name of what is computed."""
    tensor = _stored(index, name)
    return name if tensor is None else (tensor.data_type, numpy_helper.to_array(tensor).tobytes())


def _stored(index: GraphIndex, name: str) -> onnx.TensorProto | None:
    """Return the tensor of an initializer or of a Constant node, moved or not, in files of any origin."""
    return index.stored(_still(index, name))


def _still(index: GraphIndex, name: str) -> str:
    """Return a tensor before it was moved."""
    return index.origin(name, _MOVES)[1]
