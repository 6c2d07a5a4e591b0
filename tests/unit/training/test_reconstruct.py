"""Reconstruction: layers of a tiny model come nearer to FP32, or stay as PTQ left them."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qdqbench.eval.selection.trials.store import draw_samples
from qdqbench.quantize.calibration.fakequant.quantizers import list_quantizers
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.recipe.schema import find_recipe
from qdqbench.quantize.recipe.sections import Calibration, Reconstruction
from qdqbench.quantize.training import reconstruct as module
from qdqbench.quantize.training.reconstruct import LayerStore, draw_rows, read_rows, reconstruct
from qdqbench.quantize.utils.errors import CheckFailed, UserError

from ...support.families import write_model
from ...support.tiny_bert import LAYERS, VOCABULARY, Quantized, assert_same_state, calibrate, recipe_with
from ...support.trainings import session_of

SETTINGS = Reconstruction(samples=160, steps=60, batch_size=8, holdout=0.25)
SPLIT: dict[str, Any] = {"smoothing": 0.5, "outlier_channel_splitting": 32, "bias_correction": True}


def samples(count: int = 160, seed: int = 0) -> list[tuple[int, Any, Any]]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(5, 58, rng.integers(4, 17)) for _ in range(count)]
    return [(number, row, np.zeros_like(row)) for number, row in enumerate(rows)]


@pytest.fixture(scope="module")
def made(tiny_bert: Path) -> Quantized:
    return calibrate(tiny_bert, recipe_with("bert-int8-attention", calibration=SPLIT))


def rebuilt(made: Quantized, folder: Path, store: Path, **changes: Any) -> tuple[Any, Any]:
    """A reconstructed model as it is exported, and what was said of it."""
    model, teacher = copy.deepcopy(made.model), load_model(str(folder))
    settings, store_of = SETTINGS.model_copy(update=changes), LayerStore(store, "of this test")
    rows = draw_rows(samples(), settings, 0)
    return model, reconstruct(model, teacher, made.plan, made.record, rows, settings, store_of)


def test_layers_come_nearer_and_stay_plain(made: Quantized, tiny_bert: Path, tmp_path: Path) -> None:
    model, run = rebuilt(made, tiny_bert, tmp_path)
    assert [row.layer for row in run.layers] == [f"bert.encoder.layer.{n}" for n in range(LAYERS)]
    assert all(row.after_db > row.before_db + 0.3 for row in run.layers)
    assert run.gained
    assert run.after_db > run.before_db + 0.2
    assert (run.rows, run.held_out, run.kept) == (120, 40, LAYERS)
    assert list(model.state_dict()) == list(made.model.state_dict())
    amax = {name: each.amax for name, each in list_quantizers(made.model).items()}
    learned = {name: each.amax for name, each in list_quantizers(model).items()}
    assert any(not torch.equal(amax[name], learned[name]) for name in amax)
    for name in ("embeddings.word_embeddings", "pooler.dense"):  # outside of the layers nothing is trained
        before, after = (each.bert.get_submodule(name).weight for each in (made.model, model))
        assert torch.equal(before, after)


def test_the_same_seed_gives_the_same_weights(made: Quantized, tiny_bert: Path, tmp_path: Path) -> None:
    one, other = (rebuilt(made, tiny_bert, tmp_path / name, steps=3)[0] for name in ("one", "other"))
    assert_same_state(one, other)


def test_a_killed_one_goes_on_with_the_next_layer(
    made: Quantized, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    whole, _ = rebuilt(made, tiny_bert, tmp_path / "whole", steps=10)
    first, last = sorted((tmp_path / "whole").iterdir())
    last.write_bytes(last.read_bytes()[:100])  # not whole
    train = module.Reconstructor.train

    def noted(self: Any, layer: int, *given: Any) -> Any:
        trained.append(layer)
        return train(self, layer, *given)

    monkeypatch.setattr(module.Reconstructor, "train", noted)
    again, run = rebuilt(made, tiny_bert, tmp_path / "whole", steps=10)
    assert trained == [1]
    assert any("resumed" in note for note in run.notes)
    assert_same_state(whole, again)
    assert load_file(first).keys() == load_file(last).keys()


def test_what_comes_no_nearer_is_ptq_as_it_was(made: Quantized, tiny_bert: Path, tmp_path: Path) -> None:
    model, run = rebuilt(made, tiny_bert, tmp_path, learning_rate=0.9, amax_learning_rate=0.9, steps=5)
    assert not any(row.kept for row in run.layers)
    assert not run.gained
    assert any("PTQ is kept" in note for note in run.notes)
    assert_same_state(model, made.model)


def test_a_layer_whose_loss_becomes_nan_is_ptq_and_the_others_are_trained(
    made: Quantized, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_layer = module.Chain.run

    def poisoned(self: Any, name: str, number: int, state: torch.Tensor) -> torch.Tensor:
        made_of = run_layer(self, name, number, state)
        learns = name.endswith(".0") and torch.is_grad_enabled()
        return made_of * torch.nan if learns else made_of

    monkeypatch.setattr(module.Chain, "run", poisoned)
    model, run = rebuilt(made, tiny_bert, tmp_path, steps=20)
    first, second = run.layers
    assert (first.after_db, first.kept) == (None, False)
    assert second.kept
    assert any("gave NaN" in note and "layer.0" in note for note in run.notes)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_refusals(made: Quantized, tiny_bert: Path) -> None:
    with pytest.raises(UserError, match="3 calibration rows"):
        draw_rows(samples(3), SETTINGS, 0)
    teacher = load_model(str(tiny_bert))
    with torch.no_grad():
        teacher.classifier.bias.fill_(torch.nan)
    rest = made.plan, made.record, draw_rows(samples(8), SETTINGS, 0), SETTINGS
    with pytest.raises(CheckFailed, match="NaN or infinite"):
        reconstruct(copy.deepcopy(made.model), teacher, *rest)


def test_a_shared_layer_comes_nearer_in_all_its_runs(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "albert")
    recipe = find_recipe("int8-linears", str(folder))
    made = calibrate(folder, recipe.model_copy(update={"calibration": Calibration()}))
    model, run = rebuilt(made, folder, tmp_path / "store")
    assert len({row.layer for row in run.layers}) == len(run.layers) == 2  # of four runs
    assert all(row.after_db > row.before_db + 0.3 for row in run.layers)
    assert run.after_db > run.before_db + 0.2
    again, resumed = rebuilt(made, folder, tmp_path / "store")
    assert any("after 2 of 2 layers" in note for note in resumed.notes)
    assert_same_state(model, again)


def test_texts_of_the_user_have_no_labels_and_are_none_that_judge(tiny_bert: Path, tmp_path: Path) -> None:
    session = session_of(tmp_path, tiny_bert)
    other = tmp_path / "other" / "train.jsonl"
    judged = (tmp_path / "validation.csv").read_text().split("\n")[1].split(",")[0]
    own = [f"{word} {word} {word}" for word in VOCABULARY[5:13]]
    settings = SETTINGS.model_copy(update={"texts": str(other.parent)})
    other.parent.mkdir()
    other.write_text("\n".join(json.dumps({"sentence": text}) for text in [judged, *own, " "]))
    rows, fingerprint = read_rows(session, settings)
    assert sum(len(batch["input_ids"]) for batch in rows.batches) == len(own)
    assert any("has 10 texts, 1 empty, 1 evaluated on" in note for note in session.notes)
    assert fingerprint != read_rows(session, SETTINGS)[1]
    other.write_text("\n".join(json.dumps({"sentence": text}) for text in [judged, *[" "] * 8]))
    with pytest.raises(UserError, match="9 texts, 8 empty, 1 evaluated on, which leaves 0"):
        read_rows(session, settings)


def test_rows_on_which_others_judge_teach_nothing(tiny_bert: Path, tmp_path: Path) -> None:
    session = session_of(tmp_path, tiny_bert, calibration={"samples": 4})
    judged = {tuple(row) for row in draw_samples(session, 3)[1].input_ids}
    rows, _ = read_rows(session, SETTINGS.model_copy(update={"batch_size": 1}), judged=3)
    taught = {tuple(batch["input_ids"][0]) for batch in rows.batches}
    assert len(taught) == 9
    assert not judged & taught
