"""Tokens first: an encoder whose hidden states are [length, batch, hidden] needs no copies of q, k and v.

A fused attention reads q, k and v as [batch * heads, length, head size] with one stride for all of batch *
heads. What a linear makes of [batch, length, hidden] has no such view, so it is copied; in the order [length,
batch, heads, head size] it is one, and the attention reads what the linear wrote.
"""

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qdqbench.quantize.graph.index import FOLDED, GraphIndex, attribute, prune, replace_nodes

TURN = (1, 0, 2)  # [batch, length, hidden] to [length, batch, hidden], and back
_START, _BACK = "/tokens_first/Transpose", "/batch_first/Transpose"
_SWAPPED = {0: 1, 1: 0}
_OUT = (0, 2, 1, 3)  # of [batch, heads, length, size] to [batch, length, heads, size]
_OUT_TURNED = (2, 0, 1, 3)  # the same to [length, batch, heads, size]
# what computes every token alone, where the other operands are constants of a token's width or alike
_BY_TOKEN = {
    "Add", "Cast", "Concat", "Div", "DequantizeLinear", "Erf", "Gelu", "Identity", "LayerNormalization",
    "MatMul", "Mul", "QuantizeLinear", "Relu", "Sigmoid", "Sqrt", "Sub", "Tanh",
}  # fmt: skip


def tokens_first(model: onnx.ModelProto) -> int:
    """Turn the hidden states between the embeddings and the head of an encoder, in place; values stay.

    Returns:
        Attentions whose q, k and v need no copy any more. 0: nothing was changed, as no attention was
        recognised, or something between two of them is not computed for every token alone.
    """
    index = GraphIndex(model)
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    regions = ((norm, _walk(index, norm.output[0], _OUT)) for norm in norms)
    norm, region = next((found for found in regions if found[1].out), (None, _Region(set())))
    if norm is None or len(region.into) not in (len(region.out), 3 * len(region.out)):
        return 0
    _turn_heads(model, index, region)
    inside = {id(node) for node in region.inside}
    behind: dict[int, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        if _first_token(index, node) and node.input[0] in region.tensors:
            _set(node, "axis", 0)
            inside.add(id(node))
        for position, name in enumerate(node.input):
            if name in region.tensors and id(node) not in inside:
                node.input[position] = back = f"{name}/batch_first"
                behind.setdefault(id(index.producers[name]), [turn(name, back, f"{_BACK}_{len(behind)}")])
    for number, name in enumerate(value.name for value in model.graph.output if value.name in region.tensors):
        # a head that computes every token alone
        maker, inner = index.producers[name], f"{name}/turned"
        backs = behind.setdefault(id(maker), [])
        _rename([maker, *index.consumers.get(name, []), *backs], name, inner)
        backs.append(turn(inner, name, f"{_BACK}_out_{number}"))
    # ahead of the LayerNorm, where the kernel of the embeddings does it by the way
    first = turn(norm.input[0], f"{norm.input[0]}/tokens_first", _START)
    norm.input[0] = first.output[0]
    nodes = [new for node in model.graph.node for new in (node, *behind.get(id(node), []))]
    nodes.insert(nodes.index(norm), first)
    replace_nodes(model, nodes)
    prune(model)
    return len(region.out)


def turned(model: onnx.ModelProto) -> set[str]:
    """Tensors of a graph that are [length, batch, ...] where `tokens_first` has turned it; else none."""
    index = GraphIndex(model)
    starts = [node.output[0] for node in model.graph.node if node.name == _START]
    return _walk(index, starts[0], _OUT_TURNED).tensors if starts else set()


@dataclass
class _Region:
    """What is computed for every token alone from one tensor on."""

    tensors: set[str]
    inside: list[onnx.NodeProto] = field(default_factory=list)  # read a tensor of it as it is
    into: list[onnx.NodeProto] = field(default_factory=list)  # Reshapes to heads, before Transposes
    out: list[onnx.NodeProto] = field(default_factory=list)  # Transposes from heads, before a Reshape


def _walk(index: GraphIndex, start: str, out: tuple[int, ...]) -> _Region:
    """Follow a tensor through a graph; nodes are in topological order."""
    region = _Region({start})
    computed = {value.name for value in index.graph.input}
    for node in index.graph.node:
        if computed.isdisjoint(node.input):
            continue
        computed.update(node.output)
        if node.op_type == "Transpose" and _perm(node) == out and _merges(index, node):
            reshape = index.consumers[node.output[0]][0]
            region.out.append(node)
            region.tensors.add(reshape.output[0])
        elif region.tensors.isdisjoint(node.input):
            continue
        elif node.op_type == "Reshape" and _splits(index, node):
            region.into.append(node)
            region.inside.append(node)
        elif node.op_type in _BY_TOKEN and _by_token(index, node, region.tensors, computed):
            region.inside.append(node)
            region.tensors.update(node.output)
    return region


def _by_token(index: GraphIndex, node: onnx.NodeProto, tensors: set[str], computed: set[str]) -> bool:
    """Whether a node's other operands are constants that every token gets alike."""
    others = [name for name in node.input if name and name not in tensors]
    if node.op_type == "MatMul":
        return node.input[0] in tensors and others == [node.input[1]] and node.input[1] not in computed
    if node.op_type == "Concat":
        return not others and attribute(node, "axis") in (-1, 2)
    constants = (index.constant(name) for name in others if name not in computed)
    return computed.isdisjoint(others) and all(value is not None and value.ndim <= 1 for value in constants)


def _splits(index: GraphIndex, reshape: onnx.NodeProto) -> bool:
    """Whether a Reshape makes [batch, length, (3,) heads, size], which Transposes alone read."""
    moves = index.consumers.get(reshape.output[0], [])
    moved = all(move.op_type == "Transpose" and len(_perm(move)) in (4, 5) for move in moves)
    return bool(moves) and moved and _width(index, reshape) is not None


def _merges(index: GraphIndex, move: onnx.NodeProto) -> bool:
    """Whether a Reshape to [batch, length, hidden] alone reads a Transpose."""
    readers = index.consumers.get(move.output[0], [])
    return len(readers) == 1 and readers[0].op_type == "Reshape" and len(_width(index, readers[0]) or []) == 1


def _width(index: GraphIndex, reshape: onnx.NodeProto) -> list[int] | None:
    """What a Reshape's shape holds behind batch and length; None where it is not constant."""
    shape, concat = index.constant(reshape.input[1]), index.producers.get(reshape.input[1])
    if shape is not None:
        return [int(size) for size in np.ravel(shape)[2:]]
    if concat is None or concat.op_type != "Concat":
        return None
    sizes = [index.constant(name, (*FOLDED, "Unsqueeze")) for name in concat.input[2:]]
    return None if any(size is None for size in sizes) else [int(np.ravel(size)[0]) for size in sizes]  # type: ignore[arg-type]


def _first_token(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Whether a node takes the hidden state of one token, such as the first, of every sample."""
    if node.op_type != "Gather" or attribute(node, "axis") != 1:
        return False
    number = index.constant(node.input[1])
    return number is not None and not number.ndim


def _turn_heads(model: onnx.ModelProto, index: GraphIndex, region: _Region) -> None:
    """Reshape to and from heads in the other order; shapes take batch and length from their input."""
    for move in [move for reshape in region.into for move in index.consumers[reshape.output[0]]]:
        _set(move, "perm", [_SWAPPED.get(axis, axis) for axis in _perm(move)])
    for move in region.out:
        _set(move, "perm", list(_OUT_TURNED))
    merging = [index.consumers[move.output[0]][0] for move in region.out]
    for reshape in (*region.into, *merging):
        known = index.constant(reshape.input[1])
        if known is not None and not known[:2].any():
            continue
        shape = np.array([0, 0, *(_width(index, reshape) or [])], np.int64)
        name = f"{reshape.output[0]}/shape"
        model.graph.initializer.append(numpy_helper.from_array(shape, name))
        reshape.input[1] = name


def _rename(nodes: list[onnx.NodeProto], old: str, new: str) -> None:
    for node in nodes:
        for names in (node.input, node.output):
            for position, name in enumerate(names):
                names[position] = new if name == old else name


def _perm(move: onnx.NodeProto) -> tuple[int, ...]:
    return next((tuple(item.ints) for item in move.attribute if item.name == "perm"), ())


def _set(node: onnx.NodeProto, name: str, value: int | list[int]) -> None:
    kept = [item for item in node.attribute if item.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def turn(source: str, target: str, name: str) -> onnx.NodeProto:
    """A Transpose between [batch, length, hidden] and [length, batch, hidden]."""
    return helper.make_node("Transpose", [source], [target], name=name, perm=list(TURN))
