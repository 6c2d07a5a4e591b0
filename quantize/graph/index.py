"""Small, shared readings of an ONNX graph: producers, consumers and constants."""

from collections import defaultdict
from functools import cached_property

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

Array = npt.NDArray[np.generic]


class GraphIndex:
    """Look-ups over one graph, made once and valid until the graph is changed."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph = model.graph
        self._constants: dict[str, Array | None] = {}

    @cached_property
    def initializers(self) -> dict[str, onnx.TensorProto]:
        """Initializers by name."""
        return {tensor.name: tensor for tensor in self.graph.initializer}

    @cached_property
    def producers(self) -> dict[str, onnx.NodeProto]:
        """The node that makes each tensor."""
        return {name: node for node in self.graph.node for name in node.output if name}

    @cached_property
    def consumers(self) -> dict[str, list[onnx.NodeProto]]:
        """The nodes that read each tensor."""
        found: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.graph.node:
            for name in dict.fromkeys(node.input):
                found[name].append(node)
        return found

    def constant(self, name: str) -> Array | None:
        """Value of an initializer or a Constant node, or a Cast, Identity or Reciprocal of one; else None."""
        if name not in self._constants:
            self._constants[name] = self._read_constant(name)
        return self._constants[name]

    def _read_constant(self, name: str) -> Array | None:
        if name in self.initializers:
            return numpy_helper.to_array(self.initializers[name])
        node = self.producers.get(name)
        if node is not None and node.op_type == "Constant":
            return constant_value(node)
        if node is None or node.op_type not in ("Identity", "Cast", "Reciprocal"):
            return None
        value = self.constant(node.input[0])
        if value is None or node.op_type == "Identity":  # the exporter writes equal initializers once
            return value
        if node.op_type == "Reciprocal":  # of smoothing's factors, behind an INT8 residual
            return np.asarray(np.reciprocal(value))
        return value.astype(onnx.helper.tensor_dtype_to_np_dtype(attribute(node, "to")))


def constant_value(node: onnx.NodeProto) -> Array:
    """Value of a Constant node that holds a tensor, int or float attribute."""
    return np.asarray(
        numpy_helper.to_array(node.attribute[0].t)
        if node.attribute[0].name == "value"
        else onnx.helper.get_attribute_value(node.attribute[0])
    )


def attribute(node: onnx.NodeProto, name: str, default: int = 0) -> int:
    """Integer attribute of a node, or `default`."""
    for item in node.attribute:
        if item.name == name:
            return int(item.i)
    return default


def module_of(node_name: str) -> str:
    """Module path inside the node name that the TorchScript exporter writes.

    `/bert/encoder/layer.0/output/dense/MatMul` is made by `bert.encoder.layer.0.output.dense`.
    """
    return node_name.strip("/").rpartition("/")[0].replace("/", ".")


def prune(model: onnx.ModelProto) -> None:
    """Remove nodes and initializers whose outputs nobody reads, in place."""
    graph = model.graph
    needed = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):  # exporters write nodes in topological order
        if any(name in needed for name in node.output):
            kept.append(node)
            needed.update(node.input)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    initializers = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(initializers)
