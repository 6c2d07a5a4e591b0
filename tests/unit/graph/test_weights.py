"""INT8 codes of weights, and the two forms of their scales."""

import functools

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper

from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.eval.metrics.runners import session_of
from qdqbench.quantize.graph.export import ExportSettings, finish_graph, trace
from qdqbench.quantize.graph.index import module_of, prune
from qdqbench.quantize.graph.weights import factor_scales, fold_weights, quantize_weights
from qdqbench.quantize.utils.errors import CheckFailed

from ...support.graphs import model_of
from ...support.tiny_bert import (
    INT8,
    LAYERS,
    LINEARS,
    calibrate,
    copied,
    exported,
    padded_batch,
    quantized,
    recipe_with,
    run_onnx,
    tensor,
    traced,
)
from ...support.tiny_layer import store

Floats = npt.NDArray[np.float32]
ROWS, COLUMNS = 4, 6
weights = arrays.arrays(np.float32, (ROWS, COLUMNS), elements=st.floats(-100, 100, width=32))
HALVES = (np.arange(ROWS * COLUMNS, dtype=np.float32) / 2 - 130).reshape(ROWS, COLUMNS)
scales = st.floats(2**-20, 1000, width=32)


def vectors(size):
    """Scales of channels, or ones."""
    return arrays.arrays(np.float32, size, elements=scales) | st.just(np.ones(size, np.float32))


ties = arrays.arrays(np.float32, (ROWS, COLUMNS), elements=st.integers(-260, 260).map(lambda n: n / 2))


@functools.cache
def quantize_linear(axis):
    """QuantizeLinear of ONNX Runtime."""
    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"], axis=axis)
    size = (ROWS, COLUMNS)
    kinds = {"y": TensorProto.INT8, "z": TensorProto.INT8}
    model = model_of([node], {"x": size, "s": None, "z": None}, {"y": size}, **kinds)
    session = session_of(model.SerializeToString(), "one QuantizeLinear")
    return lambda x, s: session.run(None, {"x": x, "s": s, "z": np.zeros(s.shape, np.int8)})[0]


@settings(deadline=None)
@given(
    weight=weights | ties,
    scaled=st.tuples(scales.map(np.float32).map(np.asarray) | vectors(ROWS), st.just(0))
    | st.tuples(vectors(COLUMNS), st.just(1)),
)
@example(weight=HALVES, scaled=(np.asarray(np.float32(1)), 0))
def test_codes_are_those_of_onnx_runtime_bit_for_bit(weight, scaled):
    scale, axis = scaled
    np.testing.assert_array_equal(quantize_weights(weight, scale, axis), quantize_linear(axis)(weight, scale))


def test_folded_codes_dequantize_to_the_fake_quant_weights(tiny_bert):
    model = quantized(tiny_bert).model
    graph = exported(tiny_bert, compute="fp32")
    for name in LINEARS:
        linear = model.get_submodule(name)
        codes, scale = (tensor(graph, f"{name}.weight_{part}") for part in ("int8", "scale"))
        fake = linear.weight_quantizer(linear.weight).detach().numpy()
        assert codes.dtype == np.int8
        assert codes.shape == (linear.out_features, linear.in_features)  # K is contiguous
        np.testing.assert_allclose(codes * scale[:, None], fake, rtol=1e-6, atol=0)


class TestFolding:
    def test_every_weight_is_int8_behind_one_dq(self, tiny_bert):
        graph = traced(tiny_bert)
        before = graph.ByteSize()
        assert fold_weights(graph) == LINEARS
        prune(graph)
        onnx.checker.check_model(graph, full_check=True)
        elements = sum(tensor(graph, f"{name}.weight_int8").size for name in LINEARS)
        assert before - graph.ByteSize() > 0.85 * 3 * elements  # three of four bytes, less the zero points
        assert not any(
            n.endswith(".weight") and n[:-7] in LINEARS for n in (t.name for t in graph.graph.initializer)
        )
        modules = {module_of(n.name) for n in graph.graph.node if n.op_type == "DequantizeLinear"}
        assert modules == {f"{name}.{kind}_quantizer" for name in LINEARS for kind in ("weight", "input")}
        assert not any("/layer/" in n.name for n in graph.graph.node)  # names as the exporter writes them
        quantizers = [n for n in graph.graph.node if n.op_type == "QuantizeLinear"]
        assert len(quantizers) == len(LINEARS)  # of the inputs
        turned = [n for n in graph.graph.node if n.name.endswith("/weight_quantizer/Transpose")]
        assert [module_of(n.name).removesuffix(".weight_quantizer") for n in turned] == LINEARS

    def test_folding_changes_no_number(self, tiny_bert):
        graph, batch = traced(tiny_bert), padded_batch()
        before = run_onnx(graph, batch)
        fold_weights(graph)
        np.testing.assert_allclose(run_onnx(graph, batch), before, rtol=1e-5)
        again = copied(graph)
        assert fold_weights(again) == []
        assert again == graph

    def test_a_shared_weight_is_refused(self, tiny_bert):
        graph = traced(tiny_bert)
        readers = {n.input[0]: n for n in graph.graph.node if n.input}
        dq = readers[readers[f"{LINEARS[0]}.weight"].output[0]]
        graph.graph.node.append(helper.make_node("Neg", [dq.output[0]], ["negated"], name="/x/Neg"))
        with pytest.raises(CheckFailed, match=rf"quantized weight {LINEARS[0]}\.weight feeds 2 nodes"):
            fold_weights(graph)


class TestFactoring:
    def scalar(self, graph, name):
        found = tensor(graph, f"{name}.weight_scalar")
        assert found.shape == ()
        return float(found)

    def test_the_same_codes_and_the_same_scales(self, tiny_bert):
        channel, factored = (exported(tiny_bert, compute="fp32", weights=w) for w in ("channel", "factored"))
        for name in LINEARS:
            codes = [tensor(graph, f"{name}.weight_int8") for graph in (channel, factored)]
            np.testing.assert_array_equal(*codes)
            factor = tensor(factored, f"{name}.weight_factor").astype(np.float64)
            product = self.scalar(factored, name) * factor
            np.testing.assert_allclose(product, tensor(channel, f"{name}.weight_scale"), rtol=2e-7)
        assert not any("weight_scale" in t.name for t in factored.graph.initializer)
        of_weights = (n for n in factored.graph.node if n.name.endswith("/weight_quantizer/DequantizeLinear"))
        assert not any(n.attribute for n in of_weights)  # one scale has no axis

    def test_linears_of_one_input_share_the_scalar(self, tiny_bert):
        graph = exported(tiny_bert, compute="fp32")
        scales = {name: tensor(graph, f"{name}.weight_scale") * 2.0**i for i, name in enumerate(LINEARS)}
        for name, scale in scales.items():
            store(graph, f"{name}.weight_scale", scale)
        factor_scales(graph)
        for layer in (LINEARS[:6], LINEARS[6:]):
            for shared in (layer[:3], layer[3:4], layer[4:5], layer[5:]):
                every = np.concatenate([scales[name] for name in shared])
                found = {self.scalar(graph, name) for name in shared}
                assert len(found) == 1
                off_middle = np.log2(found.pop()) - np.log2(np.sqrt(every.min() * every.max()))
                assert abs(off_middle) <= 0.5 + 1e-6
        # a power of two, so codes times it are exact in FP16
        assert all(np.log2(self.scalar(graph, name)) % 1 == 0 for name in LINEARS)
        assert len({self.scalar(graph, name) for name in LINEARS}) >= 6

    def test_the_same_layers_numerically(self, tiny_bert):
        model = quantized(tiny_bert).model
        graph = exported(tiny_bert, compute="fp32", weights="factored")
        rows = compare_layers(graph, model, [padded_batch()]).rows
        assert len(rows) == len(LINEARS)
        assert max(row.output_rel_error or 0.0 for row in rows) < 1e-5

    def test_per_tensor_weights_stay_where_the_input_is_their_own(self, tiny_bert):
        name = "bert-int8-linears-per-tensor"
        channel, factored = (exported(tiny_bert, name, "fp32", form) for form in ("channel", "factored"))
        scales = {each: tensor(channel, f"{each}.weight_scale") for each in LINEARS}
        shared = [each for each in LINEARS if ".self." in each]
        assert len(shared) == 3 * LAYERS
        names = {t.name for t in factored.graph.initializer}
        assert {each for each in LINEARS if f"{each}.weight_factor" in names} == set(shared)
        assert {each for each in LINEARS if f"{each}.weight_scale" in names} == set(LINEARS) - set(shared)
        for each in set(LINEARS) - set(shared):
            np.testing.assert_array_equal(tensor(factored, f"{each}.weight_scale"), scales[each])
        for layer in (shared[:3], shared[3:]):
            (scalar,) = {self.scalar(factored, each) for each in layer}
            assert np.log2(scalar) % 1 == 0
            for each in layer:
                factor = tensor(factored, f"{each}.weight_factor")
                assert factor.shape == ()
                assert factor * np.float32(scalar) == scales[each]
                assert np.float16(factor) == factor  # so FP16 loses none of it
        for batch in (padded_batch(), padded_batch((7, 7))):
            np.testing.assert_allclose(run_onnx(factored, batch), run_onnx(channel, batch), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("change", ["input scale", "alone"])
    def test_per_tensor_weights_without_a_partner_stay(self, tiny_bert, change):
        """Only linears that read one tensor with one scale can merge."""
        name = "bert-int8-linears-per-tensor"
        graph = traced(tiny_bert, name)
        fold_weights(graph)
        for number, linear in enumerate(LINEARS[:3]):
            quantizer = "/" + linear.replace(".", "/").replace("layer/", "layer.") + "/input_quantizer"
            node = next(n for n in graph.graph.node if n.name == f"{quantizer}/QuantizeLinear")
            if change == "input scale":
                store(graph, node.input[1], tensor(graph, node.input[1]) * np.float32(1 + number))
            else:  # each of the three reads its own copy of the tensor
                copy = helper.make_node("Identity", [node.input[0]], [f"copy{number}"], name=f"/copy{number}")
                node.input[0] = f"copy{number}"
                graph.graph.node.insert(list(graph.graph.node).index(node), copy)
        factor_scales(graph)
        names = {t.name for t in graph.graph.initializer if t.name.endswith(".weight_factor")}
        assert names == {f"{each}.weight_factor" for each in LINEARS[6:9]}


@pytest.fixture(scope="module")
def gemms(tiny_bert):
    """Everything in INT8: pooler and classifier are Gemms in the trace."""
    found = calibrate(tiny_bert, recipe_with(rules=[{"match": "*"} | INT8]))
    return found, trace(found.model, 20)


@pytest.mark.parametrize("form", ["channel", "factored"])
def test_gemms_become_matmul_and_add(gemms, form):
    (model, plan, _), graph = gemms
    assert [n.name for n in graph.graph.node if n.op_type == "Gemm"] == [
        "/bert/pooler/dense/Gemm",
        "/classifier/Gemm",
    ]
    done = finish_graph(graph, plan, ExportSettings(20, "fp32", form))
    operators = {n.name: n.op_type for n in done.graph.node}
    assert "Gemm" not in operators.values()
    assert operators["/classifier/Gemm"] == "MatMul"
    assert operators["/classifier/Gemm_bias"] == "Add"
    assert tensor(done, "classifier.weight_int8").shape == (3, 32)
    rows = {row.name: row for row in compare_layers(done, model, [padded_batch()]).rows}
    assert len(rows) == 14
    assert max(row.output_rel_error or 0.0 for row in rows.values()) < 1e-5


ONE = [[1.0, 2.0, 4.0], [-8.0, 0.5, 127.0]]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [0, 1])
def test_one_gemm_by_hand(bias, transposed):
    """Y = X W + b with a weight scale per output channel, in both layouts of W and both forms of scales."""
    weight = np.array(ONE, np.float32)  # [K, N]
    scale = np.array([0.5, 0.25, 1.0], np.float32)
    stored = np.ascontiguousarray(weight.T) if transposed else weight
    axis = 0 if transposed else 1
    initializers = {"w": stored, "s": scale, "z": np.zeros(3, np.int8), "b": np.array([1, 2, 3], np.float32)}
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"], name="/lin/weight_quantizer/Q", axis=axis),
        helper.make_node(
            "DequantizeLinear", ["q", "s", "z"], ["d"], name="/lin/weight_quantizer/DQ", axis=axis
        ),
        helper.make_node("Gemm", ["x", "d", *["b"] * bias], ["y"], name="/lin/Gemm", transB=transposed),
    ]
    model = model_of(nodes, {"x": (2, 2)}, {"y": (2, 3)}, initializers)
    x = np.array([[1, -2], [3, 0.5]], np.float32)
    wanted = x @ weight + (initializers["b"] if bias else 0)
    assert fold_weights(model) == ["lin"]
    prune(model)
    np.testing.assert_array_equal(tensor(model, "w_int8"), [[2, -16], [8, 2], [4, 127]])  # [N, K]
    np.testing.assert_allclose(run_onnx(model, {"x": x}), wanted, rtol=1e-6)
    factor_scales(model)
    prune(model)
    np.testing.assert_allclose(float(tensor(model, "w_scalar")), 0.5)
    np.testing.assert_allclose(tensor(model, "w_factor"), [1, 0.5, 2])
    np.testing.assert_allclose(run_onnx(model, {"x": x}), wanted, rtol=1e-6)
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("scale", [0.0, float("inf")])
def test_scales_that_no_factor_tells_apart_are_refused(scale):
    constants = {f"{name}_codes": np.array([[1, 2], [3, 4]], np.int8) for name in "ab"}
    constants |= {"scales": np.full(2, scale, np.float32), "zeros": np.zeros(2, np.int8)}
    constants |= {"step": np.float32(0.5), "zero": np.int8(0)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "step", "zero"], ["read"]),
    ]
    for name in "ab":
        given, weight = [f"{name}_codes", "scales", "zeros"], f"{name}_weight"
        nodes += [
            helper.make_node("DequantizeLinear", given, [weight], axis=1),
            helper.make_node("MatMul", ["read", weight], [name], name=name),
        ]
    model = model_of(nodes, {"x": [1, 2]}, {name: [1, 2] for name in "ab"}, constants)
    with np.errstate(all="ignore"), pytest.raises(CheckFailed, match="the weight scale of b is"):
        factor_scales(model, merge=False)
