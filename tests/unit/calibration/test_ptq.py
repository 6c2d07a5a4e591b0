"""Calibration: every amax by hand, its record, and what is not a usable amax."""

import contextlib
import copy
import gc
import json
import math
import weakref

import numpy as np
import pytest
import torch

from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration import record as calibration
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.calibration.record import summarize_spread
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.tasks.data.encode import Sample, equal_length_batches
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.progress import Reporter, reporting_to

from ...support import tiny_bert as bert

QKV = ("query", "key", "value")
LENGTHS = (9, 4, 16, 4, 9, 11)


def largest_inputs(model, batch, *, padding=False):
    """Largest magnitude that enters each encoder linear, by hooks; over unpadded positions by default."""
    seen = torch.from_numpy(batch["attention_mask"]).bool()
    with bert.watched(model, bert.LINEARS, inputs=True) as found:
        quantizers.forward(model, batch)
    return {n: float((given if padding else given[seen]).abs().max()) for n, (given,) in found.items()}


def calibrated(model, batches=None, section=None, plan=None):
    """The record of a model that becomes a fake-quant one."""
    plan = plan or bert.plan_of(bert.recipe_with(), model)
    return ptq.calibrate(
        model, plan, bert.calibration_batches() if batches is None else batches, section or Calibration()
    )


def rounded_up(amax):
    """127 times the next scale at or above amax / 127 that FP16's 11 bits hold."""
    scales = []
    for value in (amax / np.float32(127)).astype(np.float64):
        unit = 2.0 ** (math.floor(math.log2(value)) - 10)
        scales.append(math.ceil(value / unit) * unit)
    assert all(low <= 127 * s <= low * (1 + 2**-9) for low, s in zip(amax.tolist(), scales, strict=True))
    return [127 * scale for scale in scales]


def test_input_amax_is_the_largest_over_unpadded_tokens(tiny_bert):
    batch = bert.padded_batch(LENGTHS)
    samples = [
        Sample(row, batch["input_ids"][row, :length], batch["token_type_ids"][row, :length], False)
        for row, length in enumerate(LENGTHS)
    ]
    batches = (made for _, made in equal_length_batches(samples, 2, pad_id=0))
    model, untouched = load_model(str(tiny_bert)), load_model(str(tiny_bert))
    record = calibrated(model, batches, Calibration(seed=7))
    assert (record.method, record.seed) == ("max", 7)
    amax = {n: record.quantizers[f"{n}.input_quantizer"].amax for n in bert.LINEARS}
    assert amax == pytest.approx(largest_inputs(untouched, batch), rel=1e-5)
    padded = largest_inputs(untouched, batch, padding=True)
    assert any(padded[name] > 1.01 * amax[name] for name in bert.LINEARS)  # so the padding would have shown
    quantiles = {"min": 4, "p50": 9, "p90": 11, "p99": 11, "max": 16, "mean": sum(LENGTHS) / 6}
    assert record.data == {"samples": len(LENGTHS), "tokens": sum(LENGTHS), "lengths": quantiles}


def test_weight_amax_per_channel_and_per_tensor(tiny_bert):
    weights = dict(load_model(str(tiny_bert)).named_parameters())
    channel, per_tensor = (
        bert.quantized(tiny_bert, name).record.quantizers
        for name in ("bert-int8-linears", "bert-int8-linears-per-tensor")
    )
    for name in bert.LINEARS:
        magnitudes = weights[f"{name}.weight"].detach().abs()
        state = channel[f"{name}.weight_quantizer"]
        assert (state.kind, state.axis) == ("weight", 0)
        assert state.amax == rounded_up(magnitudes.amax(dim=1).numpy())
        state = per_tensor[f"{name}.weight_quantizer"]
        assert state.axis is None
        assert [state.amax] == rounded_up(magnitudes.max().reshape(1).numpy())


def test_exactly_the_planned_quantizers(tiny_bert):
    model, plan, record = bert.calibrate(tiny_bert, bert.recipe_with(rules=[{"match": "*"} | bert.INT8]))
    linears = [*bert.LINEARS, "bert.pooler.dense", "classifier"]
    wanted = {f"{name}.{kind}_quantizer" for name in linears for kind in ("weight", "input")}
    assert set(record.quantizers) == set(quantizers.list_quantizers(model)) == wanted
    assert not any("LayerNorm" in name for name in quantizers.list_quantizers(model))
    assert plan.attention == ()


def test_int8_attention(tiny_bert):
    record = bert.quantized(tiny_bert, "bert-int8-attention").record
    model = load_model(str(tiny_bert))
    parts = {f"{name}.{part}": f"{name}.{part[0]}_bmm" for name in bert.ATTENTIONS for part in QKV}
    for part, outputs in bert.values_in(model, parts).items():
        largest = max(float(output.abs().max()) for output in outputs)
        assert record.quantizers[f"{parts[part]}_quantizer"].amax == pytest.approx(largest, rel=1e-6)
    for name in bert.ATTENTIONS:
        softmax = record.quantizers[f"{name}.p_bmm_quantizer"]
        assert (softmax.kind, softmax.axis, softmax.amax) == ("softmax", None, 1.0)
    assert len(record.quantizers) == 2 * len(bert.LINEARS) + 4 * len(bert.ATTENTIONS)


WAYS = {
    "per-channel": {},
    "per-tensor": {"name": "bert-int8-linears-per-tensor"},
    "attention": {"name": "bert-int8-attention"},
    "percentile": {"calibration": {"method": "percentile/99.9"}} | bert.INT8_ATTENTION,
    "mse": {"calibration": {"method": "mse", "weights_method": "mse"}} | bert.INT8_ATTENTION,
    "entropy": {"rules": [bert.EVERY, {"match": "encoder.layer.0.output.dense", "method": "entropy"}]},
    "smoothing": {"calibration": {"smoothing": 0.65}} | bert.INT8_ATTENTION,
    "softmax": {"calibration": {"softmax_scale": "min-error", "bias_correction": True}} | bert.INT8_ATTENTION,
    "gain": {"calibration": {"smoothing": "gain"}},
    "value": {"rules": [bert.EVERY, {"match": "*.attention.output.dense", "smoothing": 0.5}]},
    "biases": {"calibration": {"bias_correction": True}},
    "everything": {
        "calibration": {"method": "percentile/99", "smoothing": 0.5, "bias_correction": True},
        "rules": [
            bert.EVERY,
            {"match": "encoder.layer.1.*", "method": "mse", "weights_method": "mse"},
            {"match": "*.output.dense", "smoothing": 0.6},
        ],
    }
    | bert.INT8_ATTENTION,
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_calibrating_is_restored_bit_for_bit(tiny_bert, tmp_path, way):
    model, _, record = made = bert.calibrate(tiny_bert, bert.recipe_with(**WAYS[way]))
    calibration.write_record(tmp_path / "calibration.json", record)
    assert calibration.read_record(tmp_path / "calibration.json") == record
    plain, batch = load_model(str(tiny_bert)), bert.padded_batch()
    assert not torch.equal(quantizers.forward(model, batch), quantizers.forward(plain, batch))
    mine = quantizers.list_quantizers(model)
    smoothed = [name for name, quantizer in mine.items() if quantizer.pre_quant_scale is not None]
    assert {f"{name}.input_quantizer" for name in record.smoothing.inputs} == {*smoothed}
    assert list(quantizers.list_quantizers(bert.restored(made, plain))) == list(mine)


def test_how_it_was_calibrated_is_recorded(tiny_bert):
    record = bert.calibrate(tiny_bert, bert.recipe_with(**WAYS["everything"])).record
    assert record.method == "percentile/99"
    second = [name for name in (*bert.LINEARS, *bert.ATTENTIONS) if "layer.1." in name]
    assert record.methods == dict.fromkeys(second, "mse")
    plain = bert.quantized(tiny_bert).record
    assert (plain.methods, plain.smoothing, plain.biases) == ({}, calibration.Smoothing(), {})


class Samples(Reporter):
    """Keeps how many samples of a pass are through the model."""

    def __init__(self):
        self.seen = []

    def advance(self, done=0, total=0, phase="", row=None):
        self.seen += [done] if done and not phase else []


def test_smoothing_and_correction_pass_over_the_same_data(tiny_bert):
    class Counted(list[bert.Batch]):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    passes = []
    for way in ("entropy", "gain", "smoothing", "everything"):
        model, batches = load_model(str(tiny_bert)), Counted(bert.calibration_batches())
        recipe = bert.recipe_with(**WAYS[way])
        with reporting_to(Samples()) as samples:
            record = ptq.calibrate(model, bert.plan_of(recipe, model), batches, recipe.calibration)
        passes.append(batches.passes)
        assert record.data["samples"] == 24  # each sample counts once
        assert samples.seen.count(24) == {"entropy": 1, "gain": 2}.get(way, 3)
    assert passes == [1, 2, 3, 4]  # INT8 attention: its softmax


@pytest.mark.parametrize("how", ["none", 0.65])
def test_amax_and_rms_are_of_all_that_is_rounded(tiny_bert, how):
    """Behind the factors of smoothing."""
    record = bert.calibrate(tiny_bert, bert.recipe_with(calibration={"smoothing": how})).record
    model = load_model(str(tiny_bert))
    factors = np.array(record.smoothing.inputs.get(bert.LINEARS[0], 1.0), dtype=np.float32)
    seen = bert.values_in(model, bert.LINEARS[:1], inputs=True)
    rounded = np.concatenate([(given.numpy() * factors).ravel() for given in seen[bert.LINEARS[0]]])
    state = record.quantizers[f"{bert.LINEARS[0]}.input_quantizer"]
    assert state.amax == pytest.approx(np.abs(rounded).max(), rel=1e-6)
    assert state.rms == pytest.approx(math.sqrt(float(np.square(rounded.astype(np.float64)).mean())))


def test_a_smoothed_record_of_another_model(tiny_bert):
    record = bert.calibrate(tiny_bert, bert.recipe_with(**WAYS["everything"])).record.model_copy(deep=True)
    for named in (record.smoothing.inputs, record.biases, record.quantizers):
        for name in [n for n in named if "layer.1." in n]:
            named[name.replace("layer.1.", "layer.7.")] = named.pop(name)
    model = load_model(str(tiny_bert))
    with pytest.raises(UserError, match="is of another recipe or model"):
        ptq.restore(model, bert.plan_of(bert.recipe_with(**WAYS["everything"]), model), record)


def test_a_record_of_an_older_version(tiny_bert, tmp_path):
    newer = {"methods", "smoothing", "biases"}
    fields = bert.quantized(tiny_bert).record.model_dump(mode="json", exclude=newer)
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(fields | {"schema_version": 1}))
    said = r"calibration\.json is no calibration record of this version of qdqbench \(.*\); quantize again$"
    with pytest.raises(UserError, match=said):
        calibration.read_record(path)


@pytest.mark.parametrize("name", ["bert-int8-ffn", "bert-int8-linears-per-tensor"])
def test_a_record_of_another_recipe(name, tiny_bert):
    model = load_model(str(tiny_bert))
    plan = bert.plan_of(bert.recipe_with(name), model)
    with pytest.raises(UserError, match="is of another recipe or model"):
        ptq.restore(model, plan, bert.quantized(tiny_bert).record)


@pytest.mark.parametrize(
    ("content", "told"),
    [("{", "not valid JSON "), ("[]", "no "), ('{"schema_version": 2}', "no "), ("{}", "no ")],
)
def test_a_record_that_is_none(tmp_path, content, told):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(UserError, match=rf"c\.json is {told}"):
        calibration.read_record(tmp_path / "c.json")


@pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan"), 1e300, 1e-45, 1e38, -1.0])
def test_a_record_is_held_to_the_rule_of_calibration(tiny_bert, tmp_path, amax):
    told, path = bert.quantized(tiny_bert).record.model_dump(), tmp_path / "calibration.json"
    name, state = next(iter(told["quantizers"].items()))
    several = isinstance(state["amax"], list)
    state["amax"] = [*state["amax"][1:], amax] if several else amax
    path.write_text(json.dumps(told))
    said = r"calibration\.json (cannot be used: .*" + name + "|has numbers that are not finite)"
    with pytest.raises(UserError, match=said):
        calibration.read_record(path)
    told = bert.quantized(tiny_bert).record.model_dump() | {"biases": {"a": [amax]}}
    path.write_text(json.dumps(told))
    with contextlib.nullcontext() if math.isfinite(amax) else pytest.raises(UserError, match="not finite"):
        calibration.read_record(path)


def test_rows_of_the_results(tiny_bert):
    record = bert.quantized(tiny_bert).record
    rows = {row.name: row for row in record.rows()}
    assert list(rows) == list(record.quantizers)
    weight = rows[f"{bert.LINEARS[0]}.weight_quantizer"]
    amax = record.quantizers[weight.name].amax
    assert isinstance(amax, list)
    assert (weight.module, weight.amax, weight.amax_min) == (bert.LINEARS[0], max(amax), min(amax))
    assert weight.amax_over_rms is None
    assert all(row.amax_over_rms > 1 for row in rows.values() if row.kind == "input" and row.amax_over_rms)


def test_spread_of_amax_over_parts_of_the_rows(tiny_bert, monkeypatch):
    clipped, fixed = f"{bert.LINEARS[0]}.input_quantizer", f"{bert.LINEARS[-1]}.input_quantizer"
    rules = [bert.EVERY, {"match": "encoder.layer.0.*", "method": "percentile/99.9"}]
    monkeypatch.setattr(ptq, "WIDE", 0.0)
    recipe = bert.recipe_with(
        "bert-int8-attention", rules=rules, calibration={"amax": {fixed: 3.0}, "softmax_scale": "fixed"}
    )
    model, _, record = bert.calibrate(tiny_bert, recipe)
    spreads = {name: state.spread for name, state in record.quantizers.items()}
    seen = bert.values_in(load_model(str(tiny_bert)), bert.LINEARS, inputs=True)
    for name in bert.LINEARS[:-1]:
        rows = np.concatenate([values.abs().amax((1, 2)).numpy() for values in seen[name]])
        parts = [rows[part::4].max() for part in range(4)]
        assert spreads[f"{name}.input_quantizer"] == pytest.approx(np.std(parts, ddof=1) / np.mean(parts))
    without = {name for name, spread in spreads.items() if spread is None}
    assert without == {fixed} | {n for n, q in record.quantizers.items() if q.kind in ("weight", "softmax")}
    named = [name for name in spreads if any(f"{name} (" in line for line in record.warnings)]
    assert named == [name for name in spreads if ".layer.1." in name and name not in without]
    median, widest = summarize_spread(record.rows())
    assert 0 < median < widest.amax_spread == max(spread for spread in spreads.values() if spread)
    changed = quantizers.list_quantizers(model)[clipped]
    changed.amax = 2 * changed.amax  # as training might
    after = calibration.trained_record(model, record).quantizers
    assert {n: q.spread for n, q in after.items()} == spreads | {clipped: None}
    old = record.model_dump(mode="json")
    for state in old["quantizers"].values():
        del state["spread"]
    assert summarize_spread(calibration.CalibrationRecord.model_validate(old).rows()) is None


def test_quantizers_with_one_amax_have_one_spread(tiny_bert):
    _, _, record = bert.calibrate(tiny_bert, bert.recipe_with("bert-int8-residual-fused"))
    names = [f"bert.encoder.layer.1.attention.self.{each}_bmm_quantizer" for each in "qkv"]
    assert len({(record.quantizers[name].amax, record.quantizers[name].spread) for name in names}) == 1


class TestUnusable:
    """Each one names every layer that it hits."""

    def fail(self, model, plan=None):
        with pytest.raises(CheckFailed) as error:
            calibrated(model, plan=plan)
        assert "\n" not in str(error.value)
        return str(error.value)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_weights_that_are_not_finite(self, tiny_bert, value):
        model = load_model(str(tiny_bert))
        for name in (bert.LINEARS[-1], bert.LINEARS[-2]):
            model.get_submodule(name).weight.data[3, 3] = value
        message = self.fail(model)
        assert f"NaN or infinity in {bert.LINEARS[-2]}.weight, {bert.LINEARS[-1]}.weight;" in message

    def test_activations_that_are_not_finite(self, tiny_bert):
        model = load_model(str(tiny_bert))
        for name in (bert.LINEARS[4], bert.LINEARS[5]):  # finite weights whose product is not
            model.get_submodule(name).weight.data.fill_(3e38)
        assert f"met NaN or infinity at {bert.LINEARS[5]}.input_quantizer;" in self.fail(model)

    def test_an_input_that_is_always_zero(self, tiny_bert):
        model = load_model(str(tiny_bert))
        value, dead = (model.get_submodule(bert.LINEARS[number]) for number in (2, 4))
        value.weight.data.mul_(1e-30)  # layer 0: the attention of zeros is zero
        dead.weight.data.zero_()
        for linear in (value, dead):
            linear.bias.data.zero_()
        message = self.fail(model)
        for number, what in ((5, "input"), (4, "weight"), (2, "weight"), (3, "input")):
            zero = "not positive (0)" * (number > 3)
            assert f"{bert.LINEARS[number]}.{what}_quantizer: {zero}" in message
        assert "4 unusable amax values" in message

    def test_an_input_beyond_fp16(self, tiny_bert):
        model = load_model(str(tiny_bert))
        model.bert.encoder.layer[0].attention.output.LayerNorm.weight.data.mul_(1e6)
        assert f"{bert.LINEARS[4]}.input_quantizer: " in (message := self.fail(model))
        assert "outside 1e-06 to 65504" in message

    def test_an_implausible_outlier(self):
        good = calibration.QuantizerState(kind="input", axis=None, amax=90.0, rms=1.0)
        calibration.require_plausible({"good": good})
        bad = good.model_copy(update={"amax": 6000.0})
        with pytest.raises(CheckFailed, match=r"2 unusable .*a: 6000 times its root mean square; b: 6000"):
            calibration.require_plausible({"a": bad, "good": good, "b": bad})
        calibration.require_plausible({"softmax": bad.model_copy(update={"kind": "softmax"})})
        with pytest.raises(CheckFailed, match="x: not finite"):  # it saw nothing
            calibration.require_plausible({"x": good.model_copy(update={"amax": []})})

    @pytest.mark.parametrize("batches", [[], iter(())])
    def test_no_batches(self, tiny_bert, batches):
        with pytest.raises(UserError, match="calibration saw no samples of split 'train'"):
            calibrated(load_model(str(tiny_bert)), batches)

    def test_a_plan_of_another_model(self, tiny_bert):
        model = load_model(str(tiny_bert))
        plan = Plan(int8={bert.LINEARS[0]: "channel", "bert.encoder.layer.7.output.dense": "channel"})
        assert "missing bert.encoder.layer.7.output.dense.input_quantizer" in self.fail(model, plan)


def test_dead_channels_are_revived_and_noted(tiny_bert):
    model = load_model(str(tiny_bert))
    query = model.get_submodule(bert.LINEARS[0])
    query.weight.data[4:7] = 0
    before = copy.deepcopy(model)
    record = calibrated(model)
    name = f"{bert.LINEARS[0]}.weight_quantizer"
    assert record.notes == [f"{name}: 3 output channels are all zero"]
    magnitudes = before.get_submodule(bert.LINEARS[0]).weight.detach().abs().amax(dim=1)
    magnitudes[4:7] = magnitudes.max()
    assert record.quantizers[name].amax == rounded_up(magnitudes.numpy())
    assert torch.equal(query.weight_quantizer(query.weight)[4:7], torch.zeros(3, 32))


def test_batches_are_taken_one_at_a_time(tiny_bert):
    held, living = [], []

    def batches():
        for seed in range(12):
            assert samples.seen[-1:] == [4 * seed] * (seed > 0)  # all earlier ones are through the model
            gc.collect()
            held.append(sum(reference() is not None for reference in living))
            batch = bert.padded_batch((8,) * 4, seed)
            living.extend(weakref.ref(array) for array in batch.values())
            yield batch

    model = load_model(str(tiny_bert))
    with reporting_to(Samples()) as samples:
        calibrated(model, batches())
    assert len(held) == 12
    assert max(held) <= 3  # the arrays of the latest batch
