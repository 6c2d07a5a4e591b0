"""INT8 softmax: what rounding loses of the attention's output, and the form that loses least of it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.calibration.fakequant.quantizers import INT8_MAX
from qdqbench.quantize.calibration.record import select_record
from qdqbench.quantize.calibration.techniques import softmax_scale as softmax
from qdqbench.quantize.models.attention import ROW_MAX
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.recipe.sections import Calibration

from ...support import tiny_bert as bert
from ...support.families import write_model

LONG_BATCHES = [bert.padded_batch((length,) * 4, seed=length) for length in (12, 120)]


def calibrated(folder, how, model=None):
    recipe = bert.recipe_with(rules=[bert.EVERY], calibration={"softmax_scale": how}, **bert.INT8_ATTENTION)
    return bert.calibrate_model(model or load_model(str(folder)), recipe, LONG_BATCHES)


def summed(p, v, *forms):
    part = softmax._SoftmaxSums(tries={form: softmax._Try() for form in forms})
    part.add(p, v)
    return part


@given(
    seed=st.integers(0, 999),
    amax=st.sampled_from(softmax.FORMS["min-error"]),
    sharp=st.floats(0.1, 8),
    shift=st.floats(-3, 3),
)
@settings(max_examples=40)
def test_the_error_of_centred_values_by_hand(seed, amax, sharp, shift):
    random = torch.Generator().manual_seed(seed)
    p = torch.softmax(sharp * torch.randn(2, 3, 40, 40, generator=random), dim=-1)
    v = torch.randn(2, 3, 40, 4, generator=random) + shift
    scale = amax / INT8_MAX
    rounded = torch.fake_quantize_per_tensor_affine(p, scale, 0, -128, 127)
    part = summed(p, v, amax)
    for center in (None, torch.randn(3, 4, generator=random).double()):
        m = torch.zeros(()) if center is None else center[None, :, None, :].float()
        direct = (rounded @ (v - m) + m - p @ v).double().square().sum()
        assert part.tries[amax].error(center) == pytest.approx(float(direct), rel=1e-3, abs=1e-6)
    tried = part.tries[amax]
    assert float(tried.clipped) == pytest.approx(float((p - amax).clamp(min=0).sum()), rel=1e-4, abs=1e-6)
    assert float(tried.zeroed) == pytest.approx(float(p[p < scale / 2].sum()), rel=0.05, abs=1e-2)


@given(length=st.integers(255, 400), value=st.floats(-4, 4).filter(lambda x: abs(x) > 0.1))
@settings(max_examples=10)
def test_even_attention_is_all_lost_and_all_in_the_centre(length, value):
    p = torch.full((1, 1, length, length), 1 / length)
    part = summed(p, torch.full((1, 1, length, 2), value), 1.0)
    mean = part.values / part.tokens
    assert part.make_row("a", 512, 1.0, None).zeroed == pytest.approx(1, rel=1e-4)
    assert part.make_row("a", 512, 1.0, None).error == pytest.approx(1, rel=1e-4)
    assert part.make_row("a", 512, 1.0, mean).error < 0.01


def test_centring_changes_no_answer_and_lowers_the_error(tiny_bert):
    batch = bert.padded_batch((120, 90))
    plain = quantizers.forward(load_model(str(tiny_bert)), batch)
    of_max, of_error = (calibrated(tiny_bert, how) for how in ("fixed", "min-error"))
    model, _, record = of_error
    assert record.centers
    assert calibrated(tiny_bert, "auto").record == record
    with quantizers.quantizers_off(model):
        torch.testing.assert_close(quantizers.forward(model, batch), plain, rtol=1e-4, atol=1e-4)
    for name in bert.ATTENTIONS:
        before, after = ([r for r in found.softmax if r.module == name] for found in (of_max[2], record))
        assert [row.length for row in before] == [row.length for row in after] == [64, 128]
        assert np.mean([row.error**2 for row in after]) < np.mean([row.error**2 for row in before])
        assert all(row.clipped == 0 and not row.centered for row in before)
    chosen = {record.quantizers[f"{name}.p_bmm_quantizer"].amax for name in bert.ATTENTIONS}
    assert chosen <= set(np.float32(softmax.FORMS["min-error"]).tolist())


@pytest.mark.parametrize("model_type", ["distilbert", "albert", "mpnet", "deberta-v2", "modernbert"])
def test_the_attention_of_any_family_is_measured(model_type, tmp_path):
    recipe = load_recipe(f"{model_type}-int8-attention")
    recipe = recipe.model_copy(update={"calibration": Calibration(softmax_scale="min-error")})
    folder, batch = str(write_model(tmp_path, model_type)), bert.padded_batch((40, 12))
    plain = quantizers.forward(load_model(folder), batch)
    model, plan, record = bert.calibrate_model(load_model(folder), recipe, [bert.padded_batch((60,) * 4)])
    assert {row.module for row in record.softmax} == set(plan.attention)
    assert all(0 < row.error < 1 for row in record.softmax)
    if model_type == "modernbert":  # its linears have no bias
        assert not record.centers
    with quantizers.quantizers_off(model):
        torch.testing.assert_close(quantizers.forward(model, batch), plain, rtol=1e-3, atol=1e-3)


@given(seed=st.integers(0, 999), sharp=st.floats(0.1, 8))
@settings(max_examples=20)
def test_codes_over_the_largest_of_each_row_lose_less(seed, sharp):
    random = torch.Generator().manual_seed(seed)
    p = torch.softmax(sharp * torch.randn(2, 3, 40, 40, generator=random), dim=-1)
    v = torch.randn(2, 3, 40, 4, generator=random)
    part = summed(p, v, "row-max", softmax.PLAIN)
    codes = (p / p.amax(-1, keepdim=True) * 255).round()
    direct = (codes @ v / codes.sum(-1, keepdim=True) - p @ v).double().square().sum()
    row, plain = (part.make_row("a", 64, form, None) for form in ("row-max", softmax.PLAIN))
    assert part.tries["row-max"].error(None) == pytest.approx(float(direct), rel=1e-3, abs=1e-6)
    assert (row.amax, row.row_max, row.clipped, plain.row_max) == (1.0, True, 0.0, False)
    assert row.error < plain.error


def test_a_softmax_over_the_largest_of_each_row_is_restored(tiny_bert):
    batch = bert.padded_batch((120, 90))
    model, _, record = made = calibrated(tiny_bert, "row-max")
    assert [(row.row_max, row.centered) for row in record.softmax] == [(True, False)] * len(record.softmax)
    assert record.softmax
    assert not record.centers
    again = bert.restored(made, load_model(str(tiny_bert)))
    with quantizers.quantizers_off(model):
        exact = quantizers.forward(model, batch)
    plain = quantizers.forward(load_model(str(tiny_bert)), batch)
    torch.testing.assert_close(exact, plain, rtol=1e-4, atol=1e-4)
    softmax.leave_row_max(again)
    for name in bert.ATTENTIONS:
        attention = again.get_submodule(name)
        left = attention.p_bmm_quantizer
        assert (getattr(attention, ROW_MAX), left.unsigned, float(left.amax)) == (False, False, softmax.PLAIN)


@pytest.mark.parametrize("how", ["auto", "fixed", "min-error", "row-max"])
def test_a_form_of_no_softmax_is_noted(how, tiny_bert):
    recipe = bert.recipe_with(rules=[bert.EVERY], calibration={"softmax_scale": how})
    record = bert.calibrate_model(load_model(str(tiny_bert)), recipe, LONG_BATCHES)[2]
    note = f"calibration.softmax_scale: {how} changes nothing: no attention is in INT8"
    assert (note in record.notes) == (how in {"min-error", "row-max"})


def test_without_a_bias_the_values_stay_where_they_are(tiny_bert):
    model = load_model(str(tiny_bert))
    model.get_submodule(bert.LINEARS[2]).bias = None
    record = calibrated(tiny_bert, "min-error", model)[2]
    assert set(record.centers) == {bert.LINEARS[8], bert.LINEARS[9]}
    assert {(row.module, row.centered) for row in record.softmax} == {
        (bert.ATTENTIONS[0], False),
        (bert.ATTENTIONS[1], True),
    }


def test_a_part_of_a_calibration_keeps_what_its_scales_were_measured_with(tiny_bert):
    _, plan, record = calibrated(tiny_bert, "min-error")
    part = Plan(int8=plan.int8, attention=(bert.ATTENTIONS[1],), scaling=plan.scaling)
    alone = select_record(part, record, record)
    assert alone.centers == record.centers  # the inputs of the output projections are centred too
    assert {row.module for row in alone.softmax} == {bert.ATTENTIONS[1]}
    plain = calibrated(tiny_bert, "fixed")[2]
    assert set(select_record(part, plain, record).centers) == {bert.LINEARS[8], bert.LINEARS[9]}
