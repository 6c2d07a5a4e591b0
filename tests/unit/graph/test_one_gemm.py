"""q, k and v as one MatMul for the builder: bit for bit the same, and still three linears in the proof."""

import numpy as np
import onnx
import pytest

from qdqbench.quantize.engine.build import TOGETHER, build, list_gemms, merge_qkv_gemms
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.graph.export import ExportSettings, finish_graph, trace
from qdqbench.quantize.graph.index import module_of

from ...support import tiny_bert as tiny

PARTS = ("query", "key", "value")


@pytest.fixture(scope="module")
def graph(tiny_bert):
    """q, k and v with shared scales, before INT8 attention; shared, so never changed."""
    rules = [{"match": "encoder.layer.*", "type": "Linear"} | tiny.INT8, *tiny.one_scale(*PARTS)]
    export = {"opset": 20, "max_length": 128, "qkv_scales": "shared"}
    made = tiny.calibrate(tiny_bert, tiny.recipe_with("bert-int8-attention", rules=rules, export=export))
    return finish_graph(trace(made.model, 20), made.plan, ExportSettings(20, "fp16", "factored", True))


def joined(graph):
    made = merge_qkv_gemms(graph)
    assert made is not None
    return made


def test_the_same_logits_bit_for_bit(graph):
    before = graph.SerializeToString(deterministic=True)
    made = joined(graph)
    onnx.checker.check_model(made, full_check=True)
    for batch in (tiny.padded_batch(), tiny.padded_batch((5, 1, 2, 3))):
        np.testing.assert_array_equal(tiny.run_onnx(made, batch), tiny.run_onnx(graph, batch))
    assert graph.SerializeToString(deterministic=True) == before


def test_one_node_has_the_names_of_three(graph):
    def gemms(model):
        return [node.name for node in model.graph.node if node.op_type == "MatMul"]

    made, names = joined(graph), gemms(graph)
    ours = gemms(made)
    assert len(ours) == len(names) - 2 * tiny.LAYERS
    assert sorted(name for node in ours for name in node.split(TOGETHER)) == sorted(names)
    together = [[module_of(name) for name in node.split(TOGETHER)] for node in ours if TOGETHER in node]
    assert [[name.rpartition(".")[2] for name in group] for group in together] == [[*PARTS]] * tiny.LAYERS
    kept = {tensor.name: tensor.dims for tensor in made.graph.initializer}
    wide = [dims for name, dims in kept.items() if name.endswith("_joined")]
    assert [list(dims) for dims in wide] == [[96, 32]] * tiny.LAYERS
    assert not any(name.endswith("self.key.weight_int8") for name in kept)


@pytest.mark.parametrize("change", ["scale", "input", "order", "reader", "output", "axis"])
def test_what_is_not_alike_stays_apart(graph, change):
    other = tiny.copied(graph)
    key = next(node for node in other.graph.node if node.name.endswith("layer.0/attention/self/key/MatMul"))
    concat = next(node for node in other.graph.node if key.output[0] in node.input)
    of_weight = "layer.0/attention/self/key/weight_quantizer/DequantizeLinear"
    dq = next(node for node in other.graph.node if node.name.endswith(of_weight))
    if change == "scale":
        scale = onnx.numpy_helper.from_array(np.array(0.5, np.float32), "another")
        other.graph.initializer.append(scale)
        dq.input[1] = "another"
    elif change == "input":
        key.input[0] = concat.input[0]
    elif change == "order":  # codes [K, N], as no Transpose stands behind them
        readers = {name: node for node in other.graph.node for name in node.input}
        turned = readers[dq.output[0]]
        while turned.op_type != "Transpose":
            turned = readers[turned.output[0]]
        codes = next(tensor for tensor in other.graph.initializer if tensor.name == dq.input[0])
        codes.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(codes).T, codes.name))
        turned.CopyFrom(onnx.helper.make_node("Cast", turned.input, turned.output, name=turned.name, to=1))
    elif change == "output":
        other.graph.output.append(onnx.ValueInfoProto(name=key.output[0]))
    elif change == "reader":
        other.graph.node.append(onnx.helper.make_node("Identity", [key.output[0]], ["read"], name="/read"))
    else:
        concat.attribute[0].i = 1
    made_of = merge_qkv_gemms(other)
    names = [node.name for node in made_of.graph.node] if made_of is not None else []
    assert sum(TOGETHER in name for name in names) == tiny.LAYERS - 1


@pytest.mark.parametrize("name", ["bert-int8-attention", "bert-int8-linears", "bert-fp16"])
def test_other_graphs_are_left_alone(tiny_bert, name):
    assert merge_qkv_gemms(tiny.traced(tiny_bert, name)) is None


def test_the_proof_counts_three_linears(graph, tmp_path):
    """In an engine that is built ahead of time from the file that has three."""
    pytest.importorskip("tensorrt_rtx")
    onnx.save(graph, tmp_path / "model.onnx")
    wanted = [name for name in list_gemms(tmp_path / "model.onnx") if module_of(name) in tiny.LINEARS]
    result = build(
        tmp_path / "model.onnx",
        tmp_path / "model.engine",
        backend="tensorrt_rtx",
        profiles=[Profile((1, 64), (8, 64), (8, 64))],
        expected_gemms=wanted,
        expected_attention=tiny.LAYERS,
        compute_capability="8.9",
    )
    assert (result.int8_gemms, result.not_int8) == (len(tiny.LINEARS), [])
    assert result.attention_int8 == tiny.LAYERS
    merged = [row for row in result.layers if row.name.count(TOGETHER) == 2]
    assert len(merged) == tiny.LAYERS
    assert {row.outputs[0] for row in merged} == {"Int8"}
