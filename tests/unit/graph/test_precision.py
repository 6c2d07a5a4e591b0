"""Types of a strongly typed graph: FP16 compute, FP32 Q/DQ, FP32 islands, one Cast at each border."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqbench.quantize.graph.export import ExportSettings, finish_graph
from qdqbench.quantize.graph.index import module_of
from qdqbench.quantize.graph.precision import FP16_MAX, constants_to_initializers, drop_noop_casts, to_fp16
from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.utils.errors import CheckFailed

from ...support import tiny_bert as tiny
from ...support.graphs import model_of
from ...support.tiny_layer import store

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
FLOATS = (FLOAT, HALF)


def types_of(model):
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    found = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)}
    return found | {t.name: t.data_type for t in graph.initializer}


def compute_types(model):
    """Float types that each node but Cast, Q and DQ reads and writes."""
    types = types_of(model)
    return {
        node.name: {types[n] for n in (*node.input, *node.output) if n and types[n] in FLOATS}
        for node in model.graph.node
        if node.op_type not in ("Cast", "QuantizeLinear", "DequantizeLinear")
    }


def graph_of(nodes, constants, outputs=("y",)):
    """x, float32 [2, 3], to float32 outputs of the same shape."""
    values = {name: np.asarray(value, np.float32) for name, value in constants.items()}
    return model_of(nodes, {"x": (2, 3)}, dict.fromkeys(outputs, (2, 3)), values)


def op(operator, inputs, output, name, **attributes):
    return helper.make_node(operator, inputs.split(), [output], name=name, **attributes)


X = np.array([[1, 2, 3], [-4, 0.5, 0]], np.float32)


@pytest.mark.parametrize("weights", ["channel", "factored"])
@pytest.mark.parametrize("name", ["bert-int8-linears", "bert-int8-linears-per-tensor", "bert-int8-attention"])
def test_the_result_passes_the_check_keeps_its_interface_and_casts_nothing_twice(tiny_bert, name, weights):
    before, after = tiny.traced(tiny_bert, name), tiny.exported(tiny_bert, name, weights=weights)
    assert check_model(after).errors == []
    assert after.graph.input == before.graph.input
    assert after.graph.output == before.graph.output
    assert all(found <= {HALF} for found in compute_types(after).values())
    types = types_of(after)
    scales = [
        types[n.input[1]] for n in after.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")
    ]
    assert set(scales) == {FLOAT}
    casts = [(n.input[0], n.attribute[0].i) for n in after.graph.node if n.op_type == "Cast"]
    assert len(casts) == len(set(casts))
    assert all(types[source] != to for source, to in casts)


@pytest.mark.parametrize(
    ("rules", "inside"),
    [
        ([{"match": "*", "type": "LayerNorm"}], lambda node: node.op_type == "LayerNormalization"),
        ([{"match": "*", "type": "Softmax"}], lambda node: node.op_type == "Softmax"),
        ([{"match": "encoder.layer.1.output.dense"}], lambda node: module_of(node.name) == tiny.LINEARS[-1]),
        ([{"match": "encoder.layer.1"}], lambda node: node.name.startswith("/bert/encoder/layer.1/")),
        ([{"match": "encoder.layer.1.*"}], lambda node: node.name.startswith("/bert/encoder/layer.1/")),
        (
            [
                {"match": "encoder.layer.1"},
                {"match": "encoder.layer.1.intermediate.dense", "precision": "fp16"},
                {"match": "*.softmax", "precision": "fp16"},
            ],
            lambda node: (
                node.name.startswith("/bert/encoder/layer.1/")
                and "intermediate/dense" not in node.name
                and node.op_type != "Softmax"
            ),
        ),
        (
            [{"match": "classifier"}, {"match": "bert.pooler.*"}],
            lambda node: node.op_type in ("Gemm", "Tanh"),
        ),
    ],
    ids=["layernorm", "softmax", "linear", "layer", "in-layer", "opened-again", "head"],
)
def test_islands_compute_in_fp32(tiny_bert, rules, inside):
    recipe = tiny.recipe_with(rules=[{"precision": "fp32"} | rule for rule in rules])
    plan = tiny.plan_of(recipe, load_model(str(tiny_bert)))
    twin = finish_graph(traced_twin(tiny_bert), plan, ExportSettings(20, "fp16", "channel"))
    found = compute_types(twin)
    members = [node for node in twin.graph.node if found.get(node.name) and inside(node)]
    assert members
    for node in twin.graph.node:
        if found.get(node.name):
            assert found[node.name] == {FLOAT if inside(node) else HALF}, node.name
    types = types_of(twin)
    made = {n.output[0]: n for n in twin.graph.node}
    borders = [
        made[name] for node in members for name in node.input if name in made and made[name].op_type == "Cast"
    ]
    assert borders
    assert all(types[cast.input[0]] in (HALF, TensorProto.INT64, TensorProto.BOOL) for cast in borders)
    assert check_model(twin).errors == []
    onnx.checker.check_model(twin, full_check=True)


def traced_twin(folder):
    from qdqbench.quantize.graph.export import trace

    return trace(load_model(str(folder)), 20)


def test_an_island_is_nearer_to_fp32(tiny_bert):
    twin, batch = traced_twin(tiny_bert), tiny.padded_batch((16,) * 32)
    exact = tiny.run_onnx(twin, batch)
    model = load_model(str(tiny_bert))

    def error(*rules):
        plan = tiny.plan_of(tiny.recipe_with(rules=list(rules)), model)
        done = finish_graph(twin, plan, ExportSettings(20, "fp16", "channel"))
        return float(np.abs(tiny.run_onnx(done, batch) - exact).mean())

    everything, nothing = error({"match": "*", "precision": "fp32"}), error()
    assert everything == 0
    assert 0 < nothing < 0.01


def test_an_int8_layer_in_an_fp32_island(tiny_bert):
    """A later INT8 rule takes the linear out of the island around it; its neighbors stay."""
    recipe = tiny.recipe_with(
        rules=[{"match": "encoder.layer.0", "precision": "fp32"}, *tiny.recipe_with().model_dump()["rules"]]
    )
    plan = tiny.plan_of(recipe, tiny.quantized(tiny_bert).model)
    assert list(plan.int8) == tiny.LINEARS
    found = compute_types(finish_graph(tiny.traced(tiny_bert), plan, ExportSettings(20, "fp16", "channel")))
    assert found["/bert/encoder/layer.0/output/dense/MatMul"] == {HALF}
    assert found["/bert/encoder/layer.0/output/LayerNorm/LayerNormalization"] == {FLOAT}


class TestConstants:
    def test_a_mask_beyond_fp16_stays_in_fp32_up_to_the_softmax(self):
        """As that of the question's tokens in BigBird."""
        nodes = [
            helper.make_node("Mul", ["x", "far"], ["mask"], name="/Mul"),
            helper.make_node("Sub", ["x", "mask"], ["scores"], name="/Sub"),
            helper.make_node("Softmax", ["scores"], ["y"], name="/Softmax"),
        ]
        model = graph_of(nodes, {"far": 1e6})
        to_fp16(model)
        onnx.checker.check_model(model, full_check=True)
        types = compute_types(model)
        assert (types["/Mul"], types["/Sub"], types["/Softmax"]) == ({FLOAT}, {FLOAT}, {HALF})

    def test_too_large_ones_are_all_named(self, tiny_bert):
        graph = tiny.traced(tiny_bert)
        first, second = (f"{name}.bias" for name in tiny.LINEARS[:2])
        values = {first: 1e5, "classifier.bias": -np.inf, second: np.nan}
        for name, value in values.items():
            store(graph, name, np.full(tiny.tensor(graph, name).shape, value))
        with pytest.raises(CheckFailed) as error:
            finish_graph(graph, tiny.quantized(tiny_bert).plan, ExportSettings(20, "fp16", "channel"))
        message = str(error.value)
        assert all(name in message for name in values)
        assert "precision: fp32" in message

    def test_in_an_island_it_may_be_large(self):
        model = graph_of([op("Add", "x big", "y", "/island/Add")], {"big": 1e5})
        to_fp16(model, ["island"])
        assert [n.op_type for n in model.graph.node] == ["Add"]  # whose output is that of the graph
        np.testing.assert_array_equal(tiny.run_onnx(model, {"x": X}), X + np.float32(1e5))

    @pytest.mark.parametrize("value", [FP16_MAX, -FP16_MAX])
    def test_the_largest_that_fits(self, value):
        model = graph_of([op("Mul", "x c", "y", "/a/Mul")], {"c": value})
        to_fp16(model)
        assert tiny.run_onnx(model, {"x": np.full((2, 3), 0.5, np.float32)})[0, 0] == value / 2

    def test_what_hides_padding_is_finite(self):
        least = float(np.finfo(np.float32).min)
        nodes = [op("Mul", "x fill", "m", "/a/Mul"), op("Softmax", "m", "y", "/a/Softmax", axis=1)]
        model = graph_of(nodes, {"fill": [least, least, least]})
        to_fp16(model)
        shown = np.array([[0, 0, 1], [0, 1, 1]], np.float32)
        np.testing.assert_array_equal(tiny.run_onnx(model, {"x": shown}), [[0.5, 0.5, 0], [1, 0, 0]])

    def test_an_empty_one(self):
        model = graph_of([op("Concat", "x none", "y", "/a/Concat", axis=1)], {"none": np.zeros((2, 0))})
        to_fp16(model)
        np.testing.assert_array_equal(tiny.run_onnx(model, {"x": X}), X)

    def test_one_for_both_sides_of_a_border(self):
        nodes = [op("Add", "x c", "t", "/a/Add"), op("Mul", "t c", "y", "/island/Mul")]
        model = graph_of(nodes, {"c": 3})
        to_fp16(model, ["island"])
        assert compute_types(model) == {"/a/Add": {HALF}, "/island/Mul": {FLOAT}}
        np.testing.assert_array_equal(tiny.run_onnx(model, {"x": X}), (X + 3) * 3)


class TestOutputs:
    def test_an_output_that_is_read_inside_as_well(self):
        nodes = [op("Add", "x c", "y", "/a/Add"), op("Mul", "y c", "z", "/a/Mul")]
        model = graph_of(nodes, {"c": 3}, outputs=("y", "z"))
        to_fp16(model)
        onnx.checker.check_model(model, full_check=True)
        types = {output.name: output.type.tensor_type.elem_type for output in model.graph.output}
        assert types == {"y": FLOAT, "z": FLOAT}
        np.testing.assert_array_equal(tiny.run_onnx(model, {"x": X}), X + 3)


class TestCasts:
    def test_chains_of_casts_to_their_own_type_go(self):
        nodes = [
            op("Cast", "x", "a", "/c1", to=FLOAT),
            op("Cast", "a", "b", "/c2", to=FLOAT),
            op("Add", "b a", "y", "/Add"),
        ]
        model = graph_of(nodes, {})
        drop_noop_casts(model)
        assert [(n.op_type, *n.input) for n in model.graph.node] == [("Add", "x", "x")]
        np.testing.assert_array_equal(tiny.run_onnx(model, {"x": X}), 2 * X)

    def test_casts_that_convert_or_make_an_output_stay(self):
        nodes = [
            op("Cast", "x", "i", "/to-int", to=TensorProto.INT64),
            op("Cast", "i", "f", "/to-float", to=FLOAT),
            op("Cast", "f", "y", "/to-output", to=FLOAT),
        ]
        model = graph_of(nodes, {})
        drop_noop_casts(model)
        assert [n.name for n in model.graph.node] == ["/to-int", "/to-float", "/to-output"]
        np.testing.assert_array_equal(tiny.run_onnx(model, {"x": X}), np.trunc(X))

    def test_a_cast_of_an_integer_becomes_fp16(self):
        nodes = [
            op("Cast", "x", "i", "/a/to-int", to=TensorProto.INT64),
            op("Cast", "i", "f", "/a/to-float", to=FLOAT),
            op("Add", "f c", "y", "/a/Add"),
        ]
        model = graph_of(nodes, {"c": 1})
        to_fp16(model)
        onnx.checker.check_model(model, full_check=True)
        assert compute_types(model) == {"/a/Add": {HALF}}
        np.testing.assert_array_equal(tiny.run_onnx(model, {"x": X}), np.trunc(X) + 1)

    def test_constants_become_initializers(self):
        value = np.array([1.5, 2.5, 3.5], np.float64)
        nodes = [
            helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(value)),
            op("Cast", "c", "d", "/cast", to=FLOAT),
            op("Add", "x d", "y", "/Add"),
        ]
        model = graph_of(nodes, {})
        constants_to_initializers(model)
        assert [n.op_type for n in model.graph.node] == ["Add"]
        assert tiny.tensor(model, "d").dtype == np.float32
        np.testing.assert_array_equal(tiny.run_onnx(model, {"x": X}), X + value.astype(np.float32))


def test_a_mean_is_summed_and_divided_in_fp32():
    axes = numpy_helper.from_array(np.array([1]), "axes")
    nodes = [op("ReduceSum", "x axes", "sum", "/sum"), op("Div", "sum count", "mean", "/mean")]
    small = np.full((2, 3), 2.0**-12)
    model = graph_of([*nodes, op("Mul", "mean small", "y", "/last")], {"count": 3.0, "small": small})
    model.graph.initializer.append(axes)
    to_fp16(model)
    types = compute_types(model)
    assert (types["/sum"], types["/mean"], types["/last"]) == ({FLOAT}, {FLOAT}, {HALF})
    large = np.full((2, 3), 2.0**15, np.float32)  # three of them are more than FP16 holds
    np.testing.assert_array_equal(tiny.run_onnx(model, {"x": large}), np.full((2, 3), 8.0))
