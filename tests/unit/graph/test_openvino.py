"""Rewrites for OpenVINO: the same numbers, with fewer operators between the LayerNorms and the linears."""

from pathlib import Path

import onnx
import pytest

from qdqbench.quantize.graph.export import ExportSettings, finish_graph, trace
from qdqbench.quantize.graph.index import GraphIndex
from qdqbench.quantize.graph.rewrites import fuse_for_openvino, move_value_biases, split_norms
from qdqbench.quantize.utils.arrays import Array

from ...support import tiny_bert as tiny
from ...support.draws import require_alike


@pytest.mark.parametrize(("name", "moved"), [("bert-int8-linears", tiny.LAYERS), ("bert-int8-attention", 0)])
def test_the_numbers_stay_and_codes_are_scaled_by_what_makes_them(
    tiny_bert: Path, name: str, moved: int
) -> None:
    settings = ExportSettings(20, "fp32", "channel", for_gpu=False)
    made = tiny.calibrate(tiny_bert, tiny.recipe_with(name, calibration={"smoothing": 0.65}))
    before = finish_graph(trace(made.model, 20), made.plan, settings)
    graph = tiny.copied(before)
    assert split_norms(graph) == 2 * tiny.LAYERS
    assert move_value_biases(graph) == moved  # not behind an INT8 softmax, whose rows do not sum to 1
    assert split_norms(graph) == move_value_biases(graph) == 0
    onnx.checker.check_model(graph, full_check=True)
    assert fuse_for_openvino(before.SerializeToString()) == graph.SerializeToString()

    def answer(seed: int) -> tuple[Array, Array]:
        batch = tiny.padded_batch(seed=seed)
        return tiny.run_onnx(graph, batch), tiny.run_onnx(before, batch)

    require_alike(answer, 1e-5)
    index = GraphIndex(graph)
    norms = [node.output[0] for node in graph.graph.node if node.op_type == "LayerNormalization"]
    for norm in norms[:-1]:
        assert [node.op_type for node in index.consumers[norm]].count("Mul") == 2
    inputs = [index.producers[n.input[0]].op_type for n in graph.graph.node if n.op_type == "QuantizeLinear"]
    assert inputs.count("Reshape") == (0 if moved else tiny.LAYERS)


def test_a_graph_without_quantizers_is_not_read() -> None:
    assert fuse_for_openvino(b"anything") == b"anything"
