"""Steps from the cheapest to the dearest until a recipe holds: each is proposed, run, timed and checked.

A proposal is chosen on train rows that do not calibrate, as in `methods`, `sensitivity` and `search`, and
never on evaluation data. These only say whether to take the next step.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from qdqbench.eval.bench.measure import alone, measure_speedup, open_engine
from qdqbench.eval.metrics.compare import compare
from qdqbench.eval.metrics.gate import drop_issue, slow_issues
from qdqbench.eval.metrics.logits import Logits, read_logits
from qdqbench.eval.metrics.results import Comparison, Gate, GateIssue, Speedup
from qdqbench.eval.runs.report.verdict import last_measured
from qdqbench.eval.runs.results import read_results
from qdqbench.eval.runs.run import run_until
from qdqbench.eval.selection.auto.report import auto_report
from qdqbench.eval.selection.auto.results import (
    BEST_RECIPE,
    Auto,
    AutoChoice,
    AutoStep,
    Criteria,
    NestedFolds,
    Proposal,
    SkipReason,
    StepKind,
    StepRun,
    choose_step,
)
from qdqbench.eval.selection.calibration_comparison import CalibrationMeasurement, calibration_report
from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.results import SearchTrial, Source
from qdqbench.eval.selection.search.worker import open_worker
from qdqbench.eval.selection.search.workspace import measured_source
from qdqbench.eval.selection.sensitivity.measure import Measurement, make_recipe
from qdqbench.eval.selection.sensitivity.report import sensitivity_report
from qdqbench.eval.selection.sensitivity.results import SENSITIVITY_FILE, CurvePoint
from qdqbench.eval.selection.trials.results import Failure, Origin, failure_of, write_result
from qdqbench.eval.selection.trials.store import RECIPE_FILE, TRIALS, Store, describe_session, hash_of
from qdqbench.quantize.engine.build import require_int8
from qdqbench.quantize.models.families.known import family_named
from qdqbench.quantize.pipeline.graphs import FP16, FP32, graph_path
from qdqbench.quantize.pipeline.ownership import locked_folder
from qdqbench.quantize.pipeline.pipeline import STAGES_FILE, open_run, read_finished
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import Recipe, dump_recipe, load_recipe
from qdqbench.quantize.recipe.sections import Qat, Reconstruction
from qdqbench.quantize.tasks.data.splits import source_fingerprint
from qdqbench.quantize.tasks.kinds.encoded import Encoded
from qdqbench.quantize.tasks.metrics import NOISE
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Int64
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.progress import Prefixed, reporter, reporting_to
from qdqbench.quantize.utils.system.environment import get_code_identity

RUN, RECIPE = "run", "run.yaml"  # in the folder of a step
FOLDS = 5
WAIT_S = 60.0
# of the noise power of the recipe before: 6 and 12 dB
ISLANDS, SEARCHED = 1 / 4, 1 / 16
ORIGINS: dict[StepKind, Origin] = {
    "shipped": "shipped",
    "methods": "calibration",
    "islands": "ranking",
    "search": "tpe",
    "qat": "qat",
    "unquantized": "unquantized",
}


def list_drops(
    scores: Mapping[str, Comparison], metric: str, max_drop: float, stage: str = ""
) -> list[GateIssue]:
    """Return the drops of the primary metric that are above `max_drop`, and no noise either.

    That is stricter than `gate.judge`: `auto` can try another recipe, where a run cannot.
    """
    return [
        drop_issue(row, max_drop, stage=stage or None, split=split, metric=metric)
        for split, row in scores.items()
        if row.drop > max_drop and row.drop > NOISE * row.drop_stderr
    ]


def list_unmet(
    gate: Gate, drops: list[GateIssue], speedup: Speedup | None, min_speedup: float | None
) -> list[GateIssue]:
    """Return what keeps a run's recipe from holding; `drops` are those of its last measured stage."""
    # a drop of a stage before the last one counts where the last one has none
    issues = drops + [each for each in gate.failures if each.code != "accuracy" or not drops]
    return issues + slow_issues(speedup, min_speedup)


@dataclass(frozen=True)
class StepAnswers:
    logits: Logits
    fails_anyway: bool  # it lacks something that other samples would not change


@dataclass(frozen=True)
class Evaluation:
    task: Task
    encoded: Mapping[str, Encoded]  # by split
    max_drop: float
    seed: int

    def compare(
        self, reference: Logits, answers: Logits, samples: Mapping[str, Int64] | None = None
    ) -> dict[str, Comparison]:
        scores = {}
        for name in answers:
            encoded, both = self.encoded[name], (reference[name], answers[name])
            if samples is not None:
                places = encoded.answers_of(encoded.rows_of(samples[name]))
                encoded, both = encoded.part(samples[name]), (both[0][places], both[1][places])
            scores[name] = compare(self.task, *both, encoded.gold, seed=self.seed)
        return scores

    def nest_folds(self, fp32: Logits, tried: Sequence[StepAnswers], chosen: int) -> NestedFolds:
        """Return what step number `chosen` is worth on samples that had no say in its choice.

        Which step is the first that holds is decided by evaluation data, so its own figure on them is a
        little too good. Here the samples of each of five folds get the answers of the step that the other
        four would have chosen. Together they are one paired comparison of all samples (nested
        cross-validation: Varma and Simon 2006, "Bias in error estimation when using cross-validation for
        model selection").
        """
        mixed = {name: np.array(tried[chosen].logits[name]) for name in self.encoded}
        folds = {
            name: np.random.default_rng(self.seed).permutation(len(each.gold)) % FOLDS
            for name, each in self.encoded.items()
        }
        other = 0
        for fold in range(FOLDS):
            outside = {name: np.flatnonzero(parts != fold) for name, parts in folds.items()}
            at = self._choose(fp32, tried, outside)
            if at == chosen:
                continue
            for name, each in self.encoded.items():
                inside = np.flatnonzero(folds[name] == fold)
                places = each.answers_of(each.rows_of(inside))
                mixed[name][places] = tried[at].logits[name][places]
                other += len(inside)
        scores = self.compare(fp32, mixed)
        return NestedFolds(
            folds=FOLDS,
            scores=scores,
            others=other / sum(len(each.gold) for each in self.encoded.values()),
            unmet=list_drops(scores, self.task.metrics[0], self.max_drop),
        )

    def _choose(self, fp32: Logits, tried: Sequence[StepAnswers], samples: Mapping[str, Int64]) -> int:
        drops = []
        for at, each in enumerate(tried):
            scores = self.compare(fp32, each.logits, samples)
            if not each.fails_anyway and not list_drops(scores, self.task.metrics[0], self.max_drop):
                return at
            drops.append(max(row.drop for row in scores.values()))
        return int(np.argmin(drops))


@dataclass(frozen=True)
class Proposer:
    """A step that can be taken.

    `propose` gets the steps before and the seconds that are left. `require_fit` and `propose` raise UserError
    or CheckFailed where the step does not fit the model, or finds no recipe.
    """

    name: str
    kind: StepKind
    propose: Callable[[Sequence[AutoStep], float], tuple[Recipe, Proposal]]
    require_fit: Callable[[], object] = lambda: None


class _Step(Prefixed):
    """The run of a step, which ends where it cannot hold."""

    def log(self, text: str, *, alarm: bool = False) -> None:
        if alarm:
            raise CheckFailed(text)
        super().log(text)


@dataclass
class AutoRun:
    """State that all steps share: model, data, gate, and the folder with one of its own for each step."""

    config: RunConfig  # with the first recipe
    recipes: Sequence[Recipe]  # to start with, with the gate of the criteria
    folder: Path
    criteria: Criteria
    options: SearchOptions  # rows that proposals are chosen on, trials, shape of speed-ups

    @cached_property
    def session(self) -> Session:
        """Return model and data; nothing is written through it."""
        return Session(self.config, self.folder)

    def open_session(self, recipe: Recipe, folder: Path) -> Session:
        folder.mkdir(parents=True, exist_ok=True)
        return Session(self.config.model_copy(update={"recipe": recipe}), folder)

    def run(self, step: AutoStep, before: Sequence[AutoStep]) -> None:
        assert step.recipe is not None
        name, folder = step.name, self.folder / step.name / RUN
        files.write_text(self.folder / name / RECIPE, dump_recipe(step.recipe))
        session = open_run(self.config.model_copy(update={"recipe": step.recipe}), folder)
        self._share_baseline(folder, before)
        with reporting_to(_Step(name)):
            results = run_until(session, quick_bench=False)
        reporter().begin(f"{name}: timing")
        source, timed = self._time(session) if step.recipe.quantizes else (None, None)
        last = last_measured(results)
        if last is None or last[1].vs_fp32 is None:
            raise CheckFailed(f"no stage of {session.folder} was compared with FP32")
        stage, _ = last
        fp32, own = (read_logits(folder / "logits" / f"{each}.npz") for each in ("fp32", stage))
        step.scores = self.evaluation.compare(fp32, own)
        step.speedup = timed if isinstance(timed, Speedup) else None
        measured = [each for each in before if each.run]
        tried = [self._answers(each) for each in measured]
        drops = list_drops(step.scores, self.config.task.metrics[0], self.criteria.max_drop, stage)
        issues = list_unmet(results.gate, drops, step.speedup, self.criteria.min_speedup)
        nested = None
        if tried and not issues and not any(each.holds for each in measured):
            answers = [*tried, StepAnswers(own, fails_anyway=False)]
            nested = self.evaluation.nest_folds(fp32, answers, len(tried))
        step.run = StepRun(
            folder=f"{name}/{RUN}",
            engine=f"{name}/{RUN}/engine/{results.engine.file}" if results.engine else None,
            int8_linears=len(session.plan.int8),
            int8_attention=len(session.plan.attention),
            stage=stage,
            previous=measured[-1].name if measured else None,
            vs_previous=self.evaluation.compare(tried[-1].logits, own) if tried else {},
            source=source,
            not_timed=timed if isinstance(timed, Failure) else None,
            issues=issues,
            open=[
                issue
                for issue in results.gate.having("inconclusive", "not_evaluated")
                if issue.code != "min_speedup"
            ],
            nested=nested,
        )

    @cached_property
    def evaluation(self) -> Evaluation:
        encoded = {split: each for split, (_, each) in self.session.eval_splits.items()}
        return Evaluation(self.config.task, encoded, self.criteria.max_drop, self.config.seed)

    def _answers(self, step: AutoStep) -> StepAnswers:
        """Return the answers of a step, and whether other samples could change that it does not hold."""
        assert step.run is not None
        drops = list_drops(step.scores, self.config.task.metrics[0], self.criteria.max_drop)
        logits = read_logits(self.folder / step.run.folder / "logits" / f"{step.run.stage}.npz")
        return StepAnswers(logits, bool(step.run.issues) and not drops)

    def _share_baseline(self, folder: Path, before: Sequence[AutoStep]) -> None:
        """Copy FP32's answers of an earlier run: the pipeline sees whether it would make the same."""
        runs = (self.folder / step.name / RUN for step in before)  # one that failed later has them too
        source = next((run for run in runs if "baseline" in read_finished(run)), None)
        if source is None or (folder / STAGES_FILE).exists():
            return
        manifest = files.read_json(source / STAGES_FILE)
        baseline = manifest["stages"]["baseline"]
        for name in baseline["outputs"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        files.write_json(folder / STAGES_FILE, manifest | {"stages": {"baseline": baseline}})

    def _time(self, session: Session) -> tuple[Source | None, Speedup | Failure]:
        shape = self.options.batch, self.options.length
        try:
            source = measured_source(session, self.options)
            on_cpu = session.target.on_cpu
            graph, plain = graph_path(session), session.folder / (FP16 if session.target.half else FP32)
            with (
                TemporaryDirectory(dir=self.folder, prefix=".timing.", suffix=".tmp") as work,
                _alone_in_time(on_cpu),
                open_engine(session, plain, Plan(), Path(work) / "baseline", shape) as baseline,
                open_engine(session, graph, session.plan, Path(work) / "trial", shape) as engine,
            ):
                require_int8(engine.result)
                return source, measure_speedup(engine, baseline, shape)
        except (MissingDevice, UserError, CheckFailed) as error:
            return None, failure_of(error)

    def open_store(self) -> Store[AutoStep]:
        task, source, options = self.config.task, self.session.data_source, self.options
        splits = {*(recipe.calibration.split for recipe in self.recipes), task.train_split, *task.eval_splits}
        settings = {
            **get_code_identity(),
            "model": self.session.model_sha256,
            "data": {split: source_fingerprint(task, source, split) for split in sorted(splits)},
            "recipes": [recipe.model_dump(mode="json") for recipe in self.recipes],
            "config": self.config.model_dump(mode="json", exclude={"command", "recipe", "model"}),
            "criteria": self.criteria.model_dump(mode="json"),
            "options": [options.samples, options.trials, options.batch, options.length],
        }
        return Store(self.folder / TRIALS, AutoStep, settings)


@contextmanager
def _alone_in_time(on_cpu: bool) -> Iterator[None]:
    """Wait a while for other processes that time engines here, then keep them out."""
    with ExitStack() as stack:
        try:
            stack.enter_context(alone(on_cpu=on_cpu))
        except UserError:
            reporter().begin("waiting for another process that times engines")
            stack.enter_context(alone(on_cpu=on_cpu, wait_s=WAIT_S))
        yield


def list_proposers(auto: AutoRun) -> list[Proposer]:
    def propose_shipped(recipe: Recipe) -> Proposer:
        folder, proposal = auto.folder / recipe.name, Proposal(base=recipe.name)
        propose = lambda before, left: (recipe, proposal)  # noqa: E731
        return Proposer(recipe.name, "shipped", propose, lambda: auto.open_session(recipe, folder).plan)

    return [
        *map(propose_shipped, auto.recipes),
        Proposer("methods", "methods", partial(propose_methods, auto)),
        Proposer("islands", "islands", partial(propose_islands, auto)),
        Proposer("search", "search", partial(propose_search, auto)),
        Proposer("qat", "qat", propose_qat),
        # on a CPU with BF16 units, INT8 may gain nothing
        *(
            [Proposer("unquantized", "unquantized", propose_unquantized)]
            if auto.session.target.on_cpu
            else []
        ),
    ]


def choose_base(before: Sequence[AutoStep], *, moved: bool = False) -> Recipe:
    """Return the nearest calibration, else the most careful shipped recipe.

    Where single linears are moved out of INT8, recipes with INT8 residuals are the last choice.
    """
    done = [step for step in before if step.run and step.kind in {"shipped", "methods"}]
    known = [(not step.lacks("min_speedup"), step.recipe) for step in done if step.recipe]
    known = [each for each in known if not (moved and each[1].int8_residual)] or known
    return ([recipe for fast, recipe in known if fast] or [recipe for _, recipe in known])[-1]


def propose_methods(auto: AutoRun, before: Sequence[AutoStep], left: float) -> tuple[Recipe, Proposal]:
    folder, base = auto.folder / "methods", choose_base(before)
    session = auto.open_session(base, folder)
    with reporting_to(Prefixed("methods")):
        methods = CalibrationMeasurement(session, auto.options.samples, evaluates=False).run()
    write_result(methods, calibration_report(methods), folder)
    best, given = methods.best, methods.given
    if best is given:
        raise CheckFailed(f"no other calibration is nearer to FP32 than that of {base.name}")
    known = not given.trial.failure and given.trial.noise_power
    share = best.trial.noise_power / given.trial.noise_power if known else None
    proposal = Proposal(base=base.name, samples=methods.data["samples"], share=share, method=best.name)
    return load_recipe(str(folder / RECIPE_FILE)), proposal


def propose_islands(auto: AutoRun, before: Sequence[AutoStep], left: float) -> tuple[Recipe, Proposal]:
    session = auto.open_session(choose_base(before, moved=True), auto.folder / "islands")
    measurement = Measurement(session, auto.options.samples)
    with reporting_to(Prefixed("islands")):
        sensitivity = measurement.run()
    write_result(sensitivity, sensitivity_report(sensitivity), session.folder)
    point = find_islands(sensitivity.curve)
    return make_recipe(point, measurement.found), Proposal(
        base=session.recipe.name,
        samples=sensitivity.data["samples"],
        share=point.comparison.noise_power / sensitivity.full.noise_power,
        linears=point.linears,
    )


def propose_search(auto: AutoRun, before: Sequence[AutoStep], left: float) -> tuple[Recipe, Proposal]:
    """Propose the fastest recipe that is a good deal nearer to FP32, else the nearest."""
    base, ranking = choose_base(before, moved=True), auto.folder / "islands" / SENSITIVITY_FILE
    known = files.sha256(ranking) if ranking.is_file() else None
    run_s = before[-1].seconds if before else 0.0
    key = hash_of([get_code_identity(), auto.session.model_sha256, base.model_dump(mode="json"), known])[:16]
    options = auto.options.model_copy(
        update={
            "budget": max(left - run_s, 1.0),  # the recipe that it finds is run too
            "sensitivity": ranking if known else None,
        }
    )
    with reporting_to(Prefixed("search")), ExitStack() as stack:
        session = auto.open_session(base, auto.folder / "search" / key / "work")
        try:
            worker = open_worker(session, options, stack)
        except MissingDevice as error:  # a speed-up is asked for, and no engine runs here
            raise UserError(str(error)) from error
        worker.run()
        trials = worker.list_trials()
    trial = choose_trial(trials, auto.criteria.min_speedup)
    assert trial.recipe is not None
    given = next((each.noise_power for each in trials if each.is_scored and each.origin == "given"), None)
    return trial.recipe, Proposal(
        base=base.name,
        samples=worker.work.trials.draw.rows,
        share=trial.noise_power / given if given else None,
        trial=trial.number,
        trials=len(trials),
        speedup=trial.speedup.value if trial.speedup else None,
    )


def propose_qat(before: Sequence[AutoStep], left: float) -> tuple[Recipe, Proposal]:
    """Propose to train the nearest calibration with everything in INT8, FP32 as its teacher."""
    base = choose_base(before)
    trained = {"reconstruction": Reconstruction(), "qat": Qat()}
    recipe = base.model_copy(update={"name": f"{base.name}-qat", **trained})
    return recipe, Proposal(base=base.name)


def propose_unquantized(before: Sequence[AutoStep], left: float) -> tuple[Recipe, Proposal]:
    """Propose the family's recipe without INT8, with all else of the recipe that is no faster."""
    base = next(step.recipe for step in before if step.recipe and step.no_faster)
    kept = {name: getattr(base, name) for name in ("model", "export", "engine", "gate")}
    return load_recipe("fp16", lambda: family_named(base.model.family)).model_copy(update=kept), Proposal(
        base=base.name
    )


def find_islands(curve: Sequence[CurvePoint]) -> CurvePoint:
    full = next(point.comparison.noise_power for point in curve if not point.kept)
    for point in sorted(curve, key=lambda point: point.kept):
        if point.kept and point.comparison.noise_power <= ISLANDS * full:
            return point
    most = max(point.kept for point in curve)
    raise CheckFailed(
        f"no {most} linears out of INT8 leave at most {ISLANDS:.0%} of the noise power: it is spread over all"
    )


def choose_trial(trials: Sequence[SearchTrial], min_speedup: float | None) -> SearchTrial:
    """Return the fastest trial with at most `SEARCHED` of the given recipe's noise power; else the nearest.

    Train rows say too little of a drop, since the model has learned them: so an SQNR is asked for. Where
    `min_speedup` is set, it is the nearest to FP32 of those that are so fast.
    """
    done = [trial for trial in trials if trial.is_scored and trial.int8_linears]
    new = [trial for trial in done if trial.origin != "given"]
    fast = [trial for trial in new if trial.speedup is None or trial.speedup.value >= (min_speedup or 1.0)]
    if min_speedup is None:  # where INT8 is slower anyway, accuracy is all that can be won
        fast = fast or new
    if not new:
        raise CheckFailed("no other recipe with INT8 finished")
    if not fast:
        raise CheckFailed(
            f"none of the {len(new)} recipes that were tried is {min_speedup:g}x as fast as its baseline"
        )
    given = next((trial.noise_power for trial in done if trial.origin == "given"), None)
    near = [trial for trial in fast if given and trial.noise_power <= SEARCHED * given]
    if near and min_speedup is None:
        return max(near, key=lambda trial: trial.gain)
    return min(fast, key=lambda trial: trial.noise_power)


def take_steps(
    auto: AutoRun,
    proposers: Sequence[Proposer],
    budget_s: float,
    store: Store[AutoStep],
    clock: Callable[[], float] = time.perf_counter,
) -> list[AutoStep]:
    """Take steps in their order until one holds; all shipped recipes where samples are too few to tell.

    A step is skipped, with its reason, where it is not needed, cannot help, or where the last one took longer
    than what is left of the budget. The first one that can be taken is always taken.
    """
    steps: list[AutoStep] = []
    for each in proposers:
        if each.name in store.trials:
            steps.append(store.trials[each.name])
            continue
        step = AutoStep(
            recipe=None, origin=ORIGINS[each.kind], name=each.name, kind=each.kind, status="skipped"
        )
        left = budget_s - sum(done.seconds for done in steps)
        step.estimate_s = next((done.seconds for done in reversed(steps) if done.run), None)
        step.skipped = find_skip_reason(each.kind, steps)
        if step.skipped is None and step.estimate_s is not None and step.estimate_s > left:
            step.skipped = "budget"
        if step.skipped is None:
            try:
                each.require_fit()
            except (UserError, CheckFailed) as error:
                step.skipped, step.failure = "misfit", failure_of(error)
        if step.skipped is None:
            start = clock()
            try:
                step.recipe, step.proposal = each.propose(steps, left)
                auto.run(step, steps)
                step.status = "done"
            except (UserError, CheckFailed) as error:
                step.status, step.failure = "failed", failure_of(error)
            step.seconds = clock() - start
            if not (step.failure and step.failure.is_retryable):
                store.add(step.name, step)
        steps.append(step)
    return steps


def find_skip_reason(kind: StepKind, before: Sequence[AutoStep]) -> SkipReason | None:
    holding = [step for step in before if step.holds]
    done = [step for step in before if step.run]
    if kind == "unquantized":
        return None if any(step.no_faster for step in before) else "faster"
    if holding and not (kind == "shipped" and all(step.undecided for step in holding)):
        return "holds"
    if kind == "shipped":
        return None
    if not done:
        return "no_base"
    if not (done[-1].lacks("accuracy") or done[-1].lacks("min_speedup")):
        return "no_remedy"
    remedies = kind == "search" or any(step.lacks("accuracy") for step in done)
    return None if remedies else "only_speed"


def run_auto(auto: AutoRun, budget_s: float, command: str) -> Auto:
    """Take steps until a recipe holds, and write `auto.json`, the reports and `best.yaml`.

    Args:
        budget_s: seconds of all steps, those of interrupted calls included.
        command: what repeats the recipe that is chosen, as a shell takes it.
    """
    session, config, folder = auto.session, auto.config, auto.folder
    with locked_folder(folder):
        store = auto.open_store()
        if store.resume_note:
            reporter().log(store.resume_note)
        steps = take_steps(auto, list_proposers(auto), budget_s, store)
        best, fp32 = choose_step(steps), dict[str, float]()
        choice = AutoChoice(passed=False, step=None)
        if best is None or best.run is None or best.recipe is None:
            (folder / BEST_RECIPE).unlink(missing_ok=True)
        else:
            fp32 = read_results(folder / best.run.folder).stages["fp32"].metrics
            files.write_text(folder / BEST_RECIPE, dump_recipe(best.recipe))
            choice = AutoChoice(
                passed=best.holds,
                step=best.name,
                recipe=str(folder / BEST_RECIPE),
                engine=str(folder / best.run.engine) if best.run.engine else None,
                run=str(folder / best.run.folder),
                command=command,
            )
        result = Auto(
            **describe_session(session),
            folder=str(folder),
            model={"name": session.model_name, "sha256": session.model_sha256},
            task=config.task.model_dump(mode="json"),
            data={
                "source": session.data_source,
                "evaluation": {name: len(gold) for name, gold in session.gold.items()},
                "proposals": auto.options.samples,
                "limit": config.limit,
            },
            seed=config.seed,
            gate=auto.criteria,
            fp32=fp32,
            budget_s=budget_s,
            elapsed_s=sum(step.seconds for step in steps),
            steps=steps,
            choice=choice,
        )
        write_result(result, auto_report(result), folder)
    return result
