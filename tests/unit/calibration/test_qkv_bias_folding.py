"""k, v and q straight from their GEMMs: the same model, with nothing left to do behind them."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqbench.quantize.calibration.fakequant.quantizers import forward, quantizers_off
from qdqbench.quantize.calibration.techniques import qkv_bias_folding, smoothing
from qdqbench.quantize.calibration.techniques.bias_correction import apply_biases
from qdqbench.quantize.calibration.techniques.smoothing import Smoothing
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.recipe import plan as plans
from qdqbench.quantize.utils.errors import UserError

from ...support import tiny_bert as bert

STRAIGHT = bert.one_scale("key", "value")
(QUERY,) = bert.one_scale("query")
NORMS = ["bert.embeddings.LayerNorm", "bert.encoder.layer.0.output.LayerNorm"]  # what they read
QUERIES = {name for name in bert.LINEARS if name.endswith("query")}
KEYS_AND_VALUES = {name for name in bert.LINEARS if name.endswith(("key", "value"))}


def recipe(*rules, qkv_scales="separate", **calibration):
    export = {"opset": 20, "max_length": 128, "qkv_scales": qkv_scales}
    return bert.recipe_with(
        "bert-int8-attention", rules=[bert.EVERY, *rules], calibration=calibration, export=export
    )


@pytest.fixture
def model(tiny_bert):
    """Rows of k and v of very different ranges."""
    model = load_model(str(tiny_bert))
    for name in KEYS_AND_VALUES:
        weight = model.get_submodule(name).weight.data
        weight[::3] *= 8
        weight[5] = 0
    return model


def shifts_of(model, plan, ranges):
    with qkv_bias_folding.record_inputs(model, plan) as seen:
        for each in bert.calibration_batches():
            forward(model, each)
    return qkv_bias_folding.choose_shifts(model, plan, seen, ranges)


@pytest.mark.parametrize("scales", ["separate", "shared"])
@pytest.mark.parametrize(
    ("rules", "kv", "q"),
    [
        ([*STRAIGHT, QUERY], True, True),
        (STRAIGHT, True, False),
        ([STRAIGHT[0], QUERY], False, False),
        ([QUERY], False, False),
        ([], False, False),
    ],
)
def test_which_biases_go(model, rules, kv, q, scales):
    plan = bert.plan_of(recipe(*rules, qkv_scales=scales), model)
    assert plans.folds_kv_bias(plan) == bert.ATTENTIONS * kv
    assert plans.folds_q_bias(plan) == (dict(zip(bert.ATTENTIONS, NORMS, strict=True)) if q else {})
    assert plans.list_bias_free_linears(plan) == (KEYS_AND_VALUES if kv else set()) | (
        QUERIES if q else set()
    )
    assert plans.shares_qkv_scales(plan) == bert.ATTENTIONS * (q and scales == "shared")
    without = bert.recipe_with("bert-int8-linears", rules=[bert.EVERY, *rules])
    assert plans.folds_kv_bias(bert.plan_of(without, model)) == []


def test_a_shift_changes_no_answer_and_does_what_the_bias_of_q_does(model):
    for name in QUERIES:
        model.get_submodule(name).bias.data.normal_(generator=torch.Generator().manual_seed(0))
    plan, batch = bert.plan_of(recipe(*STRAIGHT, QUERY), model), bert.padded_batch()
    before = forward(model, batch)
    ranges = smoothing.Ranges({name: np.zeros(1) for name in QUERIES}, {})
    shifts, notes = shifts_of(model, plan, ranges)
    assert (list(shifts), notes) == (bert.ATTENTIONS, [])
    without = copy.deepcopy(model)
    for each in shifts.values():
        assert each.rest < qkv_bias_folding.LARGEST_REST
        apply_biases(model, each.added)
    torch.testing.assert_close(forward(model, batch), before, rtol=1e-4, atol=1e-5)
    for name in QUERIES:
        assert ranges.inputs[name].shape == (2, model.config.hidden_size)
        without.get_submodule(name).bias.data.zero_()
    apply_biases(model, qkv_bias_folding.compute_moved_biases(model, plan))
    assert not any(model.get_submodule(name).bias.any() for name in KEYS_AND_VALUES | QUERIES)
    lost, rest = (float((forward(each, batch) - before).abs().max()) for each in (without, model))
    assert rest < 0.1 * lost


def test_what_a_shift_cannot_do_is_a_warning_of_the_record(model):
    """Weights of q that see next to nothing, or nothing: no shift of their input replaces their bias."""
    queries = [model.get_submodule(name) for name in QUERIES]
    for query in queries:
        query.weight.data *= 0.01
        query.bias.data.fill_(100.0)
    record = bert.calibrate_model(copy.deepcopy(model), recipe(*STRAIGHT, QUERY)).record
    (warning,) = record.warnings
    assert warning not in record.notes
    for query in queries:
        query.weight.data.zero_()
    plan = bert.plan_of(recipe(*STRAIGHT, QUERY), model)
    shifts, (warning,) = shifts_of(model, plan, smoothing.Ranges({}, {}))
    assert all(name in warning for name in bert.ATTENTIONS)
    assert "int8/per-channel for their query" in warning
    assert not any(any(shifts[name].added[norm]) for name, norm in plans.folds_q_bias(plan).items())


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(1e-3, 1e3))
def test_no_shift_near_the_chosen_one_is_better(seed, scale):
    rng = np.random.default_rng(seed)
    width, size = 12, 4
    query, key = rng.standard_normal((2, width, width))
    bias, half = scale * rng.standard_normal(width), rng.uniform(0.1, 10, width)
    x = rng.standard_normal((40, width)) * half
    x -= x.mean(axis=0)

    def cost(shift):
        scores = [
            x @ key[at : at + size].T @ (bias - query @ shift)[at : at + size] / np.sqrt(size)
            for at in range(0, width, size)
        ]
        return float(
            np.square(scores).mean() + qkv_bias_folding.RIDGE_LAMBDA * np.square(shift / half).mean()
        )

    found, rest = qkv_bias_folding.solve_shift(query, key, bias, size, x.T @ x / len(x), half)
    best = cost(found)
    assert best <= cost(np.zeros(width)) * (1 + 1e-9)
    gained = qkv_bias_folding.RIDGE_LAMBDA * np.square(found / half).mean()
    assert rest**2 == pytest.approx(best - gained, abs=1e-9 * cost(0 * half))
    for _ in range(5):
        assert best <= cost(found * (1 + 0.01 * rng.standard_normal(width))) * (1 + 1e-9)


def test_values_of_a_straight_attention_are_not_centred(tiny_bert):
    """Its amax is the best of what is there, without a centre that nothing could take out again."""
    made = bert.calibrate(tiny_bert, recipe(*STRAIGHT, softmax_scale="min-error"))
    assert {(row.module, row.centered) for row in made.record.softmax} == {
        (n, False) for n in bert.ATTENTIONS
    }
    outputs = {name for name in bert.LINEARS if name.endswith("attention.output.dense")}
    assert set(made.record.centers) == KEYS_AND_VALUES | outputs


def test_given_ranges_of_what_is_moved_are_refused(tiny_bert):
    for also, refused in (([], "output.dense.input"), ([QUERY], "self.query.input"), ([], "self.q_bmm")):
        amax = {f"encoder.layer.0.attention.{refused}_quantizer": 1.0}
        with pytest.raises(UserError, match=f"{refused}_quantizer is given another range"):
            bert.calibrate(tiny_bert, recipe(*STRAIGHT, *also, amax=amax))
    amax = {"encoder.layer.0.attention.self.query.input_quantizer": 1.0}  # nothing moves it without a shift
    made = bert.calibrate(tiny_bert, recipe(*STRAIGHT, amax=amax))
    assert made.record.quantizers[f"bert.{next(iter(amax))}"].amax == 1.0


def test_merged_ones_share_their_scales(tiny_bert):
    made = bert.calibrate(tiny_bert, recipe(*STRAIGHT, QUERY, qkv_scales="shared"))
    states = made.record.quantizers
    for name in bert.ATTENTIONS:
        assert len({states[f"{name}.{x}_bmm_quantizer"].amax for x in "qkv"}) == 1
        weights = [f"{name}.{part}.weight_quantizer" for part in ("query", "key", "value")]
        assert len({states[weight].amax for weight in weights}) == 1


def measure(model, plan):
    return smoothing.measure_ranges(model, plan, lambda inner: forward(inner, bert.padded_batch()))


def equalize(model, plan):
    return qkv_bias_folding.equalize(model, plan, Smoothing(), measure(model, plan))


def column_ranges_of(model, name):
    return smoothing.column_ranges(model.get_submodule(name).weight.T)


def test_the_model_stays_the_same(model):
    plan = bert.plan_of(recipe(*STRAIGHT), model)
    batch = bert.padded_batch()
    before = forward(model, batch)
    moved = equalize(model, plan)
    np.testing.assert_array_equal(forward(model, batch), before)  # powers of two
    apply_biases(model, qkv_bias_folding.compute_moved_biases(model, plan))
    for name in KEYS_AND_VALUES:
        assert not model.get_submodule(name).bias.any()
    torch.testing.assert_close(forward(model, batch), before, rtol=1e-4, atol=1e-5)
    assert set(moved.rows) == {name for name in bert.LINEARS if name.endswith(("query", "key", "value"))}
    assert set(moved.columns) == {name for name in bert.LINEARS if name.endswith("attention.output.dense")}


def test_rows_of_q_and_k_become_alike(model):
    """Where q has one scale too; v of a merged one takes all room under their weights and their results."""
    plan = bert.plan_of(recipe(*STRAIGHT, QUERY, qkv_scales="shared"), model)
    for name in QUERIES:
        model.get_submodule(name).bias.data.zero_()  # it is dropped, and no shift is made here
    equalize(model, plan)
    apply_biases(model, qkv_bias_folding.compute_moved_biases(model, plan))
    values = measure(model, plan).outputs
    for name in bert.ATTENTIONS:
        parts = [f"{name}.{part}" for part in ("query", "key", "value")]
        weights = [column_ranges_of(model, part) for part in parts]
        results = [values[part].max(axis=0) for part in parts]
        alive = weights[1] > 0
        assert (np.abs(np.log2(weights[0][alive] / weights[1][alive])) <= 1).all()
        taken = np.maximum(*(of[2] / max(of[0].max(), of[1].max()) for of in (weights, results)))
        assert taken.max() <= 1 + 1e-4
        assert (taken[weights[2] > 0] > 0.5 - 1e-4).all()


def test_rows_get_about_one_range(model):
    """Those of k, and those of v by the larger of weights and values."""

    def spread(what, ranges):
        rows = [
            np.maximum(of / of.mean(), values / values.mean()) if what == "value" else of
            for name in bert.ATTENTIONS
            for of, values in [(column_ranges_of(model, f"{name}.{what}"), ranges[f"{name}.{what}"].max(0))]
        ]
        return max(float(each[each > 0].max() / each[each > 0].min()) for each in rows)

    plan = bert.plan_of(recipe(*STRAIGHT), model)
    assert spread("key", measure(model, plan).outputs) > 8
    equalize(model, plan)
    apply_biases(model, qkv_bias_folding.compute_moved_biases(model, plan))
    assert spread("key", measure(model, plan).outputs) <= 2
    assert spread("value", measure(model, plan).outputs) <= 4


def test_factors_that_are_there_already_are_multiplied(model):
    name = bert.LINEARS[0]
    rows = [2.0] * len(model.get_submodule(name).weight)
    plan = bert.plan_of(recipe(*STRAIGHT), model)
    ranges = measure(model, plan)
    alone = qkv_bias_folding.equalize(copy.deepcopy(model), plan, Smoothing(), ranges)
    moved = qkv_bias_folding.equalize(model, plan, Smoothing(rows={name: rows}), ranges)
    assert moved.rows[name] == [2 * factor for factor in alone.rows[name]]


@pytest.mark.parametrize("also", [[], [QUERY]])
def test_calibration_keeps_the_biases_out_and_restores(tiny_bert, also):
    asked = recipe(*STRAIGHT, *also, smoothing=0.65, bias_correction=True, softmax_scale="min-error")
    made = bert.calibrate(tiny_bert, asked)
    assert plans.folds_kv_bias(made.plan) == bert.ATTENTIONS
    assert list(made.record.shifts) == (bert.ATTENTIONS if also else [])
    for name in plans.list_bias_free_linears(made.plan):
        assert not made.model.get_submodule(name).bias.any(), name
        assert name not in made.record.biases
    again = bert.restored(made, load_model(str(tiny_bert)))
    with quantizers_off(again):
        exact, plain = (
            forward(again, bert.padded_batch()),
            forward(load_model(str(tiny_bert)), bert.padded_batch()),
        )
    assert float((exact - plain).abs().max()) < 0.2 * float(plain.abs().max())  # bias correction alone


def test_codes_of_k_and_v_are_as_good_as_with_scales_per_channel(model, tmp_path):
    """Error of the attention's output in one layer, relative to that with a scale for each channel."""
    model.save_pretrained(tmp_path)
    errors = {}
    for what, rules in (("channel", []), ("tensor", STRAIGHT)):
        found = bert.calibrate(tmp_path, recipe(*rules, softmax_scale="fixed")).model
        truth = forward(load_model(str(tmp_path)), bert.padded_batch((16, 16)))
        errors[what] = float((forward(found, bert.padded_batch((16, 16))) - truth).square().mean())
    assert errors["tensor"] < 3 * errors["channel"]
