"""Rewrites for speed: the same numbers, and in an engine fewer kernels."""

import copy
import functools
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.eval.verification.bisect import bisect, run_onnxruntime
from qdqbench.eval.verification.blocks import reference_blocks, stitch
from qdqbench.quantize.engine import backend as trt
from qdqbench.quantize.engine.layers import is_int8, kernel_kind, name_parts
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.graph import export
from qdqbench.quantize.graph.export import ExportSettings, finish_graph, trace
from qdqbench.quantize.graph.index import GraphIndex, module_of, rename_tensors
from qdqbench.quantize.graph.rewrites import (
    clip_scaled_linears,
    fuse_for_openvino,
    join_heads,
    list_sequence_first,
    move_value_biases,
    note_unjoined,
    shorten_gelu,
    split_norms,
    use_sequence_first,
)
from qdqbench.quantize.graph.weights import fold_weights
from qdqbench.quantize.models.families.known import BERT

from ...support import tiny_bert as tiny
from ...support.draws import require_alike
from ...support.graphs import model_of
from ...support.tiny_layer import store

Floats = npt.NDArray[np.floating[Any]]
JOINED = ["bert-int8-linears", "bert-int8-linears-per-tensor", "bert-int8-attention"]
BATCHES = [tiny.padded_batch(lengths) for lengths in ((9, 4, 16), (16, 16), (7, 7, 7), (5, 1, 2, 3))]
PARTS = ("query", "key", "value")


@pytest.fixture
def without(monkeypatch):
    """A call of a function while the export skips a rewrite."""

    def call(rewrite, function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(export.rewrites, rewrite, lambda model: 0)
            return function(*arguments)

    return call


def finished(folder, name, compute, weights="factored"):
    settings = ExportSettings(20, compute, weights)
    return finish_graph(tiny.traced(folder, name), tiny.quantized(folder, name).plan, settings)


def folded(graph):
    fold_weights(graph)
    return graph


def joined_modules(graph):
    return [module_of(node.name) for node in graph.graph.node if node.name.endswith("/joined_Split")]


def node_names(graph):
    return [node.name for node in graph.graph.node]


class TestJoining:
    @pytest.mark.parametrize(
        ("compute", "weights", "limit"),
        [("fp32", "channel", 0), ("fp32", "factored", 0), ("fp16", "factored", 2e-3)],
    )
    @pytest.mark.parametrize("name", JOINED)
    def test_the_same_logits_of_a_sound_graph(self, tiny_bert, without, name, *, compute, weights, limit):
        joined = finished(tiny_bert, name, compute, weights)
        apart = without("join_heads", finished, tiny_bert, name, compute, weights)
        assert (joined_modules(joined), joined_modules(apart)) == (tiny.ATTENTIONS, [])
        onnx.checker.check_model(joined, full_check=True)
        names = node_names(joined)
        new = Counter(module_of(each) for each in {*names} - {*node_names(apart)})
        assert new == dict.fromkeys(tiny.ATTENTIONS, new.total() // tiny.LAYERS)  # none in another module
        products = [[n.name for n in g.graph.node if n.op_type == "MatMul"] for g in (joined, apart)]
        assert products[0] == products[1]
        for each in (names, [name for node in joined.graph.node for name in node.output]):
            assert len({*each}) == len(each)
        for batch in BATCHES:  # FP32 bit for bit
            wanted = tiny.run_onnx(apart, batch)
            np.testing.assert_allclose(tiny.run_onnx(joined, batch), wanted, atol=limit, rtol=limit)

    @pytest.mark.parametrize("name", JOINED)
    def test_one_copy_moves_q_k_and_v(self, tiny_bert, name):
        graph = finished(tiny_bert, name, "fp32")
        index = GraphIndex(graph)
        for attention in tiny.ATTENTIONS:
            path = "/" + attention.replace(".", "/").replace("layer/", "layer.")
            concat = next(n for n in graph.graph.node if n.name == f"{path}/joined_Concat")
            sources = [module_of(index.producers[each].name) for each in concat.input]
            assert sources == [f"{attention}.{part}" for part in PARTS]
            for part, source in zip(PARTS, concat.input, strict=True):
                assert index.consumers[source] == [concat], part  # the copies of before are gone
            np.testing.assert_array_equal(
                tiny.tensor(graph, f"{path}/joined_shape"), [0, 0, 3, tiny.HEADS, tiny.HIDDEN // tiny.HEADS]
            )

    @pytest.mark.parametrize("name", JOINED)
    def test_joins_are_counted_and_made_once(self, tiny_bert, name):
        graph = folded(tiny.traced(tiny_bert, name))
        assert join_heads(graph) == tiny.LAYERS
        assert_untouched(graph)

    @pytest.mark.parametrize(
        "shape", [[0, 0, tiny.HEADS, tiny.HIDDEN // tiny.HEADS], [0, 0, -1, tiny.HIDDEN // tiny.HEADS]]
    )
    @pytest.mark.parametrize("name", ["bert-int8-linears", "bert-int8-attention"])
    def test_a_constant_shape(self, tiny_bert, name, shape):
        graph = folded(tiny.traced(tiny_bert, name))
        index = GraphIndex(graph)
        reshapes = [n for n in graph.graph.node if n.op_type == "Reshape" and n.name[-1] != "3"]
        assert {index.producers[n.input[1]].op_type for n in reshapes[: 3 * tiny.LAYERS]} == {"Concat"}
        apart = tiny.copied(graph)
        assert join_heads(graph) == tiny.LAYERS  # with shapes as the exporter writes them
        with_constants(apart, shape)
        constant = tiny.copied(apart)
        assert join_heads(constant) == tiny.LAYERS
        for batch in BATCHES[:2]:
            wanted = tiny.run_onnx(apart, batch)
            np.testing.assert_array_equal(tiny.run_onnx(graph, batch), wanted)
            np.testing.assert_array_equal(tiny.run_onnx(constant, batch), wanted)

    @pytest.mark.parametrize(
        "shape", [[0, 0, tiny.HEADS, -1], [0, 0, 1, 24], None]
    )  # 32 is no multiple of 24
    def test_heads_of_unknown_size_or_in_another_order_stay(self, tiny_bert, shape):
        graph = folded(tiny.traced(tiny_bert))
        if shape:
            with_constants(graph, shape)
        for node in moves_to_heads(graph) if shape is None else ():
            del node.attribute[:]  # no perm: its default, which reverses all axes
        assert_untouched(graph)
        assert_untouched(tiny.twin(tiny_bert))

    @pytest.mark.parametrize(("part", "precision"), [("query", "fp16"), ("key", "fp16"), ("value", "fp32")])
    def test_a_linear_that_is_not_int8_is_not_joined(self, tiny_bert, part, precision):
        rules = [
            {"match": "encoder.layer.*", "type": "Linear"} | tiny.INT8,
            {"match": f"encoder.layer.0.*.{part}", "type": "Linear", "precision": precision},
        ]
        model, plan, _ = tiny.calibrate(tiny_bert, tiny.recipe_with(rules=rules))
        assert f"{tiny.ATTENTIONS[0]}.{part}" in plan.high
        graph = finish_graph(trace(model, 20), plan, ExportSettings(20, "fp16", "factored"))
        assert joined_modules(graph) == tiny.ATTENTIONS[1:]
        onnx.checker.check_model(graph, full_check=True)

    @pytest.mark.parametrize("part", PARTS)
    def test_linears_of_another_input_scale_are_not_joined(self, tiny_bert, part):
        graph = tiny.traced(tiny_bert)
        quantizer = f"/bert/encoder/layer.1/attention/self/{part}/input_quantizer/QuantizeLinear"
        scale = next(n for n in graph.graph.node if n.name == quantizer).input[1]
        store(graph, scale, tiny.tensor(graph, scale) * np.float32(1.0001))
        plan = tiny.quantized(tiny_bert).plan
        graph = finish_graph(graph, plan, ExportSettings(20, "fp32", "factored"))
        assert joined_modules(graph) == tiny.ATTENTIONS[:1]

    def test_a_product_that_something_else_reads_is_not_joined(self, tiny_bert):
        graph = folded(tiny.traced(tiny_bert))
        product = next(n for n in graph.graph.node if n.name.endswith("layer.0/attention/self/key/MatMul"))
        graph.graph.node.append(helper.make_node("Neg", list(product.output), ["minus"], name="/x/Neg"))
        assert join_heads(graph) == tiny.LAYERS - 1
        assert joined_modules(graph) == tiny.ATTENTIONS[1:]


@pytest.mark.parametrize(
    ("left_out", "joined", "says"),
    [
        ([], tiny.LAYERS, None),
        ([], 1, "q, k and v of 1 of 2 attentions"),
        ([], 0, "q, k and v of 2 of 2 attentions"),
        (["0.attention.self.key"], tiny.LAYERS - 1, None),
        (["0.attention.self.key"], 0, "q, k and v of 1 of 1 attentions"),
        (["0.attention.self.key", "1.attention.self.query"], 0, None),
    ],
)
def test_attentions_that_were_not_joined(left_out, joined, says):
    """Only an attention with all of q, k and v in INT8 can be joined."""
    linears = [name for name in tiny.LINEARS if not name.endswith(tuple(left_out))]
    note = note_unjoined(BERT, linears, joined)
    assert (note is None) if says is None else (note is not None and note.startswith(says))


def moves_to_heads(graph):
    """The Transposes of q, k and v."""
    index = GraphIndex(graph)
    moves = [node for node in graph.graph.node if node.op_type == "Transpose"]
    moves = [node for node in moves if index.producers[node.input[0]].op_type == "Reshape"]
    assert len(moves) == 3 * tiny.LAYERS
    return moves


def with_constants(graph, shape):
    """Give the Reshape of q, k and v a constant shape."""
    graph.graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), f"shape {shape}"))
    reshapes = {node.input[0] for node in moves_to_heads(graph)}
    for node in graph.graph.node:
        if node.output[0] in reshapes:
            node.input[1] = f"shape {shape}"


def assert_untouched(graph):
    before = tiny.copied(graph)
    assert join_heads(graph) == 0
    assert graph == before


@functools.cache
def one_gelu(dtype):
    """The sigmoid form of one tanh GELU; every operation rounds to `dtype`."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = helper.make_node("Gelu", ["x"], ["y"], name="/act/Gelu", approximate="tanh")
    model = model_of([node], {"x": ["n"]}, {"y": ["n"]}, x=kind, y=kind)
    assert shorten_gelu(model) == 1
    for constant in model.graph.initializer:
        value = numpy_helper.to_array(constant).astype(dtype)
        constant.CopyFrom(numpy_helper.from_array(value, constant.name))
    onnx.checker.check_model(model, full_check=True)
    assert "Gelu" not in {node.op_type for node in model.graph.node}
    assert {module_of(name) for name in node_names(model)} == {"act"}
    assert len({*node_names(model)}) == len(model.graph.node)
    return ReferenceEvaluator(model)


def sigmoid_form(x):
    # infinite squares are meant, and the reference's sigmoid computes a branch that it then drops
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(one_gelu(x.dtype.name).run(None, {"x": x})[0])


def gelu(x):
    """PyTorch's, in float64."""
    x64 = torch.from_numpy(x.astype(np.float64))
    return np.asarray(torch.nn.functional.gelu(x64, approximate="tanh").numpy())


class TestGelu:
    @settings(deadline=None)
    @given(x=arrays.arrays(np.float64, 8, elements=st.floats(-65504, 65504) | st.floats(-8, 8)))
    @example(x=np.array([0.0, -0.0, 5e-324, -1e-300, 65504, -65504, 1, -1]))
    def test_the_sigmoid_form_is_the_tanh_form(self, x):
        np.testing.assert_allclose(sigmoid_form(x), gelu(x), rtol=1e-6, atol=1e-6)

    def test_every_number_of_fp16(self):
        every = np.arange(2**16, dtype=np.uint16).view(np.float16)
        x = every[np.isfinite(every)]
        assert x.max() == -x.min() == 65504
        found = sigmoid_form(x)
        assert found.dtype == np.float16
        assert np.isfinite(found).all()
        wanted = gelu(x)
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2e-3, atol=5e-4)
        np.testing.assert_array_equal(found[x > 6], x[x > 6])
        assert not found[x < -8].any()

    def test_only_the_tanh_form_is_rewritten(self):
        forms = [{}, {"approximate": "tanh"}, {"approximate": "none"}]
        nodes = [
            helper.make_node("Gelu", [read], [made], name=f"/{made}/Gelu", **form)
            for read, made, form in zip("xab", "aby", forms, strict=True)
        ]
        model = model_of(nodes, {"x": ["n"]}, {"y": ["n"]})
        feeds = {"x": np.linspace(-6, 6, 101, dtype=np.float32)}
        before = tiny.run_onnx(model, feeds)
        assert [shorten_gelu(model), shorten_gelu(model)] == [1, 0]
        onnx.checker.check_model(model, full_check=True)
        assert [n for n in model.graph.node if n.op_type == "Gelu"] == [nodes[0], nodes[2]]
        np.testing.assert_allclose(tiny.run_onnx(model, feeds), before, atol=1e-6)


@pytest.mark.parametrize("name", JOINED)
def test_an_engine_merges_q_k_and_v_and_moves_them_in_one_kernel(
    tiny_bert, tmp_path, monkeypatch, without, name
):
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx: pip install 'qdqbench[rtx]'")
    monkeypatch.setattr(trt, "find_gpu", lambda: None)  # ahead of time on any machine
    backend = trt.choose_backend("tensorrt_rtx")
    moves = {}
    for form in ("joined", "apart"):
        make = (finished, tiny_bert, name, "fp16")
        graph = make[0](*make[1:]) if form == "joined" else without("join_heads", *make)
        path = tmp_path / f"{form}.onnx"
        onnx.save(graph, path)
        built = trt.build_engine(path, backend, [Profile((1, 16), (8, 32), (16, 64))])
        rows = built.layers
        for layer in range(tiny.LAYERS):
            linears = [f"/bert/encoder/layer.{layer}/attention/self/{part}" for part in PARTS]
            gemms = {f"{each}/MatMul" for each in linears}
            (gemm,) = [row for row in rows if row.kind == "gemm" and gemms & set(name_parts(row))]
            assert gemms <= set(name_parts(gemm))
            assert is_int8(gemm)
            biases = {f"{each}/Add" for each in linears}  # added by the kernels that move q, k and v
            moving = [biases & set(row.onnx) for row in rows if biases & set(row.onnx)]
            assert set.union(*moving) == biases
            moves[form, layer] = len(moving)
    wanted = {"joined": 1, "apart": 3}  # three show that the test sees what joining is for
    assert moves == {(form, layer): count for form, count in wanted.items() for layer in range(tiny.LAYERS)}


STRAIGHT = tiny.one_scale("key", "value")
EVERY = {"match": "encoder.layer.*", "type": "Linear"} | tiny.INT8


@pytest.fixture(scope="module")
def straight(tiny_bert):
    """k and v with one weight scale each, in an INT8 attention."""
    return tiny.calibrate(tiny_bert, tiny.recipe_with("bert-int8-attention", rules=[EVERY, *STRAIGHT]))


@pytest.fixture(scope="module")
def graphs(straight):
    """Its graphs for TensorRT-RTX; shared, so never changed."""
    made = trace(straight.model, 20)
    types = ("fp16", "fp32")
    return {
        each: finish_graph(made, straight.plan, ExportSettings(20, each, "factored", False)) for each in types
    }


def kinds(model, folder):
    """Kernels of the first layer in an engine that is built ahead of time."""
    pytest.importorskip("tensorrt_rtx")
    onnx.save(model, folder / "model.onnx")
    profile = Profile((1, 64), (8, 64), (8, 64))
    built = trt.build_engine(
        folder / "model.onnx", trt.choose_backend("tensorrt_rtx"), [profile], compute_capability="8.9"
    )
    rows = [row for row in built.layers if any("layer.0/" in name for name in row.onnx)]
    return [kernel_kind(row) for row in rows]


@pytest.fixture
def graph(tiny_bert):
    """An INT8 attention as it is traced."""
    return tiny.traced(tiny_bert, "bert-int8-attention")


def _norms(graph):
    return [n.output[0] for n in graph.graph.node if n.op_type == "LayerNormalization"]


def assert_same_answers(graph, turned=tiny.LAYERS):
    """So many attentions are turned, and all outputs stay bit for bit; return the new graph."""
    other = tiny.copied(graph)
    assert use_sequence_first(other) == turned
    onnx.checker.check_model(other, full_check=True)
    for batch in BATCHES:
        ours, theirs = run_onnxruntime(other, batch), run_onnxruntime(graph, batch)
        for name, value in ours.items():
            np.testing.assert_array_equal(value, theirs[name])
    return other


def test_what_is_turned_is_known_and_changes_no_logits(graph):
    assert list_sequence_first(graph) == set()
    fold_weights(graph)
    found = list_sequence_first(assert_same_answers(graph))
    assert {name for name in _norms(graph) if "layer" in name or "embeddings" in name} <= found
    assert found.isdisjoint(value.name for value in graph.graph.input)


def test_what_mixes_tokens_gets_them_back(graph):
    """A sum over tokens behind the first layer: the graph stays as it is."""
    end = next(name for name in _norms(graph) if "layer.0/output/LayerNorm" in name)
    graph.graph.initializer.append(helper.make_tensor("axis", onnx.TensorProto.INT64, [], [1]))
    readers = [n for n in graph.graph.node if end in n.input]
    at = list(graph.graph.node).index(readers[0])
    rename_tensors(readers, {end: "summed"})
    graph.graph.node.insert(at, helper.make_node("CumSum", [end, "axis"], ["summed"], name="/sum/CumSum"))
    assert_same_answers(graph, turned=0)


def test_answers_to_tokens_stay_in_their_order(graph):
    """A head that computes every token alone ends the graph, and another reads what is behind it."""
    end = _norms(graph)[-1]
    graph.graph.initializer.append(helper.make_tensor("axis", onnx.TensorProto.INT64, [], [1]))
    graph.graph.node.append(helper.make_node("Sigmoid", [end], ["gates"], name="/head/Sigmoid"))
    graph.graph.node.append(helper.make_node("CumSum", [end, "axis"], ["sums"], name="/head/CumSum"))
    shape = ["batch", "length", tiny.HIDDEN]
    for value in (end, "gates", "sums"):
        graph.graph.output.append(helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, shape))
    assert_same_answers(graph)


def test_a_graph_without_attention_stays(graph):
    for node in graph.graph.node:
        if node.op_type == "LayerNormalization":
            node.op_type = "Unknown"
    before = tiny.copied(graph)
    assert use_sequence_first(graph) == 0
    assert graph == before


def test_a_clip_after_a_linear_that_is_scaled_changes_no_number_and_is_counted():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="linear"),
        helper.make_node("Mul", ["y", "first"], ["a"]),
        helper.make_node("Mul", ["y", "second"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["z"]),
    ]
    constants = {name: np.full(2, 0.25, np.float32) for name in ("first", "second")}
    constants["w"] = np.eye(2, dtype=np.float32)
    graph = model_of(nodes, {"x": ["n", 2]}, {"z": ["n", 2]}, constants)
    feeds = {"x": np.array([[1e5, -3e38], [-0.0, 1.0]], np.float32)}
    before = tiny.run_onnx(graph, feeds)
    assert clip_scaled_linears(graph) == 1
    onnx.checker.check_model(graph, full_check=True)
    assert Counter(node.op_type for node in graph.graph.node)["Clip"] == 1
    np.testing.assert_array_equal(tiny.run_onnx(graph, feeds), before)


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_parity_compares_in_the_order_of_the_model(straight, graphs, compute):
    graph = graphs[compute]
    assert list_sequence_first(graph)
    found = compare_layers(graph, straight.model, [tiny.padded_batch()])
    assert found.passed, [row.name for row in found.rows if not row.holds]


def test_blocks_are_cut_in_the_order_of_the_model(straight, graphs):
    stitched = stitch(graphs["fp16"], BERT)
    onnx.checker.check_model(stitched.model, full_check=True)
    batch = tiny.padded_batch((16, 3, 9))
    tensors = reference_blocks(straight.model, None, batch, half=True)
    got = run_onnxruntime(stitched.model, batch | stitched.feeds(tensors))
    for block in stitched.blocks:
        wanted = tensors[block.name].output
        assert got[block.output].shape == wanted.shape
        assert np.linalg.norm(got[block.output] - wanted) < 0.03 * np.linalg.norm(wanted), block.name


def test_bisect_finds_no_fault_in_a_right_graph(straight, graphs, tmp_path):
    onnx.save(graphs["fp16"], tmp_path / "model.onnx")
    batch = tiny.padded_batch((16, 3, 9))
    how = {"family": BERT, "tensors": reference_blocks(straight.model, None, batch, half=True)}
    found = bisect(tmp_path / "model.onnx", batch, run_onnxruntime, run_onnxruntime, **how)
    assert found.block is None
    assert len(found.blocks) == tiny.LAYERS + 2


def test_biases_that_are_zero_in_the_model_itself_stay(straight, graphs):
    model = copy.deepcopy(straight.model)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("dense.bias") or name.endswith("query.bias"):
                value.zero_()
    settings = ExportSettings(20, "fp32", "factored", False)
    ours = finish_graph(trace(model, 20), straight.plan, settings)
    adds = [[n.name for n in each.graph.node if n.op_type == "Add"] for each in (ours, graphs["fp32"])]
    assert adds[0] == adds[1]


@pytest.mark.parametrize(("qkv", "gemms", "copies"), [("separate", 6, 0), ("shared", 4, 1)])
def test_a_straight_q_needs_no_kernel_and_a_merged_one_shares_gemm_and_copy(
    tiny_bert, tmp_path, qkv, gemms, copies
):
    rules = [EVERY, *STRAIGHT, *tiny.one_scale("query")]
    export = {"opset": 20, "max_length": 128, "qkv_scales": qkv}
    made = tiny.calibrate(tiny_bert, tiny.recipe_with("bert-int8-attention", rules=rules, export=export))
    settings = ExportSettings(20, "fp16", "factored", qkv == "shared")
    graph = finish_graph(trace(made.model, 20), made.plan, settings)
    assert compare_layers(graph, made.model, [tiny.padded_batch()]).passed
    assert list_sequence_first(graph)
    ours = kinds(graph, tmp_path)
    assert ours.count("gemm") == gemms, ours
    assert ours.count("layout") + ours.count("quantize") == copies, ours
    assert ours.count("attention") == 1


def test_nothing_stands_between_the_gemms_of_k_and_v_and_the_attention(graphs, tmp_path):
    graph = graphs["fp16"]
    names = {node.name for node in graph.graph.node}
    assert not any("key/Add" in name or "value/Add" in name or "key/MatMul_factor" in name for name in names)
    assert any("query/Add" in name for name in names)
    ours = kinds(graph, tmp_path)
    assert ours.count("layout") + ours.count("quantize") == 1, ours  # q alone
    assert ours.count("attention") == 1


@pytest.mark.parametrize(("name", "moved"), [("bert-int8-linears", tiny.LAYERS), ("bert-int8-attention", 0)])
def test_the_numbers_stay_and_codes_are_scaled_by_what_makes_them(tiny_bert, name, moved):
    settings = ExportSettings(20, "fp32", "channel", for_gpu=False)
    made = tiny.calibrate(tiny_bert, tiny.recipe_with(name, calibration={"smoothing": 0.65}))
    before = finish_graph(trace(made.model, 20), made.plan, settings)
    graph = tiny.copied(before)
    assert split_norms(graph) == 2 * tiny.LAYERS
    assert move_value_biases(graph) == moved  # not behind an INT8 softmax, whose rows do not sum to 1
    assert split_norms(graph) == move_value_biases(graph) == 0
    onnx.checker.check_model(graph, full_check=True)
    assert fuse_for_openvino(before.SerializeToString()) == graph.SerializeToString()

    def answer(seed):
        batch = tiny.padded_batch(seed=seed)
        return tiny.run_onnx(graph, batch), tiny.run_onnx(before, batch)

    require_alike(answer, 1e-5)
    index = GraphIndex(graph)
    norms = [node.output[0] for node in graph.graph.node if node.op_type == "LayerNormalization"]
    for norm in norms[:-1]:
        assert [node.op_type for node in index.consumers[norm]].count("Mul") == 2
    inputs = [index.producers[n.input[0]].op_type for n in graph.graph.node if n.op_type == "QuantizeLinear"]
    assert inputs.count("Reshape") == (0 if moved else tiny.LAYERS)


def test_a_graph_without_quantizers_is_not_read():
    assert fuse_for_openvino(b"anything") == b"anything"
