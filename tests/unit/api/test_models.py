"""Models in memory: samples in any form, the model unharmed, the same scales as a run's."""

import copy

import numpy as np
import pytest
import torch

import qdqbench
from qdqbench.quantize.models.load import load_model

from ...support.tiny_bert import calibrate, calibration_batches, recipe_with


def recipe():
    """With the model's own GELU, as the other side of the comparison has it."""
    return recipe_with("bert-int8-linears", export={"gelu": "exact"})


@pytest.fixture(scope="module")
def model(tiny_bert):
    return load_model(str(tiny_bert))


@pytest.fixture(scope="module")
def made(model):
    return qdqbench.quantize(model, calibration_batches(), recipe())


def amax(found):
    return {name: state.amax for name, state in found.record.quantizers.items()}


def test_scales_are_those_of_a_run_and_in_the_table(made, tiny_bert):
    assert amax(made) == amax(calibrate(tiny_bert, recipe()))
    table = made.to_frame()
    assert [*table.name] == [*made.record.quantizers]
    assert {"module", "kind", "amax", "amax_over_rms"} <= {*table.columns}


def test_the_model_that_was_given_is_not_changed(model):
    before = copy.deepcopy(model.state_dict())
    qdqbench.quantize(model, calibration_batches()[:1], recipe_with(calibration={"smoothing": 0.5}))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any("quantizer" in name for name, _ in model.named_modules())


def test_samples_in_every_form_give_the_same_scales(made, model):
    """One sample an item, tensors, and padded batches: no quantizer sees the padding."""
    batches = calibration_batches()
    single = [{key: [*map(int, batch[key][row])] for key in batch} for batch in batches for row in range(8)]
    assert amax(qdqbench.quantize(model, single, recipe())) == amax(made)
    padded = []
    for batch in batches:
        wide = {key: np.pad(values, ((0, 0), (0, 4))) for key, values in batch.items()}
        padded.append({key: torch.from_numpy(values) for key, values in wide.items()})
    assert amax(qdqbench.quantize(model, padded, recipe())) == amax(made)


def test_an_export_holds_to_the_recipe(made, tmp_path):
    exported = qdqbench.export(made, tmp_path / "deep" / "model.onnx")
    report = qdqbench.check(exported.path, "bert-int8-linears")
    assert report.errors == []
    assert len(report.quantized) == len(made.plan.int8)
    strict = qdqbench.check(exported.path, "bert-int8-ffn")
    assert strict.errors
    assert [*strict.to_frame().code] == [row.code for row in strict.findings]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"tokens": [1, 2]}], "has tokens, but no input_ids"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], "have shapes"),
        (iter([{"input_ids": [1, 2]}]), "more than once; give a list"),
        ([], "no samples"),
        ([{"input_ids": [7] * 129}], "has 129 tokens, but the model has 128 positions"),
    ],
)
def test_samples_that_cannot_be_read_are_one_sentence(samples, message, model):
    with pytest.raises(qdqbench.UserError, match=message):
        qdqbench.quantize(model, samples, recipe())


def test_what_does_not_fit_is_refused(model):
    with pytest.raises(qdqbench.UserError, match="bert-fp16 quantizes nothing"):
        qdqbench.quantize(model, calibration_batches(), "bert-fp16")
    other = copy.deepcopy(model)
    other.config.model_type = "bart"
    with pytest.raises(qdqbench.UserError, match="'bart'; supported here"):
        qdqbench.quantize(other, calibration_batches(), recipe())
