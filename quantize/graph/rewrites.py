"""Rewrites of an exported graph that change no value, for fewer and faster kernels (why-it-is-fast.md)."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from qdqbench.quantize.graph.index import (
    FOLDED,
    GraphIndex,
    attribute,
    permutation_of,
    prune,
    rename_tensors,
    replace_nodes,
    run_of,
    store_constants,
)
from qdqbench.quantize.graph.weights import input_key, weight_dq
from qdqbench.quantize.models.families.family import Family
from qdqbench.quantize.utils.arrays import Array

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


def share_scaled_inputs(model: onnx.ModelProto) -> None:
    """Let linears that read one tensor times equal factors (SmoothQuant) share the Mul: then they merge."""
    index = GraphIndex(model)
    first: dict[tuple[str, bytes], str] = {}
    replaced: dict[str, str] = {}
    for node in model.graph.node:
        if (factors := _factors(index, node)) is None:
            continue
        output = first.setdefault((node.input[0], factors.tobytes()), node.output[0])
        if output != node.output[0]:
            replaced[node.output[0]] = output
    rename_tensors(model.graph.node, replaced)


def _factors(index: GraphIndex, node: onnx.NodeProto) -> Array | None:
    """Return the factors of channels that a Mul has; None for any other node."""
    factors = index.constant(node.input[1]) if node.op_type == "Mul" else None
    return factors if factors is not None and factors.ndim == 1 else None


def clip_scaled_linears(model: onnx.ModelProto) -> int:
    """Put a Clip without bounds, which changes no number, between a linear and a Mul by factors, in place.

    OpenVINO 2026.4 merges such a Mul (SmoothQuant) and the next Q into a FakeQuantize with a range per
    channel. That is wrong where shapes are dynamic and the linear has other readers, as after the narrow
    embeddings of ELECTRA and ALBERT. It does not merge a Mul that follows an elementwise operator.
    Returns the number of Clips.
    """
    index = GraphIndex(model)
    nodes: list[onnx.NodeProto] = []
    clipped: dict[str, str] = {}
    for node in model.graph.node:
        source = "" if _factors(index, node) is None else node.input[0]
        maker = index.producers.get(source)
        if maker is not None and maker.op_type in ("MatMul", "Gemm", "Add"):
            if source not in clipped:
                clipped[source] = f"{source}_clipped"
                nodes.append(helper.make_node("Clip", [source], [clipped[source]], name=f"{maker.name}/Clip"))
            node.input[0] = clipped[source]
        nodes.append(node)
    replace_nodes(model, nodes)
    return len(clipped)


def join_heads(model: onnx.ModelProto) -> int:
    """Move q, k and v to their heads in one step, in place: Concat, one Transpose, Split.

    An engine copies q, k and v into the layout of its attention kernel in a kernel each; joined they take
    one. Where one of them has neither scales nor a bias behind its GEMM, all three must, and share one scale:
    one GEMM makes them then, and one copy takes them apart. Returns the number of rewritten attentions.
    """
    index = GraphIndex(model)
    groups: dict[str, list[_Branch]] = defaultdict(list)
    for node in model.graph.node:
        if (branch := _branch(index, node)) is not None:
            groups[f"{input_key(index, node)} {branch.size} {branch.width}"].append(branch)
    joinable = [members for members in groups.values() if _can_join(index, members)]
    order = {id(node): number for number, node in enumerate(model.graph.node)}
    before: dict[int, list[onnx.NodeProto]] = {}
    for members in joinable:
        last = max(order[id(index.producers[member.product])] for member in members)
        moves = (order[id(node)] for member in members for node in member.nodes[1:])
        before[min(number for number in moves if number > last)] = _join(model, members)
    dropped = {id(node) for members in joinable for member in members for node in member.nodes}
    nodes = []
    for number, node in enumerate(model.graph.node):
        nodes += before.get(number, [])
        if id(node) not in dropped:
            nodes.append(node)
    replace_nodes(model, nodes)
    return len(joinable)


def _can_join(index: GraphIndex, members: list[_Branch]) -> bool:
    straight = [member.matmul for member in members if member.straight]
    if not straight or len(members) != 3:
        return len(members) == 3
    dequantizers = [dq for node in straight if (dq := weight_dq(index, node)) is not None]
    scales = [index.constant(dq.input[1]) for dq in dequantizers]
    same = {float(scale) for scale in scales if scale is not None and not scale.ndim}
    return len(scales) == len(members) and len(same) == 1


def has_direct_heads(model: onnx.ModelProto) -> bool:
    index = GraphIndex(model)
    branches = (_branch(index, node) for node in model.graph.node)
    return any(branch.straight for branch in branches if branch is not None)


def note_unjoined(family: Family, linears: Iterable[str], joined: int) -> str | None:
    """Note where fewer attentions were joined than have q, k and v in INT8: `linears`, once for each run."""
    parts: dict[int | None, Counter[str]] = defaultdict(Counter)
    for name in linears:
        parts[family.layer_of(name)][family.role(name)] += 1
    possible = sum(min(roles[role] for role in ("query", "key", "value")) for roles in parts.values())
    if joined >= possible:
        return None
    return (
        f"q, k and v of {possible - joined} of {possible} attentions were not joined: their inputs are "
        "quantized with different scales, or the installed torch or transformers writes another graph. The "
        "engine moves them to their heads in separate kernels, which is slower and not wrong"
    )


def is_tanh_gelu(node: onnx.NodeProto) -> bool:
    tanh = any(item.name == "approximate" and item.s == b"tanh" for item in node.attribute)
    return node.op_type == "Gelu" and tanh


def shorten_gelu(model: onnx.ModelProto) -> int:
    """Write each tanh GELU as x * sigmoid(x (a + b x^2)), in place: the same function in fewer operations.

    The kernel behind the first feed-forward GEMM is bound by its instructions; an infinite square still
    gives x or 0, so nothing overflows in FP16. Returns the number of GELUs that were rewritten.
    """
    nodes: list[onnx.NodeProto] = []
    count = sum(map(is_tanh_gelu, model.graph.node))
    for node in model.graph.node:
        nodes += _write_sigmoid(model, node) if is_tanh_gelu(node) else [node]
    replace_nodes(model, nodes)
    return count


def _branch(index: GraphIndex, matmul: onnx.NodeProto) -> _Branch | None:
    """Return the branch that a MatMul with INT8 weights starts, if it ends in the heads of an attention."""
    turned = index.producers.get(matmul.input[1]) if matmul.op_type == "MatMul" else None
    dq = weight_dq(index, matmul) if turned is not None and turned.op_type == "Transpose" else None
    codes = index.constant(dq.input[0]) if dq is not None and dq.op_type == "DequantizeLinear" else None
    if codes is None:
        return None
    width = int(codes.shape[0])  # codes are [N, K]
    tensor = matmul.output[0]
    while len(readers := index.consumers.get(tensor, [])) == 1 and readers[0].op_type in ("Mul", "Add"):
        tensor = readers[0].output[0]
    node = readers[0] if len(readers) == 1 and readers[0].op_type == "Reshape" else None
    moves = index.consumers.get(node.output[0], []) if node is not None else []
    if node is None or not moves or any(move.op_type != "Transpose" for move in moves):
        return None
    size = (_constant_sizes(index, node, -1) or [0])[-1]
    perms = {move.output[0]: permutation_of(move) or () for move in moves}
    if any(len(perm) != len(_HEADS_AXES) for perm in perms.values()) or size < 1 or width % size:
        return None
    heads = {name: tuple(_HEADS_AXES[axis] for axis in perm) for name, perm in perms.items()}
    return _Branch(matmul, tensor, heads, size, width, [node, *moves])


def _join(model: onnx.ModelProto, members: list[_Branch]) -> list[onnx.NodeProto]:
    size, width = members[0].size, members[0].width
    reshape = members[0].nodes[0].name
    path = f"{reshape.rpartition('/')[0]}/joined{run_of(reshape)}"
    shape, axes, split, heads = f"{path}_shape", f"{path}_axes", f"{path}_split", f"{path}_heads"
    sizes = np.array([0, 0, len(members), width // size, size], np.int64)
    store_constants(model, {shape: sizes, axes: np.array([0], np.int64)})
    parts = [f"{path}_{number}" for number in range(len(members))]
    steps: list[tuple[str, str, list[str], list[str], dict[str, Any]]] = [
        (path, "Concat", [member.product for member in members], [path], {"axis": 2}),
        (path, "Reshape", [path, shape], [split], {}),
        (path, "Transpose", [split], [heads], {"perm": [2, 0, 3, 1, 4]}),
        (path, "Split", [heads], parts, {"axis": 0, "num_outputs": 3}),
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


def _write_sigmoid(model: onnx.ModelProto, gelu: onnx.NodeProto) -> list[onnx.NodeProto]:
    x, name = gelu.input[0], gelu.name
    linear, cubic = f"{name}_linear", f"{name}_cubic"
    numbers = {linear: _GELU_LINEAR, cubic: _GELU_CUBIC}
    store_constants(model, {key: np.array(value, np.float32) for key, value in numbers.items()})
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


def _constant_sizes(index: GraphIndex, reshape: onnx.NodeProto, first: int = 2) -> list[int] | None:
    """Return the sizes from axis `first` on in a Reshape's shape; None where they are not constant."""
    shape, concat = index.constant(reshape.input[1]), index.producers.get(reshape.input[1])
    if shape is not None:
        return [int(size) for size in np.ravel(shape)[first:]]
    if concat is None or concat.op_type != "Concat":
        return None
    sizes = [index.constant(name, (*FOLDED, "Unsqueeze")) for name in concat.input[first:]]
    known = [size for size in sizes if size is not None]
    return [int(size) for part in known for size in np.ravel(part)] if len(known) == len(sizes) else None


TURN = (1, 0, 2)  # [batch, length, hidden] to [length, batch, hidden], and back
_START, _BACK = "/tokens_first/Transpose", "/batch_first/Transpose"
_OUT_TURNED = (2, 0, 1, 3)  # of [batch, heads, length, size] to [length, batch, heads, size]
# what computes every token alone, where the other operands are constants of a token's width or alike
_BY_TOKEN = {
    "Add", "Cast", "Concat", "Div", "DequantizeLinear", "Erf", "Gelu", "Identity", "LayerNormalization",
    "MatMul", "Mul", "QuantizeLinear", "Relu", "Sigmoid", "Sqrt", "Sub", "Tanh",
}  # fmt: skip


def use_sequence_first(model: onnx.ModelProto) -> int:
    """Turn the hidden states between the embeddings and the head of an encoder, in place; values stay.

    A fused attention reads q, k and v as [batch * heads, length, head size] with one stride for all of
    batch * heads. A linear's [batch, length, hidden] has no such view and is copied; [length, batch, hidden]
    has one. Returns how many attentions need no copy any more; 0: nothing was changed.
    """
    index = GraphIndex(model)
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    regions = ((norm, _walk(index, norm.output[0], _HEADS_AXES)) for norm in norms)
    norm, region = next(((norm, region) for norm, region in regions if region.out), (None, _Region(set())))
    if norm is None or len(region.into) not in (len(region.out), 3 * len(region.out)):
        return 0
    _turn_heads(model, index, region)
    inside = {id(node) for node in region.inside}
    behind: dict[int, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        if node.op_type == "Gather" and attribute(node, "axis") == 1 and node.input[0] in region.tensors:
            token = index.constant(node.input[1])
            if token is not None and not token.ndim:  # of one token, such as the first
                _set(node, "axis", 0)
                inside.add(id(node))
        for position, name in enumerate(node.input):
            if name in region.tensors and id(node) not in inside:
                node.input[position] = back = f"{name}/batch_first"
                turned = transpose_hidden(name, back, f"{_BACK}_{len(behind)}")
                behind.setdefault(id(index.producers[name]), [turned])
    for number, name in enumerate(value.name for value in model.graph.output if value.name in region.tensors):
        # a head that computes every token alone
        maker, inner = index.producers[name], f"{name}/turned"
        backs = behind.setdefault(id(maker), [])
        rename_tensors([maker, *index.consumers.get(name, []), *backs], {name: inner}, outputs=True)
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
    """Nodes that compute every token alone, from one tensor on."""

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
        readers = index.consumers.get(node.output[0], [])
        sizes = _constant_sizes(index, readers[0]) if [n.op_type for n in readers] == ["Reshape"] else None
        if (
            node.op_type == "Transpose"
            and permutation_of(node) == out
            and sizes is not None
            and len(sizes) == 1
        ):
            region.out.append(node)  # to [batch, length, hidden]
            region.tensors.add(readers[0].output[0])
        elif region.tensors.isdisjoint(node.input):
            continue
        elif node.op_type == "Reshape":
            moved = all(
                move.op_type == "Transpose" and len(permutation_of(move) or ()) in (4, 5) for move in readers
            )
            if readers and moved and _constant_sizes(index, node) is not None:
                region.into.append(node)  # to [batch, length, (3,) heads, size]
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


def _turn_heads(model: onnx.ModelProto, index: GraphIndex, region: _Region) -> None:
    """Reshape to and from heads in the other order; shapes take batch and length from their input."""
    for move in [move for reshape in region.into for move in index.consumers[reshape.output[0]]]:
        _set(move, "perm", [{0: 1, 1: 0}.get(axis, axis) for axis in permutation_of(move) or ()])
    for move in region.out:
        _set(move, "perm", list(_OUT_TURNED))
    merging = [index.consumers[move.output[0]][0] for move in region.out]
    for reshape in (*region.into, *merging):
        known = index.constant(reshape.input[1])
        if known is None or known[:2].any():
            shape = np.array([0, 0, *(_constant_sizes(index, reshape) or [])], np.int64)
            reshape.input[1] = f"{reshape.output[0]}/shape"
            store_constants(model, {reshape.input[1]: shape})


def _set(node: onnx.NodeProto, name: str, value: int | list[int]) -> None:
    kept = [item for item in node.attribute if item.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def transpose_hidden(source: str, target: str, name: str) -> onnx.NodeProto:
    return helper.make_node("Transpose", [source], [target], name=name, perm=list(TURN))


def fuse_for_openvino(data: bytes) -> bytes:
    """Return an ONNX file with fewer kernels of OpenVINO's CPU plugin; without INT8 activations as it is.

    Made where a graph is compiled, since blocks of a verification are cut where LayerNorms end.
    """
    if b"QuantizeLinear" not in data:
        return data
    model = onnx.load_from_string(data)
    count = split_norms(model) + move_value_biases(model)
    fused: bytes = model.SerializeToString() if count else data
    return fused


def split_norms(model: onnx.ModelProto) -> int:
    """Scale a LayerNorm once for the codes of the next linears and once for all else, in place.

    Its gamma and beta take a kernel of their own in OpenVINO, whose result the residual's Add and the Q read.
    With constants of its own each of these does it by the way: those in front of a Q hold the factors of
    SmoothQuant too. Returns the number of LayerNorms.
    """
    index, count = GraphIndex(model), 0
    nodes: list[onnx.NodeProto] = []
    dropped: set[int] = set()
    for node in model.graph.node:
        scaled = [*_scaled_codes(index, node)]
        if not scaled or len(scaled) == len(index.consumers[node.output[0]]):
            nodes += [] if id(node) in dropped else [node]
            continue
        count += 1
        gamma, beta = (np.asarray(index.constant(name)) for name in node.input[1:3])
        output = node.output[0]
        plain = {f"{output}/one": np.ones_like(gamma), f"{output}/zero": np.zeros_like(beta)}
        store_constants(model, plain)
        node.output[0] = f"{output}/normalized"
        del node.input[1:]
        node.input.extend(plain)
        nodes.append(node)
        for maker, made, factors in [(node, output, np.ones_like(gamma)), *scaled]:
            dropped.add(id(maker))
            path, run = maker.name.rpartition("/")[0], run_of(maker.name)
            names = {f"{made}/gamma": gamma * factors, f"{made}/beta": beta * factors}
            store_constants(model, names)
            operands = zip((node.output[0], f"{made}/product"), names, (f"{made}/product", made), strict=True)
            nodes += [
                helper.make_node(kind, [read, constant], [result], name=f"{path}/{kind}{run}")
                for kind, (read, constant, result) in zip(("Mul", "Add"), operands, strict=True)
            ]
        for reader in index.consumers[output]:
            if reader.op_type == "Add" and reader.input[1] == output:  # fuses with what it reads first
                reader.input[1], reader.input[0] = reader.input[0], output
    replace_nodes(model, nodes)
    return count


def _scaled_codes(index: GraphIndex, norm: onnx.NodeProto) -> Iterator[tuple[onnx.NodeProto, str, Array]]:
    """Yield each Mul by factors between a LayerNorm over the last axis and Qs alone, with the factors."""
    if norm.op_type != "LayerNormalization" or len(norm.input) != 3 or len(norm.output) != 1:
        return
    gamma, beta = (index.constant(name) for name in norm.input[1:])
    outputs = {value.name for value in index.graph.output}
    if gamma is None or beta is None or gamma.ndim != 1 or gamma.shape != beta.shape:
        return
    for reader in index.consumers.get(norm.output[0], []):
        factors = _factors(index, reader)
        behind = index.consumers.get(reader.output[0], [])
        if factors is None or factors.shape != gamma.shape or reader.output[0] in outputs:
            continue
        if behind and all(node.op_type == "QuantizeLinear" for node in behind):
            yield reader, reader.output[0], factors


def move_value_biases(model: onnx.ModelProto) -> int:
    """Add the bias of v after an attention, in front of the Q of its output projection, in place.

    Rows of a softmax sum to 1, so that changes no value. OpenVINO makes such a Q in two kernels, in FP32,
    but in one with the Add in front of it. Returns the number of attentions.
    """
    index, outputs = GraphIndex(model), {value.name for value in model.graph.output}
    nodes, dropped, behind = list(model.graph.node), set[int](), dict[int, onnx.NodeProto]()
    for q in [node for node in nodes if node.op_type == "QuantizeLinear"]:
        way = [*_makers(index, q.input[0], ("Reshape", "Transpose", "MatMul"))]
        product = way[-1] if len(way) == 3 else None
        softmax = index.producers.get(product.input[0]) if product is not None else None
        if product is None or softmax is None or softmax.op_type != "Softmax":
            continue
        value = [*_makers(index, product.input[1], ("Transpose", "Reshape", "Add"))]
        turned = [permutation_of(node) for node in (way[1], value[0])] if len(value) == 3 else []
        if turned != [_HEADS_AXES, _HEADS_AXES]:
            continue
        add = value[2]
        biases = [
            name for name in add.input if (known := index.constant(name)) is not None and known.ndim == 1
        ]
        read = [*(node.output[0] for node in (*way, *value))]
        if len(biases) != 1 or any(len(index.consumers[name]) != 1 or name in outputs for name in read[1:]):
            continue
        (rest,) = (name for name in add.input if name != biases[0])
        value[1].input[0] = rest
        dropped.add(id(add))
        source, moved = q.input[0], f"{q.input[0]}/biased"
        for reader in index.consumers[source]:  # a Q for each linear that reads it
            reader.input[0] = moved
        behind[id(way[0])] = helper.make_node("Add", [source, biases[0]], [moved], name=add.name)
    kept = [node for node in nodes if id(node) not in dropped]
    replace_nodes(model, (new for node in kept for new in (node, behind.get(id(node))) if new is not None))
    return len(behind)


def _makers(index: GraphIndex, tensor: str, kinds: tuple[str, ...]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that make a tensor, as long as they are of these operators, in this order."""
    for kind in kinds:
        node = index.producers.get(tensor)
        if node is None or node.op_type != kind:
            return
        yield node
        tensor = node.input[0]
