"""The distance of hidden states in QAT; and what it trains where q, k and v come from their GEMMs alone."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qdqbench.quantize.calibration.fakequant import native
from qdqbench.quantize.calibration.fakequant.quantizers import list_quantizers, quantizers_off
from qdqbench.quantize.calibration.techniques.qkv_bias_folding import group_shared_scales
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.recipe.plan import list_bias_free_linears
from qdqbench.quantize.recipe.sections import Qat
from qdqbench.quantize.training.qat import compute_hidden_distance, prepare_student, unshift_states

from ...support.tiny_bert import EVERY, LAYERS, Quantized, calibrate, one_scale, padded_batch, recipe_with


def session_of(made: Quantized) -> Any:
    return SimpleNamespace(
        plan=made.plan,
        ptq_record=made.record,
        start_record=made.record,
        new_start_model=lambda: copy.deepcopy(made.model),
    )


def merged(folder: Path, scales: str) -> Quantized:
    """A model whose q, k and v have one weight scale each."""
    rules = [EVERY, *one_scale("query", "key", "value")]
    export = {"opset": 20, "max_length": 128, "qkv_scales": scales}
    return calibrate(folder, recipe_with("bert-int8-attention", rules=rules, export=export))


def test_a_shift_is_no_distance_and_a_bias_that_is_gone_stays_so(tiny_bert: Path) -> None:
    made = merged(tiny_bert, "separate")
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
    made = merged(tiny_bert, "shared")
    settings = Qat(epochs=1, learning_rate=1e-5, amax="learned")
    student = prepare_student(session_of(made), settings, [padded_batch((16,))])
    with torch.no_grad():
        for number, ratio in enumerate(native.list_learned(student)):
            ratio.mul_(1 + 0.01 * number)
    native.settle_learned(student)
    native.use_modelopt(student)
    amax = {name: each.amax for name, each in list_quantizers(student).items()}
    groups = [*group_shared_scales(made.plan)]
    shared = [{float(amax[name]) for name in group} for group in groups]
    assert len(groups) == len(set().union(*shared)) == sum(map(len, shared)) == 2 * LAYERS
    learned = len(native.learn_amax(student, groups))
    native.settle_learned(student)
    list_quantizers(student)[groups[0][0]].disable()  # the others still share one
    assert len(native.learn_amax(student, groups)) == learned


def hidden(seed: int, rows: int, length: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, length, 4, generator=generator) for _ in range(3))


def test_padding_does_not_count_in_hidden_states() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    mine, wanted = hidden(0, 2, 3), hidden(1, 2, 3)
    before = compute_hidden_distance(mine, wanted, mask).item()
    for layer in mine:
        layer[1, 1:] = 99.0
    assert compute_hidden_distance(mine, wanted, mask).item() == pytest.approx(before)
    mine[0][1, 0] = 99.0
    assert compute_hidden_distance(mine, wanted, mask).item() > before


def test_hidden_distances_add_up_over_samples_and_are_relative() -> None:
    def distance(factor: float = 1.0, scale: float = 1.0, row: int | None = None) -> float:
        some = slice(None) if row is None else slice(row, row + 1)
        mine, wanted = (tuple(scale * layer[some] for layer in hidden(seed, 4, 3)) for seed in (0, 1))
        mask = torch.ones(len(mine[0]), 3, dtype=torch.long)
        return compute_hidden_distance(tuple(factor * layer for layer in mine), wanted, mask).item()

    assert distance() == pytest.approx(sum(distance(row=row) for row in range(4)), rel=1e-5)
    assert distance(factor=0) == pytest.approx(4, rel=1e-5)  # all of the power
    assert distance(scale=5) == pytest.approx(distance(), rel=1e-5)
