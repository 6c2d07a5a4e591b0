"""k and v straight from their GEMMs: the same model, with nothing left to do behind them."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qdqbench.quantize.calibrate import ptq
from qdqbench.quantize.calibrate.bias import apply_biases
from qdqbench.quantize.calibrate.record import CalibrationRecord, Smoothing
from qdqbench.quantize.calibrate.straight import equalize, moved_biases, straight, straight_linears
from qdqbench.quantize.encoders.load import load_model
from qdqbench.quantize.fakequant.quantizers import forward, quantizers_off

from ...support.tiny_bert import (
    ATTENTIONS,
    INT8,
    LINEARS,
    calibrate,
    calibration_batches,
    padded_batch,
    plan_of,
    recipe_with,
)

EVERY = {"match": "encoder.layer.*", "type": "Linear"} | INT8
STRAIGHT = [
    {"match": f"*.self.{part}", "type": "Linear", "weights": "int8/tensor", "input": "int8/tensor"}
    for part in ("key", "value")
]
KEYS_AND_VALUES = {name for name in LINEARS if name.endswith(("key", "value"))}


def recipe(*rules: dict[str, Any], **calibration: Any) -> Any:
    return recipe_with("bert-int8-attention", rules=[EVERY, *rules], calibration=calibration)


@pytest.fixture
def model(tiny_bert: Path) -> Any:
    """Rows of k and v of very different ranges."""
    model = load_model(str(tiny_bert))
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            for linear in (layer.attention.self.key, layer.attention.self.value):
                linear.weight[::3] *= 8
                linear.weight[5] = 0
    return model


def test_it_is_for_key_and_value_with_one_scale_in_an_int8_attention(model: Any) -> None:
    assert straight(plan_of(recipe(*STRAIGHT), model)) == ATTENTIONS
    assert straight_linears(plan_of(recipe(*STRAIGHT), model)) == KEYS_AND_VALUES
    assert straight(plan_of(recipe(), model)) == []
    assert straight(plan_of(recipe(STRAIGHT[0]), model)) == []
    without = recipe_with("bert-int8-linears", rules=[EVERY, *STRAIGHT])
    assert straight(plan_of(without, model)) == []


def test_the_model_stays_the_same(model: Any) -> None:
    plan = plan_of(recipe(*STRAIGHT), model)
    batch = padded_batch()
    before = forward(model, batch)
    moved = equalize(model, plan, Smoothing())
    np.testing.assert_array_equal(forward(model, batch), before)  # powers of two
    apply_biases(model, moved_biases(model, plan))
    for name in KEYS_AND_VALUES:
        assert not model.get_submodule(name).bias.any()
    torch.testing.assert_close(forward(model, batch), before, rtol=1e-4, atol=1e-5)
    assert set(moved.rows) == {name for name in LINEARS if name.endswith(("query", "key", "value"))}
    assert set(moved.columns) == {name for name in LINEARS if name.endswith("attention.output.dense")}


def test_rows_get_about_one_range(model: Any) -> None:
    def spread() -> float:
        weights = [model.get_submodule(name).weight.detach().abs().amax(1) for name in KEYS_AND_VALUES]
        return max(float(rows[rows > 0].max() / rows[rows > 0].min()) for rows in weights)

    assert spread() > 8
    equalize(model, plan_of(recipe(*STRAIGHT), model), Smoothing())
    assert spread() <= 2


def test_factors_that_are_there_already_are_multiplied(model: Any) -> None:
    name = LINEARS[0]
    rows = [2.0] * len(model.get_submodule(name).weight)
    plan = plan_of(recipe(*STRAIGHT), model)
    alone = equalize(copy.deepcopy(model), plan, Smoothing())
    moved = equalize(model, plan, Smoothing(rows={name: rows}))
    assert moved.rows[name] == [2 * factor for factor in alone.rows[name]]


def test_calibration_keeps_the_biases_out_and_restores_bit_for_bit(tiny_bert: Path) -> None:
    asked = recipe(*STRAIGHT, smooth=0.65, bias_correction=True, softmax="error")
    made = calibrate(tiny_bert, asked)
    assert straight(made.plan) == ATTENTIONS
    for name in KEYS_AND_VALUES:
        assert not made.model.get_submodule(name).bias.any(), name
        assert name not in made.record.biases
    again = load_model(str(tiny_bert))
    ptq.restore(again, made.plan, CalibrationRecord.model_validate_json(made.record.model_dump_json()))
    for (name, ours), theirs in zip(
        made.model.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    with quantizers_off(again):
        exact, plain = forward(again, padded_batch()), forward(load_model(str(tiny_bert)), padded_batch())
    assert float((exact - plain).abs().max()) < 0.2 * float(plain.abs().max())  # bias correction alone


def test_codes_of_k_and_v_are_as_good_as_with_scales_per_channel(model: Any, tmp_path: Path) -> None:
    """Error of the attention's output in one layer, relative to that with a scale for each channel."""
    model.save_pretrained(tmp_path)
    errors = {}
    for what, rules in (("channel", []), ("tensor", STRAIGHT)):
        found = load_model(str(tmp_path))
        plan = plan_of(recipe(*rules), found)
        ptq.calibrate(found, plan, calibration_batches(), recipe(*rules).calibration)
        truth = forward(load_model(str(tmp_path)), padded_batch((16, 16)))
        errors[what] = float((forward(found, padded_batch((16, 16))) - truth).square().mean())
    assert errors["tensor"] < 3 * errors["channel"]
