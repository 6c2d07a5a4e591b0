"""Rewrites of a graph that change no value, for fewer kernels of OpenVINO's CPU plugin.

They are made where a graph is compiled, since blocks of a verification are cut where LayerNorms end.
"""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper

from qdqbench.quantize.graph.index import GraphIndex, permutation_of, replace_nodes, run_of, store_constants
from qdqbench.quantize.utils.arrays import Array

_HEADS_AXES = (0, 2, 1, 3)  # of [B, L, H, D] in [B, H, L, D], and back


def fuse_for_openvino(data: bytes) -> bytes:
    """Return the ONNX file with the rewrites of this module; a file without INT8 activations as it is."""
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
        factors = index.constant(reader.input[1]) if reader.op_type == "Mul" else None
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
        way = [*_back(index, q.input[0], ("Reshape", "Transpose", "MatMul"))]
        product = way[-1] if len(way) == 3 else None
        softmax = index.producers.get(product.input[0]) if product is not None else None
        if product is None or softmax is None or softmax.op_type != "Softmax":
            continue
        value = [*_back(index, product.input[1], ("Transpose", "Reshape", "Add"))]
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


def _back(index: GraphIndex, tensor: str, kinds: tuple[str, ...]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that make a tensor, as long as they are of these operators, in this order."""
    for kind in kinds:
        node = index.producers.get(tensor)
        if node is None or node.op_type != kind:
            return
        yield node
        tensor = node.input[0]
