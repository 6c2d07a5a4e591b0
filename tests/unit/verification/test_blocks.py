"""The cut graph computes what the fake-quant model computes, and a fault shows in its block alone."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import onnx
import pytest
import torch

from qdqbench.eval.verification import blocks
from qdqbench.eval.verification.bisect import run_onnxruntime
from qdqbench.eval.verification.blocks import (
    HEAD,
    check_blocks,
    computed_floats,
    extract,
    layer_errors,
    reference_blocks,
    stitch,
)
from qdqbench.quantize.calibration.fakequant.native import use_frozen_weights
from qdqbench.quantize.calibration.record import get_state_shifts
from qdqbench.quantize.calibration.techniques.bias_correction import add_biases_temporarily
from qdqbench.quantize.models.families.known import BERT, MODERNBERT
from qdqbench.quantize.models.load import load_model, prepare_model
from qdqbench.quantize.models.rounding import ROUNDING, set_rounding
from qdqbench.quantize.utils.errors import UserError

from ...support.tiny_bert import (
    HIDDEN,
    INT8,
    LAYERS,
    calibrate,
    exported,
    exported_of,
    one_scale,
    padded_batch,
    quantized,
    recipe_with,
    run_onnx,
    tensor,
)
from ...support.tiny_layer import healthy, store
from ...support.tiny_modernbert import new_modernbert
from ...support.tiny_modernbert import quantized as of_modernbert

NAMES = ["embeddings", *(f"layer.{layer}" for layer in range(LAYERS)), HEAD]
BATCHES = [padded_batch((16, 4, 9, 16, 12, 7) * 4, seed) for seed in range(2)]
FAULTY = "layer.1"
MODULE = "bert.encoder.layer.1"


def judged(folder, graph, name):
    return judge(graph, BERT, quantized(folder, name).model, load_model(str(folder)))


def judge(graph, family, model, fp32, batches=BATCHES):
    cut = stitch(graph, family)
    checks = check_blocks(cut, partial(run_onnxruntime, cut.model), model, fp32, batches)
    return {row.name: row for row in checks}


def failing(checks):
    return [name for name, row in checks.items() if not row.holds]


@pytest.mark.parametrize("compute", ["fp16", "fp32"])
@pytest.mark.parametrize("weights", ["channel", "factored"])
@pytest.mark.parametrize("name", ["bert-int8-linears", "bert-int8-linears-per-tensor", "bert-int8-attention"])
def test_the_right_graph_passes_in_every_block(tiny_bert, name, weights, compute):
    graph = exported(tiny_bert, name, compute, weights)
    before = graph.SerializeToString(deterministic=True)
    checks = judged(tiny_bert, graph, name)
    assert list(checks) == NAMES
    assert failing(checks) == []
    assert all(checks[f"layer.{i}"].quantization_error > 0.005 for i in range(LAYERS))
    assert all((row.error or 0) < 0.002 for name, row in checks.items() if not name.startswith("layer"))
    assert graph.SerializeToString(deterministic=True) == before


def test_layers_that_end_with_a_sum_are_cut_behind_it():
    made = of_modernbert(new_modernbert(), attention=True)
    graph = exported_of(made.model, made.plan, "factored", "fp16")
    checks = judge(graph, MODERNBERT, made.model, prepare_model(new_modernbert()), BATCHES[:1])
    assert [*checks] == ["embeddings", *(f"layer.{n}" for n in range(4)), HEAD]
    for name, row in checks.items():
        assert row.holds
        assert name == HEAD or (row.quantization_error > 0.005) == (name != "embeddings")


def test_the_cut_graph_with_its_own_values_is_the_whole_graph(tiny_bert):
    graph, batch = exported(tiny_bert), BATCHES[0]
    stitched = stitch(graph, BERT)
    feeds = dict(batch)
    feeds |= {b.input: np.zeros((*batch["input_ids"].shape, HIDDEN), np.float16) for b in stitched.blocks[1:]}
    for block, following in zip(stitched.blocks, stitched.blocks[1:], strict=False):
        feeds[following.input] = run_onnxruntime(stitched.model, feeds)[block.output]
    assert np.array_equal(run_onnxruntime(stitched.model, feeds)["logits"], run_onnx(graph, dict(batch)))


def test_new_inputs_have_the_shape_and_type_of_the_border(tiny_bert):
    for compute, kind in (("fp16", onnx.TensorProto.FLOAT16), ("fp32", onnx.TensorProto.FLOAT)):
        stitched = stitch(exported(tiny_bert, compute=compute), BERT)
        inputs = {value.name: value.type.tensor_type for value in stitched.model.graph.input}
        for block in stitched.blocks[1:]:
            found = inputs[str(block.input)]
            assert found.elem_type == kind
            assert [d.dim_param or d.dim_value for d in found.shape.dim] == ["batch", "length", HIDDEN]
        onnx.checker.check_model(stitched.model)
        onnx.shape_inference.infer_shapes(stitched.model, strict_mode=True)


def test_quantization_inside_of_a_block_stays(tiny_bert):
    graph = exported(tiny_bert, "bert-int8-attention")
    cut = stitch(graph, BERT).model
    assert [(n.name, n.op_type) for n in graph.graph.node] == [(n.name, n.op_type) for n in cut.graph.node]
    assert list(graph.graph.initializer) == list(cut.graph.initializer)


def test_large_biases_are_rounded_as_the_graph_has_them(tiny_bert, monkeypatch):
    """Linears with a centered input have such biases, and a constant for the rounding of their weights."""
    model = calibrate(tiny_bert, recipe_with()).model
    linear = model.get_submodule(f"{MODULE}.output.dense")
    linear.bias.data = torch.linspace(-300.3, 300.3, HIDDEN)
    set_rounding(linear, torch.linspace(0.01, 0.02, HIDDEN).tolist())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = reference_blocks(model, None, BATCHES[0], half=True)[FAULTY].output
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    monkeypatch.setattr(blocks, "_half_biases", nullcontext)
    exact = reference_blocks(model, None, BATCHES[0], half=True)[FAULTY].output
    linear.bias.data += getattr(linear, ROUNDING)
    setattr(linear, ROUNDING, None)
    for name, value in model.named_parameters():
        if name.endswith("dense.bias") or name.split(".")[-2] in ("query", "key", "value"):
            value.data = value.half().float() if name.endswith("bias") else value
    rounded = reference_blocks(model, None, BATCHES[0], half=True)[FAULTY].output
    assert np.array_equal(found, rounded)
    assert np.abs(found - exact).max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_block_alone_computes_the_same(tiny_bert, name):
    stitched, batch = stitch(exported(tiny_bert), BERT), BATCHES[0]
    model = quantized(tiny_bert).model
    made = reference_blocks(model, None, batch, half=True)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    feeds = batch | stitched.feeds(made)
    alone, output = extract(stitched, name), stitched.blocks[NAMES.index(name)].output
    assert len(alone.graph.node) < len(stitched.model.graph.node)
    own, whole = (run_onnxruntime(graph, feeds)[output] for graph in (alone, stitched.model))
    assert np.array_equal(own, whole)


def test_marked_tensors_come_out(tiny_bert):
    stitched = stitch(exported(tiny_bert), BERT)
    inner = computed_floats(extract(stitched, FAULTY))
    assert all(name.startswith(("/bert/encoder/layer.1/", "/bert/Where")) for name in inner)
    kinds = {name: n.op_type for n in stitched.model.graph.node for name in n.output}
    assert {kinds[name] for name in inner} >= {"MatMul", "Add", "Softmax", "LayerNormalization"}
    assert not {kinds[name] for name in inner} & {"Cast", "DequantizeLinear", "Reshape", "Shape"}
    marked = extract(stitched, FAULTY, inner[:3])
    assert [value.name for value in marked.graph.output] == [*inner[:3], stitched.blocks[2].output]


def test_a_graph_without_names_is_refused():
    with pytest.raises(UserError, match="cannot be cut into blocks"):
        stitch(healthy(), BERT)


FAULTS = {  # of a module's initializer
    "a wrong scale": ("output.dense.weight_scale", lambda value: value * 1.1),
    "a dropped bias": ("output.dense.bias_fp16", lambda value: value * 0),
    "weights of others": ("attention.self.query.weight_int8", lambda value: value[:, ::-1]),
    "one channel": ("output.LayerNorm.bias_fp16", lambda value: value + 0.5 * (np.arange(len(value)) == 3)),
    # behind the last Q, which would make a number of it
    "NaN": ("output.dense.bias_fp16", lambda value: value * np.nan),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["bert-int8-linears", "bert-int8-attention"])
def test_a_fault_fails_its_block_and_no_other(tiny_bert, fault, name):
    graph, (part, change) = exported(tiny_bert, name), FAULTS[fault]
    store(graph, f"{MODULE}.{part}", change(tensor(graph, f"{MODULE}.{part}")))
    checks = judged(tiny_bert, graph, name)
    assert failing(checks) == [FAULTY]
    assert bool(checks[FAULTY].nonfinite) == (fault == "NaN")


BATCH = padded_batch((16, 4, 9, 16, 12, 7), 3)


@pytest.fixture(scope="module")
def made(tiny_bert):
    return quantized(tiny_bert, "bert-int8-attention")


def errors(made, tiny_bert, corrections=None):
    model, fp32 = made.model, load_model(str(tiny_bert))
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with use_frozen_weights(model):
        found = layer_errors(model, fp32, [*made.plan.int8], BATCH, corrections or {})
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert found.n == 6
    return {row.name: row for row in found.rows}


def test_every_linear_and_block_has_an_error_of_the_size_of_int8(made, tiny_bert):
    found = errors(made, tiny_bert)
    blocks = [f"layer.{number}" for number in range(LAYERS)]
    assert [*found] == [*made.plan.int8, "embeddings", *blocks, "head"]
    assert all(1e-3 < found[name].isolated < 0.1 for name in made.plan.int8)
    assert all(found[name].cumulative is None for name in (*made.plan.int8, "embeddings"))
    assert found["embeddings"].isolated < 1e-6
    assert found["layer.0"].cumulative == pytest.approx(found["layer.0"].isolated, rel=1e-3)
    assert found[blocks[-1]].cumulative > found[blocks[-1]].isolated
    assert found["head"].isolated < 1e-6 < found["head"].cumulative


def test_a_broken_linear_shows_alone_and_in_all_that_follows(made, tiny_bert):
    before = errors(made, tiny_bert)
    name = "bert.encoder.layer.1.intermediate.dense"
    with made.model.get_submodule(name).register_forward_hook(lambda _, __, output: output + 1):
        after = errors(made, tiny_bert)
    assert after[name].isolated > 10 * before[name].isolated
    assert after["layer.1"].isolated > 2 * before["layer.1"].isolated
    assert after["head"].cumulative > before["head"].cumulative
    assert after["layer.0"] == before["layer.0"]


def test_a_correction_is_part_of_what_is_judged(made, tiny_bert):
    name = "bert.encoder.layer.0.output.dense"
    plain = errors(made, tiny_bert)[name].isolated
    width = len(made.model.get_submodule(name).bias)
    assert errors(made, tiny_bert, {name: [1.0] * width})[name].isolated > 5 * plain


def test_shifted_hidden_states_are_no_error(tiny_bert):
    """What q, k and v read is shifted from layer to layer: that is no cost of INT8."""
    rules = [{"match": "encoder.layer.*", "type": "Linear"} | INT8, *one_scale("query", "key", "value")]
    made = calibrate(tiny_bert, recipe_with("bert-int8-attention", rules=rules))
    moved = get_state_shifts(made.record)
    assert [*moved] == [*range(LAYERS)]
    fp32 = load_model(str(tiny_bert))
    before = {name: value.clone() for name, value in fp32.state_dict().items()}
    added = [shift.added for shift in made.record.shifts.values()]
    with use_frozen_weights(made.model), add_biases_temporarily(fp32, added):
        found = layer_errors(made.model, fp32, [*made.plan.int8], BATCH, {}, moved)
    assert all(torch.equal(value, before[name]) for name, value in fp32.state_dict().items())
    rows = {row.name: row for row in found.rows}
    assert rows["embeddings"].isolated < 1e-5
    assert all(0.005 < rows[f"layer.{number}"].isolated < 0.1 for number in range(LAYERS))
    assert rows["layer.0"].cumulative == pytest.approx(rows["layer.0"].isolated, rel=0.1)
    assert errors(made, tiny_bert)["embeddings"].isolated > 0.1
