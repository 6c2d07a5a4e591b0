"""Tokens first: the same numbers in another order, and q, k and v that no kernel copies."""

import copy
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.eval.verification.bisect import bisect, run_onnxruntime
from qdqbench.eval.verification.blocks import reference_blocks, stitch
from qdqbench.quantize.engine import backend as trt
from qdqbench.quantize.engine.kernels import kernel_kind
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.graph.export import ExportSettings, finish_graph, trace
from qdqbench.quantize.graph.rewrites import list_sequence_first, use_sequence_first
from qdqbench.quantize.graph.weights import fold_weights
from qdqbench.quantize.models.families.known import BERT

from ...support.tiny_bert import (
    HIDDEN,
    LAYERS,
    Quantized,
    calibrate,
    copied,
    one_scale,
    padded_batch,
    recipe_with,
    run_onnx,
    traced,
)

BATCHES = [padded_batch(), padded_batch((7, 7, 7)), padded_batch((5, 1, 2, 3))]
STRAIGHT = one_scale("key", "value")
EVERY = {
    "match": "encoder.layer.*",
    "type": "Linear",
    "weights": "int8/per-channel",
    "input": "int8/per-tensor",
}


@pytest.fixture(scope="module")
def straight(tiny_bert: Path) -> Quantized:
    """k and v with one weight scale each, in an INT8 attention."""
    return calibrate(tiny_bert, recipe_with("bert-int8-attention", rules=[EVERY, *STRAIGHT]))


@pytest.fixture(scope="module")
def graphs(straight: Quantized) -> dict[str, onnx.ModelProto]:
    """Its graphs for TensorRT-RTX; shared, so never changed."""
    made = trace(straight.model, 20)
    types: tuple[Literal["fp16", "fp32"], ...] = ("fp16", "fp32")
    return {
        each: finish_graph(made, straight.plan, ExportSettings(20, each, "factored", False)) for each in types
    }


def kinds(model: onnx.ModelProto, folder: Path) -> list[str]:
    """Kernels of the first layer in an engine that is built ahead of time."""
    pytest.importorskip("tensorrt_rtx")
    onnx.save(model, folder / "model.onnx")
    profile = Profile((1, 64), (8, 64), (8, 64))
    built = trt.build_engine(
        folder / "model.onnx", trt.choose_backend("tensorrt_rtx"), [profile], compute_capability="8.9"
    )
    rows = [row for row in built.layers if any("layer.0/" in name for name in row.onnx)]
    return [kernel_kind(row) for row in rows]


@pytest.mark.parametrize("name", ["bert-int8-attention"])
def test_the_same_logits_bit_for_bit(tiny_bert: Path, name: str) -> None:
    graph = copied(traced(tiny_bert, name))
    fold_weights(graph)
    other = copied(graph)
    assert use_sequence_first(other) == LAYERS
    onnx.checker.check_model(other, full_check=True)
    for batch in BATCHES:
        np.testing.assert_array_equal(run_onnx(other, batch), run_onnx(graph, batch))


def test_what_is_turned_is_known(tiny_bert: Path) -> None:
    graph = copied(traced(tiny_bert, "bert-int8-attention"))
    assert list_sequence_first(graph) == set()
    assert use_sequence_first(graph) == LAYERS
    ends = {n.output[0] for n in graph.graph.node if n.op_type == "LayerNormalization" and "layer" in n.name}
    assert ends <= list_sequence_first(graph)
    assert _norms(graph)[0] in list_sequence_first(graph)  # of the embeddings
    assert list_sequence_first(graph).isdisjoint(value.name for value in graph.graph.input)


def _norms(graph: onnx.ModelProto) -> list[str]:
    return [n.output[0] for n in graph.graph.node if n.op_type == "LayerNormalization"]


def test_what_mixes_tokens_gets_them_back(tiny_bert: Path) -> None:
    """A sum over tokens behind the first layer: the graph stays right, turned up to there or not at all."""
    graph = copied(traced(tiny_bert, "bert-int8-attention"))
    end = next(name for name in _norms(graph) if "layer.0/output/LayerNorm" in name)
    graph.graph.initializer.append(helper.make_tensor("axis", onnx.TensorProto.INT64, [], [1]))
    readers = [n for n in graph.graph.node if end in n.input]
    at = list(graph.graph.node).index(readers[0])
    for node in readers:
        node.input[list(node.input).index(end)] = "summed"
    nodes = [*graph.graph.node]
    nodes.insert(at, helper.make_node("CumSum", [end, "axis"], ["summed"], name="/sum/CumSum"))
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    other = copied(graph)
    use_sequence_first(other)
    for batch in BATCHES:
        np.testing.assert_array_equal(run_onnx(other, batch), run_onnx(graph, batch))


def test_answers_to_tokens_stay_in_their_order(tiny_bert: Path) -> None:
    """A head that computes every token alone ends the graph, and another reads what is behind it."""
    graph = copied(traced(tiny_bert, "bert-int8-attention"))
    end = _norms(graph)[-1]
    graph.graph.initializer.append(helper.make_tensor("axis", onnx.TensorProto.INT64, [], [1]))
    graph.graph.node.append(helper.make_node("Sigmoid", [end], ["gates"], name="/head/Sigmoid"))
    graph.graph.node.append(helper.make_node("CumSum", [end, "axis"], ["sums"], name="/head/CumSum"))
    shape = ["batch", "length", HIDDEN]
    for value in (end, "gates", "sums"):
        graph.graph.output.append(helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, shape))
    other = copied(graph)
    assert use_sequence_first(other) == LAYERS
    onnx.checker.check_model(other, full_check=True)
    batch = padded_batch()
    for ours, theirs in zip(
        run_onnxruntime(other, batch).values(), run_onnxruntime(graph, batch).values(), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_graph_without_attention_stays(tiny_bert: Path) -> None:
    graph = copied(traced(tiny_bert, "bert-int8-attention"))
    for node in graph.graph.node:
        if node.op_type == "LayerNormalization":
            node.op_type = "Unknown"
    before = graph.SerializeToString(deterministic=True)
    assert use_sequence_first(graph) == 0
    assert graph.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_parity_compares_in_the_order_of_the_model(
    straight: Quantized, graphs: dict[str, onnx.ModelProto], compute: str
) -> None:
    graph = graphs[compute]
    assert list_sequence_first(graph)
    found = compare_layers(graph, straight.model, [padded_batch()])
    assert found.passed, [row.name for row in found.rows if not row.holds]


def test_blocks_are_cut_in_the_order_of_the_model(
    straight: Quantized, graphs: dict[str, onnx.ModelProto]
) -> None:
    stitched = stitch(graphs["fp16"], BERT)
    onnx.checker.check_model(stitched.model, full_check=True)
    batch = padded_batch((16, 3, 9))
    tensors = reference_blocks(straight.model, None, batch, half=True)
    feeds = stitched.feeds({name: t.input for name, t in tensors.items() if t.input is not None})
    got = run_onnxruntime(stitched.model, {**batch, **feeds})
    for block in stitched.blocks:
        wanted = tensors[block.name].output
        assert got[block.output].shape == wanted.shape
        assert np.linalg.norm(got[block.output] - wanted) < 0.03 * np.linalg.norm(wanted), block.name


def test_bisect_finds_no_fault_in_a_right_graph(graphs: dict[str, onnx.ModelProto], tmp_path: Path) -> None:
    """Its own hidden states, cut where the graph has them the other way."""
    onnx.save(graphs["fp16"], tmp_path / "model.onnx")
    batch = padded_batch((16, 3, 9))
    found = bisect(tmp_path / "model.onnx", batch, run_onnxruntime, run_onnxruntime, family=BERT)
    assert found.block is None
    assert len(found.blocks) == LAYERS + 2


def test_biases_that_are_zero_in_the_model_itself_stay(
    straight: Quantized, graphs: dict[str, onnx.ModelProto]
) -> None:
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
    tiny_bert: Path, tmp_path: Path, qkv: str, gemms: int, copies: int
) -> None:
    rules = [EVERY, *STRAIGHT, *one_scale("query")]
    export = {"opset": 20, "max_length": 128, "qkv_scales": qkv}
    made = calibrate(tiny_bert, recipe_with("bert-int8-attention", rules=rules, export=export))
    settings = ExportSettings(20, "fp16", "factored", qkv == "merged")
    graph = finish_graph(trace(made.model, 20), made.plan, settings)
    assert compare_layers(graph, made.model, [padded_batch()]).passed
    assert list_sequence_first(graph)
    ours = kinds(graph, tmp_path)
    assert ours.count("gemm") == gemms, ours
    assert ours.count("layout") + ours.count("quantize") == copies, ours
    assert ours.count("attention") == 1


def test_nothing_stands_between_the_gemms_of_k_and_v_and_the_attention(
    graphs: dict[str, onnx.ModelProto], tmp_path: Path
) -> None:
    graph = graphs["fp16"]
    names = {node.name for node in graph.graph.node}
    assert not any("key/Add" in name or "value/Add" in name or "key/MatMul_factor" in name for name in names)
    assert any("query/Add" in name for name in names)
    ours = kinds(graph, tmp_path)
    assert ours.count("layout") + ours.count("quantize") == 1, ours  # q alone
    assert ours.count("attention") == 1
