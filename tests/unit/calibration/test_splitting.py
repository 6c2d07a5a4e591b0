"""Outlier channel splitting: the same answers from a wider feed-forward, and less error once it is INT8."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qdqbench.quantize.calibration import ptq, smoothing
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.calibration.fakequant import quantizers as quantizers_module
from qdqbench.quantize.calibration.record import CalibrationRecord, ChannelSplit
from qdqbench.quantize.models.families.known import BERT
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.utils.errors import UserError

from ...support.tiny_bert import (
    INT8,
    INTERMEDIATE,
    LAYERS,
    LINEARS,
    Batch,
    calibration_batches,
    exported_of,
    padded_batch,
    plan_of,
    recipe_with,
    run_onnx,
)

FIRSTS, SECONDS = LINEARS[4::6], LINEARS[5::6]
EVERY = {"match": "encoder.layer.*"} | INT8
CHANNEL, EXTRA = 7, 32
Found = tuple[Any, Any, CalibrationRecord]
RANGES = hnp.arrays(np.float64, 40, elements=st.floats(0, 2.0**20, allow_subnormal=False))


def outlying(folder: Path) -> Any:
    """One channel of each feed-forward has a large activation that meets a large weight."""
    model: Any = load_model(str(folder))
    with torch.no_grad():
        for name in SECONDS:
            first, second = smoothing._linears(model, name)
            first.bias[CHANNEL] += 30
            second.weight[:, CHANNEL] *= 10
            second.bias -= 30 * second.weight[:, CHANNEL]
    return model


def calibrated(folder: Path, *rules: dict[str, Any], per: str = "channel", **calibration: Any) -> Found:
    model = outlying(folder)
    every = EVERY | {"weights": f"int8/per-{per}"}
    recipe = recipe_with(
        rules=[every, *rules], calibration={"outlier_channel_splitting": EXTRA} | calibration
    )
    plan = plan_of(recipe, model)
    return model, plan, ptq.calibrate(model, plan, calibration_batches(), recipe.calibration)


def answers(model: Any, batches: list[Batch] | None = None) -> torch.Tensor:
    batches = batches or [padded_batch((9, 9), seed=3), padded_batch((12, 5), seed=4)]
    return torch.cat([quantizers.forward(model, batch) for batch in batches])


@settings(max_examples=200)
@given(RANGES, RANGES, st.integers(0, 4).map(lambda n: 32 * n))
def test_what_is_chosen_fits_and_only_helps(
    activations: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], extra: int
) -> None:
    found = smoothing.choose_channels(activations, weights, extra)
    assert sum(a * b - 1 for a, b in found.outliers.values()) <= extra
    for values, side in ((activations, 0), (weights, 1)):
        divisors = np.ones(len(values))
        for channel, parts in found.outliers.items():
            assert parts[side] & (parts[side] - 1) == 0  # a power of two
            divisors[channel] = parts[side]
        left, divided = values / divisors, divisors > 1
        assert (2 * left[divided] > np.sort(left)[-smoothing.LIKE - 1]).all()  # not more copies than it takes


def test_nothing_stands_out_of_equal_ranges() -> None:
    assert smoothing.choose_channels(np.ones(64), np.ones(64), 64) == ChannelSplit(extra=64, outliers={})


def test_an_activation_and_its_weight_share_the_copies() -> None:
    ranges = np.ones(64)
    ranges[CHANNEL] = 4
    found = smoothing.choose_channels(ranges, ranges, EXTRA)
    assert found.outliers == {CHANNEL: (4, 4)}  # 15 of 32 copies; the others are filling


@pytest.mark.parametrize("smoothing", ["none", 0.5])
def test_answers_stay_until_something_is_quantized(tiny_bert: Path, smoothing: Any) -> None:
    model, _, record = calibrated(tiny_bert, smoothing=smoothing)
    assert list(record.splits) == SECONDS
    assert all(CHANNEL in each.outliers for each in record.splits.values())
    for name in SECONDS:
        assert model.get_submodule(name).weight.shape[1] == INTERMEDIATE + EXTRA
    with quantizers_module.quantizers_off(model):
        torch.testing.assert_close(answers(model), answers(outlying(tiny_bert)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_int8_loses_far_less(tiny_bert: Path, per: str) -> None:
    exact = answers(outlying(tiny_bert))
    error = {
        extra: float(
            (answers(calibrated(tiny_bert, per=per, outlier_channel_splitting=extra)[0]) - exact).norm()
        )
        for extra in (0, EXTRA)
    }
    assert error[EXTRA] < 0.5 * error[0]


def test_the_amax_of_what_was_split_falls(tiny_bert: Path) -> None:
    plain, split = (calibrated(tiny_bert, outlier_channel_splitting=extra)[2] for extra in (0, EXTRA))
    for name in SECONDS:
        before, after = (r.quantizers[f"{name}.input_quantizer"].amax for r in (plain, split))
        assert isinstance(after, float)
        assert isinstance(before, float)
        assert after < before / 3


def test_copies_differ_and_fit_fp16() -> None:
    layout = smoothing.make_split_layout(ChannelSplit(extra=32, outliers={3: (4, 8), 5: (1, 2)}), 40)
    for channel, (by_input, by_weight), each in ((3, (4, 8), 32), (5, (1, 2), 2), (0, (1, 1), 1)):
        mine = (layout.channels == channel) & (layout.columns > 0)
        assert mine.sum() == each == len(set(layout.inputs[mine]))
        np.testing.assert_allclose((layout.inputs * layout.columns)[mine].sum(), 1, rtol=1e-12)
        assert layout.inputs[channel] == 1 / by_input
        assert layout.columns[channel] == 1 / by_weight
    assert (layout.inputs == layout.inputs.astype(np.float16)).all()
    assert (layout.columns == 0).sum() == len(layout.channels) - 40 - 31 - 1


@pytest.mark.parametrize(
    "changes", [{}, {"bias_correction": True, "smoothing": 0.5, "weights_method": "mse"}]
)
def test_the_record_rebuilds_every_bit(tiny_bert: Path, changes: dict[str, Any]) -> None:
    model, plan, record = calibrated(tiny_bert, **changes)
    again = outlying(tiny_bert)
    ptq.restore(again, plan, CalibrationRecord.model_validate_json(record.model_dump_json()))
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert torch.equal(answers(model), answers(again))


def test_only_int8_feed_forwards_are_split(tiny_bert: Path) -> None:
    model, _, record = calibrated(tiny_bert, {"match": "encoder.layer.1.output.dense", "precision": "fp16"})
    assert list(record.splits) == SECONDS[:1]
    assert model.config.intermediate_size == INTERMEDIATE
    with quantizers_module.quantizers_off(model):
        torch.testing.assert_close(answers(model), answers(outlying(tiny_bert)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", ["channel", "factored"])
def test_the_graph_computes_what_the_model_does(tiny_bert: Path, form: str) -> None:
    model, plan, _ = calibrated(tiny_bert, per="tensor" if form == "factored" else "channel")
    batch = padded_batch((9, 9), seed=3)
    graph = exported_of(model, plan, form)
    np.testing.assert_allclose(run_onnx(graph, batch), answers(model, [batch]), rtol=1e-3, atol=2e-3)


def test_training_keeps_copies_equal_and_they_merge_exactly(tiny_bert: Path) -> None:
    model, plan, record = calibrated(tiny_bert, smoothing=0.5)
    tie = smoothing.keep_equal(model, record.splits)
    torch.manual_seed(0)
    with torch.no_grad():
        for name in (*FIRSTS, *SECONDS):  # a step that treats copies differently
            linear = model.get_submodule(name)
            linear.weight += 0.01 * torch.randn_like(linear.weight)
            linear.bias += 0.01 * torch.randn_like(linear.bias)
    tie()
    trained = outlying(tiny_bert)
    weights = smoothing.remove_copies(smoothing.remove_factors(model, record.smoothing), record.splits, BERT)
    trained.load_state_dict({name: weights[name] for name in trained.state_dict()})
    with quantizers_module.quantizers_off(model):
        torch.testing.assert_close(answers(model), answers(trained), rtol=1e-5, atol=1e-4)
    ptq.restore(trained, plan, record)
    ours, theirs = model.state_dict(), trained.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_there_must_be_something_to_split(tiny_bert: Path) -> None:
    with pytest.raises(UserError, match=r"second linear of feed-forwards, and none of them is INT8"):
        calibrated(tiny_bert, {"match": "*.output.dense", "precision": "fp16"})


def test_one_way_at_a_time(tiny_bert: Path) -> None:
    with pytest.raises(UserError, match=r"layer\.1\.output\.dense, and so would smoothing; drop one"):
        calibrated(tiny_bert, {"match": "encoder.layer.1.output.dense", "smoothing": 0.5})


@pytest.mark.parametrize("count", [-32, 8, 2048])
def test_kernels_need_aligned_sizes(count: int) -> None:
    with pytest.raises(ValueError, match="outlier_channel_splitting"):
        recipe_with(calibration={"outlier_channel_splitting": count})


def test_layers_are_counted(tiny_bert: Path) -> None:
    model, _, record = calibrated(tiny_bert)
    assert len(record.splits) == LAYERS
    assert model.config.intermediate_size == INTERMEDIATE + EXTRA
