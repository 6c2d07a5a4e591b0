"""Small ONNX models of opset 20."""

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str] | None


def model_of(nodes, inputs, outputs, constants=None, **kinds):
    """A model of these shapes by name, FLOAT unless `kinds` has another type, and constants by name."""

    def values(shapes):
        typed = ((name, kinds.get(name, TensorProto.FLOAT), shape) for name, shape in shapes.items())
        return [helper.make_tensor_value_info(*value) for value in typed]

    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    graph = helper.make_graph(nodes, "tiny", values(inputs), values(outputs), stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
