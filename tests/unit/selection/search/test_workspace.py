"""What trials of a search share: calibrations, and the keys of recipes that make the same model."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from qdqbench.eval.selection.search.worker import Worker
from qdqbench.eval.selection.search.workspace import Workspace, engine_key, make_space, plan_key
from qdqbench.eval.selection.trials.results import Failure
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.calibration.record import select_record
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe.schema import Recipe, load_recipe

from ....support.searches import open_search, placed, raising
from ....support.tiny_bert import calibration_batches, padded_batch
from ....support.trainings import session_of

smoothed = partial(placed, smoothing="0.5")


@pytest.fixture(scope="module")
def space(tiny_bert):
    model = load_model(str(tiny_bert))
    base = load_recipe("bert-int8-linears").model_dump(mode="json")
    base["calibration"]["bias_correction"] = False
    base["export"]["gelu"] = "exact"
    return make_space(Recipe.model_validate(base), module_table(model), model.base_model_prefix)


def logits_of(folder, recipe, plan, record=None):
    """Logits of a recipe's fake-quant model, calibrated alone or restored from a record."""
    model = load_model(str(folder))
    if record is None:
        ptq.calibrate(model, plan, calibration_batches(), recipe.calibration)
    else:
        ptq.restore(model, plan, select_record(plan, *record))
    return quantizers.forward(model, padded_batch()).numpy()


@pytest.fixture(scope="module")
def everything(tiny_bert, space):
    """Records that hold all candidates, smoothed: without INT8 attention, and with it."""
    found = []
    for attention in (set(), set(space.attention)):
        (recipe, plan), model = smoothed(space, space.units, attention), load_model(str(tiny_bert))
        found.append(ptq.calibrate(model, plan, calibration_batches(), recipe.calibration))
    return found


@pytest.mark.parametrize(
    ("units", "attention"),
    [
        ([(0, "qkv"), (0, "output"), (1, "ffn-in")], []),
        ([(0, "output"), (1, "output")], [0, 1]),
        ([(1, "ffn-out")], []),
        ([(0, "qkv"), (0, "output"), (0, "ffn-in"), (0, "ffn-out"), (1, "qkv"), (1, "output")], [1]),
    ],
)
def test_a_part_of_a_shared_calibration_is_the_recipe_s_own(tiny_bert, space, everything, units, attention):
    made = smoothed(space, units, attention)
    own, shared = logits_of(tiny_bert, *made), logits_of(tiny_bert, *made, everything)
    fp32 = quantizers.forward(load_model(str(tiny_bert)), padded_batch()).numpy()
    assert np.abs(own - fp32).max() > 0
    assert np.abs(shared - own).max() <= 1e-5  # the same codes


def test_nothing_of_other_linears_is_left(space, everything):
    _, plan = smoothed(space, {(1, "qkv")})
    found = select_record(plan, *everything)
    assert {name.rpartition(".")[0] for name in found.quantizers} == set(plan.int8)
    assert set(found.smoothing.inputs) == set(plan.int8)


def test_keys_tell_apart_what_makes_another_model(space):
    def key(*parts, **how):
        return plan_key(*smoothed(space, *parts, **how))

    some = [(0, "output"), (1, "ffn-in")]
    assert key(some) == key(some[::-1])
    others = [key(some[:1]), key(some, [0]), key(some, method="mse"), key(some, weights_method="mse")]
    assert len({key(some), *others}) == 5
    assert key([], method="mse") == key([], method="max")  # nothing to calibrate
    # smoothing is of LayerNorm outputs: with other linears alone it changes nothing
    assert key(some[:1], smoothing="0.8") == key(some[:1], smoothing="none")


@pytest.mark.parametrize(
    ("section", "changes", "same"),
    [
        ("calibration", {"method": "mse", "samples": 9}, True),
        ("calibration", {"outlier_channel_splitting": 32}, False),
        ("calibration", {"centering": False}, False),
        ("precision", {"compute": "fp32"}, False),
    ],
)
def test_one_speed_is_that_of_recipes_with_one_engine(space, section, changes, same):
    """The speed of a search's choice was shown for a shipped recipe of another compute type or graph."""
    recipe, plan = smoothed(space, {(0, "output")})
    other = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=changes)})
    assert (engine_key(recipe, plan) == engine_key(other, plan)) is same
    assert engine_key(recipe, plan) != engine_key(recipe, replace(plan, residual=("bert.encoder.layer.0",)))


def test_the_choice_is_confirmed_with_reconstruction_and_trials_are_not(tiny_bert, tmp_path):
    trains = {"samples": 8, "steps": 40, "batch_size": 4, "holdout": 0.25}
    session = session_of(tmp_path, tiny_bert, calibration={"samples": 4}, reconstruction=trains)
    model = session.fp32_model
    work = Workspace(session, make_space(session.recipe, module_table(model), model.base_model_prefix), 3)
    plain = session.recipe.ptq
    trial, same = (work.score(recipe, "given").noise_power for recipe in (session.recipe, plain))
    assert trial == same
    confirmed, before = (
        work.score(recipe, "given", work.confirmations) for recipe in (session.recipe, plain)
    )
    assert confirmed.failure is None
    assert confirmed.scores != before.scores


def test_a_point_that_fails_is_recorded_with_its_reason(tmp_path):
    session = SimpleNamespace(recipe=load_recipe("bert-int8-linears"))
    work = SimpleNamespace(session=session, plan=lambda recipe: raising(MemoryError("no  more"))(None))
    worker = Worker(work, None, None, open_search(tmp_path, trials=1))
    worker.run()
    (trial,) = worker.list_trials()
    assert trial.failure == Failure(code="error", text="MemoryError: no more")
    assert (trial.origin, trial.params, trial.is_scored) == ("given", {"keep": 3}, False)
