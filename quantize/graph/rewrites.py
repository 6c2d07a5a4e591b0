"""Rewrites of an exported graph that change no value and that an engine turns into fewer, faster kernels.

What each one buys was measured kernel by kernel: docs/performance.md.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qdqbench.quantize.graph.index import FOLDED, GraphIndex, attribute, prune, replace_nodes, run_of
from qdqbench.quantize.graph.weights import input_key, weight_dq
from qdqbench.quantize.models.families.family import Family
from qdqbench.quantize.utils.limits import FP16_MAX

_HEADS_AXES = (0, 2, 1, 3)  # of [B, L, H, D] in [B, H, L, D], and back
# tanh(t) = 2 sigmoid(2t) - 1 in 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
_GELU_LINEAR, _GELU_CUBIC = 2 * np.sqrt(2 / np.pi), 2 * np.sqrt(2 / np.pi) * 0.044715


@dataclass
class _Branch:
    """A linear of an attention, up to the tensor that holds its heads apart."""

    matmul: onnx.NodeProto
    product: str  # [B, L, H * D]
    heads: dict[str, tuple[int, ...]]  # outputs of the Transposes, each with its axes in [B, H, L, D]
    size: int  # D
    width: int  # H * D
    nodes: list[onnx.NodeProto]  # Reshape and Transposes, replaced

    @property
    def straight(self) -> bool:
        """Return whether the GEMM writes INT8 itself, with no kernel after it: no copy is to be shared."""
        return self.product == str(self.matmul.output[0])


def share_scaled_inputs(model: onnx.ModelProto) -> int:
    """Let linears that read one tensor times equal factors (SmoothQuant) share the Mul, in place.

    Without it the inputs of q, k and v are three tensors, and their GEMMs cannot be merged.

    Returns:
        Mul nodes that became needless.
    """
    index = GraphIndex(model)
    first: dict[tuple[str, bytes], str] = {}
    replaced: dict[str, str] = {}
    for node in model.graph.node:
        factors = index.constant(node.input[1]) if node.op_type == "Mul" else None
        if factors is None or factors.ndim != 1:
            continue
        output = first.setdefault((node.input[0], factors.tobytes()), node.output[0])
        if output != node.output[0]:
            replaced[node.output[0]] = output
    for node in model.graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = replaced.get(name, name)
    return len(replaced)


def clip_scaled_linears(model: onnx.ModelProto) -> int:
    """Put a Clip to the range of FP16 between a linear and a Mul by factors (SmoothQuant), in place.

    OpenVINO 2026.4 merges the Mul and the Q behind it into a FakeQuantize with one range per channel, which
    computes other values where shapes are dynamic and the linear has other readers. The linear behind the
    narrow embeddings of ELECTRA and ALBERT is one. It merges no Mul behind an operator on elements.

    Returns:
        Clip nodes.
    """
    index = GraphIndex(model)
    nodes: list[onnx.NodeProto] = []
    clipped: dict[str, str] = {}
    for node in model.graph.node:
        factors = index.constant(node.input[1]) if node.op_type == "Mul" else None
        source = node.input[0] if factors is not None and factors.ndim == 1 else ""
        maker = index.producers.get(source)
        if maker is not None and maker.op_type in ("MatMul", "Gemm", "Add"):
            if source not in clipped:
                clipped[source] = f"{source}_clipped"
                bounds = [f"{source}_{bound}" for bound in ("min", "max")]
                for name, value in zip(bounds, (-FP16_MAX, FP16_MAX), strict=True):
                    model.graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
                nodes.append(
                    helper.make_node("Clip", [source, *bounds], [clipped[source]], name=f"{maker.name}/Clip")
                )
            node.input[0] = clipped[source]
        nodes.append(node)
    replace_nodes(model, nodes)
    return len(clipped)


def join_heads(model: onnx.ModelProto) -> int:
    """Move q, k and v to their heads in one step, in place: Concat, one Transpose, Split.

    An engine copies q, k and v into the layout of its attention kernel in a kernel each; joined they take
    one. Only linears with INT8 weights that read the same tensor are joined. Where one of them has neither
    scales nor a bias behind its GEMM, all three must, and share one scale: one GEMM makes them then, and one
    copy takes them apart.

    Returns:
        Attentions that were rewritten.
    """
    index = GraphIndex(model)
    groups: dict[str, list[_Branch]] = defaultdict(list)
    for node in model.graph.node:
        if (branch := _branch(index, node)) is not None:
            groups[f"{input_key(index, node)} {branch.size} {branch.width}"].append(branch)
    before: dict[int, list[onnx.NodeProto]] = {}
    dropped: set[int] = set()
    joined = [members for members in groups.values() if _joinable(index, members)]
    order = {id(node): number for number, node in enumerate(model.graph.node)}
    for members in joined:
        made = max(order[id(index.producers[member.product])] for member in members)
        moves = (id(node) for member in members for node in member.nodes[1:])
        before[min((key for key in moves if order[key] > made), key=order.__getitem__)] = _joined(
            model, members
        )
        dropped |= {id(node) for member in members for node in member.nodes}
    nodes = []
    for node in model.graph.node:
        nodes += before.get(id(node), [])
        if id(node) not in dropped:
            nodes.append(node)
    replace_nodes(model, nodes)
    return len(joined)


def _joinable(index: GraphIndex, members: list[_Branch]) -> bool:
    straight = [member.matmul for member in members if member.straight]
    if not straight or len(members) != 3:
        return len(members) == 3
    dequantizers = [dq for node in straight if (dq := weight_dq(index, node)) is not None]
    scales = [index.constant(dq.input[1]) for dq in dequantizers]
    same = {float(scale) for scale in scales if scale is not None and not scale.ndim}
    return len(scales) == len(members) and len(same) == 1


def has_direct_heads(model: onnx.ModelProto) -> bool:
    """Return whether an INT8 linear of an attention has nothing between its GEMM and its heads."""
    index = GraphIndex(model)
    branches = (_branch(index, node) for node in model.graph.node)
    return any(branch.straight for branch in branches if branch is not None)


def note_unjoined(family: Family, linears: Iterable[str], joined: int) -> str | None:
    """Return a sentence where fewer attentions were joined than have q, k and v in INT8; else None.

    Args:
        linears: modules with INT8 weights, once for each time that they run.
    """
    parts: dict[int | None, Counter[str]] = defaultdict(Counter)
    for name in linears:
        parts[family.layer_of(name)][family.role(name)] += 1
    possible = sum(min(found[role] for role in ("query", "key", "value")) for found in parts.values())
    if joined >= possible:
        return None
    return (
        f"q, k and v of {possible - joined} of {possible} attentions were not joined, as their inputs are "
        "quantized with different scales or the installed torch or transformers writes another graph: the "
        "engine moves them to their heads in separate kernels, which is slower and not wrong"
    )


def is_tanh_gelu(node: onnx.NodeProto) -> bool:
    """Return whether a node is a GELU in its tanh form."""
    tanh = any(item.name == "approximate" and item.s == b"tanh" for item in node.attribute)
    return node.op_type == "Gelu" and tanh


def shorten_gelu(model: onnx.ModelProto) -> int:
    """Write each tanh GELU as x * sigmoid(x (a + b x^2)), in place: the same function in fewer operations.

    The kernel behind the first feed-forward GEMM is bound by its instructions; an infinite square still
    gives x or 0, so nothing overflows in FP16.

    Returns:
        GELUs that were rewritten.
    """
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in model.graph.node:
        if not is_tanh_gelu(node):
            nodes.append(node)
            continue
        nodes += _sigmoid_form(model, node)
        count += 1
    replace_nodes(model, nodes)
    return count


def _branch(index: GraphIndex, matmul: onnx.NodeProto) -> _Branch | None:
    """Return the branch that a MatMul with INT8 weights starts, if it ends in the heads of an attention."""
    width = _width(index, matmul) if matmul.op_type == "MatMul" else 0
    if not width:
        return None
    tensor = matmul.output[0]
    while (node := _only_consumer(index, tensor)) is not None and node.op_type in ("Mul", "Add"):
        tensor = node.output[0]
    moves = index.consumers.get(node.output[0], []) if node is not None and node.op_type == "Reshape" else []
    if node is None or not moves or any(move.op_type != "Transpose" for move in moves):
        return None
    size = _head_size(index, node)
    perms = {move.output[0]: tuple(axis for item in move.attribute for axis in item.ints) for move in moves}
    if any(len(perm) != len(_HEADS_AXES) for perm in perms.values()) or size < 1 or width % size:
        return None
    heads = {name: tuple(_HEADS_AXES[axis] for axis in perm) for name, perm in perms.items()}
    return _Branch(matmul, tensor, heads, size, width, [node, *moves])


def _joined(model: onnx.ModelProto, members: list[_Branch]) -> list[onnx.NodeProto]:
    """Return the nodes that replace the Reshape and Transpose of three branches."""
    size, width = members[0].size, members[0].width
    reshape = members[0].nodes[0].name
    path = f"{reshape.rpartition('/')[0]}/joined{run_of(reshape)}"
    shape, axes = f"{path}_shape", f"{path}_axes"
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array([0, 0, len(members), width // size, size], np.int64), shape),
            numpy_helper.from_array(np.array([0], np.int64), axes),
        ]
    )
    parts = [f"{path}_{number}" for number in range(len(members))]
    joined, split, heads = path, f"{path}_split", f"{path}_heads"
    steps: list[tuple[str, str, list[str], list[str], dict[str, Any]]] = [
        (joined, "Concat", [member.product for member in members], [joined], {"axis": 2}),
        (joined, "Reshape", [joined, shape], [split], {}),
        (joined, "Transpose", [split], [heads], {"perm": [2, 0, 3, 1, 4]}),
        (joined, "Split", [heads], parts, {"axis": 0, "num_outputs": 3}),
    ]
    for part, member in zip(parts, members, strict=True):
        plain = next((name for name, perm in member.heads.items() if perm == (0, 1, 2, 3)), None)
        squeezed = plain or f"{part}_squeezed"
        steps.append((part, "Squeeze", [part, axes], [squeezed], {}))
        moved = ((name, perm) for name, perm in member.heads.items() if name != plain)
        for number, (name, perm) in enumerate(moved):
            place = f"{part}_{number}" if number else part
            steps.append((place, "Transpose", [squeezed], [name], {"perm": perm}))
    return [
        helper.make_node(kind, inputs, outputs, name=f"{place}_{kind}", **attributes)
        for place, kind, inputs, outputs, attributes in steps
    ]


def _sigmoid_form(model: onnx.ModelProto, gelu: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the nodes of one GELU; their names stay inside its module."""
    x, name = gelu.input[0], gelu.name
    constants = {f"{name}_linear": _GELU_LINEAR, f"{name}_cubic": _GELU_CUBIC}
    for key, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), key))
    linear, cubic = constants
    steps = [
        ("Mul", [x, x], f"{name}_square"),
        ("Mul", [f"{name}_square", cubic], f"{name}_scaled"),
        ("Add", [f"{name}_scaled", linear], f"{name}_slope"),
        ("Mul", [f"{name}_slope", x], f"{name}_argument"),
        ("Sigmoid", [f"{name}_argument"], f"{name}_gate"),
        ("Mul", [x, f"{name}_gate"], gelu.output[0]),
    ]
    return [
        helper.make_node(kind, inputs, [output], name=f"{name}_{number}_{kind}")
        for number, (kind, inputs, output) in enumerate(steps)
    ]


def _width(index: GraphIndex, matmul: onnx.NodeProto) -> int:
    """Return the output features of a MatMul whose weight is INT8 codes [N, K]; else 0."""
    dq = weight_dq(index, matmul)
    behind = index.producers.get(matmul.input[1])
    if dq is None or dq.op_type != "DequantizeLinear" or behind is None or behind.op_type != "Transpose":
        return 0
    codes = index.constant(dq.input[0])
    return int(codes.shape[0]) if codes is not None else 0


def _head_size(index: GraphIndex, reshape: onnx.NodeProto) -> int:
    """Return D of a Reshape to a constant [B, L, H, D], or to a Concat that ends in D; 0 or -1 if unknown."""
    shape = index.constant(reshape.input[1])
    if shape is not None:
        return int(np.ravel(shape)[-1])
    concat = index.producers.get(reshape.input[1])
    if concat is None or concat.op_type != "Concat":
        return 0
    last = concat.input[-1]
    unsqueeze = index.producers.get(last)
    value = index.constant(unsqueeze.input[0] if unsqueeze is not None and unsqueeze.input else last)
    return int(np.ravel(value)[-1]) if value is not None else 0


def _only_consumer(index: GraphIndex, tensor: str) -> onnx.NodeProto | None:
    consumers = index.consumers.get(tensor, [])
    return consumers[0] if len(consumers) == 1 else None


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


def use_sequence_first(model: onnx.ModelProto) -> int:
    """Turn the hidden states between the embeddings and the head of an encoder, in place; values stay.

    A fused attention reads q, k and v as [batch * heads, length, head size] with one stride for all of
    batch * heads. A linear's [batch, length, hidden] has no such view and is copied; [length, batch, hidden]
    has one.

    Returns:
        Attentions whose q, k and v need no copy any more. 0: nothing was changed, as no attention was
        recognized, or something between two of them is not computed for every token alone.
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
                behind.setdefault(
                    id(index.producers[name]), [transpose_hidden(name, back, f"{_BACK}_{len(behind)}")]
                )
    for number, name in enumerate(value.name for value in model.graph.output if value.name in region.tensors):
        # a head that computes every token alone
        maker, inner = index.producers[name], f"{name}/turned"
        backs = behind.setdefault(id(maker), [])
        _rename([maker, *index.consumers.get(name, []), *backs], name, inner)
        backs.append(transpose_hidden(inner, name, f"{_BACK}_out_{number}"))
    # ahead of the LayerNorm, where the kernel of the embeddings does it by the way
    first = transpose_hidden(norm.input[0], f"{norm.input[0]}/tokens_first", _START)
    norm.input[0] = first.output[0]
    nodes = [new for node in model.graph.node for new in (node, *behind.get(id(node), []))]
    nodes.insert(nodes.index(norm), first)
    replace_nodes(model, nodes)
    prune(model)
    return len(region.out)


def list_sequence_first(model: onnx.ModelProto) -> set[str]:
    """Return the tensors that are [length, batch, ...] after `use_sequence_first`; else none."""
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
    """Return whether a node's other operands are constants that every token gets alike."""
    others = [name for name in node.input if name and name not in tensors]
    if node.op_type == "MatMul":
        return node.input[0] in tensors and others == [node.input[1]] and node.input[1] not in computed
    if node.op_type == "Concat":
        return not others and attribute(node, "axis") in (-1, 2)
    constants = (index.constant(name) for name in others if name not in computed)
    return computed.isdisjoint(others) and all(value is not None and value.ndim <= 1 for value in constants)


def _splits(index: GraphIndex, reshape: onnx.NodeProto) -> bool:
    """Return whether a Reshape makes [batch, length, (3,) heads, size], which Transposes alone read."""
    moves = index.consumers.get(reshape.output[0], [])
    moved = all(move.op_type == "Transpose" and len(_perm(move)) in (4, 5) for move in moves)
    return bool(moves) and moved and _constant_width(index, reshape) is not None


def _merges(index: GraphIndex, move: onnx.NodeProto) -> bool:
    """Return whether a Reshape to [batch, length, hidden] alone reads a Transpose."""
    readers = index.consumers.get(move.output[0], [])
    return (
        len(readers) == 1
        and readers[0].op_type == "Reshape"
        and len(_constant_width(index, readers[0]) or []) == 1
    )


def _constant_width(index: GraphIndex, reshape: onnx.NodeProto) -> list[int] | None:
    """Return the size after batch and length in a Reshape's shape; None where it is not constant."""
    shape, concat = index.constant(reshape.input[1]), index.producers.get(reshape.input[1])
    if shape is not None:
        return [int(size) for size in np.ravel(shape)[2:]]
    if concat is None or concat.op_type != "Concat":
        return None
    sizes = [index.constant(name, (*FOLDED, "Unsqueeze")) for name in concat.input[2:]]
    return None if any(size is None for size in sizes) else [int(np.ravel(size)[0]) for size in sizes]  # type: ignore[arg-type]


def _first_token(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Return whether a node takes the hidden state of one token, such as the first, of every sample."""
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
        shape = np.array([0, 0, *(_constant_width(index, reshape) or [])], np.int64)
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


def transpose_hidden(source: str, target: str, name: str) -> onnx.NodeProto:
    """Return a Transpose between [batch, length, hidden] and [length, batch, hidden]."""
    return helper.make_node("Transpose", [source], [target], name=name, perm=list(TURN))
