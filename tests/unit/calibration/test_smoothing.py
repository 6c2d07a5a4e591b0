"""Exact scale migration: nothing changes until something is quantized, and then the outliers are gone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant.quantizers import forward, quantizers_off
from qdqbench.quantize.calibration.techniques import channel_splitting as splitting
from qdqbench.quantize.calibration.techniques import smoothing
from qdqbench.quantize.calibration.techniques.channel_splitting import ChannelSplit
from qdqbench.quantize.calibration.techniques.smoothing import LARGEST_FACTOR, Smoothing
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.utils.errors import CheckFailed, UserError

from ...support import tiny_bert as bert

QKV, OUTPUT, FFN_IN, FFN_OUT = bert.LINEARS[:3], bert.LINEARS[3], bert.LINEARS[4], bert.LINEARS[5]
NORM = "bert.encoder.layer.0.attention.output.LayerNorm"
OUTPUTS = {"match": "*.attention.output.dense"}
CHANNEL = 5
OUTLIER = 64.0


def batches():
    return [*bert.calibration_batches(), bert.padded_batch((9, 9), seed=3)]


def smoothed(model, *rules, smooth="none", **changes):
    """Insert quantizers and smooth; `model` is changed."""
    recipe = bert.recipe_with(rules=[bert.EVERY, *rules], calibration={"smoothing": smooth}, **changes)
    plan = bert.plan_of(recipe, model)
    ptq.insert_quantizers(model, plan)

    def run(inner):
        for batch in bert.calibration_batches():
            forward(inner, batch)

    return smoothing.smooth(model, plan, smoothing.measure_ranges(model, plan, run))


def with_outlier(folder):
    """A channel of each first LayerNorm that is far out, and that hardly matters to what reads it."""
    model = load_model(str(folder))
    for layer in model.bert.encoder.layer:
        norm = layer.attention.output.LayerNorm
        norm.weight.data[CHANNEL] *= OUTLIER
        norm.bias.data[CHANNEL] *= OUTLIER
        layer.intermediate.dense.weight.data[:, CHANNEL] /= OUTLIER
        layer.output.LayerNorm.weight.data[CHANNEL] /= OUTLIER
    return model


@pytest.mark.parametrize("smooth", [0.0, 0.3, 0.5, 0.65, 0.8, 1.0, "gain"])
@pytest.mark.parametrize(
    ("rules", "changes"),
    [
        ([], {}),
        ([OUTPUTS | {"smoothing": 0.5}], {}),
        ([OUTPUTS | {"smoothing": 0.8}, {"match": "*.output.dense", "smoothing": 0.6}], bert.INT8_ATTENTION),
    ],
    ids=["norms", "value", "all"],
)
def test_no_output_changes_by_a_bit(tiny_bert, smooth, rules, changes):
    model, untouched = with_outlier(tiny_bert), with_outlier(tiny_bert)
    found = smoothed(model, *rules, smooth=smooth, **changes)
    assert set(found.inputs) >= {*QKV, FFN_IN}
    assert (OUTPUT in found.columns) == bool(rules)
    assert (QKV[0] in found.rows) == bool(changes)
    with quantizers_off(model):
        for batch in batches():
            assert torch.equal(forward(model, batch), forward(untouched, batch))
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), untouched.parameters(), strict=True))


@pytest.mark.parametrize("smooth", [0.3, 0.8, "gain"])
def test_factors(tiny_bert, smooth):
    model = with_outlier(tiny_bert)
    found = smoothed(model, OUTPUTS | {"smoothing": 0.5}, smooth=smooth, **bert.INT8_ATTENTION)
    inputs, columns, rows = (
        {name: np.log2(factors) for name, factors in group.items()}
        for group in (found.inputs, found.columns, found.rows)
    )
    for exponents in (*inputs.values(), *columns.values(), *rows.values()):
        assert np.array_equal(exponents, np.rint(exponents))
        assert np.abs(exponents).max() <= math.log2(LARGEST_FACTOR)
        assert abs(exponents.mean()) <= 0.5
    assert all(np.array_equal(-exponents, columns[name]) for name, exponents in inputs.items())
    for query, key, value, output in (bert.LINEARS[:4], bert.LINEARS[6:10]):
        assert found.inputs[query] == found.inputs[key] == found.inputs[value]
        assert np.array_equal(-rows[query], rows[key])
        assert np.array_equal(-rows[value], columns[output])
        assert output not in inputs
    assert not {FFN_OUT} & {*found.inputs, *found.columns, *found.rows}


def test_inputs_follow_the_formula(tiny_bert):
    """Equation 4 of the paper, over columns of q, k and v together."""
    untouched, model = load_model(str(tiny_bert)), load_model(str(tiny_bert))
    found = bert.values_in(untouched, QKV[:1], inputs=True)
    seen = [given.abs().flatten(0, 1).amax(dim=0) for given in found[QKV[0]]]
    columns = [untouched.get_submodule(name).weight.detach().abs().amax(dim=0) for name in QKV]
    ranges, weights = torch.stack(seen).amax(dim=0), torch.stack(columns).amax(dim=0)
    exponents = torch.log2(ranges.double() ** 0.7 / weights.double() ** 0.3)
    wanted = torch.exp2(torch.round(exponents - exponents.mean()))
    assert smoothed(model, smooth=0.7).columns[QKV[0]] == wanted.tolist()


def test_the_gain_is_that_of_the_layernorm_before(tiny_bert):
    model = with_outlier(tiny_bert)
    norm = model.get_submodule(NORM).weight.detach().abs().log2()
    found = smoothed(model, smooth="gain").columns[FFN_IN]
    assert np.log2(found).tolist() == torch.round(norm - norm.mean()).tolist()
    assert np.argmax(found) == CHANNEL


def test_q_and_k_get_one_range(tiny_bert):
    model = load_model(str(tiny_bert))
    query = model.get_submodule(QKV[0])
    query.weight.data[3] *= 16
    query.bias.data[3] *= 16

    def measure():
        with quantizers_off(model), bert.watched(model, QKV[:2]) as made:
            forward(model, bert.calibration_batches()[2])
        of_query, of_key = (outputs[0].abs().flatten(0, 1).amax(dim=0) for outputs in made.values())
        return (of_query / of_key).log2()

    before = measure()
    found = smoothed(model, smooth=0.5, **bert.INT8_ATTENTION)
    assert found.rows[f"{bert.ATTENTIONS[0]}.query"][3] <= 0.5
    assert measure().std() < 0.6 * before.std()


def test_dead_channels_are_left_alone(tiny_bert):
    model, value, query = load_model(str(tiny_bert)), bert.LINEARS[2], bert.LINEARS[6]
    for name, rows in ((NORM, [2, 7]), (value, [4]), (query, [6])):
        for part in model.get_submodule(name).parameters():
            part.data[rows] = 0
    for name in bert.LINEARS[6:9]:
        model.get_submodule(name).weight.data[:, 9] = 0
    found = smoothed(model, OUTPUTS | {"smoothing": 0.5}, smooth=0.5, **bert.INT8_ATTENTION)
    assert [found.inputs[FFN_IN][channel] for channel in (2, 7)] == [1.0, 1.0]
    assert found.rows[value][4] == found.columns[OUTPUT][4] == 1.0
    assert found.rows[query][6] == found.inputs[query][9] == 1.0
    model = load_model(str(tiny_bert))
    model.get_submodule(NORM).weight.data[2] = 0
    gain = smoothed(model, smooth="gain")
    assert gain.columns[FFN_IN][2] == 1.0
    assert all(np.isfinite(factors).all() for factors in gain.columns.values())


@settings(deadline=None)
@given(
    raw=hnp.arrays(
        np.float64, st.integers(1, 40), elements=st.floats(2.0**-60, 2.0**60) | st.sampled_from([0.0])
    )
)
def test_powers_of_two(raw):
    exponents = np.log2(smoothing._power_of_two(raw))
    assert np.array_equal(exponents, np.rint(exponents))
    assert (np.abs(exponents) <= math.log2(LARGEST_FACTOR)).all()
    assert (exponents[raw == 0] == 0).all()
    # the order of the channels stays
    alive = raw > 0
    assert (np.diff(exponents[alive][np.argsort(raw[alive])]) >= 0).all()


@pytest.mark.parametrize("rule", [{"match": "*.output.dense"}, {"match": "encoder.layer.*"}])
def test_gain_without_a_layernorm_is_one_sentence(tiny_bert, rule):
    model = load_model(str(tiny_bert))
    lost = ", ".join(name for name in bert.LINEARS if name.endswith("output.dense"))
    said = f"^smoothing: gain needs a LayerNorm before the linear, which {lost} do not have; give an.*$"
    with pytest.raises(UserError, match=said):
        smoothed(model, rule | {"smoothing": "gain"})


def test_linears_alone_or_of_other_alphas_do_not_share(tiny_bert):
    found = smoothed(load_model(str(tiny_bert)), {"match": "*.query", "smoothing": 0.9}, smooth=0.4)
    query, key, value = (found.inputs[name] for name in QKV)
    assert key == value != query
    rule = {"match": "encoder.layer.0.intermediate.dense", "smoothing": 0.5}
    found = smoothed(load_model(str(tiny_bert)), rule)
    assert [*found.inputs] == [*found.columns] == [FFN_IN]
    assert found.rows == {}


def logit_error(folder, make, smooth):
    """Relative logit error of the fake-quant model, and the largest amax over rms before the feed-forward."""
    model, exact = make(folder), make(folder)
    recipe = bert.recipe_with(rules=[bert.EVERY], calibration={"smoothing": smooth})
    record = bert.calibrate_model(model, recipe).record
    states = [state for name, state in record.quantizers.items() if "intermediate.dense.input" in name]
    ratios = [state.amax / state.rms for state in states if isinstance(state.amax, float) and state.rms]
    assert len(ratios) == 2
    pairs = [(forward(model, batch), forward(exact, batch)) for batch in batches()]
    error = sum(float((ours - theirs).square().sum()) for ours, theirs in pairs)
    return error / sum(float(theirs.square().sum()) for _, theirs in pairs), max(ratios)


@pytest.mark.parametrize("smooth", [0.5, 0.65, "gain"])
def test_an_outlier_channel_no_longer_hurts(tiny_bert, smooth):
    plain, spread = logit_error(tiny_bert, with_outlier, "none")
    better, narrow = logit_error(tiny_bert, with_outlier, smooth)
    assert narrow < 0.7 * spread
    assert better < 0.25 * plain


powers = st.integers(-8, 8).map(lambda exponent: 2.0**exponent)
weights = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(
    lambda value: value == 0 or 2.0**-100 < abs(value) < 2.0**100
)


@settings(deadline=None)
@given(data=st.data(), rows=st.integers(1, 5), columns=st.integers(1, 5), bias=st.booleans())
def test_factors_come_out_of_trained_weights(data, rows, columns, bias):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(columns, rows, bias=bias), "b": torch.nn.ReLU()})
    trained = {
        name: torch.from_numpy(data.draw(hnp.arrays(np.float32, tuple(value.shape), elements=weights)))
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(trained)
    draw = {"rows": rows, "columns": columns}
    chosen = data.draw(st.sets(st.sampled_from([*draw])))
    factors = {side: {"a": data.draw(st.lists(powers, min_size=n, max_size=n))} for side, n in draw.items()}
    found = Smoothing(**{side: factors[side] for side in chosen})
    plain = smoothing.remove_factors(model, found)
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    if "rows" in chosen and bias:
        assert torch.equal(plain["a.bias"] * torch.tensor(factors["rows"]["a"]), trained["a.bias"])
    model.load_state_dict(plain)
    smoothing.apply_factors(model, found)
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("value", [float("nan"), 2.0**-149])
def test_factors_that_cannot_come_out_are_named(value):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})
    with torch.no_grad():
        model["a"].weight[0, 0] = value
    with pytest.raises(CheckFailed, match=r"^the smoothing factors cannot be taken out of a\.weight \("):
        smoothing.remove_factors(model, Smoothing(columns={"a": [4.0, 1.0]}))


FIRSTS, SECONDS = bert.LINEARS[4::6], bert.LINEARS[5::6]
MASSIVE, EXTRA = 7, 32
FEW, ALL = slice(4), slice(None)  # rows
RANGES = hnp.arrays(np.float64, 40, elements=st.floats(0, 2.0**20, allow_subnormal=False))


def outlying(folder, rows=ALL):
    """One channel of each feed-forward has a large activation that meets a large weight in some rows."""
    model = load_model(str(folder))
    with torch.no_grad():
        for name in SECONDS:
            first, second = splitting._linears(model, name)
            first.bias[MASSIVE] += 30
            second.weight[rows, MASSIVE] *= 10
            second.bias -= 30 * second.weight[:, MASSIVE]
    return model


def calibrated(folder, *rules, per="channel", rows=ALL, **calibration):
    every = bert.EVERY | {"weights": f"int8/per-{per}"}
    calibration = {"outlier_channel_splitting": EXTRA} | calibration
    recipe = bert.recipe_with(rules=[every, *rules], calibration=calibration)
    return bert.calibrate_model(outlying(folder, rows), recipe)


def answers(model, batches=None):
    batches = batches or [bert.padded_batch((9, 9), seed=3), bert.padded_batch((12, 5), seed=4)]
    return torch.cat([forward(model, batch) for batch in batches])


@settings(max_examples=200)
@given(RANGES, RANGES, st.integers(0, 4).map(lambda n: 32 * n))
def test_what_is_chosen_fits_and_only_helps(activations, weights, extra):
    found = splitting.choose_channels(activations, weights, extra)
    assert sum(a * b - 1 for a, b in found.outliers.values()) <= extra
    for values, side in ((activations, 0), (weights, 1)):
        divisors = np.ones(len(values))
        for channel, parts in found.outliers.items():
            assert parts[side] & (parts[side] - 1) == 0  # a power of two
            divisors[channel] = parts[side]
        left, divided = values / divisors, divisors > 1
        assert (2 * left[divided] > np.sort(left)[-splitting.LIKE - 1]).all()  # not more copies than it takes


def test_equal_ranges_and_shared_copies():
    assert splitting.choose_channels(np.ones(64), np.ones(64), 64) == ChannelSplit(extra=64, outliers={})
    ranges = np.ones(64)
    ranges[MASSIVE] = 4
    found = splitting.choose_channels(ranges, ranges, EXTRA)
    assert found.outliers == {MASSIVE: (4, 4)}  # 15 of 32 copies; the others are filling


@pytest.mark.parametrize("smoothing", ["none", 0.5])
def test_answers_stay_until_something_is_quantized(tiny_bert, smoothing):
    model, _, record = calibrated(tiny_bert, smoothing=smoothing)
    assert list(record.splits) == SECONDS
    assert model.config.intermediate_size == bert.INTERMEDIATE + EXTRA
    for each in record.splits.values():
        assert each.outliers[MASSIVE][0] >= 4
        assert {by_weight for _, by_weight in each.outliers.values()} == {1}  # each row has its own scale
    for name in SECONDS:
        assert model.get_submodule(name).weight.shape[1] == bert.INTERMEDIATE + EXTRA
    with quantizers_off(model):
        torch.testing.assert_close(answers(model), answers(outlying(tiny_bert)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("per", "rows"), [("channel", FEW), ("tensor", ALL)], ids=["channel", "tensor"])
def test_int8_loses_far_less(tiny_bert, per, rows):
    exact = answers(outlying(tiny_bert, rows))
    plain, split = (
        calibrated(tiny_bert, per=per, rows=rows, outlier_channel_splitting=extra) for extra in (0, EXTRA)
    )
    before, after = (float((answers(made.model) - exact).norm()) for made in (plain, split))
    assert after < 0.5 * before
    for name in SECONDS:
        before, after = (made.record.quantizers[f"{name}.input_quantizer"].amax for made in (plain, split))
        assert after < before / 3


def test_copies_differ_and_fit_fp16():
    layout = splitting.make_split_layout(ChannelSplit(extra=32, outliers={3: (4, 8), 5: (1, 2)}), 40)
    for channel, (by_input, by_weight), each in ((3, (4, 8), 32), (5, (1, 2), 2), (0, (1, 1), 1)):
        mine = (layout.channels == channel) & (layout.columns > 0)
        assert mine.sum() == each == len(set(layout.inputs[mine]))
        np.testing.assert_allclose((layout.inputs * layout.columns)[mine].sum(), 1, rtol=1e-12)
        assert layout.inputs[channel] == 1 / by_input
        assert layout.columns[channel] == 1 / by_weight
    assert (layout.inputs == layout.inputs.astype(np.float16)).all()
    assert (layout.columns == 0).sum() == len(layout.channels) - 40 - 31 - 1


def test_the_record_rebuilds_every_bit(tiny_bert):
    also = {"bias_correction": True, "smoothing": 0.5, "weights_method": "mse"}
    bert.restored(calibrated(tiny_bert, **also), outlying(tiny_bert))


def test_only_int8_feed_forwards_are_split(tiny_bert):
    model, _, record = calibrated(tiny_bert, {"match": "encoder.layer.1.output.dense", "precision": "fp16"})
    assert list(record.splits) == SECONDS[:1]
    assert model.config.intermediate_size == bert.INTERMEDIATE
    with quantizers_off(model):
        torch.testing.assert_close(answers(model), answers(outlying(tiny_bert)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", ["channel", "factored"])
def test_the_graph_computes_what_the_model_does(tiny_bert, form):
    model, plan, _ = calibrated(tiny_bert, per="tensor" if form == "factored" else "channel")
    batch = bert.padded_batch((9, 9), seed=3)
    graph = bert.exported_of(model, plan, form)
    np.testing.assert_allclose(bert.run_onnx(graph, batch), answers(model, [batch]), rtol=1e-3, atol=2e-3)


def test_training_keeps_copies_equal_and_they_merge_exactly(tiny_bert):
    model, _, record = made = calibrated(tiny_bert, per="tensor", smoothing=0.5)
    assert any(by_weight > 1 for each in record.splits.values() for _, by_weight in each.outliers.values())
    tie = splitting.keep_equal(model, record.splits)
    torch.manual_seed(0)
    for name in (*FIRSTS, *SECONDS):  # a step that treats copies differently
        for value in model.get_submodule(name).parameters():
            value.data += 0.01 * torch.randn_like(value)
    tie()
    trained = outlying(tiny_bert)
    weights = ptq.take_out(model, record)
    trained.load_state_dict({name: weights[name] for name in trained.state_dict()})
    with quantizers_off(model):
        torch.testing.assert_close(answers(model), answers(trained), rtol=1e-5, atol=1e-4)
    bert.restored(made, trained)


def test_what_cannot_be_split(tiny_bert):
    with pytest.raises(UserError, match=r"second linear of feed-forwards, and none of them is INT8"):
        calibrated(tiny_bert, {"match": "*.output.dense", "precision": "fp16"})
    with pytest.raises(UserError, match=r"layer\.1\.output\.dense, and so would smoothing; drop one"):
        calibrated(tiny_bert, {"match": "encoder.layer.1.output.dense", "smoothing": 0.5})
