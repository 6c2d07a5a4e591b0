"""What QAT trains where q, k and v come straight from their GEMMs."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from qdqbench.quantize.calibration.fakequant import native
from qdqbench.quantize.calibration.fakequant.quantizers import list_quantizers, quantizers_off
from qdqbench.quantize.calibration.techniques.qkv_bias_folding import group_shared_scales
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.recipe.plan import list_bias_free_linears
from qdqbench.quantize.recipe.sections import Qat
from qdqbench.quantize.training.qat import prepare_student, unshift_states

from ...support.tiny_bert import INT8, LAYERS, Quantized, calibrate, one_scale, padded_batch, recipe_with


def session_of(made: Quantized) -> Any:
    return SimpleNamespace(
        plan=made.plan,
        ptq_record=made.record,
        start_record=made.record,
        new_start_model=lambda: copy.deepcopy(made.model),
    )


def test_a_shift_is_no_distance_and_a_bias_that_is_gone_stays_so(tiny_bert: Path) -> None:
    rules = [{"match": "encoder.layer.*", "type": "Linear"} | INT8, *one_scale("query", "key", "value")]
    made = calibrate(tiny_bert, recipe_with("bert-int8-attention", rules=rules))
    session = session_of(made)
    unshift = unshift_states(session, SimpleNamespace(device="cpu"))  # type: ignore[arg-type]
    batch = {name: torch.from_numpy(array) for name, array in padded_batch((16,)).items()}
    with torch.no_grad(), quantizers_off(made.model):
        moved = made.model(**batch, output_hidden_states=True).hidden_states
        plain = load_model(str(tiny_bert))(**batch, output_hidden_states=True).hidden_states
    torch.testing.assert_close(unshift(moved)[0], plain[0], rtol=1e-4, atol=1e-4)
    far, near = ((states[1] - plain[1]).norm() for states in (moved, unshift(moved)))
    assert near < 0.5 * far  # what is left of q's bias is in it
    assert torch.equal(unshift(moved)[-1], moved[-1])
    student = prepare_student(session, Qat(epochs=1, learning_rate=1e-5), [padded_batch((16,))])
    still = {name for name, parameter in student.named_parameters() if not parameter.requires_grad}
    assert still == {f"{name}.bias" for name in list_bias_free_linears(made.plan)}


def test_scales_of_merged_ones_are_learned_as_one(tiny_bert: Path) -> None:
    rules = [{"match": "encoder.layer.*", "type": "Linear"} | INT8, *one_scale("query", "key", "value")]
    export = {"opset": 20, "max_length": 128, "qkv_scales": "shared"}
    made = calibrate(tiny_bert, recipe_with("bert-int8-attention", rules=rules, export=export))
    settings = Qat(epochs=1, learning_rate=1e-5, amax="learned")
    student = prepare_student(session_of(made), settings, [padded_batch((16,))])
    with torch.no_grad():
        for number, ratio in enumerate(native.list_learned(student)):
            ratio.mul_(1 + 0.01 * number)
    native.settle_learned(student)
    native.use_modelopt(student)
    amax = {name: each.amax for name, each in list_quantizers(student).items()}
    groups = [*group_shared_scales(made.plan)]
    assert len(groups) == 2 * LAYERS
    for group in groups:
        assert len({float(amax[name]) for name in group}) == 1
    assert len({float(amax[group[0]]) for group in groups}) == len(groups)
    learned = len(native.learn_amax(student, groups))
    native.settle_learned(student)
    list_quantizers(student)[groups[0][0]].disable()  # the others still share one
    assert len(native.learn_amax(student, groups)) == learned
