"""The first wrong tensor is found and named, with its node, its kernels and the right cause."""

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from qdqbench.eval.verification import bisect as under_test
from qdqbench.eval.verification.bisect import BisectResult, bisect, bisect_lines, bisect_run, run_onnxruntime
from qdqbench.eval.verification.blocks import reference_blocks
from qdqbench.eval.verification.checks import compare_tensors, kept_positions
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.models.families.known import BERT
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.pipeline.pipeline import open_run
from qdqbench.quantize.pipeline.session import RunConfig
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.system import gpu

from ...support.tiny_bert import HIDDEN, LAYERS, exported, padded_batch, quantized, tensor
from ...support.tiny_layer import give, store

MODULE = "bert.encoder.layer.1"
BLOCK, PLACE = "layer.1", "/bert/encoder/layer.1"
BATCH = padded_batch((16, 16, 4, 9, 12, 16))
Edit = Callable[[onnx.ModelProto], None]


def faulty(edit):
    """A runner on which every graph has a fault, if it holds what the fault is in."""

    def run(model, feeds):
        edit(twin := deepcopy(model))
        return run_onnxruntime(twin, feeds)

    return run


def scaled(name, factor):
    def edit(graph):
        if any(t.name == name for t in graph.graph.initializer):
            store(graph, name, tensor(graph, name) * factor)

    return edit


@pytest.fixture
def found(tiny_bert, tmp_path):
    """The result for an engine that runs the graph of a recipe with this fault."""

    def search(edit, recipe="bert-int8-linears", **options):
        path, model = tmp_path / "model.onnx", quantized(tiny_bert, recipe).model
        onnx.save(exported(tiny_bert, recipe), path)
        options["tensors"] = reference_blocks(model, load_model(str(tiny_bert)), BATCH, half=True)
        return bisect(path, BATCH, faulty(edit), run_onnxruntime, family=BERT, **options)

    return search


def linear(name):
    return f"{PLACE}/{name}"


@pytest.mark.parametrize(
    ("part", "value", "node", "cause"),
    [
        ("output.dense.weight_scale", 1.5, "output/dense/MatMul", "factor 1.5"),
        ("attention.self.value.weight_scale", 0.5, "attention/self/value/MatMul", "0.5"),
        ("output.dense.bias_fp16", 0, "output/dense/Add", "lost or wrong bias"),
        ("intermediate.dense.bias_fp16", 0, "intermediate/dense/Add", "bias"),
        ("output.LayerNorm.weight_fp16", 1.3, "output/LayerNorm/LayerNormalization", ""),
    ],
)
@pytest.mark.parametrize("per_step", [1, 8, 100])
def test_the_first_wrong_tensor_is_named(  # noqa: PLR0917
    found, monkeypatch, part, value, node, cause, per_step
):
    monkeypatch.setattr(under_test, "PER_STEP", per_step)
    node, edit = linear(node), scaled(f"{MODULE}.{part}", value)
    kernels = {"kernel": ["/other", node], f"{node}_myl0_3": [], "other": ["/other"]}
    none = dict.fromkeys(("inputs", "constants", "outputs"), ())
    rows = [LayerRow(name=name, kind="gemm", onnx=nodes, **none) for name, nodes in kernels.items()]
    result = found(edit, layers=rows, suspects=[BLOCK])
    assert (result.block, result.node) == (BLOCK, node)
    assert cause in result.cause
    assert result.layers == ["kernel", f"{node}_myl0_3"]
    assert not result.vanished
    assert {name for name, row in result.blocks.items() if not row.holds} <= {BLOCK}
    lines = "\n".join(bisect_lines(result))
    assert node in lines
    assert result.cause in lines
    BisectResult.model_validate_json(result.model_dump_json())


def test_a_right_engine_has_no_bad_block(found):
    result = found(lambda graph: None)
    assert (result.block, result.tensor, result.engines) == (None, None, 1)
    assert list(result.blocks) == ["embeddings", *(f"layer.{i}" for i in range(LAYERS)), "head"]
    assert "no block is wrong" in bisect_lines(result)


def test_the_first_of_two_bad_blocks_is_searched_and_the_other_named(found):
    def edit(graph):
        for layer in range(LAYERS):
            scaled(f"bert.encoder.layer.{layer}.output.dense.weight_scale", 3.0)(graph)

    result = found(edit)
    assert result.block == "layer.0"
    assert any("layer.1" in note for note in result.notes)


def multiply(graph, after, factors):
    """Let the readers of a node's output, where it is there, read it times factors; it keeps its name."""
    place = next((i for i, node in enumerate(graph.graph.node) if node.name == after), None)
    if place is not None:
        name = graph.graph.node[place].output[0]
        graph.graph.node[place].output[0] = f"{name}/raw"
        inputs = [f"{name}/raw", give(graph, f"{name}/factors", factors, factors.dtype)]
        graph.graph.node.insert(place + 1, helper.make_node("Mul", inputs, [name], name=name))


def overflow(after, size):
    """Channels of a tensor over the range of FP16, as a raw INT32 accumulator would be."""
    factors = np.where(np.arange(size) % 2, 1, np.inf).astype(np.float16)
    return lambda graph: multiply(graph, after, factors)


def test_an_overflow_after_an_int8_gemm(found):
    node = linear("attention/self/value/MatMul")
    result = found(overflow(node, HIDDEN))
    assert (result.block, result.node) == (BLOCK, node)
    assert result.error is not None
    assert result.error.error is None
    assert result.cause.startswith("FP16 overflow after the INT8 GEMM")


def test_an_overflowing_norm(found):
    node = linear("attention/output/LayerNorm/LayerNormalization")
    result = found(overflow(node, HIDDEN), "bert-fp16")
    assert result.node == node
    assert result.cause.startswith("LayerNorm in FP16")


def test_a_wrong_mask(found):
    def edit(graph):
        for node in graph.graph.node:
            if node.op_type == "Add" and node.name == linear("attention/self/Add"):
                node.op_type = "Sub"

    result = found(edit)
    assert result.block == BLOCK
    assert "attention mask" in result.cause


def test_a_fault_that_vanishes_when_marked_is_said(found, monkeypatch):
    """An engine that is wrong only while the GELU is fused, and so not an output: another mark shows it."""

    def edit(graph):
        if not any("Gelu" in value.name for value in graph.graph.output):
            scaled(f"{MODULE}.output.dense.weight_scale", 4.0)(graph)

    monkeypatch.setattr(under_test, "PER_STEP", 1)
    result = found(edit)
    assert result.block == BLOCK
    assert (result.vanished, result.node) == (False, linear("output/dense/MatMul"))
    assert any("vanishes" in note and "Gelu_output_0" in note for note in result.notes)


def test_a_fault_of_a_fused_pair_only(found):
    """Any mark inside of the block repairs it."""

    def edit(graph):
        inner = [v.name for v in graph.graph.output if PLACE in v.name and "output/LayerNorm" not in v.name]
        if not inner:
            scaled(f"{MODULE}.output.dense.weight_scale", 4.0)(graph)

    result = found(edit)
    assert result.block == BLOCK
    assert result.vanished
    assert any("vanishes" in note for note in result.notes)
    assert result.node is not None
    assert result.node.startswith(PLACE)


@pytest.mark.parametrize(
    ("shape", "count"),
    [((2, 3, 8), 4 * 8), ((2, 5, 3, 4), 4 * 5 * 4), ((2, 5, 3, 3), 5 * (9 + 1)), ((2, 7), 14)],
)
def test_padding_is_left_out(shape, count):
    mask = np.array([[1, 1, 1], [1, 0, 0]], bool)
    assert kept_positions(np.ones(shape), mask).size == count


@given(seed=st.integers(0, 99), factor=st.floats(0.1, 10))
def test_error_of_a_tensor(seed, factor):
    truth = np.random.default_rng(seed).normal(size=(4, 6, 8)).astype(np.float32)
    row = compare_tensors("t", truth * np.float32(factor), truth, np.ones((4, 6), bool), 0.05)
    assert row.error == pytest.approx(abs(factor - 1), rel=1e-3, abs=1e-5)
    within = row.error is not None and row.error <= 0.05
    assert row.holds == (within and row.systematic <= row.systematic_limit)
    assert not compare_tensors("t", truth * np.nan, truth, np.ones((4, 6), bool), 0.05).holds


def test_without_a_run_or_a_gpu(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="is no run directory"):
        bisect_run(tmp_path)
    recipe = load_recipe("bert-int8-linears")
    config = RunConfig(recipe=recipe, model=None, task=get_task("embedded"), data="hub")
    open_run(config, tmp_path / "run")
    with pytest.raises(UserError, match="has no engine yet"):
        bisect_run(tmp_path / "run")
    (tmp_path / "run" / "build.json").write_text('{"skipped": "no backend"}')
    monkeypatch.setattr(gpu, "find_gpu", lambda: None)
    with pytest.raises(MissingDevice, match="CUDA shows no GPU"):
        bisect_run(tmp_path / "run")
