"""What rungs take from what was measured on train rows."""

import tempfile
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from qdqbench.eval.bench.measure import alone
from qdqbench.eval.selection.auto import run
from qdqbench.eval.selection.auto.run import choose_base, choose_trial, find_islands
from qdqbench.eval.selection.sensitivity.results import CurvePoint
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.options import parse_duration
from qdqbench.quantize.utils.progress import Reporter, reporting_to

from ....support import records


def point(kept, noise):
    compared = records.comparison({"accuracy": 0.0}, 0.0, **records.sqnr(noise))
    return CurvePoint(kept=kept, linears=[str(n) for n in range(kept)], attention=[], comparison=compared)


def trial(number, noise, speed, origin="tpe", int8=4):
    return records.search_trial(number, noise, speed, origin=origin, int8_linears=int8)


def test_islands_are_the_fewest_that_leave_a_quarter():
    curve = [point(8, 0.01), point(0, 0.4), point(4, 0.09), point(2, 0.15), point(1, 0.3)]
    assert find_islands(curve).kept == 4
    with pytest.raises(CheckFailed, match="no 2 linears out of INT8"):
        find_islands([point(0, 0.4), point(1, 0.3), point(2, 0.2)])


GIVEN = trial(0, 0.16, 1.9, "given")


def test_search_gives_the_fastest_that_is_near_enough_or_else_the_nearest():
    trials = [GIVEN, trial(1, 0.009, 1.3), trial(2, 0.002, 1.1), trial(3, 0.05, 1.8)]
    assert choose_trial(trials, None).number == 1
    assert choose_trial(trials, 1.5).number == 3  # the nearest of those that are so fast
    assert choose_trial([GIVEN, trial(1, 0.05, 1.2), trial(2, 0.03, 1.1)], None).number == 2
    assert choose_trial([GIVEN, trial(1, 0.05, 0.8), trial(2, 0.03, 0.7)], None).number == 2


def test_search_never_gives_what_was_tried_or_has_no_int8():
    with pytest.raises(CheckFailed, match="no other recipe"):
        choose_trial([GIVEN, trial(1, 0.0, 1.0, "unquantized", int8=0)], None)
    with pytest.raises(CheckFailed, match="none of the 1 recipes that were tried is 3x"):
        choose_trial([GIVEN, trial(1, 0.01, 1.2)], 3.0)


@pytest.mark.parametrize(("slow", "base"), [((), "linears"), (("linears",), "attention")])
def test_linears_leave_int8_in_a_recipe_without_int8_residuals(slow, base):
    before = []
    for name in ("attention", "residual", "linears"):
        known = {"recipe": load_recipe(f"bert-int8-{name}"), "lacks": lambda code, name=name: name in slow}
        before.append(SimpleNamespace(kind="shipped", run=True, **known))
    assert choose_base(before, moved=True).name == f"bert-int8-{base}"
    assert choose_base(before).name == f"bert-int8-{'residual' if slow else 'linears'}"
    assert choose_base(before[1:2], moved=True).name == "bert-int8-residual"  # and says why it cannot


def test_another_process_that_times_engines_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = []

    class Told(Reporter):
        def begin(self, step, *_, **__):
            told.append(step)
            other.close()  # it ends

    with ExitStack() as other, reporting_to(Told()):
        other.enter_context(alone(on_cpu=True))
        with run._alone_in_time(on_cpu=True), pytest.raises(UserError), alone(on_cpu=True):
            pass
    assert told == ["waiting for another process that times engines"]


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), (30, 30)])
def test_times(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1m", "0", "3d", "1m30s"])
def test_what_is_no_time(text):
    with pytest.raises(ValueError, match="give one such as"):
        parse_duration(text)
