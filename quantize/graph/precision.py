"""Give every float tensor of an FP32 graph its type: FP16 compute, FP32 Q/DQ, FP32 fallback layers.

Unlike ModelOpt's autocast, it takes the fallback layers from the recipe; casts, names and INT8 weights stay.
"""

from collections.abc import Collection

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqbench.quantize.graph.index import (
    QDQ,
    GraphIndex,
    attribute,
    module_of,
    rename_tensors,
    replace_nodes,
    tensor_values,
)
from qdqbench.quantize.models.attention import MASK_FILL
from qdqbench.quantize.utils.errors import CheckFailed
from qdqbench.quantize.utils.limits import FP16_MAX

LOWEST = np.finfo(np.float32).min
# an attribute, and no input, decides the type of what they make
TYPED_BY_ATTRIBUTE = (
    *("Bernoulli", "ConstantOfShape", "EyeLike"),
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
)
_SUFFIX: dict[int, str] = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16"}


def constants_to_initializers(model: onnx.ModelProto) -> None:
    """Turn Constant nodes, and Casts and Reciprocals of constants, into initializers, in place."""
    index = GraphIndex(model)
    kept = []
    for node in model.graph.node:
        folded = node.op_type in ("Constant", "Cast", "Reciprocal")  # what torch's own folding leaves
        value = index.constant(node.output[0]) if folded else None
        if value is None:
            kept.append(node)
        else:
            model.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    replace_nodes(model, kept)


def drop_noop_casts(model: onnx.ModelProto) -> None:
    """Remove Casts of FP32 tensors to FP32, in place.

    ModelOpt's INT8 symbolic leaves one behind each quantizer, and the next layer then reads that Cast: it no
    longer shows that q, k and v share an input, and an engine does not merge them.
    """
    types = {name: value.elem_type for name, value in tensor_values(model).items()}
    outputs = {output.name for output in model.graph.output}
    source: dict[str, str] = {}
    for node in model.graph.node:
        cast = node.op_type == "Cast" and node.output[0] not in outputs
        if cast and types.get(node.input[0]) == attribute(node, "to") == TensorProto.FLOAT:
            source[node.output[0]] = source.get(node.input[0], node.input[0])
    kept = [node for node in model.graph.node if source.keys().isdisjoint(node.output)]
    rename_tensors(kept, source)
    replace_nodes(model, kept)


def to_fp16(model: onnx.ModelProto, fp32_modules: Collection[str] = ()) -> None:
    """Type an FP32 graph for a strongly typed parser, in place; graph inputs and outputs keep their types.

    Every node computes in FP16 but Q/DQ (FP16 scales overflow with per-channel weights), `TYPED_BY_ATTRIBUTE`
    and the nodes of `fp32_modules`. Those are as `Plan.fp32` has them (`x.softmax` is the Softmax of module
    `x`), or names of nodes. Rotary angles stay in
    FP32 with their Sin and Cos: FP16 rounds an angle of 500 by up to an eighth of a radian. So do sums over
    tokens with what divides them, which leave FP16 on long inputs. A Cast stands at each border, one per
    tensor and type.
    CheckFailed: constants that do not fit FP16, all of them named.
    """
    graph = model.graph
    floats = {n for n, value in tensor_values(model).items() if value.elem_type == TensorProto.FLOAT}
    constants = {item.name: item for item in graph.initializer if item.data_type == TensorProto.FLOAT}
    exact = _list_exact(model)
    types = dict.fromkeys(floats | set(constants), TensorProto.FLOAT)  # that each float tensor has so far
    nodes: list[onnx.NodeProto] = []
    converted: set[str] = set()
    too_large: list[str] = []
    for node in graph.node:
        module = module_of(node.name) + (".softmax" if node.op_type == "Softmax" else "")
        typed = node.op_type in (*QDQ, *TYPED_BY_ATTRIBUTE)
        fp32 = typed or not exact.isdisjoint(node.output) or not {module, node.name}.isdisjoint(fp32_modules)
        wanted = TensorProto.FLOAT if fp32 else TensorProto.FLOAT16
        for position, name in enumerate(node.input):
            if types.get(name, wanted) == wanted:
                continue
            node.input[position] = target = f"{name}_{_SUFFIX[wanted]}"
            if target not in converted:
                converted.add(target)
                if name not in constants:
                    nodes.append(cast_node(name, target, wanted))
                elif (constant := _to_fp16_constant(constants[name], target)) is not None:
                    graph.initializer.append(constant)
                else:
                    too_large.append(name)
        if node.op_type == "Cast" and node.output[0] in floats:
            next(item for item in node.attribute if item.name == "to").i = wanted
        types |= dict.fromkeys(floats & {*node.output}, wanted)
        nodes.append(node)
    if too_large:
        raise CheckFailed(
            f"constants do not fit FP16 (largest {FP16_MAX:.0f}): {', '.join(too_large)}; keep their modules "
            "in FP32 with a rule (precision: fp32)"
        )
    for name in [output.name for output in graph.output if types.get(output.name) == TensorProto.FLOAT16]:
        rename_tensors(nodes, {name: f"{name}_fp16"}, outputs=True)
        nodes.append(cast_node(f"{name}_fp16", name, TensorProto.FLOAT))
    del graph.value_info[:]
    replace_nodes(model, nodes)


def _to_fp16_constant(constant: TensorProto, target: str) -> TensorProto | None:
    """Return an FP32 constant in FP16 by another name; None where FP16 cannot hold it."""
    value = numpy_helper.to_array(constant)
    # what an attention of its own hides padding with; FP16 would make -inf of it, and NaN of 0 times it
    if value.min(initial=0.0) == LOWEST:
        value = np.where(value == LOWEST, np.float32(MASK_FILL), value)
    # a NaN is no such number either
    if not -FP16_MAX <= value.min(initial=0.0) <= value.max(initial=0.0) <= FP16_MAX:
        return None
    return numpy_helper.from_array(value.astype(np.float16), target)


def _list_exact(model: onnx.ModelProto) -> set[str]:
    """Return the tensors of rotary angles with their Sin and Cos, and of sums with what divides them.

    And what is made with a number beyond FP16, such as a mask of 1e6, up to the Softmax that reads it.
    """
    exact: set[str] = set()
    for node in reversed(model.graph.node):
        if node.op_type in ("Sin", "Cos") or not exact.isdisjoint(node.output):
            exact |= {*node.input, *node.output}
    sums: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "ReduceSum" or (node.op_type == "Div" and node.input[0] in sums):
            sums |= {*node.output}
    constants = (item for item in model.graph.initializer if item.data_type == TensorProto.FLOAT)
    values = {item.name: numpy_helper.to_array(item) for item in constants if not [*item.dims]}
    large = {name for name, value in values.items() if FP16_MAX < abs(value) < abs(LOWEST)}
    for node in model.graph.node:
        if node.op_type != "Softmax" and not large.isdisjoint(node.input):
            large |= {*node.output}
    return exact | sums | large


def halve_table(model: onnx.ModelProto, shape: tuple[int, ...]) -> None:
    """Keep the word embeddings, of this shape, in FP16, and cast what is taken of them, in place."""
    tables = [item for item in model.graph.initializer if tuple(item.dims) == shape]
    for table in tables:
        table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table).astype(np.float16), table.name))
    names, nodes = {table.name for table in tables}, []
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type == "Gather" and node.input[0] in names:
            taken = node.output[0]
            node.output[0] = f"{taken}_fp16"
            nodes.append(cast_node(node.output[0], taken, TensorProto.FLOAT))
    replace_nodes(model, nodes)


def cast_node(source: str, target: str, to: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"{target}/Cast", to=to)
