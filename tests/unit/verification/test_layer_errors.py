"""What INT8 costs each layer against FP32."""

import pytest
import torch
from torch import nn

from qdqbench.eval.verification.layer_errors import layer_errors
from qdqbench.quantize.calibration.bias import add_biases_temporarily
from qdqbench.quantize.calibration.fakequant.native import use_frozen_weights
from qdqbench.quantize.calibration.record import get_state_shifts
from qdqbench.quantize.models.load import load_model

from ...support.tiny_bert import (
    INT8,
    LAYERS,
    calibrate,
    one_scale,
    padded_batch,
    quantized,
    recipe_with,
)

BATCH = padded_batch((16, 4, 9, 16, 12, 7), 3)


@pytest.fixture(scope="module")
def made(tiny_bert):
    return quantized(tiny_bert, "bert-int8-attention")


def errors(made, tiny_bert, corrections=None):
    with use_frozen_weights(made.model):
        found = layer_errors(
            made.model, load_model(str(tiny_bert)), [*made.plan.int8], [BATCH], corrections or {}
        )
    assert found.n == 6
    return {row.name: row for row in found.rows}


def test_every_linear_and_block_has_an_error_of_the_size_of_int8(made, tiny_bert):
    found = errors(made, tiny_bert)
    blocks = [f"layer.{number}" for number in range(LAYERS)]
    assert [*found] == [*made.plan.int8, "embeddings", *blocks, "head"]
    assert all(1e-3 < found[name].alone < 0.1 for name in made.plan.int8)
    assert all(found[name].accumulated is None for name in (*made.plan.int8, "embeddings"))
    assert found["embeddings"].alone < 1e-6
    assert found["layer.0"].accumulated == pytest.approx(found["layer.0"].alone, rel=1e-3)
    assert found[blocks[-1]].accumulated > found[blocks[-1]].alone
    assert found["head"].alone < 1e-6 < found["head"].accumulated


def test_a_broken_linear_shows_alone_and_in_all_that_follows(made, tiny_bert):
    before = errors(made, tiny_bert)
    name = "bert.encoder.layer.1.intermediate.dense"
    linear = made.model.get_submodule(name)

    def shifted(_, __, output):
        return output + 1

    handle = linear.register_forward_hook(shifted)
    try:
        after = errors(made, tiny_bert)
    finally:
        handle.remove()
    assert after[name].alone > 10 * before[name].alone
    assert after["layer.1"].alone > 2 * before["layer.1"].alone
    assert after["head"].accumulated > before["head"].accumulated
    assert after["layer.0"] == before["layer.0"]


def test_a_correction_is_part_of_what_is_judged(made, tiny_bert):
    name = "bert.encoder.layer.0.output.dense"
    plain = errors(made, tiny_bert)[name].alone
    width = len(made.model.get_submodule(name).bias)
    assert errors(made, tiny_bert, {name: [1.0] * width})[name].alone > 5 * plain


def test_shifted_hidden_states_are_no_error(tiny_bert):
    """What q, k and v read is shifted from layer to layer: that is no cost of INT8."""
    rules = [{"match": "encoder.layer.*", "type": "Linear"} | INT8, *one_scale("query", "key", "value")]
    made = calibrate(tiny_bert, recipe_with("bert-int8-attention", rules=rules))
    moved = get_state_shifts(made.record, made.plan)
    assert [*moved] == [*range(LAYERS)]
    fp32 = load_model(str(tiny_bert))
    before = {name: value.clone() for name, value in fp32.state_dict().items()}
    added = [shift.added for shift in made.record.shifts.values()]
    with use_frozen_weights(made.model), add_biases_temporarily(fp32, added):
        found = layer_errors(made.model, fp32, [*made.plan.int8], [BATCH], {}, moved)
    assert all(torch.equal(value, before[name]) for name, value in fp32.state_dict().items())
    rows = {row.name: row for row in found.rows}
    assert rows["embeddings"].alone < 1e-5
    assert all(0.005 < rows[f"layer.{number}"].alone < 0.1 for number in range(LAYERS))
    assert rows["layer.0"].accumulated == pytest.approx(rows["layer.0"].alone, rel=0.1)
    without = {row.name: row for row in unshifted(made, tiny_bert).rows}
    assert without["embeddings"].alone > 0.1


def unshifted(made, tiny_bert):
    with use_frozen_weights(made.model):
        return layer_errors(made.model, load_model(str(tiny_bert)), [], [BATCH], {})


def test_hooks_are_gone_afterwards(made, tiny_bert):
    errors(made, tiny_bert)
    linears = (m for m in made.model.modules() if isinstance(m, nn.Linear))
    assert not any(linear._forward_hooks for linear in linears)
