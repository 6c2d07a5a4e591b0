"""Amax of activations from a bounded histogram, and of weights by their squared error."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qdqbench.quantize.calibration import histograms
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.utils.errors import CheckFailed

from ...support.tiny_bert import EVERY, INT8, LINEARS, calibrate, calibrate_model, recipe_with

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from modelopt.torch.quantization.calib import HistogramCalibrator
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

METHODS = ["percentile/99.9", "percentile/100", "mse", "entropy"]
magnitudes = st.floats(2.0**-20, 2.0**20, width=32) | st.just(0.0)
batches = st.lists(hnp.arrays(np.float32, st.integers(1, 40), elements=magnitudes), min_size=1, max_size=6)


def collected(parts, method="percentile/99.9"):
    calibrator = histograms.ActivationCalibrator(method)
    for part in parts:
        calibrator.collect(torch.from_numpy(part))
    return calibrator


def amax_of(values, method):
    return amax_in(collected([values.astype(np.float32)], method))


def amax_in(calibrator):
    found = calibrator.compute_amax()
    assert (found.dtype, found.shape) == (torch.float32, ())
    return float(found)


def heavy_tailed(seed, outliers=0.0):
    """Activations like those of BERT: normal, a few channels far out."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((200, 64)).astype(np.float32)
    values[:, :1] *= np.float32(1 + outliers)
    return values


def error_of(values, amax):
    """Squared error of INT8 codes with this amax."""
    scale = amax / (histograms.MAGNITUDES - 1)
    rounded = np.clip(np.rint(values / scale), -histograms.MAGNITUDES, histograms.MAGNITUDES - 1) * scale
    return float(np.square(rounded - values).sum())


def between(values, edges, slack):
    """How many values are below each edge, moved by a rounding error."""
    return np.searchsorted(np.sort(values.astype(np.float64)), edges * (1 + slack))


@settings(deadline=None)
@given(parts=batches)
def test_the_histogram_is_bounded_and_loses_no_value(parts):
    calibrator = collected(parts)
    values = np.concatenate(parts)
    held = [each.nbytes for each in vars(calibrator).values() if isinstance(each, (np.ndarray, torch.Tensor))]
    assert sum(held) == histograms.BINS * 8
    assert calibrator.counts.shape == (histograms.BINS,)
    assert calibrator.counts.sum() == values.size
    assert calibrator.largest == values.max()
    if not values.any():
        assert calibrator.compute_amax() is None
        return
    assert calibrator.limit / 2 < calibrator.largest <= calibrator.limit
    # doubling gives the histogram of all values at the final width: a value on an edge may be on either side
    edges = np.arange(1, histograms.BINS) * (calibrator.limit / histograms.BINS)
    below = np.cumsum(calibrator.counts)[:-1]
    assert (between(values, edges, -1e-6) <= below).all()
    assert (below <= between(values, edges, 1e-6)).all()


@settings(deadline=None)
@given(
    values=hnp.arrays(np.float32, 60, elements=magnitudes).filter(lambda v: v.any()),
    cuts=st.lists(st.integers(1, 59), max_size=5),
    method=st.sampled_from(["percentile/99", "percentile/75", "percentile/100"]),
)
def test_the_cut_into_batches_moves_amax_by_a_bin_width(values, cuts, method):
    whole = collected([values], method)
    parted = collected(np.split(values, sorted(set(cuts))), method)
    limit = max(whole.limit, parted.limit)
    assert abs(amax_in(whole) - amax_in(parted)) <= 1.001 * limit / histograms.BINS


@settings(deadline=None)
@given(
    values=hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-(2.0**20), 2.0**20, width=32)),
    chunk=st.integers(1, 250),
)
def test_chunks_count_what_one_histogram_of_all_counts(values, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histograms, "CHUNK", chunk)
        found = collected([values])
    magnitudes = torch.from_numpy(values).abs()
    if found.limit:
        assert found.limit == found.largest == float(magnitudes.max())
        whole = torch.histc(magnitudes, bins=histograms.BINS, min=0, max=found.limit)
        assert found.counts.tolist() == whole.to(torch.int64).tolist()
    assert found.counts.sum() == values.size


def test_counts_are_exact_beyond_what_float32_counts():
    equal, larger = 2**24 + 1000, 2**20
    calibrator = histograms.ActivationCalibrator("percentile/90")
    calibrator.collect(torch.cat([torch.full((equal,), 0.5), torch.ones(larger)]))
    assert calibrator.counts.sum() == equal + larger
    assert calibrator.counts[histograms.BINS // 2] == equal
    assert amax_in(calibrator) == pytest.approx(0.5, rel=0.01)  # 94% of all values


def test_the_order_of_batches_hardly_matters_to_any_method():
    parts = np.array_split(heavy_tailed(0, outliers=20).ravel(), 7)
    for method in METHODS:
        first, second = (amax_in(collected(order, method)) for order in (parts, parts[::-1]))
        # entropy and mse try one amax in so many, over histograms of different widths
        assert first == pytest.approx(second, rel=0.1 if method in {"mse", "entropy"} else 1e-3)


@settings(deadline=None, max_examples=40)
@given(parts=batches.filter(lambda parts: any(part.any() for part in parts)))
@pytest.mark.parametrize("method", ["percentile/50.1", "percentile/99.9", "percentile/100", "mse"])
def test_amax_is_above_zero_and_at_most_the_largest(method, parts):
    calibrator = collected(parts, method)
    assert 0 < amax_in(calibrator) <= max(part.max() for part in parts)
    assert calibrator.compute_amax() is calibrator.compute_amax()  # not searched twice


@pytest.mark.parametrize("outliers", [0, 10, 50])
@pytest.mark.parametrize("percentile", [60, 99, 99.9, 99.99, 100])
def test_percentile_is_that_of_numpy_within_a_bin(percentile, outliers):
    values = heavy_tailed(1, outliers)
    found = amax_of(values, f"percentile/{percentile}")
    width = 2 * np.abs(values).max() / histograms.BINS
    assert abs(found - np.percentile(np.abs(values), percentile, method="inverted_cdf")) <= width


def test_values_on_an_edge_and_zeros_count_until_they_are_forgotten():
    """1.5 of 2 is where bin 3072 begins."""
    calibrator = collected([np.full(10, 1.0, np.float32), np.full(990, 1.5, np.float32)], "percentile/90")
    assert calibrator.limit == 2.0
    before = amax_in(calibrator)
    assert before == pytest.approx(1.5, rel=2 / histograms.BINS)
    calibrator.collect(torch.zeros(10000))
    assert 0 < amax_in(calibrator) < before
    calibrator.reset()
    assert calibrator.compute_amax() is None
    calibrator.collect(torch.full((4,), 3.0))
    assert calibrator.counts.sum() == 4
    assert amax_in(calibrator) <= 3.0


def test_more_values_than_int32_holds_keep_their_outlier():
    values = np.linspace(0, 1, 5000, dtype=np.float32)
    few, many = (collected([values, np.array([8.0], np.float32)], "percentile/100") for _ in range(2))
    many.counts[:512] *= 2**32
    assert many.counts.sum() > 2**31
    assert amax_in(many) == pytest.approx(amax_in(few), rel=2 / histograms.BINS)
    assert amax_in(few) == pytest.approx(8.0, rel=2 / histograms.BINS)


@pytest.mark.parametrize("outliers", [0, 5, 50])
@pytest.mark.parametrize("seed", range(2))
def test_mse_is_the_best_of_a_brute_force_search_and_modelopt_s_is_not(seed, outliers):
    values = heavy_tailed(seed, outliers)
    largest = float(np.abs(values).max())
    best = min(error_of(values, amax) for amax in np.linspace(largest / 32, largest, 2000))
    found = amax_of(values, "mse")
    step = largest / histograms.CANDIDATES
    assert error_of(values, found) <= max(error_of(values, found - step), error_of(values, found + step))
    assert error_of(values, found) <= 1.02 * best
    assert error_of(values, found) <= 1.0001 * error_of(values, largest)  # bins are not values
    theirs = HistogramCalibrator(num_bits=8, axis=None, num_bins=2048)
    theirs.collect(torch.from_numpy(values))
    judged = float(theirs.compute_amax("mse"))
    assert error_of(values, judged) > 5 * best, "ModelOpt's MSE over a histogram is usable: drop ours"


def test_entropy_is_at_most_max_and_clips_what_hardly_ever_comes():
    for outliers in (0, 20):
        values = heavy_tailed(2, outliers)
        assert np.abs(values).mean() < amax_of(values, "entropy") <= np.abs(values).max()
    values = np.append(np.random.default_rng(3).standard_normal(200_000), 40.0)
    assert 3 < amax_of(values, "entropy") < 20


@pytest.mark.parametrize("method", METHODS)
def test_an_input_that_is_always_zero_is_named(tiny_bert, method):
    model = load_model(str(tiny_bert))
    dead = model.get_submodule(LINEARS[4])
    dead.weight.data[:, 1:] = 0
    dead.weight.data[:, 0] = 1e-6  # so that the weight itself is usable
    dead.bias.data.zero_()
    for name, value in model.bert.encoder.layer[0].attention.output.LayerNorm.named_parameters():
        value.data[0] = 0.0 if name in {"weight", "bias"} else value.data[0]
    recipe = recipe_with(rules=[{"match": LINEARS[5], "method": method} | INT8])
    with pytest.raises(CheckFailed, match=f"1 unusable amax .*{LINEARS[5]}.input_quantizer: ") as error:
        calibrate_model(model, recipe)
    assert "\n" not in str(error.value)


def test_each_quantizer_has_the_calibrator_of_its_rule(tiny_bert):
    rules = [
        EVERY,
        {"match": "encoder.layer.0.*", "method": "percentile/90"},
        {"match": "*", "type": "Attention", "method": "mse"},
    ]
    model, _, record = calibrate(tiny_bert, recipe_with("bert-int8-attention", rules=rules))
    for name, quantizer in quantizers.list_quantizers(model).items():
        if name.endswith((".weight_quantizer", ".p_bmm_quantizer")):
            method = "max"
        else:
            method = "mse" if "_bmm_" in name else "percentile/90" if "layer.0" in name else "max"
        assert getattr(quantizer._calibrator, "method", "max") == method
    wanted = dict.fromkeys(LINEARS[:6], "percentile/90")
    wanted |= {f"bert.encoder.layer.{i}.attention.self": "mse" for i in range(2)}
    assert record.methods == wanted
    assert record.method == "max"


def weight_quantizer(weight, axis):
    quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=8, axis=axis))
    quantizer.amax = weight.abs().amax(dim=1, keepdim=True) if axis == 0 else weight.abs().max()
    return quantizer


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), tail=st.floats(1, 4), axis=st.sampled_from([0, None]))
def test_clipping_never_makes_a_weight_worse(seed, tail, axis):
    noise = torch.randn((6, 40), generator=torch.Generator().manual_seed(seed))
    weight = noise.sign() * noise.abs() ** tail
    quantizer, axes = weight_quantizer(weight, axis), 1 if axis == 0 else (0, 1)
    was, largest = (quantizer(weight) - weight).square().sum(dim=axes), quantizer.amax.clone()
    histograms.clip_weight(quantizer, weight)
    assert ((quantizer(weight) - weight).square().sum(dim=axes) <= was).all()
    assert quantizer.amax.shape == largest.shape
    assert ((quantizer.amax <= largest) & (quantizer.amax >= 0.39 * largest)).all()


@pytest.mark.parametrize("axis", [0, None])
def test_clipping_pays_where_few_weights_are_large(axis):
    weight = torch.randn((4, 512), generator=torch.Generator().manual_seed(0)) * 0.1
    weight[:, 0] = 1.0
    quantizer = weight_quantizer(weight.repeat(1, 8), axis)
    flat = torch.cat([weight, weight[:, 1:].repeat(1, 200)], dim=1)
    was = (quantizer(flat) - flat).square().sum()
    histograms.clip_weight(quantizer, flat)
    assert (quantizer(flat) - flat).square().sum() < 0.9 * was


def test_weights_are_clipped_where_a_rule_says_so(tiny_bert, monkeypatch):
    """With weights as few as these no amax is better than max, so a stand-in halves it."""

    def halve(quantizer, weight):
        assert torch.equal(quantizer.amax, weight.abs().amax(dim=1, keepdim=True))
        quantizer.amax = quantizer.amax / 2

    monkeypatch.setattr(histograms, "clip_weight", halve)
    rules = [EVERY, {"match": "encoder.layer.1.*", "weights_method": "mse"}]
    model, _, record = calibrate(tiny_bert, recipe_with(rules=rules))
    for number, name in enumerate(LINEARS):
        largest = model.get_submodule(name).weight.detach().abs().amax(dim=1).numpy()
        ratio = np.array(record.quantizers[f"{name}.weight_quantizer"].amax) / largest
        low = 1.0 if number < 6 else 0.5
        assert ((ratio >= low) & (ratio <= low * (1 + 2**-9))).all()  # scales are rounded up
