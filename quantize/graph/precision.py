"""Give every float tensor of an FP32 graph its type: FP16 compute, FP32 Q/DQ and FP32 islands.

Own code, not ModelOpt's autocast: islands are modules of the recipe (a plain op-type list cannot say "this
layer's LayerNorm"), and existing casts, names and INT8 weights must stay as they are.
"""

from collections.abc import Collection

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqbench.quantize.graph.index import GraphIndex, attribute, module_of, replace_nodes, tensor_values
from qdqbench.quantize.models.attention import MASK_FILL
from qdqbench.quantize.utils.errors import CheckFailed
from qdqbench.quantize.utils.limits import FP16_MAX

LOWEST = np.finfo(np.float32).min
QDQ = ("QuantizeLinear", "DequantizeLinear")
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
    source: dict[str, str] = {}
    kept = []
    outputs = {output.name for output in model.graph.output}
    for node in model.graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = source.get(name, name)
        noop = (
            node.op_type == "Cast" and types.get(node.input[0]) == attribute(node, "to") == TensorProto.FLOAT
        )
        if noop and node.output[0] not in outputs:
            source[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    replace_nodes(model, kept)


def to_fp16(model: onnx.ModelProto, fp32_modules: Collection[str] = ()) -> None:
    """Type an FP32 graph for a strongly typed parser, in place; graph inputs and outputs keep their types.

    Every node computes in FP16, except Q/DQ (FP32 scales: FP16 ones overflow with per-channel weights), the
    nodes of `fp32_modules`, rotary angles with their Sin and Cos (an angle is as large as its position, and
    FP16 rounds one of 500 by up to an eighth of a radian), and sums over tokens with what divides them
    (they leave FP16 on long inputs). A Cast stands at each border, one per tensor and type.

    Args:
        model: FP32 graph in topological order; changed.
        fp32_modules: module paths whose own nodes compute in FP32, as `Plan.fp32` has them; those inside are
            named apart. `x.softmax` means the Softmax of module `x`.

    Raises:
        CheckFailed: constants that do not fit FP16, all of them named.
    """
    typer = _Typer(model, fp32_modules)
    for node in model.graph.node:
        typer.place(node)
    typer.finish()


class _Typer:
    """State of one pass over the nodes: the type that each float tensor has so far."""

    def __init__(self, model: onnx.ModelProto, fp32_modules: Collection[str]) -> None:
        self.graph = model.graph
        self.fp32_modules = fp32_modules
        values = tensor_values(model).items()
        self.floats = {name for name, value in values if value.elem_type == TensorProto.FLOAT}
        self.constants = {i.name: i for i in model.graph.initializer if i.data_type == TensorProto.FLOAT}
        self.exact = _before(model, ("Sin", "Cos")) | _means(model)
        self.types = dict.fromkeys(self.floats | set(self.constants), TensorProto.FLOAT)
        self.nodes: list[onnx.NodeProto] = []
        self.converted: set[str] = set()
        self.new_constants: list[onnx.TensorProto] = []
        self.too_large: list[str] = []

    def place(self, node: onnx.NodeProto) -> None:
        """Convert the inputs of one node to its precision and note what it makes."""
        wanted = TensorProto.FLOAT if self._is_fp32(node) else TensorProto.FLOAT16
        for position, name in enumerate(node.input):
            if name in self.types and self.types[name] != wanted:
                node.input[position] = self._converted(name, wanted)
        if node.op_type == "Cast" and node.output[0] in self.floats:
            next(item for item in node.attribute if item.name == "to").i = wanted
        for name in node.output:
            if name in self.floats:
                self.types[name] = wanted
        self.nodes.append(node)

    def finish(self) -> None:
        """Cast outputs back to FP32 and write the graph."""
        if self.too_large:
            raise CheckFailed(
                f"constants do not fit FP16 (largest {FP16_MAX:.0f}): {', '.join(self.too_large)}; keep "
                f"their modules in FP32 with a rule (precision: fp32)"
            )
        for output in self.graph.output:
            if self.types.get(output.name) == TensorProto.FLOAT16:
                self._rename(output.name, f"{output.name}_fp16")
                self.nodes.append(_cast(f"{output.name}_fp16", output.name, TensorProto.FLOAT))
        del self.graph.node[:], self.graph.value_info[:]
        self.graph.node.extend(self.nodes)
        self.graph.initializer.extend(self.new_constants)

    def _is_fp32(self, node: onnx.NodeProto) -> bool:
        suffix = ".softmax" if node.op_type == "Softmax" else ""
        exact = node.op_type in QDQ or not self.exact.isdisjoint(node.output)
        return exact or f"{module_of(node.name)}{suffix}" in self.fp32_modules

    def _converted(self, name: str, wanted: int) -> str:
        target = f"{name}_{_SUFFIX[wanted]}"
        if target not in self.converted:
            self.converted.add(target)
            if name in self.constants:
                self.new_constants.append(self._fp16_constant(name, target))
            else:
                self.nodes.append(_cast(name, target, wanted))
        return target

    def _fp16_constant(self, name: str, target: str) -> onnx.TensorProto:
        value = numpy_helper.to_array(self.constants[name])
        # what an attention of its own hides padding with; FP16 would make -inf of it, and NaN of 0 times it
        if value.min(initial=0.0) == LOWEST:
            value = np.where(value == LOWEST, np.float32(MASK_FILL), value)
        # a NaN is no such number either
        if not -FP16_MAX <= value.min(initial=0.0) <= value.max(initial=0.0) <= FP16_MAX:
            self.too_large.append(name)
            value = np.zeros_like(value)
        return numpy_helper.from_array(value.astype(np.float16), target)

    def _rename(self, old: str, new: str) -> None:
        for node in self.nodes:
            for names in (node.input, node.output):
                for position, name in enumerate(names):
                    if name == old:
                        names[position] = new


def _before(model: onnx.ModelProto, operators: Collection[str]) -> set[str]:
    """Return the tensors that nodes of these operators make, and all that these are computed from."""
    found: set[str] = set()
    for node in reversed(model.graph.node):
        if node.op_type in operators or not found.isdisjoint(node.output):
            found |= {*node.input, *node.output}
    return found


def _means(model: onnx.ModelProto) -> set[str]:
    """Return the outputs of sums, and of their divisions."""
    found: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "ReduceSum" or (node.op_type == "Div" and node.input[0] in found):
            found |= {*node.output}
    return found


def _cast(source: str, target: str, to: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"{target}/Cast", to=to)
