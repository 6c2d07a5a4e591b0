"""The order of the steps, the budget, the stop and the resume, with steps that are plain functions."""

from types import SimpleNamespace

import pytest

from qdqbench.eval.selection.auto.results import AutoStep, NestedFolds, Proposal, StepRun, choose_step
from qdqbench.eval.selection.auto.run import Proposer, take_steps
from qdqbench.eval.selection.trials.store import Store
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.comparison import GateIssue
from qdqbench.quantize.utils.errors import CheckFailed, UserError

from ....support.records import comparison

KINDS = ("shipped", "shipped", "methods", "islands", "search", "qat")
NAMES = ("attention", "linears", "methods", "islands", "search", "qat")
RECIPE = load_recipe("bert-int8-linears")


def issue(code):
    return GateIssue(code=code, state="failed", detail="INT8 is not proven")


def run_of(*codes, drop=0.0, nested=None):
    """What a run leaves of a recipe that loses so much, a fraction, and has these issues."""
    run = StepRun(
        folder="run",
        recipe_file="run.yaml",
        engine=None,
        int8_linears=1,
        int8_attention=0,
        stage="engine",
        previous=None,
        vs_previous={},
        source=None,
        not_timed=None,
        issues=[issue(code) for code in codes],
        nested=nested,
    )
    return run, {"validation": comparison({"accuracy": -drop}, 0.001, within_noise=False)}


class Planned:
    """Steps that come to what is planned, and a clock that each of them turns by its seconds."""

    def __init__(self, path, plan, misfits=(), took=10.0):
        self.path, self.plan, self.misfits, self.took = path, plan, misfits, took
        self.taken, self.left, self.now = [], {}, 0.0

    def proposer(self, name, kind):
        def propose(before, left):
            self.taken.append(name)
            self.left[name] = left
            self.now += self.took
            return RECIPE, Proposal(base="base")

        def require_fit():
            if name in self.misfits:
                raise UserError("no such head size")

        return Proposer(name, kind, propose, require_fit)

    def run(self, step, before):
        outcome = self.plan[step.name]
        if isinstance(outcome, BaseException):
            raise outcome
        step.run, step.scores = outcome

    def take(self, budget=1000.0):
        proposers = [self.proposer(name, kind) for name, kind in zip(NAMES, KINDS, strict=True)]
        store = Store(self.path / "trials.jsonl", AutoStep, {})
        return take_steps(SimpleNamespace(run=self.run), proposers, budget, store, lambda: self.now)


def failing(drop=0.03):
    return {name: run_of("accuracy", drop=drop) for name in NAMES}


def test_the_first_that_holds_ends_it(tmp_path):
    planned = Planned(tmp_path, failing() | {"linears": run_of()})
    steps = planned.take()
    assert planned.taken == ["attention", "linears"]
    assert [step.holds for step in steps] == [False, True, False, False, False, False]
    assert {step.skipped for step in steps[2:]} == {"holds"}
    assert choose_step(steps).name == "linears"


def test_without_one_that_holds_all_are_taken_and_the_nearest_is_chosen(tmp_path):
    planned = Planned(tmp_path, failing() | {"islands": run_of("accuracy", drop=0.02)})
    steps = planned.take()
    assert planned.taken == [*NAMES]
    assert not any(step.holds for step in steps)
    assert choose_step(steps).name == "islands"


def test_a_recipe_that_does_not_hold_on_unseen_samples_is_not_the_last(tmp_path):
    nested = NestedFolds(folds=5, scores={}, others=0.2, unmet=[issue("accuracy")])
    planned = Planned(tmp_path, failing() | {"linears": run_of(nested=nested), "methods": run_of()})
    assert planned.take()[2].holds
    assert planned.taken == ["attention", "linears", "methods"]


def test_the_last_steps_seconds_are_the_next_ones_estimate(tmp_path):
    planned = Planned(tmp_path, failing())
    steps = planned.take(budget=35.0)
    assert planned.taken == ["attention", "linears", "methods"]
    assert [step.estimate_s for step in steps] == [None, *[10.0] * 5]
    assert [step.skipped for step in steps[3:]] == ["budget"] * 3
    assert planned.left == {"attention": 35.0, "linears": 25.0, "methods": 15.0}


def test_the_first_is_taken_whatever_the_budget(tmp_path):
    planned = Planned(tmp_path, failing())
    assert planned.take(budget=1.0)[1].skipped == "budget"
    assert planned.taken == ["attention"]


def test_a_misfit_is_skipped_and_a_failure_is_recorded(tmp_path):
    failures = {"methods": CheckFailed("none is nearer"), "islands": UserError("too few rows")}
    steps = Planned(tmp_path, failing() | failures, misfits=("attention",)).take()
    assert (steps[0].status, steps[0].skipped, steps[0].failure.text) == (
        "skipped", "misfit", "no such head size"
    )  # fmt: skip
    assert [(step.status, step.failure.code, step.seconds) for step in steps[2:4]] == [
        ("failed", "check", 10.0),
        ("failed", "input", 10.0),
    ]


def test_without_a_shipped_recipe_there_is_no_base(tmp_path):
    planned = Planned(tmp_path, failing() | dict.fromkeys(NAMES[:2], CheckFailed("NaN")))
    steps = planned.take()
    assert planned.taken == ["attention", "linears"]
    assert {step.skipped for step in steps[2:]} == {"no base"}
    assert choose_step(steps) is None


def test_where_only_speed_is_unmet_search_alone_can_help(tmp_path):
    planned = Planned(tmp_path, {name: run_of("min_speedup") for name in NAMES})
    steps = planned.take()
    assert planned.taken == ["attention", "linears", "search"]
    assert steps[-1].skipped == "only speed"


def test_nothing_is_tried_where_no_step_can_help(tmp_path):
    planned = Planned(tmp_path, {name: run_of("require_int8") for name in NAMES})
    assert planned.take()[-1].skipped == "no remedy"
    assert planned.taken == ["attention", "linears"]


def test_finished_steps_of_an_interrupted_call_are_not_taken_again_and_count(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Planned(tmp_path, failing() | {"methods": KeyboardInterrupt()}).take(budget=45.0)
    again = Planned(tmp_path, failing())
    again.take(budget=45.0)
    assert again.taken == ["methods", "islands"]
    assert again.left["methods"] == 25.0
    more = Planned(tmp_path, failing())
    more.take(budget=500.0)  # resumes with what was skipped
    assert more.taken == ["search", "qat"]


def test_what_the_user_can_fix_is_tried_again(tmp_path):
    plan = failing() | {"methods": UserError("no disk"), "islands": CheckFailed("spread over all")}
    Planned(tmp_path, plan).take()
    again = Planned(tmp_path, failing())
    steps = again.take()
    assert again.taken == ["methods"]
    assert (steps[3].status, steps[3].failure.code) == ("failed", "check")
