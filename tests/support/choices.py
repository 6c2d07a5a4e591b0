"""Results of the commands that choose a recipe; every number is invented."""

import math

from qdqbench.eval.metrics.results import GateIssue
from qdqbench.eval.selection.auto.results import Auto, AutoStep, NestedFolds
from qdqbench.eval.selection.calibration_comparison import CalibrationComparison, CalibrationRow
from qdqbench.eval.selection.search.confirm import compare_drops, judge_confirmed
from qdqbench.eval.selection.search.results import (
    ConfirmedRecipe,
    Search,
    SearchOutcome,
    SearchTrial,
    Source,
    choose_trial,
    mark_trials,
)
from qdqbench.eval.selection.sensitivity.results import (
    CandidateRow,
    CurvePoint,
    Sensitivity,
    SensitivityChoice,
    ranking,
)
from qdqbench.eval.selection.trials.results import DRAW, CalibrationCost, Failure, Scores, Trial
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.recipe.sections import GateSettings

from .pages import HOSTILE
from .records import comparison, draw_record, sample_of, search_trial, speedup, sqnr, step_run

GATE = GateSettings(max_drop=0.003)


LINEARS = load_recipe("bert-int8-linears")


def trial_of(number, drop, noise, ms, **changes):
    error = changes.pop("error", 0.0001)
    return search_trial(number, noise, 2 / ms, drop, error, recipe=LINEARS, **changes)


def failed_trial(number, text="no"):
    return SearchTrial(number=number, recipe=None, origin="tpe", failure=Failure(code="check", text=text))


def confirmed(name, drop, ms, error=0.001, **changes):
    fields = {"name": name, "recipe": LINEARS, "origin": "shipped", "speedup": speedup(2 / ms, ms=ms)}
    fields["scores"] = {"validation": comparison({"accuracy": -drop}, error)}
    return ConfirmedRecipe.model_validate(fields | changes)


def chosen_by(trials, gate=GATE):
    mark_trials(trials, gate, "sqnr")
    return choose_trial(trials, gate)


def sample_search(**changes):
    trials = [
        trial_of(0, 0.001, 0.1, 1.5, origin="given"),
        trial_of(1, 0.002, 0.2, 1.2),
        trial_of(2, 0.002, 0.2, 1.3, origin="shipped", shipped="bert-int8-ffn"),
        failed_trial(3, "out of <memory> | bar"),
    ]
    outcome = chosen_by(trials)
    outcome.passed = True
    shared = ("created", "command", "metric", "recipe", "environment")
    values = {name: value for name, value in draw_record("x").items() if name in shared}
    values |= sample_of(
        "search",
        trials=trials,
        outcome=outcome,
        confirmed=[
            confirmed("found", 0.0, 1.2, origin="tpe"),
            confirmed("bert-int8-ffn", -0.01, 1.1, dominates=True),
        ],
        agreement=compare_drops(trials[1], confirmed("found", 0.0, 1.2)),
    )
    return Search.model_validate(values | changes)


def asked_search(**gate):
    """Two trials whose drop is noise, by a gate of one's own."""
    trials = [trial_of(0, 0.004, 0.1, 1.0, error=0.003), trial_of(1, 0.004, 0.2, 1.0, error=0.003)]
    asked = GateSettings(**gate)
    recipe = LINEARS.model_copy(update={"gate": asked}).model_dump(mode="json")
    found = sample_search(trials=trials, outcome=chosen_by(trials, asked), recipe=recipe)
    found.outcome.passed = found.chosen is not None
    return found


def unconfirmed_search():
    """A search whose choice fails on evaluation data."""
    failure = Failure(code="check", text="2 layers are not in INT8")
    row = ConfirmedRecipe(name="found", recipe=LINEARS, origin="tpe", failure=failure)
    outcome = SearchOutcome(chosen=1, issues=judge_confirmed(row, GATE, "accuracy"))
    return sample_search(confirmed=[row], agreement=None, outcome=outcome)


NOTHING = {"outcome": SearchOutcome(), "confirmed": [], "agreement": None}


def drops(delta, error):
    return {"validation": comparison({"matthews": delta}, error)}


def drop_issue(value):
    where = {"code": "accuracy", "state": "failed", "stage": "engine", "metric": "matthews"}
    return GateIssue(**where, value=value, stderr=0.006, limit=0.005)


def step_of(name, kind, delta, previous=None, *, nested=None, issues=()):
    run = step_run(
        folder=f"{name}/run",
        engine=f"{name}/run/engine/model.engine",
        int8_linears=36,
        previous=previous,
        vs_previous=drops(0.02, 0.004) if previous else {},
        source=Source(**sample_of("source on a cpu")),
        issues=issues,
        nested=nested,
    )
    about = {"name": name, "kind": kind, "recipe": LINEARS.model_copy(update={"name": name}), "run": run}
    about |= {"origin": "shipped" if kind == "shipped" else "calibration", "scores": drops(delta, 0.006)}
    return AutoStep(**about, speedup=speedup(1.4, 1.3, 1.5, ms=1.5), **sample_of("step of auto"))


def skipped_step(name, kind=None, reason="budget"):
    return AutoStep(name=name, kind=kind or name, **sample_of("skipped step", skipped=reason))


REASONS = ("holds", "no_base", "no_remedy", "only_speed", "faster", "misfit")


def sample_auto(name="a-model", *, passed=True):
    nested = NestedFolds(folds=5, scores=drops(-0.004, 0.007), others=0.2, unmet=[])
    second = {"nested": nested} if passed else {"issues": [drop_issue(0.02)]}
    steps = [
        step_of("bert-int8-linears", "shipped", -0.029, issues=[drop_issue(0.029)]),
        step_of("methods", "methods", -0.002 if passed else -0.02, "bert-int8-linears", **second),
        skipped_step("islands"),
        AutoStep(failure=Failure(code="check", text=name), **sample_of("failed step")),
        skipped_step("qat"),
        *(skipped_step(f"qat: {reason}", "qat", reason) for reason in (() if passed else REASONS)),
    ]
    about = draw_record(name, task={"name": "cola", "metrics": ["matthews"]})
    about |= {"data": {"source": name, "evaluation": {"validation": 1043}, "proposals": 512, "limit": None}}
    known = {key: value for key, value in about.items() if key in Auto.model_fields}
    made = Auto.model_validate(known | sample_of("auto", steps=steps))
    made.choice.passed = passed
    return made


def undecided_auto():
    """Two steps hold as far as few samples can tell."""
    auto = sample_auto()
    sizes = {"limit": 0.005, "needed": 3031, "n": 120}
    few = GateIssue(code="accuracy", state="inconclusive", stage="engine", metric="matthews", **sizes)
    for step in auto.steps[:2]:
        step.run.issues, step.run.open = [], [few]
    return auto


KINDS = {"attention.self.query": "qkv", "attention.output.dense": "output", "output.dense": "ffn-out"}


def compared(amount, drop=0.001):
    return comparison({"accuracy": -drop}, 0.002, **sqnr(amount))


def candidate(name, group, kind, layer, *values):
    """Return a row with one noise power, of only this, or two, of all but this too."""
    only, *rest = values
    fields = {"modules": [f"bert.{name}"], "diagnostic": kind == "embeddings"}
    fields |= {"only": compared(only), "all_but": compared(rest[0], 0.05) if rest else None}
    return CandidateRow(name=name, group=group, kind=kind, layer=layer, **fields)


def sample_sensitivity(name="a-model", *, kept=2, reached=True):
    rows = [
        candidate(f"encoder.layer.{n}.{part}", "linear", kind, n, 0.001 * (n + place), 0.01 + place / 100)
        for n in range(3)
        for place, (part, kind) in enumerate(KINDS.items())
    ]
    rows += [candidate("classifier", "linear", "classifier", None, 0.5)]
    rows += [candidate("encoder.layer.1", "block", "block", 1, 0.01, 0.01)]
    rows += [candidate("embeddings", "kind", "embeddings", None, 0.02)]
    order = [row.modules[0] for row in ranking(rows)]
    points = [(0, 0.05), (1, 0.04), (2, 0.02), (4, 0.01)]
    return Sensitivity(
        **draw_record(name),
        fp32=Scores(metrics={"accuracy": 0.9}, stderr={"accuracy": 0.01}, n=512),
        full=compared(0.05, 0.03),
        int8=order,
        rows=rows,
        curve=[
            CurvePoint(kept=kept, linears=order[:kept], attention=[], comparison=compared(amount))
            for kept, amount in points
        ],
        choice=SensitivityChoice(kept=kept, reached=reached, file="recipe.yaml"),
        timings={"candidates_s": 200.0, "this_run_s": 220.0},
    )


def calibration_row(
    method, value, *, best=False, given=False, failed=False, smoothing="none", splits=("validation",)
):
    section = LINEARS.calibration.model_copy(update={"method": method, "smoothing": smoothing})
    recipe = LINEARS.model_copy(update={"calibration": section})
    trial = Trial(recipe=recipe, origin="given" if given else "calibration")
    if failed:
        trial.failure = Failure(code="check", text=HOSTILE)
        return CalibrationRow(trial=trial)
    place = "bert.encoder.layer.0.output.dense.input_quantizer"
    trial.calibration = CalibrationCost(seconds=12.34, amax_over_rms=44.4, amax_over_rms_at=place)
    trial.scores = {
        DRAW: comparison({"f1": 0.0}, 0.004, **sqnr(value)),
        **{split: comparison({"f1": -0.02 if best else -0.001}, 0.004) for split in splits},
    }
    return CalibrationRow(
        trial=trial,
        best=best,
        below_best_db=10 * math.log10(value / 0.001),
        below_best_db_stderr=0.7,
        ties=value < 0.0014,
    )


def sample_calibrations(*, name="tiny", splits=("validation",)):
    data = {"split": "train", "samples": 256, "calibration": 512, "rows": 3668}
    return CalibrationComparison(
        **draw_record(name, task={"name": "mrpc"}, data=data, metric="f1"),
        fp32={split: Scores(metrics={"f1": 0.855}, stderr={"f1": 0.01}, n=400) for split in splits},
        rows=[
            calibration_row("max", 0.005, given=True, splits=splits),
            calibration_row("mse", 0.0013, splits=splits),
            calibration_row("entropy", 0.001, best=True, smoothing=0.65, splits=splits),
            calibration_row("percentile/99.9", 0.0, failed=True),
        ],
        timings={"total_s": 100.0},
    )
