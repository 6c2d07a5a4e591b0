"""The order of the steps, the budget, the stop and going on, with steps that are plain functions."""

import pytest

from qdqbench.eval.auto.climb import Rung, chosen, climb
from qdqbench.eval.auto.results import Final, Lacks, Measured, Step
from qdqbench.quantize.core.errors import CheckFailed, UserError

from ...support.records import comparison

KINDS = ("shipped", "shipped", "methods", "islands", "search", "qat")
NAMES = ("attention", "linears", "methods", "islands", "search", "qat")


def measured(name, drop=0.0, final=None, **lacks):
    """A recipe that loses so much, as a fraction, and lacks what is said."""
    versus = comparison({"accuracy": -drop}, 0.001, within_noise=False)
    return Measured(
        recipe=name,
        recipe_file=f"{name}/recipe.yaml",
        run=f"{name}/run",
        engine=None,
        int8_linears=1,
        int8_attention=0,
        stage="engine",
        metrics={"accuracy": 0.9 - drop},
        vs_fp32={"validation": versus},
        before=None,
        vs_before={},
        latency=None,
        latency_note="",
        lacks=Lacks(**lacks),
        final=final,
    )


class Climbing:
    """Rungs that come to what is planned, and a clock that each of them turns by its seconds."""

    def __init__(self, plan, estimates=None, took=10.0, known=None):
        self.plan, self.taken, self.now, self.saved = plan, [], 0.0, []
        self.estimates, self.took, self.known = estimates or {}, took, known or {}
        self.left = {}

    def rung(self, name, kind):
        def take(before, left):
            self.now += self.took
            self.taken.append(name)
            found = self.plan[name]
            if isinstance(found, BaseException):
                raise found
            return [f"{name} was proposed"], found

        def estimate(before, left):
            self.left[name] = left
            found = self.estimates.get(name, 10.0)
            if isinstance(found, BaseException):
                raise found
            return found

        return Rung(name, kind, take, estimate)

    def up(self, budget=1000.0):
        rungs = [self.rung(name, kind) for name, kind in zip(NAMES, KINDS, strict=True)]
        keep = lambda steps: self.saved.append([step.name for step in steps])  # noqa: E731
        return climb(rungs, budget, self.known, lambda: self.now, keep)


def failing(drop=0.03):
    return {name: measured(name, drop, accuracy=["too far"]) for name in NAMES}


def statuses(steps):
    return {step.name: step.status for step in steps}


def test_the_first_that_holds_ends_it():
    climbing = Climbing(failing() | {"linears": measured("linears")})
    steps = climbing.up()
    assert climbing.taken == ["attention", "linears"]
    assert [step.holds for step in steps] == [False, True, False, False, False, False]
    assert {step.reason for step in steps[2:]} == {"linears holds the gate"}
    assert chosen(steps, "accuracy").name == "linears"


def test_without_one_that_holds_all_are_taken_and_the_nearest_is_named():
    plan = failing() | {"islands": measured("islands", 0.02, accuracy=["too far"])}
    climbing = Climbing(plan)
    steps = climbing.up()
    assert climbing.taken == [*NAMES]
    assert not any(step.holds for step in steps)
    assert chosen(steps, "accuracy").name == "islands"


def test_what_does_not_hold_on_unseen_samples_is_climbed_over():
    final = Final(folds=5, vs_fp32={}, others=0.2, lacks=["too far"])
    climbing = Climbing(
        failing() | {"linears": measured("linears", final=final), "methods": measured("methods")}
    )
    assert climbing.up()[2].holds
    assert climbing.taken == ["attention", "linears", "methods"]


def test_a_step_that_does_not_fit_is_skipped_and_a_cheaper_one_is_taken():
    climbing = Climbing(failing(), estimates={"islands": 500.0, "methods": 60.0})
    steps = climbing.up(budget=100.0)
    assert climbing.taken == ["attention", "linears", "methods", "search", "qat"]
    islands = steps[3]
    assert (islands.status, islands.estimate_s) == ("skipped", 500.0)
    assert "it needs about 8 min 20 s, and 70.0 s of 100.0 s are left" in islands.reason
    assert [step.seconds for step in steps] == [10.0, 10.0, 10.0, 0.0, 10.0, 10.0]
    assert climbing.left["qat"] == 60.0


def test_the_first_is_taken_whatever_it_needs():
    climbing = Climbing(failing(), estimates=dict.fromkeys(NAMES, 50.0))
    steps = climbing.up(budget=1.0)
    assert climbing.taken == ["attention"]
    assert statuses(steps)["linears"] == "skipped"


def test_what_does_not_fit_the_model_is_skipped_and_what_fails_is_told():
    plan = failing() | {"methods": CheckFailed("none is nearer"), "islands": UserError("too few rows")}
    steps = Climbing(plan, estimates={"attention": UserError("no such head size")}).up()
    told = {step.name: (step.status, step.reason) for step in steps[:4]}
    assert told["attention"] == ("skipped", "no such head size")
    assert told["methods"] == ("failed", "none is nearer")
    assert told["islands"] == ("failed", "too few rows")
    assert steps[2].seconds == 10.0
    assert [step.again for step in steps[2:4]] == [False, True]


def test_without_a_shipped_recipe_there_is_nothing_to_go_on_from():
    broken = dict.fromkeys(NAMES[:2], CheckFailed("NaN"))
    climbing = Climbing(failing() | broken)
    steps = climbing.up()
    assert climbing.taken == ["attention", "linears"]
    assert "no shipped recipe came to an end" in steps[2].reason
    assert chosen(steps, "accuracy") is None


def test_where_only_speed_is_lacking_search_alone_can_help():
    climbing = Climbing({name: measured(name, speed=["too slow"]) for name in NAMES})
    steps = climbing.up()
    assert climbing.taken == ["attention", "linears", "search"]
    assert "only speed is lacking" in steps[-1].reason


def test_what_is_not_about_accuracy_is_not_climbed_for():
    climbing = Climbing({name: measured(name, other=["INT8 is not proven"]) for name in NAMES})
    steps = climbing.up()
    assert climbing.taken == ["attention", "linears"]
    assert "INT8 is not proven" in steps[-1].reason


def test_finished_steps_of_an_interrupted_call_are_not_taken_again_and_count():
    plan = failing() | {"methods": KeyboardInterrupt()}
    first = Climbing(plan)
    with pytest.raises(KeyboardInterrupt):
        first.up(budget=45.0)
    assert first.saved[-1] == ["attention", "linears"]
    known = {
        name: Step(name=name, kind="shipped", status="done", seconds=10.0, measured=plan[name])
        for name in NAMES[:2]
    }
    again = Climbing(failing(), known=known)
    again.up(budget=45.0)
    assert again.taken == ["methods", "islands"]
    assert again.left["methods"] == 25.0


def test_more_budget_goes_on_with_what_was_skipped():
    climbing = Climbing(failing(), estimates={"methods": 60.0})
    short = climbing.up(budget=50.0)
    known = {step.name: step for step in short if step.status != "skipped"}
    again = Climbing(failing(), estimates={"methods": 60.0}, known=known)
    again.up(budget=500.0)
    assert again.taken == ["methods"]
