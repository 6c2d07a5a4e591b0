"""Remove Q/DQ and insert it in the form for INT8 GEMMs: scalar on activations, weights [N, K]."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqbench.quantize.graph.index import (
    FOLDED,
    MOVES,
    GraphIndex,
    argument,
    attribute,
    is_qdq,
    operator,
    permutation_of,
    prune,
    rename_tensors,
    replace_nodes,
)
from qdqbench.quantize.graph.precision import cast_node
from qdqbench.quantize.graph.weights import as_matmul, quantize_weights
from qdqbench.quantize.lint.findings import finding_label
from qdqbench.quantize.lint.view import CheckGraph, Operand, is_quantize, walk_types
from qdqbench.quantize.utils.arrays import Array, Float32
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import INT8_HEAD_SIZES
from qdqbench.quantize.utils.names import count_of, name_list

_RANGES: dict[int, tuple[int, int]] = {
    TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255), TensorProto.INT16: (-32768, 32767),
    TensorProto.UINT16: (0, 65535), TensorProto.INT4: (-8, 7), TensorProto.UINT4: (0, 15),
    TensorProto.FLOAT8E4M3FN: (-448, 448), TensorProto.FLOAT8E5M2: (-57344, 57344),
}  # fmt: skip
_FP8 = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)


@dataclass
class Product:
    node: str  # first output, which names it
    label: str
    amax: dict[int, float] = field(default_factory=dict)  # by input that is an activation
    weighted: bool = False  # its second input is a constant
    scale: Float32 | None = None  # of the file's codes, scalar or by output channel; None: from the values


@dataclass
class Scales:
    products: list[Product] = field(default_factory=list)
    widened: list[str] = field(default_factory=list)  # ranges with a zero point, made symmetric around 0
    converted: list[str] = field(default_factory=list)  # ranges of FP8
    shifted: list[str] = field(default_factory=list)  # UINT8 with zero point 128: the same codes less 128
    completed: list[str] = field(default_factory=list)  # products that get the Q/DQ they lacked at the weight
    waiting: list[Product] = field(default_factory=list)  # linears whose activation has no usable scale
    apart: list[str] = field(default_factory=list)  # products of attentions that cannot be wholly INT8
    unusable: list[str] = field(default_factory=list)  # bad scales that samples cannot replace
    lost: list[str] = field(default_factory=list)  # weights whose values a bad scale has lost


def read_scales(model: onnx.ModelProto) -> Scales:
    """Decide which products can run in INT8, and with which scales. The model is valid and is not changed."""
    graph, found = CheckGraph(model), Scales()
    apart = {
        node.output[0]
        for attention in graph.attentions
        if not (attention.is_whole and graph.head_size(attention) in (None, *INT8_HEAD_SIZES))
        for node in (attention.scores, attention.context)
    }
    for node in graph.matmuls:
        pair = graph.operands[node.output[0]]
        if node.output[0] not in apart:
            product = _product(graph, node, pair, found)
            found.products += [product] if product else []
        elif any(operand.dq is not None for operand in pair):
            found.apart.append(finding_label(node))
    return found


def _product(
    graph: CheckGraph, node: onnx.NodeProto, pair: tuple[Operand, Operand], found: Scales
) -> Product | None:
    product = Product(node.output[0], finding_label(node))
    constants, quantized, lost = list[int](), False, []
    for position, operand in enumerate(pair):
        if operand.constant or (operand.dq is None and graph.is_constant(node.input[position])):
            quantized = quantized or operand.dq is not None
            product.weighted, product.scale = True, _read_scale(graph, node, operand, found)
            constants.append(position)
        elif operand.dq is not None:
            amax = _amax_of(graph, operand.dq, found)
            if amax is None or not 0 < amax * operand.factor < np.inf:
                lost.append(operand.dq)
            else:
                product.amax[position] = amax * operand.factor
    if 0 in constants:
        return None  # a constant times a constant, or a weight on the left: nothing that INT8 runs
    if len(product.amax) + len(constants) < 2:
        if constants and (quantized or lost):
            found.waiting.append(product)
        else:
            found.unusable += map(finding_label, lost)
        return None
    if constants and pair[1].dq is None:
        found.completed.append(product.label)
    return product


def _amax_of(graph: CheckGraph, dq: onnx.NodeProto, found: Scales) -> float | None:
    scale = graph.value(dq.input[1])
    kind = graph.types.get(dq.input[0], 0)
    if scale is None or kind not in _RANGES or not _is_good(scale):
        return None
    zero = graph.zero_point(dq)
    low, high = _RANGES[kind]
    step = float(np.max(scale.astype(np.float64)))
    point = 0 if zero is None or kind in _FP8 else int(zero.reshape(-1)[0])
    if kind == TensorProto.UINT8 and point == 128:
        found.shifted.append(finding_label(dq))
        return step * 127
    if kind == TensorProto.INT8 and point == 0:
        return step * 127
    (found.converted if kind in _FP8 else found.widened).append(finding_label(dq))
    return step * max(high - point, point - low)


def _is_good(scale: np.ndarray) -> bool:
    number = scale.astype(np.float64)
    return bool(number.size) and bool(np.all(np.isfinite(number) & (number > 0)))


def _read_scale(graph: CheckGraph, node: onnx.NodeProto, operand: Operand, found: Scales) -> Float32 | None:
    """Return a weight's scales where they are symmetric, and by tensor or by output channel."""
    dq = operand.dq
    if dq is None or operand.reshaped:
        return None
    scale, zero = graph.value(dq.input[1]), graph.zero_point(dq)
    kind = graph.types.get(dq.input[0], 0)
    shift = 128 if kind == TensorProto.UINT8 else 0
    symmetric = kind in (TensorProto.INT8, TensorProto.UINT8)
    symmetric &= shift == 0 if zero is None else bool(np.all(zero == shift))
    if scale is None or not np.isfinite(scale.astype(np.float64)).all() or not scale.all():
        found.lost.append(finding_label(dq))
        return None
    if not symmetric or not _is_good(scale) or scale.ndim > 1 or attribute(dq, "block_size"):
        return None
    if scale.size == 1:
        return np.asarray(scale, np.float32).reshape(())
    axis = attribute(dq, "axis", 1)
    axis += 2 if axis < 0 else 0
    # of the weight as the MatMul sees it, [K, N]
    wanted = 0 if node.op_type == "Gemm" and attribute(node, "transB") else 1
    for permutation in operand.permutations:
        if permutation is not None and sorted(permutation) != [0, 1]:
            return None
        wanted = 1 - wanted if permutation is None else permutation[wanted]
    return np.asarray(scale, np.float32) if wanted == axis else None


def remove_qdq(model: onnx.ModelProto) -> int:
    """Take every Q and DQ off a graph, in place, and return their number; constants become their values.

    Raises:
        UserError: Codes are dequantized by hand.
    """
    index = GraphIndex(model)
    _require_dequantization(index)
    renamed: dict[str, str] = {}
    added: dict[str, onnx.TensorProto] = {}
    inputs: dict[str, str] = {}  # codes that are moved before their DQ -> floating-point constant
    outputs = {value.name for value in model.graph.output}
    kept = []
    for node in model.graph.node:
        codes_leave = is_quantize(node) and node.output[0] in outputs
        if not is_qdq(node) or codes_leave:
            kept.append(node)
        if not is_qdq(node):
            continue
        renamed[node.output[0]] = renamed.get(node.input[0], node.input[0])  # nodes are in topological order
        *moves, (origin, _) = index.back(node.input[0], MOVES)
        if is_quantize(node) or (stored := index.stored(origin)) is None:
            continue
        moved = origin != node.input[0]
        name = f"{origin if moved else node.output[0]}_values"
        turns = [permutation_of(maker) for _, maker in moves if maker and maker.op_type == "Transpose"]
        values = numpy_helper.from_array(_values(index, node, stored, turns), name)
        if added.setdefault(name, values) != values:
            raise UserError(f"codes {origin!r} are read with two scales; give each DequantizeLinear its own")
        (inputs if moved else renamed)[origin if moved else node.output[0]] = name
    count = len(model.graph.node) - len(kept)
    rename_tensors(kept, renamed | inputs)
    made = {name for node in kept for name in node.output}
    for value in model.graph.output:  # that of a DQ keeps its name
        if value.name not in made and (source := renamed.get(value.name)) is not None:
            kept.append(helper.make_node("Identity", [source], [value.name], name=f"{value.name}_Identity"))
    model.graph.initializer.extend(added.values())
    replace_nodes(model, kept)
    del model.graph.value_info[:]
    prune(model)
    return count


def _require_dequantization(index: GraphIndex) -> None:
    """Stop where codes become values by arithmetic; those that nothing scales are taken for values."""
    by_hand = {
        finding_label(reader): finding_label(node)
        for node in filter(is_quantize, index.graph.node)
        for reader in index.forward(node.output[0], MOVES)
        if operator(reader) in ("Mul", "Div", "Sub")
        and any(index.constant(name) is not None for name in reader.input)
    }
    if by_hand:
        raise UserError(
            f"{next(iter(by_hand))} computes on the codes of {next(iter(by_hand.values()))} "
            f"({count_of(len(by_hand), 'such operator')}: {name_list(by_hand)}); use DequantizeLinear"
        )


def _values(
    index: GraphIndex,
    dq: onnx.NodeProto,
    codes: onnx.TensorProto,
    turns: Sequence[tuple[int, ...] | None],  # permutations on the way from the DQ back to its codes
) -> Array:
    try:
        whole = numpy_helper.to_array(codes).astype(np.float32)
        scale = index.constant(dq.input[1])
        if scale is None:
            scale = np.ones((), np.float32)
        zero = index.constant(argument(dq, 2))
        axis, block = attribute(dq, "axis", 1), attribute(dq, "block_size")
        for turn in turns if whole.ndim else ():
            axis = range(whole.ndim)[::-1][axis] if turn is None else turn[axis]

        def spread(value: Array) -> Array:
            value = value.astype(np.float32)
            if block:
                return np.repeat(value, block, axis)[tuple(slice(size) for size in whole.shape)]
            shape = [1] * whole.ndim
            if scale.ndim == 1 and scale.size > 1 and whole.ndim:
                shape[axis] = -1
            return value.reshape(shape if value.size > 1 else ())

        with np.errstate(all="ignore"):  # a bad scale makes what it makes
            real: Array = (whole - (0 if zero is None else spread(zero))) * spread(scale)
            kind = attribute(dq, "output_dtype")
            return real.astype(helper.tensor_dtype_to_np_dtype(kind) if kind else scale.dtype)
    except (ValueError, IndexError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"scales of {finding_label(dq)} do not fit its codes ({why}); export the model again"
        ) from error


def insert_qdq(model: onnx.ModelProto, products: Collection[Product]) -> tuple[int, int, list[str]]:
    """Put Q/DQ on the inputs of these products, in place; scales are FP32 whatever the graph computes in.

    Return how many are in INT8, and of their weights how many have other codes than the file had. Then the
    labels of products that stay in floating point, as their weight is no stored matrix.
    """
    index = GraphIndex(model)
    wanted = {product.node: product for product in products}
    types, _ = walk_types(model)
    nodes: list[onnx.NodeProto] = []
    pairs: dict[tuple[str, float], str] = {}
    made, rounded, odd = 0, 0, list[str]()
    arrays: dict[str, Array] = {}
    for node in model.graph.node:
        product = wanted.get(node.output[0]) if node.output else None
        value = _matrix(index, node) if product is not None and product.weighted else None
        if product is None or (product.weighted and value is None):
            odd += [product.label] if product else []
            nodes.append(node)
            continue
        half = types.get(node.output[0]) == TensorProto.FLOAT16
        for position, amax in product.amax.items():
            nodes += _pair(node, position, amax, half, pairs, arrays)
        if value is None:
            nodes.append(node)
        else:
            name = f"{node.name or node.output[0]}/weight"
            while f"{name}_kn" in index.producers:  # of a file that `fix` wrote
                name += "_"
            nodes += _linear(node, name, value, product.scale, half, arrays)
            rounded += product.scale is None
        made += 1
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    replace_nodes(model, nodes)
    prune(model)
    return made, rounded, odd


def _pair(  # noqa: PLR0913, PLR0917
    node: onnx.NodeProto, position: int, amax: float, half: bool, pairs: dict[tuple[str, float], str],
    arrays: dict[str, Array],
) -> list[onnx.NodeProto]:  # fmt: skip
    """Return a Q and a DQ before one input; linears that read one tensor with one scale share them."""
    source = node.input[position]
    if (source, amax) in pairs:
        node.input[position] = pairs[source, amax]
        return []
    name = f"{source}/int8" if not any(key[0] == source for key in pairs) else f"{source}/int8_{len(pairs)}"
    scale, zero = f"{name}/scale", f"{name}/zero_point"
    arrays |= {scale: np.array(amax / 127, np.float32), zero: np.array(0, np.int8)}
    first, codes, real = f"{name}/fp32" if half else source, f"{name}/q", f"{name}/dq"
    quantize, dequantize = f"{name}/QuantizeLinear", f"{name}/DequantizeLinear"
    new = [
        helper.make_node("QuantizeLinear", [first, scale, zero], [codes], name=quantize),
        helper.make_node("DequantizeLinear", [codes, scale, zero], [real], name=dequantize),
    ]
    if half:
        new.insert(0, cast_node(source, first, TensorProto.FLOAT))
        new.append(cast_node(real, f"{name}/fp16", TensorProto.FLOAT16))
    pairs[source, amax] = node.input[position] = new[-1].output[0]
    return new


def _linear(  # noqa: PLR0913, PLR0917
    node: onnx.NodeProto, name: str, value: Float32, scale: Float32 | None, half: bool,
    arrays: dict[str, Array],
) -> list[onnx.NodeProto]:  # fmt: skip
    columns = np.ascontiguousarray(value.T)
    if scale is None or (scale.ndim and scale.size != columns.shape[0]):
        scale = np.maximum(np.abs(columns).max(1, initial=0.0), np.float32(1e-12)) / np.float32(127)
    parts: dict[str, Array] = {
        f"{name}_int8": quantize_weights(columns, scale, 0),
        f"{name}_scale": scale,
        f"{name}_zero_point": np.zeros(scale.shape, np.int8),
    }
    arrays |= parts
    dq = helper.make_node("DequantizeLinear", [*parts], [f"{name}_dq"], name=f"{name}_DequantizeLinear")
    if scale.ndim:
        dq.attribute.append(helper.make_attribute("axis", 0))
    new = [dq]
    if half:
        new.append(cast_node(f"{name}_dq", f"{name}_fp16", TensorProto.FLOAT16))
    last = new[-1].output[0]
    new.append(helper.make_node("Transpose", [last], [f"{name}_kn"], name=f"{name}_Transpose", perm=[1, 0]))
    return [*new, *as_matmul(node, f"{name}_kn")]


def _matrix(index: GraphIndex, node: onnx.NodeProto) -> Float32 | None:
    value = index.constant(node.input[1], (*FOLDED, "Transpose"))
    if value is None or value.ndim != 2 or not np.isfinite(value).all():
        return None
    if node.op_type == "Gemm":
        floats = {item.name: item.f for item in node.attribute if item.name in ("alpha", "beta")}
        if any(number != 1.0 for number in floats.values()) or attribute(node, "transA"):
            return None
        value = value.T if attribute(node, "transB") else value
    return value.astype(np.float32)
