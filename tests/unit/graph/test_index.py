"""Constants of a graph, however a file stores them."""

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.shape_inference import infer_shapes

from qdqbench.quantize.graph.index import GraphIndex, tensor_values

from ...support.graphs import model_of


@pytest.mark.parametrize(
    "stored", [{"value": helper.make_tensor("t", TensorProto.FLOAT, [], [0.1])}, {"value_float": 0.1}]
)
def test_a_constant_node_is_read_in_its_own_type(stored):
    nodes = [
        helper.make_node("Constant", [], ["a"], **stored),
        helper.make_node("Identity", ["a"], ["b"]),
        helper.make_node("Cast", ["b"], ["c"], to=TensorProto.FLOAT16),
    ]
    index = GraphIndex(model_of(nodes, {}, {}))
    assert index.constant("b").dtype == np.float32
    assert index.constant("c") == np.float16(0.1)
    assert index.constant("c", ("Cast",)) is None  # only Casts were to be followed


def test_text_and_a_circle_are_no_constants():
    nodes = [
        helper.make_node("Constant", [], ["text"], value_string=b"x"),
        helper.make_node("Identity", ["b"], ["a"]),
        helper.make_node("Identity", ["a"], ["b"]),
    ]
    index = GraphIndex(model_of(nodes, {}, {}))
    assert index.constant("text") is None
    assert index.constant("a") is None


def test_shapes_need_no_weights():
    constants = {"weight": np.ones((16, 12), np.float32), "shape": np.array([0, -1, 3, 4])}
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["y"]),
        helper.make_node("Reshape", ["y", "shape"], ["z"]),
        helper.make_node("Cast", ["z"], ["half"], to=TensorProto.FLOAT16),
    ]
    sizes = {"x": ["batch", 8, 16]}, {"half": ["batch", 8, 3, 4]}
    model = model_of(nodes, *sizes, constants, half=TensorProto.FLOAT16)
    before = model.SerializeToString(deterministic=True)
    inferred = infer_shapes(model, strict_mode=True).graph
    wanted = [*inferred.value_info, *inferred.input, *inferred.output]
    assert tensor_values(model) == {value.name: value.type.tensor_type for value in wanted}
    assert [d.dim_value for d in tensor_values(model)["z"].shape.dim][2:] == [3, 4]
    assert model.SerializeToString(deterministic=True) == before


def test_a_walk_visits_each_tensor_once_and_ends():
    nodes = [
        helper.make_node("Add", ["x", "c"], ["a"], name="add"),
        helper.make_node("Cast", ["a"], ["b"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Add", ["b", "a"], ["c"], name="circle"),
        helper.make_node("Sub", ["b", ""], ["d"], name="sub"),
    ]
    index = GraphIndex(model_of(nodes, {}, {}))
    assert [name for name, _ in index.back("d", lambda node: node.input)] == ["d", "b", "", "a", "x", "c"]
    assert [name for name, _ in index.back("b", ("Cast", "Add"))] == ["b", "a", "x"]
    assert [name for name, _ in index.back("d", lambda node: node.input, 2)] == ["d", "b", ""]
    assert [node.name for node in index.forward("a", ("Cast",))] == ["cast", "circle", "circle", "sub"]
    assert [node.name for node in index.forward("x", ("Cast", "Add"), 3)] == ["add", "cast", "circle"]
    assert not [*index.forward("", ())]
