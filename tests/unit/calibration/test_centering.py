"""Centering: answers stay until something is quantized, ranges get smaller, and all of it can be restored."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant.quantizers import forward, quantizers_off
from qdqbench.quantize.calibration.record import get_state_shifts, trained_record
from qdqbench.quantize.calibration.techniques import centering, channel_splitting
from qdqbench.quantize.graph import export
from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe.plan import resolve
from qdqbench.quantize.recipe.schema import find_recipe, load_recipe

from ...support.families import LAYERS, SIZES, write_model
from ...support.tiny_bert import Quantized, calibration_batches, padded_batch, restored

EDGES = hnp.arrays(np.float64, (2, 12), elements=st.floats(-8, 8))
# first linears that read a LayerNorm, two in a layer, and second feed-forward linears
CENTERED = {"modernbert": (0, 0), "albert": (LAYERS, LAYERS), "deberta-v2": (LAYERS, LAYERS)}


def quantized(folder, recipe, **changes):
    model = load_model(str(folder))
    with torch.no_grad():  # one-sided ranges, as trained models have
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.LayerNorm) and module.bias is not None:
                module.bias += torch.linspace(-3, 3, len(module.bias)) * (1 + len(name) % 2)
    model.save_pretrained(folder)
    settings = recipe.calibration.model_copy(update={"bias_correction": False, "centering": True} | changes)
    plan = resolve(recipe, module_table(model), model.base_model_prefix)
    return Quantized(model, plan, ptq.calibrate(model, plan, calibration_batches(), settings))


@pytest.mark.parametrize("model_type", [name for name in SIZES if name not in {"camembert", "xlm-roberta"}])
def test_answers_stay_and_the_model_can_be_restored(model_type, tmp_path):
    folder = write_model(tmp_path / "model", model_type)
    recipe = find_recipe("int8-linears", str(folder))
    model, _, record = made = quantized(folder, recipe)
    plain, batch = load_model(str(folder)), padded_batch((12, 12))
    norms, seconds = CENTERED.get(model_type, (2 * LAYERS, LAYERS))
    assert (len(record.shifts), len(record.centering.inputs)) == (norms, seconds)
    with quantizers_off(model):
        assert torch.allclose(forward(model, batch), forward(plain, batch), rtol=1e-3, atol=1e-4)
    restored(made, load_model(str(folder)))


@pytest.mark.parametrize("recipe", ["int8-linears", "int8-attention", "int8-residual-fused"])
def test_ranges_are_smaller_and_the_graph_is_the_model(recipe, tmp_path):
    folder = write_model(tmp_path / "model", "bert", num_attention_heads=2)
    chosen = load_recipe(f"bert-{recipe}")
    whole = {"smoothing": "none", "outlier_channel_splitting": 32}
    rules = [rule.model_copy(update={"smoothing": None}) for rule in chosen.rules]
    chosen = chosen.model_copy(
        update={"rules": rules, "calibration": chosen.calibration.model_copy(update=whole)}
    )
    model, plan, record = quantized(folder, chosen)
    other = load_model(str(folder))
    apart = chosen.calibration.model_copy(update={"bias_correction": False})
    before = ptq.calibrate(other, plan, calibration_batches(), apart)
    for name in plan.int8:
        if plan.family.role(name) in {"ffn-in", "ffn-out"}:
            key = f"{name}.input_quantizer"
            assert record.quantizers[key].amax < before.quantizers[key].amax
    assert set(get_state_shifts(record)) == set(range(LAYERS))
    graph = export.finish_graph(export.trace(model, 20), plan, export.ExportSettings(20, "fp32", "channel"))
    assert sum(node.op_type == "Sub" and "output" in node.name for node in graph.graph.node) == LAYERS
    expected = {*plan.int8, *plan.attention, *plan.residual}
    assert check_model(graph, expected_quantized=expected).findings == []
    parity = compare_layers(graph, model, [padded_batch()])
    assert parity.passed, [row for row in parity.rows if row.differing]


@pytest.mark.parametrize("recipe", ["int8-linears", "int8-residual"])
def test_a_trained_model_is_saved_without_and_restored_with(recipe, tmp_path):
    folder, chosen = write_model(tmp_path / "model", "bert"), load_recipe(f"bert-{recipe}")
    model, plan, record = quantized(folder, chosen, bias_correction=True)
    assert all((record.biases, record.centering.inputs, record.smoothing.inputs, record.splits))
    for value in model.parameters():
        value.data += 0.01 * torch.randn_like(value)
    channel_splitting.keep_equal(model, record.splits)()
    trained = trained_record(model, record)
    before = [value.clone() for value in model.parameters()]
    weights = ptq.take_out(model, trained)
    torch.testing.assert_close([*model.parameters()], before)
    plain = load_model(str(folder))
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    batch = padded_batch((12, 12))
    with quantizers_off(model):
        assert torch.allclose(forward(model, batch), forward(plain, batch), rtol=1e-3, atol=1e-4)
    restored(Quantized(model, plan, trained), plain)


@given(EDGES)
def test_the_middle_of_a_centered_range_is_zero(edges):
    moved = centering.shift_edges(edges, -centering.find_middle(edges))
    assert np.allclose(moved[0], moved[1])
    assert np.allclose(moved.sum(axis=0), edges.sum(axis=0))


def test_a_range_with_two_sides_has_no_constant(tmp_path):
    model, plan, _ = quantized(write_model(tmp_path / "model", "bert"), load_recipe("bert-int8-linears"))
    name = next(each for each in plan.int8 if plan.family.role(each) == "ffn-out")
    for high, chosen in ((1.0, {}), (1.1, {}), (4.0, {name: 1.5}), (0.0, {name: -0.5})):
        edges = np.stack([np.ones(64), np.full(64, high)])
        ranges = centering.Ranges({name: edges}, {})
        assert centering.choose_constants(model, [name], ranges) == chosen
        assert ranges.inputs[name].max() == pytest.approx((1 + high) / 2 if chosen else max(1, high))


def test_zero_stays_zero_where_it_is_quantized(tmp_path):
    """Most of what GELU gives is near zero: no step and no rounded weight may move it."""
    recipe = load_recipe("bert-int8-linears")
    model, _, record = quantized(write_model(tmp_path / "model", "bert"), recipe, outlier_channel_splitting=0)
    for name in record.centering.inputs:
        linear = model.get_submodule(name)
        zeros = torch.zeros(1, 1, linear.in_features)
        with quantizers_off(model):
            exact = linear(zeros)
        assert torch.allclose(linear(zeros), exact, atol=1e-4)
        assert torch.allclose(exact, linear.bias - torch.tensor(record.centering.biases[name]), atol=1e-4)
    assert {*record.centering.rounding} == {*record.centering.inputs}
