"""ONNX models that are still messages, with a few fields that no exporter writes."""

import contextlib

import numpy as np
import onnx
from onnx import numpy_helper

OPERATORS = (
    "MatMul", "Gemm", "Add", "Mul", "Transpose", "Reshape", "Softmax", "Cast", "QuantizeLinear",
    "DequantizeLinear", "QLinearMatMul", "QGemm", "MatMulInteger", "DynamicQuantizeLinear",
    "LayerNormalization", "Constant", "If", "Nothing",
)  # fmt: skip
VALUES = (0.0, -1.0, float("nan"), float("inf"), 1e-45, 1e38, -3.4e38)


def disfigure(model, rng):  # noqa: PLR0912  one line a change
    """Change one to three things, in place."""
    graph = model.graph
    for _ in range(rng.randint(1, 3)):
        node = rng.choice(graph.node) if graph.node else onnx.NodeProto()
        tensor = rng.choice(graph.initializer) if graph.initializer else onnx.TensorProto()
        names = [name for each in graph.node for name in each.output] + [t.name for t in graph.initializer]
        change = rng.randrange(14)
        if change == 0 and len(graph.node) > 1:
            graph.node.remove(node)
        elif change == 1:
            node.op_type = rng.choice(OPERATORS)
        elif change == 2 and node.input:
            node.input[rng.randrange(len(node.input))] = rng.choice([*names, "", "nowhere"])
        elif change == 3 and node.output:
            node.output[0] = rng.choice(names)
        elif change == 4:
            node.name = rng.choice(["", "same", "<b>", "a" * 2000])
        elif change == 5 and node.input:
            del node.input[rng.randrange(len(node.input)) :]
        elif change == 6:
            node.attribute.append(
                onnx.helper.make_attribute(
                    rng.choice(["axis", "perm", "block_size", "transB", "to"]), rng.randint(-9, 9)
                )
            )
        elif change == 7:
            del node.attribute[:]
        elif change == 8:
            tensor.dims[:] = [rng.choice([0, 1, 3, 32, -1, 1 << 40]) for _ in range(rng.randrange(4))]
        elif change == 9:
            tensor.data_type = rng.randrange(0, 25)
        elif change == 10:
            tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
        elif change == 11 and tensor.data_type in (1, 10):
            value = rng.choice(VALUES)
            with contextlib.suppress(ValueError), np.errstate(all="ignore"):  # an earlier change broke it
                array = numpy_helper.to_array(tensor)
                full = np.full(array.shape, value).astype(array.dtype)
                tensor.CopyFrom(numpy_helper.from_array(full, tensor.name))
        elif change == 12:
            del graph.initializer[: rng.randrange(2)]
        else:
            model.opset_import[0].version = rng.choice([1, 9, 12, 13, 17, 21, 24])
