"""Constants of a graph, however a file stores them."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from qdqbench.quantize.graph.index import GraphIndex


@pytest.mark.parametrize(
    "stored", [{"value": helper.make_tensor("t", TensorProto.FLOAT, [], [0.1])}, {"value_float": 0.1}]
)
def test_a_constant_node_is_read_in_its_own_type(stored):
    nodes = [
        helper.make_node("Constant", [], ["a"], **stored),
        helper.make_node("Identity", ["a"], ["b"]),
        helper.make_node("Cast", ["b"], ["c"], to=TensorProto.FLOAT16),
    ]
    index = GraphIndex(helper.make_model(helper.make_graph(nodes, "g", [], [])))
    assert index.constant("b").dtype == np.float32
    assert index.constant("c") == np.float16(0.1)
    assert index.constant("c", ("Cast",)) is None  # only Casts were to be followed


def test_text_and_a_circle_are_no_constants():
    nodes = [
        helper.make_node("Constant", [], ["text"], value_string=b"x"),
        helper.make_node("Identity", ["b"], ["a"]),
        helper.make_node("Identity", ["a"], ["b"]),
    ]
    index = GraphIndex(helper.make_model(helper.make_graph(nodes, "g", [], [])))
    assert index.constant("text") is None
    assert index.constant("a") is None
