"""The order of the steps, the budget, the stop and the resume, with steps that are plain functions."""

from types import SimpleNamespace

import numpy as np
import pytest

from qdqbench.eval.metrics.results import Gate, GateIssue
from qdqbench.eval.selection.auto import run
from qdqbench.eval.selection.auto.results import AutoStep, NestedFolds, Proposal, choose_step
from qdqbench.eval.selection.auto.run import Evaluation, StepAnswers, list_drops, list_unmet
from qdqbench.eval.selection.trials.store import Store
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.tasks.kinds.encoded import Encoded
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.utils.errors import CheckFailed, UserError

from ....support.records import comparison, speedup, step_run

KINDS = ("shipped", "shipped", "methods", "islands", "search", "qat")
NAMES = ("attention", "linears", "methods", "islands", "search", "qat")
RECIPE = load_recipe("bert-int8-linears")


def issue(code):
    return GateIssue(code=code, state="failed", detail="INT8 is not proven")


def run_of(*codes, drop=0.0, nested=None, needed=None):
    """What a run leaves of a recipe that loses so much, a fraction, and has these issues."""
    few = [GateIssue(code="accuracy", state="inconclusive", needed=needed, n=120)] if needed else []
    run = step_run(issues=[issue(code) for code in codes], nested=nested, open=few)
    return run, {"validation": comparison({"accuracy": -drop}, 0.001, within_noise=False)}


class Planned:
    """Steps that come to what is planned, and a clock that each of them turns by its seconds."""

    def __init__(self, path, plan, misfits=(), took=10.0, speed=None):
        self.path, self.plan, self.misfits, self.took, self.speed = path, plan, misfits, took, speed
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

        return run.Proposer(name, kind, propose, require_fit)

    def run(self, step, before):
        outcome = self.plan[step.name]
        if isinstance(outcome, BaseException):
            raise outcome
        step.run, step.scores = outcome
        if self.speed and step.kind != "unquantized":
            step.speedup = speedup(*3 * [self.speed])

    def take(self, budget=1000.0, names=NAMES, kinds=KINDS):
        proposers = [self.proposer(name, kind) for name, kind in zip(names, kinds, strict=True)]
        store = Store(self.path / "trials.jsonl", AutoStep, {})
        return run.take_steps(SimpleNamespace(run=self.run), proposers, budget, store, lambda: self.now)


def failing(drop=0.03):
    return {name: run_of("accuracy", drop=drop) for name in NAMES}


UNSEEN = NestedFolds(folds=5, scores={}, others=0.2, unmet=[issue("accuracy")])
FIRST = ["attention", "linears"]


@pytest.mark.parametrize(
    ("plan", "taken", "skipped", "chosen"),
    [
        ({"linears": run_of()}, FIRST, "holds", "linears"),
        ({"islands": run_of("accuracy", drop=0.02)}, [*NAMES], None, "islands"),  # none holds: the nearest
        ({"linears": run_of(nested=UNSEEN), "methods": run_of()}, [*FIRST, "methods"], "holds", "methods"),
        (dict.fromkeys(FIRST, CheckFailed("NaN")), FIRST, "no_base", None),
        ({name: run_of("min_speedup") for name in NAMES}, [*FIRST, "search"], "only_speed", "attention"),
        ({name: run_of("require_int8") for name in NAMES}, FIRST, "no_remedy", "attention"),
    ],
    ids=["holds", "none holds", "not on unseen samples", "no base", "only search is faster", "no remedy"],
)
def test_steps_are_taken_until_one_holds_or_none_can_help(plan, taken, skipped, chosen, tmp_path):
    planned = Planned(tmp_path, failing() | plan)
    steps = planned.take()
    assert planned.taken == taken
    assert {step.skipped for step in steps if step.name not in taken} == ({skipped} if skipped else set())
    best = choose_step(steps)
    assert (best and best.name) == chosen
    assert [step.name for step in steps if step.holds] == ([chosen] if skipped == "holds" else [])


@pytest.mark.parametrize(("second", "chosen"), [(0.001, "linears"), (0.003, "attention")])
def test_where_samples_are_too_few_all_shipped_recipes_are_run_and_the_smallest_bound_wins(
    second, chosen, tmp_path
):
    plan = {"attention": run_of(drop=0.002, needed=3000), "linears": run_of(drop=second, needed=3000)}
    planned = Planned(tmp_path, failing() | plan)
    steps = planned.take()
    assert planned.taken == FIRST
    best = choose_step(steps)
    assert best.name == chosen
    assert best.holds
    steps[1].run.open = []  # these rows can tell
    assert choose_step(steps).name == "linears"


@pytest.mark.parametrize(("value", "chosen"), [(0.97, "unquantized"), (1.2, "linears")])
def test_without_int8_is_taken_where_that_is_as_fast(value, chosen, tmp_path):
    planned = Planned(tmp_path, {"linears": run_of(), "unquantized": run_of(drop=0.001)}, speed=value)
    steps = planned.take(names=("linears", "unquantized"), kinds=("shipped", "unquantized"))
    assert choose_step(steps).name == chosen
    assert steps[1].skipped == (None if value < 1 else "faster")
    recipe, proposal = run.propose_unquantized([steps[0]], 0.0) if value < 1 else (RECIPE, None)
    assert recipe.quantizes == (proposal is None)


def test_the_last_steps_seconds_are_the_next_ones_estimate_and_the_first_is_always_taken(tmp_path):
    (tmp_path / "short").mkdir()
    short = Planned(tmp_path / "short", failing())
    assert short.take(budget=1.0)[1].skipped == "budget"
    assert short.taken == ["attention"]
    planned = Planned(tmp_path, failing())
    steps = planned.take(budget=35.0)
    assert planned.taken == ["attention", "linears", "methods"]
    assert [step.estimate_s for step in steps] == [None, *[10.0] * 5]
    assert [step.skipped for step in steps[3:]] == ["budget"] * 3
    assert planned.left == {"attention": 35.0, "linears": 25.0, "methods": 15.0}


def test_a_misfit_is_skipped_and_a_failure_is_recorded(tmp_path):
    failures = {"methods": CheckFailed("none is nearer"), "islands": UserError("too few rows")}
    steps = Planned(tmp_path, failing() | failures, misfits=("attention",)).take()
    assert [steps[0].status, steps[0].skipped, steps[0].failure.text][1:] == ["misfit", "no such head size"]
    assert [step.status for step in steps[:4]] == ["skipped", "done", "failed", "failed"]
    assert [(step.failure.code, step.seconds) for step in steps[2:4]] == [("check", 10.0), ("input", 10.0)]


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


N = 400
SST2 = get_task("sst2")


def answers(right):
    """Logits [n, 2] of a model that is right where it is said; all labels are 1."""
    wrong = ~np.asarray(right)
    return np.where(wrong[:, None], [1.0, -1.0], [-1.0, 1.0]).astype(np.float32)


@pytest.fixture
def evaluation():
    ids = [np.arange(3)] * N
    encoded = Encoded(ids, ids, np.ones(N, dtype=np.int64), truncated=0)
    return Evaluation(SST2, {"validation": encoded}, 0.005, 0)


def random_losses(share, seed):
    return np.random.default_rng(seed).random(N) >= share


def logits(right):
    return {"validation": answers(right)}


ALL = np.ones(N, dtype=bool)


def drops(evaluation, right):
    return list_drops(evaluation.compare(logits(ALL), logits(right)), "accuracy", evaluation.max_drop)


def but(wrong):
    """Right answers to all but the first ones."""
    return np.arange(N) >= wrong


def test_a_drop_holds_within_the_gate_or_within_noise_and_not_within_both_together(evaluation):
    for wrong in (0, 1, 3):  # a quarter of a point; 0.75 points with an error of 0.43: noise
        assert not drops(evaluation, but(wrong))
    # 1.25 points with an error of 0.56: within the 0.5 and two errors that a run lets pass, and not noise
    (issue,) = drops(evaluation, but(5))
    assert (issue.code, issue.split, issue.metric) == ("accuracy", "validation", "accuracy")
    assert (issue.value, issue.limit, issue.n) == (pytest.approx(0.0125), 0.005, N)


def test_a_step_that_every_fold_would_choose_has_its_own_figure(evaluation):
    bad, good = logits(random_losses(0.2, 1)), logits(ALL)
    found = evaluation.nest_folds(good, [StepAnswers(bad, False), StepAnswers(good, False)], 1)
    assert found.others == 0
    assert found.scores["validation"].delta["accuracy"] == 0
    assert not found.unmet
    first = StepAnswers(good, True)  # INT8 was not proven, say: what no sample can change is chosen by none
    assert evaluation.nest_folds(good, [first, StepAnswers(good, False)], 1).others == 0


def test_a_choice_that_hangs_on_a_few_samples_is_judged_by_the_others(evaluation):
    """The first is just too far from FP32: without some of the samples it would have been chosen."""
    tried = [StepAnswers(logits(right), False) for right in (but(5), ALL)]
    found = evaluation.nest_folds(logits(ALL), tried, 1)
    assert 0 < found.others < 1
    delta = found.scores["validation"].delta["accuracy"]
    assert -5 / N <= delta < 0  # what the first loses on the folds that are judged by it
    assert found.scores["validation"].n == N


def test_noise_alone_makes_no_recipe_better_than_it_is(evaluation):
    """All lose 2%: the one that looks best does so on its own figure, and not on unseen samples."""
    own, unseen = [], []
    for seed in range(12):
        tried = [logits(random_losses(0.02, 100 * seed + at)) for at in range(8)]
        deltas = [evaluation.compare(logits(ALL), each)["validation"].delta["accuracy"] for each in tried]
        best = int(np.argmax(deltas))
        found = evaluation.nest_folds(logits(ALL), [StepAnswers(each, False) for each in tried], best)
        own.append(deltas[best])
        unseen.append(found.scores["validation"].delta["accuracy"])
    assert np.mean(own) > -0.016
    assert np.mean(unseen) < np.mean(own) - 0.002
    assert np.mean(unseen) == pytest.approx(-0.02, abs=0.005)


def test_a_regression_is_judged_the_same_way():
    task = get_task("stsb")
    random = np.random.default_rng(0)
    gold = random.normal(size=N).astype(np.float32)
    ids = [np.arange(3)] * N
    evaluation = Evaluation(task, {"validation": Encoded(ids, ids, gold, truncated=0)}, 0.005, 0)
    fp32 = {"validation": gold[:, None] + 0.1}
    far = {"validation": (gold + random.normal(size=N)).astype(np.float32)[:, None]}
    found = evaluation.nest_folds(fp32, [StepAnswers(far, False), StepAnswers(fp32, False)], 1)
    assert found.others == 0
    assert found.scores["validation"].delta["pearson"] == pytest.approx(0, abs=1e-6)


def test_unmet_criteria_and_a_drop_only_once(evaluation):
    failed = GateIssue(code="check", state="failed", names=["QDQ001", "x"], detail="y")
    drop = GateIssue(code="accuracy", state="failed", stage="onnxruntime", metric="accuracy", value=0.02)
    gate = Gate(passed=False, max_drop=0.005, issues=[failed, drop])
    same = list_drops(evaluation.compare(logits(ALL), logits(ALL)), "accuracy", 0.005, "engine")
    assert same == []
    found = list_unmet(gate, same, speedup(1.4), 1.5)
    assert found[:2] == [failed, drop]
    assert (found[2].code, found[2].value, found[2].limit) == ("min_speedup", 1.4, 1.5)
    lost = evaluation.compare(logits(ALL), logits(random_losses(0.2, 1)))
    issues = list_unmet(gate, list_drops(lost, "accuracy", 0.005, "engine"), None, 1.5)
    known = [("accuracy", "engine"), ("check", None), ("min_speedup", None)]
    assert [(each.code, each.stage) for each in issues] == known
    assert issues[2].value is None
    assert not list_unmet(Gate(passed=True, max_drop=0.0), same, None, None)
