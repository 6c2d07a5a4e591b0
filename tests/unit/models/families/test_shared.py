"""Weights that run several times (ALBERT): calibrated over all runs, stored once, and judged run by run."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.eval.metrics.runners import session_of
from qdqbench.eval.selection.search.workspace import count_multiply_adds, int8_share, make_space
from qdqbench.eval.verification.bisect import run_onnxruntime
from qdqbench.eval.verification.blocks import check_blocks, stitch
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant.quantizers import forward
from qdqbench.quantize.engine import cpu_runtimes
from qdqbench.quantize.engine.layers import block_of_node, kernel_operator, shorten_node
from qdqbench.quantize.graph import export
from qdqbench.quantize.graph.index import GraphIndex, count_attentions, module_of, run_of
from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.models.families.known import ALBERT, part_of
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe.plan import Plan, resolve
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.system.cpu import Cpu

from ....support.families import INTERMEDIATE, LAYERS, write_model
from ....support.tiny_bert import calibration_batches, padded_batch, watched

GROUPS, RUNS = LAYERS, 2 * LAYERS
LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.0"
FFN = [f"{LAYER.format(group)}.ffn" for group in range(GROUPS)]
BATCHES = [padded_batch((9, 4, 16)), padded_batch((12, 12, 3, 7), seed=1)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = str(write_model(tmp_path_factory.mktemp("albert") / "model", "albert"))
    recipe, model = load_recipe("albert-int8-attention"), load_model(folder)
    settings = recipe.calibration.model_copy(update={"outlier_channel_splitting": 8})
    plan = resolve(recipe, module_table(model), "albert")
    record = ptq.calibrate(model, plan, calibration_batches(), settings)
    graph = export.finish_graph(export.trace(model, 20), plan, export.ExportSettings(20, "fp16", "factored"))
    return SimpleNamespace(folder=folder, recipe=recipe, model=model, plan=plan, record=record, graph=graph)


def products(graph):
    return [node.name for node in graph.graph.node if node.op_type in ("MatMul", "Gemm")]


def test_every_run_has_nodes_of_its_own_that_say_which(made):
    names = [node.name for node in made.graph.graph.node]
    assert len(set(names)) == len(names)
    runs = [run_of(name) for name in products(made.graph) if module_of(name) in FFN]
    assert runs == [f"@{run}" for run in range(RUNS)]
    per_run = Counter(map(run_of, products(made.graph)))
    assert per_run == {f"@{run}": 8 for run in range(RUNS)} | {"": 3}
    assert count_attentions(products(made.graph), made.plan.attention) == RUNS


def test_weights_are_stored_once(made):
    initializers = made.graph.graph.initializer
    index = GraphIndex(made.graph)
    codes = Counter(i.name for i in initializers if i.data_type == onnx.TensorProto.INT8 and len(i.dims) == 2)
    assert len(codes) == len(made.plan.int8)
    assert set(codes.values()) == {1}
    readers = Counter(len(index.consumers[name]) for name in codes)
    assert readers == {RUNS // GROUPS: len(made.plan.int8)}
    settings = export.ExportSettings(20, "fp16", "factored")
    twin = export.finish_graph(export.trace(load_model(made.folder), 20), Plan(family=ALBERT), settings)
    wide = [i for i in twin.graph.initializer if sorted(i.dims) == [32, INTERMEDIATE]]
    assert len(wide) == 2 * GROUPS


def test_onnx_runtime_takes_shared_weights_where_its_sums_would_saturate(made, monkeypatch):
    monkeypatch.setattr(cpu_runtimes, "find_cpu", lambda: Cpu("old", 2, ("avx2",)))
    settings = export.ExportSettings.of(made.recipe, "onnxruntime")
    graph = export.finish_graph(export.trace(made.model, 20), made.plan, settings).SerializeToString()
    engine = cpu_runtimes.compile_model("onnxruntime", graph, blob=False, compute="fp32")
    exact = session_of(graph, "graph").run(None, {name: BATCHES[0][name] for name in engine.inputs})[0]
    answer = engine.run({name: BATCHES[0][name] for name in engine.inputs})["logits"]
    assert np.abs(answer - exact).max() < 0.05 * np.abs(exact).max()  # a code may be its neighbor


def test_one_amax_is_that_of_all_runs(made):
    plain = load_model(made.folder)
    plan = resolve(made.recipe, module_table(plain), "albert")
    changes = {"smoothing": "none", "outlier_channel_splitting": 0, "bias_correction": False}
    settings = made.recipe.calibration.model_copy(update=changes)
    for name in plan.scaling:
        plan.scaling[name] = type(plan.scaling[name])()
    other = load_model(made.folder)
    with watched(other, FFN, inputs=True) as seen:
        for batch in calibration_batches():
            forward(other, batch)
    record = ptq.calibrate(plain, plan, calibration_batches(), settings)
    for name in FFN:
        assert len(seen[name]) == RUNS // GROUPS * len(calibration_batches())
        largest = max(float(each.abs().max()) for each in seen[name])
        assert record.quantizers[f"{name}.input_quantizer"].amax == pytest.approx(largest)
    assert any("share the weights" in note for note in record.notes)


def test_smoothing_splitting_and_bias_correction_are_done(made):
    record = made.record
    assert {name.rpartition(".")[2] for name in record.smoothing.inputs} == {"query", "key", "value", "ffn"}
    assert set(record.splits) == {f"{LAYER.format(group)}.ffn_output" for group in range(GROUPS)}
    assert record.biases
    assert set(record.biases) <= set(made.plan.int8)
    again = load_model(made.folder)
    ptq.restore(again, made.plan, record)
    np.testing.assert_array_equal(forward(again, BATCHES[0]), forward(made.model, BATCHES[0]))


def test_every_run_has_a_parity_of_its_own(made):
    parity = compare_layers(made.graph, made.model, BATCHES)
    assert parity.passed
    found = {row.name for row in parity.rows}
    assert {f"{name}@{2 * group + run}" for group, name in enumerate(FFN) for run in range(2)} <= found
    assert len(parity.rows) == RUNS * (len(ALBERT.linears) + 4)
    assert part_of(f"{FFN[1]}@3") == (3, "ffn-in", "albert_layers.0.ffn")


def test_a_fault_in_one_run_is_found_there(made):
    broken = onnx.ModelProto()
    broken.CopyFrom(made.graph)
    index = GraphIndex(broken)
    node = next(n for n in broken.graph.node if n.name.endswith("/ffn_output/Add@2"))
    bias = next(name for name in node.input if index.constant(name) is not None)
    value = np.array(index.constant(bias))
    value[3] += 2
    broken.graph.initializer.append(onnx.numpy_helper.from_array(value, "shifted"))
    node.input[list(node.input).index(bias)] = "shifted"
    assert failing(made, made.graph) == []
    assert failing(made, broken) == ["layer.2"]


def failing(made, graph):
    stitched = stitch(graph, ALBERT)
    names = ["embeddings", *(f"layer.{run}" for run in range(RUNS)), "head"]
    assert [block.name for block in stitched.blocks] == names
    run = partial(run_onnxruntime, stitched.model)
    checks = check_blocks(stitched, run, made.model, load_model(made.folder), BATCHES)
    return [row.name for row in checks if not row.holds]


def test_check_knows_the_runs(made):
    wanted = {*made.plan.int8, *made.plan.attention}
    report = check_model(made.graph, expected_quantized=wanted)
    assert report.findings == []
    assert len(report.quantized) == 8 * RUNS
    assert len(report.attention_quantized) == RUNS


def test_kernels_are_told_by_run():
    node = "/albert/encoder/albert_layer_groups.1/albert_layers.0/attention/query/MatMul@3"
    assert block_of_node(node) == "layer.3"
    assert kernel_operator(node) == "MatMul"
    assert shorten_node(node) == "layer.3 attention query"


def test_a_search_moves_weights_and_its_int8_share_counts_runs(made):
    model = load_model(made.folder)
    space = make_space(load_recipe("albert-int8-linears"), module_table(model), "albert")
    # group 0 makes the first two of four runs: an attention output has a twelfth of a layer's linears
    settings = {"smoothing": "none", "method": "max", "weights_method": "max"}
    found = space.assemble({(0, "output")}, set(), settings)
    plan = resolve(found, space.whole.modules, "albert")  # `assemble` holds the plan to these units
    every = count_multiply_adds(model, space.whole.modules, 8)
    counts = {name: count for name, count in every.items() if space.whole.modules[name].kind == "Linear"}
    hidden, inner = model.config.hidden_size, model.config.intermediate_size
    layer = 4 * hidden**2 + 2 * hidden * inner
    assert sum(counts.values()) == RUNS * 8 * layer
    assert int8_share(plan, counts) == 2 * hidden**2 / (RUNS * layer)
