"""A model that goes on from the input of any of its layers gives the answers that it gives as a whole."""

import numpy as np
import pytest
import torch

from qdqbench.quantize.calibration.fakequant.quantizers import forward
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.load import prepare_model
from qdqbench.quantize.models.modules import record_first_inputs, resume_from

from ...support.families import SIZES, new_model
from ...support.tiny_bert import padded_batch

BATCH = padded_batch()


@pytest.mark.parametrize("model_type", SIZES)
def test_from_every_layer_on_the_answers_are_the_same(model_type):
    model = prepare_model(new_model(model_type))
    with record_first_inputs(model) as embedded:
        expected = forward(model, BATCH)
    assert len(embedded) == 1
    hidden, runs = embedded[0], family_of(model.config).runs(model)
    for number in range(len(runs) + 1):
        other = BATCH | {"input_ids": BATCH["input_ids"][:, ::-1].copy()}
        given = other if number else BATCH  # the tokens are not looked at
        with resume_from(model, number, hidden):
            np.testing.assert_allclose(forward(model, given), expected, atol=1e-6)
        if number < len(runs):
            with resume_from(model, number, hidden, number + 1) as made:
                forward(model, given)
            [behind] = made
            assert not torch.equal(behind, hidden)
            hidden = behind
    np.testing.assert_array_equal(forward(model, BATCH), expected)


def test_nothing_is_left_behind_when_the_model_fails():
    model = prepare_model(new_model("albert"))
    with pytest.raises(RuntimeError), resume_from(model, 1, torch.zeros(3, 16, 7)):
        forward(model, BATCH)
    assert not any("forward" in vars(module) for module in model.modules())
