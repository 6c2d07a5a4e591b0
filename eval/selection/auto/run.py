"""Steps until a recipe holds: each is proposed, taken through a whole run, timed, and checked."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from qdqbench.eval.bench.measure import ReadyGraph, alone_on_cpu, alone_on_gpu, measure_speedup, open_engine
from qdqbench.eval.metrics.compare import compare
from qdqbench.eval.metrics.gate import NOISE, drop_issue, slow_issue
from qdqbench.eval.metrics.logits import Logits, read_logits
from qdqbench.eval.runs.report.verdict import last_measured
from qdqbench.eval.runs.run import StageProgress, follow, run_until
from qdqbench.eval.selection.auto.report import write_auto
from qdqbench.eval.selection.auto.results import (
    AUTO_FILE,
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
from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.results import Source
from qdqbench.eval.selection.search.workspace import measured_source
from qdqbench.eval.selection.trials.results import Failure, Origin, failure_of
from qdqbench.eval.selection.trials.store import TRIALS, Store
from qdqbench.quantize.engine.build import count_attentions, require_int8
from qdqbench.quantize.pipeline.artifacts import FP16, FP32, backend_of, expected_gemms, graph_path
from qdqbench.quantize.pipeline.ownership import locked_folder
from qdqbench.quantize.pipeline.pipeline import STAGES_FILE, open_run, read_finished
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.schema import Recipe, dump_recipe
from qdqbench.quantize.tasks.sources import source_fingerprint
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.tasks.types.encoded import Encoded
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Int64
from qdqbench.quantize.utils.comparison import Comparison, Gate, GateIssue
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.results import read_results
from qdqbench.quantize.utils.speedup import Speedup
from qdqbench.quantize.utils.system.environment import describe_environment, get_code_identity, now

FOLDS = 5


def list_drops(
    scores: Mapping[str, Comparison], metric: str, max_drop: float, stage: str = ""
) -> list[GateIssue]:
    """Return the drops of the primary metric that are above `max_drop`, and no noise either.

    That is stricter than `gate.judge`, which lets a drop pass that is above `max_drop` within noise: `auto`
    can try another recipe, where a run cannot.

    Args:
        scores: against FP32, by evaluation split.
        metric: names the primary metric.
        max_drop: a fraction.
        stage: of the run that the scores are of.
    """
    return [
        drop_issue(row, max_drop, stage=stage or None, split=split, metric=metric)
        for split, row in scores.items()
        if row.drop > max_drop and row.drop > NOISE * row.drop_stderr
    ]


def list_unmet(
    gate: Gate, drops: list[GateIssue], speedup: Speedup | None, min_speedup: float | None
) -> list[GateIssue]:
    """Return what keeps the recipe of a run from holding.

    Args:
        gate: of the whole run, with the `max_drop` of the criteria.
        drops: of its last measured stage, from `list_drops`.
        speedup: of its engine; None where there is none.
        min_speedup: least speed-up over the same backend's engine without INT8, the only baseline here.
    """
    # a drop of a stage before the last one counts where the last one has none
    issues = drops + [each for each in gate.failures if each.code != "accuracy" or not drops]
    if min_speedup is not None and (speedup is None or speedup.value < min_speedup):
        issues.append(slow_issue(speedup, min_speedup))
    return issues


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

    def compare(self, reference: Logits, answers: Logits) -> dict[str, Comparison]:
        return {
            name: compare(self.task, reference[name], each, self.encoded[name].gold, seed=self.seed)
            for name, each in answers.items()
        }

    def nest_folds(self, fp32: Logits, tried: Sequence[StepAnswers], chosen: int) -> NestedFolds:
        """Return what a step is worth on samples that had no say in its choice.

        Which step is the first that holds is decided by evaluation data, so its own figure on them is a
        little too good. Here the samples of each of five folds get the answers of the step that the other
        four would have chosen; together they are one paired comparison of all samples (nested
        cross-validation: Varma and Simon 2006, "Bias in error estimation when using cross-validation for
        model selection").

        Args:
            fp32: answers of FP32 by split.
            tried: in the order of the steps.
            chosen: number of the step among them.
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
        """Return the number of the step that these samples choose, as `choose_step` does."""
        drops = []
        for at, each in enumerate(tried):
            scores = {
                name: self._compare_part(name, fp32, each.logits, kept) for name, kept in samples.items()
            }
            if not each.fails_anyway and not list_drops(scores, self.task.metrics[0], self.max_drop):
                return at
            drops.append(max(row.drop for row in scores.values()))
        return int(np.argmin(drops))

    def _compare_part(self, name: str, reference: Logits, answers: Logits, samples: Int64) -> Comparison:
        encoded = self.encoded[name]
        places = encoded.answers_of(encoded.rows_of(samples))
        gold = encoded.part(samples).gold
        return compare(self.task, reference[name][places], answers[name][places], gold, seed=self.seed)


RUN, RECIPE = "run", "run.yaml"  # in the folder of a step
WAITS, WAIT_S = 12, 5.0
ORIGINS: dict[StepKind, Origin] = {
    "shipped": "shipped",
    "methods": "calibration",
    "islands": "ranking",
    "search": "tpe",
    "qat": "qat",
}


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


@dataclass
class AutoRun:
    """What all steps share: model, data, gate, and the folder with one of its own for each step."""

    config: RunConfig  # with the first recipe
    folder: Path
    criteria: Criteria
    options: SearchOptions  # rows that proposals are chosen on, trials, shape of speed-ups
    say: Callable[[str], None] = lambda text: None

    @cached_property
    def session(self) -> Session:
        """Return model and data; nothing is written through it."""
        return Session(self.config, self.folder)

    def open_session(self, recipe: Recipe, folder: Path) -> Session:
        folder.mkdir(parents=True, exist_ok=True)
        return Session(self.config.model_copy(update={"recipe": recipe}), folder)

    def run(self, step: AutoStep, before: Sequence[AutoStep]) -> None:
        """Take the recipe of a step through a whole run, time its engine, and check it."""
        assert step.recipe is not None
        name, folder = step.name, self.folder / step.name / RUN
        files.write_text(self.folder / name / RECIPE, dump_recipe(step.recipe))
        session = open_run(self.config.model_copy(update={"recipe": step.recipe}), folder)
        self._share_baseline(folder, before)
        results = run_until(session, None, follow(session, self._show(name)))
        assert results is not None
        self.say(f"{name}: timing")
        source, timed = self._time(session)
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
        if tried and not issues:
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
            nested=nested,
        )

    def _show(self, name: str) -> Callable[[StageProgress], None]:
        """Return what shows the progress of a step's run, and ends one that cannot hold."""

        def progress(stage: StageProgress) -> None:
            if stage.alarm:
                raise CheckFailed(stage.alarm)
            if stage.said:
                self.say(stage.said)
            elif stage.total:
                report_phase("", stage.done, stage.total)
            else:
                self.say(f"{name}: stage {stage.number} of {stage.of}, {stage.stage}")

        return progress

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
        """Return the speed-up of a run's engine over its engine without INT8, or why there is none."""
        shape = self.options.batch, self.options.length
        try:
            source = measured_source(session, self.options)
            on_cpu = backend_of(session.recipe) in CPU_BACKENDS
            gemms = expected_gemms(session)
            graph = ReadyGraph(graph_path(session), gemms, count_attentions(gemms, session.plan.attention))
            half = session.recipe.precision.compute == "fp16" and not on_cpu
            plain = ReadyGraph(session.folder / (FP16 if half else FP32), [], 0)
            with (
                TemporaryDirectory(dir=self.folder, prefix="timing-") as work,
                self._alone(on_cpu),
                open_engine(session, plain, Path(work) / "baseline", [shape]) as baseline,
                open_engine(session, graph, Path(work) / "trial", [shape]) as engine,
            ):
                require_int8(engine.result)
                return source, measure_speedup(engine, baseline, shape)
        except (MissingDevice, UserError, CheckFailed) as error:
            return None, failure_of(error)

    @contextmanager
    def _alone(self, on_cpu: bool) -> Iterator[None]:
        """Wait a while for other processes that time engines here, then keep them out."""
        with ExitStack() as stack:
            for waited in range(WAITS + 1):
                try:
                    stack.enter_context(alone_on_cpu() if on_cpu else alone_on_gpu())
                    break
                except UserError:
                    if waited == WAITS:
                        raise
                    self.say("waiting for another process that times engines")
                    time.sleep(WAIT_S)
            yield

    def open_store(self, recipes: Sequence[Recipe]) -> Store[AutoStep]:
        session, config, options = self.session, self.config, self.options
        task = config.task
        splits = {*(recipe.calibration.split for recipe in recipes), task.train_split, *task.eval_splits}
        return Store(
            self.folder / TRIALS,
            AutoStep,
            {
                **get_code_identity(),
                "model": session.model_sha256,
                "data": {
                    split: source_fingerprint(task, session.data_source, split) for split in sorted(splits)
                },
                "recipes": [recipe.model_dump(mode="json") for recipe in recipes],
                "config": config.model_dump(mode="json", exclude={"command", "recipe", "model"}),
                "criteria": self.criteria.model_dump(mode="json"),
                "options": [options.samples, options.trials, options.batch, options.length],
            },
        )


def take_steps(
    auto: AutoRun,
    proposers: Sequence[Proposer],
    budget_s: float,
    store: Store[AutoStep],
    clock: Callable[[], float] = time.perf_counter,
) -> list[AutoStep]:
    """Take steps in their order until one holds.

    A step is skipped, with its reason, where it is not needed, cannot help, or where the last one took longer
    than what is left of the budget. The first one that can be taken is always taken.

    Args:
        auto: runs a proposed recipe.
        proposers: in the order of their cost.
        budget_s: seconds of all steps, those of interrupted calls included.
        store: of finished steps.
        clock: returns seconds.
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
    """Return why a step is not worth taking; None where it is."""
    if any(step.holds for step in before):
        return "holds"
    done = [step for step in before if step.run]
    if kind == "shipped":
        return None
    if not done:
        return "no_base"
    if not (done[-1].lacks("accuracy") or done[-1].lacks("min_speedup")):
        return "no_remedy"
    if kind != "search" and not any(step.lacks("accuracy") for step in done):
        return "only_speed"
    return None


def run_auto(
    auto: AutoRun,
    proposers: Sequence[Proposer],
    recipes: Sequence[Recipe],
    budget_s: float,
    command: str,
) -> Auto:
    """Take steps until a recipe holds, and write `auto.json`, the reports and `best.yaml`.

    Args:
        auto: its folder is made.
        proposers: steps.
        recipes: that they start with, with the gate of the criteria.
        budget_s: seconds of all steps, those of interrupted calls included.
        command: what repeats the recipe that is chosen, as a shell takes it.

    Raises:
        UserError: bad input.
        MissingDevice: nothing here can build what the recipes ask for.
    """
    with locked_folder(auto.folder):
        store = auto.open_store(recipes)
        if store.resume_note:
            auto.say(store.resume_note)
        steps = take_steps(auto, proposers, budget_s, store)
        result = _make_result(auto, steps, budget_s, command)
        files.write_text(auto.folder / AUTO_FILE, result.model_dump_json(indent=2) + "\n")
        write_auto(result, auto.folder)
    return result


def _make_result(auto: AutoRun, steps: list[AutoStep], budget_s: float, command: str) -> Auto:
    session, config, folder = auto.session, auto.config, auto.folder
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
    return Auto(
        created=now(),
        command=config.command,
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
        metric=config.task.metrics[0],
        fp32=fp32,
        budget_s=budget_s,
        elapsed_s=sum(step.seconds for step in steps),
        steps=steps,
        choice=choice,
        warnings=session.warnings,
        notes=session.notes,
        environment=describe_environment(),
    )
