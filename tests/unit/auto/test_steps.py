"""What rungs take from what was measured on train rows."""

from types import SimpleNamespace

import pytest

from qdqbench.eval.api.auto import duration
from qdqbench.eval.auto.steps import Steps, further, islands_of, qat_settings, same_but_steps
from qdqbench.eval.runs.pace import Pace
from qdqbench.eval.search.results import Accuracy, Trial
from qdqbench.eval.sensitivity.results import CurvePoint, Effect
from qdqbench.quantize.core.errors import CheckFailed, UserError
from qdqbench.quantize.recipe.schema import dump_recipe, load_recipe

from ...support import records


def point(kept, divergence):
    judged = Effect(
        metric=0.9,
        drop=0.0,
        drop_stderr=0.0,
        within_noise=True,
        disagreements=0,
        divergence=divergence,
        divergence_stderr=0.0,
        sqnr_db=None,
    )
    return CurvePoint(kept=kept, linears=[str(n) for n in range(kept)], attention=[], judged=judged)


def trial(number, divergence, speedup, origin="TPE", int8=4):
    accuracy = Accuracy(
        divergence=divergence,
        metric="accuracy",
        value=0.9,
        drop=0.0,
        drop_stderr=0.0,
        within_noise=True,
        disagreements=0,
        n=100,
    )
    latency = records.speedup(speedup)
    how = {"params": {}, "int8_linears": int8, "accuracy": accuracy, "latency": latency}
    return Trial(number=number, state="complete", origin=origin, recipe="", **how)


def test_islands_are_the_fewest_that_leave_a_quarter():
    curve = [point(8, 0.01), point(0, 0.4), point(4, 0.1), point(2, 0.15), point(1, 0.3)]
    assert islands_of(curve).kept == 4


def test_a_divergence_that_is_spread_over_all_has_no_islands():
    with pytest.raises(CheckFailed, match="no 2 linears out of INT8"):
        islands_of([point(0, 0.4), point(1, 0.3), point(2, 0.2)])


GIVEN = trial(0, 0.16, 1.9, "given recipe")


def test_search_gives_the_fastest_that_is_near_enough():
    trials = [GIVEN, trial(1, 0.009, 1.3), trial(2, 0.002, 1.1), trial(3, 0.05, 1.8)]
    assert further(trials, None).number == 1
    assert further(trials, 1.5).number == 3  # the nearest of those that are so fast


def test_search_gives_the_nearest_where_none_is_near_enough():
    assert further([GIVEN, trial(1, 0.05, 1.2), trial(2, 0.03, 1.1)], None).number == 2
    assert further([GIVEN, trial(1, 0.05, 0.8), trial(2, 0.03, 0.7)], None).number == 2


def test_search_never_gives_what_was_tried_or_has_no_int8():
    with pytest.raises(CheckFailed, match="no other recipe"):
        further([GIVEN, trial(1, 0.0, 1.0, "nothing in INT8", int8=0)], None)
    with pytest.raises(CheckFailed, match="none of the 1 recipes that were tried is 3x"):
        further([GIVEN, trial(1, 0.01, 1.2)], 3.0)


@pytest.mark.parametrize(("slow", "base"), [((), "linears"), (("linears",), "attention")])
def test_linears_leave_int8_in_a_recipe_without_int8_residuals(tmp_path, slow, base):
    before = []
    for name in ("attention", "residual", "linears"):
        recipe = load_recipe(f"bert-int8-{name}")
        (tmp_path / f"{name}.yaml").write_text(dump_recipe(recipe))
        lacks = SimpleNamespace(speed=name in slow)
        measured = SimpleNamespace(lacks=lacks, recipe_file=f"{name}.yaml")
        before.append(SimpleNamespace(kind="shipped", measured=measured))
    steps = Steps(SimpleNamespace(folder=tmp_path), [])
    assert steps._base(before, moved=True).name == f"bert-int8-{base}"
    assert steps._base(before).name == f"bert-int8-{'residual' if slow else 'linears'}"
    assert steps._base(before[1:2], moved=True).name == "bert-int8-residual"  # and says why it cannot


def test_a_training_that_was_begun_with_fewer_steps_is_known_again():
    recipe = load_recipe("bert-int8-attention-qat")
    shorter = recipe.model_copy(update={"qat": recipe.qat.model_copy(update={"max_steps": 7})})
    assert same_but_steps(shorter, recipe)
    other = recipe.model_copy(update={"qat": recipe.qat.model_copy(update={"learning_rate": 0.1})})
    assert not same_but_steps(other, recipe)
    assert not same_but_steps(recipe.ptq, recipe)


def test_every_family_has_settings_of_a_training():
    for name in ("bert-int8-linears", "deberta-v2-int8-linears", "albert-int8-ffn"):
        assert qat_settings(load_recipe(name)).max_steps == 1000


def test_the_cost_of_a_training_grows_with_rows_up_to_its_steps():
    pace, settings = Pace(0.01, 0.02, 0.1, 60.0), qat_settings(load_recipe("bert-int8-linears"))
    around, step, steps = pace.training(settings, 3200)
    assert steps == 3 * 90  # a tenth is held out
    assert step == pytest.approx(32 * 5 * 0.01)
    assert around == pytest.approx(3200 * 0.01 + 11 * 320 * 0.03)
    assert pace.training(settings, 10**6)[2] == 1000


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), (30, 30)])
def test_times(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1m", "0", "3d", "1m30s"])
def test_what_is_no_time(text):
    with pytest.raises(UserError, match="give one such as"):
        duration(text)
