"""The study that proposes recipes, and the workers of a search, who turn what is proposed into trials."""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from qdqbench.eval.selection.search import workspace
from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.results import Ranking, SearchTrial, Source, choose_trial, mark_trials
from qdqbench.eval.selection.sensitivity.measure import Measurement
from qdqbench.eval.selection.sensitivity.results import Sensitivity, read_sensitivity, sensitivity_file
from qdqbench.eval.selection.trials.results import DRAW, Failure, failure_of
from qdqbench.eval.selection.trials.store import TRIALS, Store, hash_of, require_same
from qdqbench.quantize.calibration.record import disable_bias_correction
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.schema import load_recipe, shipped_recipes
from qdqbench.quantize.recipe.sections import GateSettings
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.names import hide_credentials
from qdqbench.quantize.utils.progress import Within, reporter, reporting_to
from qdqbench.quantize.utils.system.quiet import quiet

RANKED_SAMPLES = 128  # enough to tell the worst units from the others
PREFIXES = (8, 4, 2)  # of the ranking: an eighth, a quarter and half of the units out of INT8
HEARTBEAT_S, GRACE_S = 10, 60  # a worker that is silent for so long is dead
MOST_RETRIES = 1  # of a trial whose process died: the second death is a result, such as out of memory
POLL_S = 1.0
LOCK_S = 120.0  # SQLite makes workers wait for each other
MOST_REPEATS = 3  # times its trials, after which a search ends whose small space has no new recipe
ORIGIN = ("origin", "shipped")  # attributes of a point
DIED = Failure(code="error", text="its process died")
NOTHING = float("nan")  # an objective of a trial that failed

Start = tuple[
    workspace.Params, dict[str, str]
]  # parameters and origin of a trial that every search starts with
Attempt = Callable[[SearchTrial, Sequence[SearchTrial]], SearchTrial]  # given the finished trials


class _Stopped(BaseException):
    """The worker ends within a trial; Optuna would let the trial fail at an exception."""


class SearchStudy:
    """An Optuna study of one search.

    Alone in its folder a search keeps its trials in a `Store`, and a study in memory is told of them. Workers
    on a database keep them in attributes of the study. There Optuna's heartbeats tell who is dead, and
    Optuna queues their trials again.
    """

    def __init__(  # noqa: PLR0913
        self,
        options: SearchOptions,
        name: str,
        path: Path,
        settings: dict[str, Any],
        *,
        gate: GateSettings,
        suggest: Callable[[Any], workspace.Params],
        rank: Callable[[], tuple[Ranking, list[Start]]],
        seed: int,
    ) -> None:
        """Start a study, or go on with it.

        Args:
            path: file of the trials, unless workers share a database.
            rank: finds the ranking of a new study, and the trials that it starts with.
        """
        self.options, self.settings, self.gate = options, settings, gate
        self.suggest, self.seed = suggest, seed
        storage = open_storage(options.storage) if options.storage else None
        self.store = None if storage else Store(path, SearchTrial, settings, keeps=True)
        with quiet("optuna"):
            self.study = optuna.create_study(
                study_name=name, storage=storage, directions=["minimize"] * 2, load_if_exists=True
            )
            for trial in self.store.trials.values() if self.store else ():
                self.study.enqueue_trial(trial.params, {"origin": trial.origin, "shipped": trial.shipped})
                self._run_one(lambda draft, _: draft)  # which is not asked: it is known
            if "ranking" not in self.study.user_attrs:
                ranking, first = rank()
                self.study.set_user_attr("settings", settings)
                for params, origin in first:
                    self.study.enqueue_trial(params, origin, skip_if_exists=True)
                self.study.set_user_attr("ranking", ranking.model_dump(mode="json"))
            made = self.study.user_attrs
        require_same(f"study {name!r}", made["settings"], settings, "--study-name a new name")
        self.ranking = Ranking.model_validate(made["ranking"])

    def run(
        self, attempt: Attempt, progress: Callable[[int, list[SearchTrial]], None] = lambda *_: None
    ) -> None:
        """Run trials until there are as many as asked for, or the budget of time is spent.

        Trials of other workers are waited for.
        """
        wanted, budget, start = self.options.trials, self.options.budget, time.monotonic()
        with quiet("optuna"):
            while True:
                optuna.storages.fail_stale_trials(self.study)
                trials = self.list_finished()
                done, active = count_new(trials), len(self._points(TrialState.RUNNING))
                again = any("failed_trial" in each.system_attrs for each in self._points(TrialState.WAITING))
                progress(min(done, wanted), trials)
                if budget is not None and done and time.monotonic() - start >= budget:
                    return
                if done + active < wanted or again:
                    self._run_one(attempt)
                elif active:
                    time.sleep(POLL_S)
                else:
                    return

    def list_finished(self) -> list[SearchTrial]:
        if self.store is not None:
            return [trial.model_copy() for trial in self.store.trials.values()]
        retried = {n for point in self._points() for n in point.system_attrs.get("retry_history", [])}
        points = self._points(TrialState.COMPLETE, TrialState.FAIL)
        return [_trial_of(point) for point in points if point.number not in retried]

    def _points(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def _run_one(self, attempt: Attempt) -> None:
        begun = list[int]()

        def objective(point: optuna.Trial) -> tuple[float, float]:
            begun.append(point.number)
            return self._try(point, attempt)

        # alone, this process repeats its proposals
        seed = self.seed + len(self._points()) if self.store is not None else None
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=8)
        try:
            self.study.optimize(objective, n_trials=1)
        except _Stopped as stop:
            raise (stop.__cause__ or stop) from None
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
            if not begun:
                raise
            # else another worker took it for dead, and Optuna tells of no trial twice

    def _try(self, point: optuna.Trial, attempt: Attempt) -> tuple[float, float]:
        draft, key = _draft(point, self.suggest(point)), str(point.number)
        try:
            if self.store is None:
                trial = attempt(draft, self.list_finished())
            elif key in self.store.trials:
                trial = self.store.trials[key]
            else:
                with self.store.attempt(key) as deaths:
                    died = draft.model_copy(update={"failure": DIED})
                    trial = died if deaths > MOST_RETRIES else attempt(draft, self.list_finished())
                self.store.add(key, trial)
        except BaseException as error:
            raise _Stopped from error
        if self.store is None:
            point.set_user_attr("trial", trial.model_dump(mode="json"))
        if trial.failure is not None:
            return NOTHING, NOTHING
        point.set_constraint("gate", trial.violation(self.gate))
        return trial.objectives(self.options.objective)


def open_storage(url: str) -> optuna.storages.RDBStorage:
    """Open a database whose silent trials fail and are queued again."""
    try:
        with quiet("optuna"):
            return optuna.storages.RDBStorage(
                url,
                engine_kwargs={"connect_args": {"timeout": LOCK_S}} if url.startswith("sqlite") else {},
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
                heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(MOST_RETRIES),
            )
    except (SQLAlchemyError, ImportError, ValueError, optuna.exceptions.OptunaError) as error:
        reason = hide_credentials(" ".join(str(error).split()))[:200]
        raise UserError(
            f"the study cannot be kept in {hide_credentials(url)} ({reason}); give --storage a "
            "SQLAlchemy URL such as sqlite:///study.db, with its driver installed"
        ) from error


def count_new(trials: Sequence[SearchTrial]) -> int:
    """Return how many trials count; those that repeat a recipe cost nothing and do not."""
    new = sum(trial.duplicate_of is None for trial in trials)
    return max(new, len(trials) // MOST_REPEATS)


def _draft(point: optuna.Trial | FrozenTrial, params: workspace.Params) -> SearchTrial:
    origin = {"origin": "tpe"} | {name: point.user_attrs[name] for name in ORIGIN if name in point.user_attrs}
    return SearchTrial(number=point.number, recipe=None, params=params, **origin)


def _trial_of(point: FrozenTrial) -> SearchTrial:
    if "trial" in point.user_attrs:
        return SearchTrial.model_validate(point.user_attrs["trial"] | {"number": point.number})
    return _draft(point, point.params).model_copy(update={"failure": DIED})


@dataclass
class Worker:
    work: workspace.Workspace
    source: Source
    measure: workspace.Measure
    search: SearchStudy

    def run(self) -> None:
        """Run trials until the study has as many as asked for, or the budget of time is spent.

        Raises:
            CheckFailed, MissingDevice: the device cannot be used any more; finished trials are kept.
        """
        wanted = self.search.options.trials

        def report(done: int, trials: list[SearchTrial]) -> None:
            text = f"{done} of {wanted} trials; {self._describe_best(trials)}"
            reporter().begin(text, done, wanted)

        self.search.run(self._try, report)

    def list_trials(self) -> list[SearchTrial]:
        return mark_trials(self.search.list_finished(), self.search.gate, self.search.options.objective)

    def _try(self, trial: SearchTrial, finished: Sequence[SearchTrial]) -> SearchTrial:
        start = time.monotonic()
        try:
            self._measure(trial, finished)
        except MissingDevice:
            raise
        except Exception as error:
            trial.failure = failure_of(error)
        trial.seconds = time.monotonic() - start
        if trial.failure is not None:
            import torch

            gc.collect()
            torch.cuda.empty_cache()
            if "CUDA error" in trial.failure.text and "out of memory" not in trial.failure.text:
                raise CheckFailed(
                    "the GPU failed and this process cannot use it any more "
                    f"({trial.failure.text}); run the same command again to resume"
                )
        return trial

    def _measure(self, trial: SearchTrial, finished: Sequence[SearchTrial]) -> None:
        """Give a trial its scores and its speed, those of an earlier one with the same recipe."""
        work, text = self.work, f"Found by `qdqbench search`, trial {trial.number}."
        recipe = work.session.recipe if trial.origin == "given" else work.space.recipe(trial.params, text)
        plan = work.plan(recipe)
        trial.recipe = recipe
        trial.int8_linears, trial.int8_attention = len(plan.int8), len(plan.attention)
        trial.int8_share = work.int8_share(plan, self.search.options.length)
        trial.key = workspace.plan_key(disable_bias_correction(recipe), plan)
        known = next((each for each in finished if each.key == trial.key), None)
        if known is not None:
            trial.duplicate_of = known.number if known.duplicate_of is None else known.duplicate_of
            trial.scores, trial.calibration = known.scores, known.calibration
            trial.speedup, trial.failure = known.speedup, known.failure
            return
        scored = work.score(recipe, trial.origin)
        trial.scores, trial.calibration, trial.failure = scored.scores, scored.calibration, scored.failure
        if trial.failure is None:
            trial.speedup = self.measure(recipe, plan)

    def _describe_best(self, trials: list[SearchTrial]) -> str:
        mark_trials(trials, self.search.gate, self.search.options.objective)
        number = choose_trial(trials, self.search.gate).chosen
        chosen = next((trial for trial in trials if trial.number == number), None)
        if chosen is None:
            return "none holds the gate yet"
        speed = f"{chosen.gain:.2f}x" if chosen.speedup else f"{chosen.gain:.0%} in INT8"
        return (
            f"best so far: trial {chosen.number}, drop {100 * chosen.scores[DRAW].drop:.2f} points, {speed}"
        )


def open_worker(session: Session, options: SearchOptions, stack: ExitStack) -> Worker:
    """Join or start a search; its trials are kept next to the folder of the session.

    Raises:
        MissingDevice: latency is asked for, and the engine does not run here.
        UserError: the recipe does not fit, too few train rows are left, or the study is of other settings.
    """
    file = options.sensitivity
    if file is not None:  # before a study is made for it
        read_ranking(session, file)
    model = session.fp32_model
    space = workspace.make_space(session.recipe, module_table(model), model.base_model_prefix)
    work = workspace.Workspace(session, space, options.samples)
    work.identity = hash_of(work.trials.settings)  # too few rows fail, too
    source, measure = workspace.open_source(session, options, work, stack)
    settings = work.trials.settings | {  # the gate may change, it only chooses
        "objective": options.objective,
        "speed": source.mode,
        "device": [source.gpu or source.cpu, source.backend, source.version, source.baseline_precision],
        "batch and length": [options.batch, options.length],
        "sensitivity file": files.sha256(sensitivity_file(file)) if file else None,
    }

    def rank() -> tuple[Ranking, list[Start]]:
        ranking = rank_units(work, file)
        return ranking, first_trials(work, ranking)

    name = options.study_name or f"{session.recipe.name}-{session.config.task.name}"
    path, gate, seed = session.folder.parent / TRIALS, session.recipe.gate, session.config.seed
    search = SearchStudy(
        options, name, path, settings, gate=gate, suggest=space.suggest, rank=rank, seed=seed
    )
    work.space = space.ranked(search.ranking)
    return Worker(work, source, measure, search)


def first_trials(work: workspace.Workspace, ranking: Ranking) -> list[Start]:
    """Return parameters and origins of the trials that every search starts with.

    These are the given recipe, the shipped ones in this space, nothing in INT8, and prefixes of the ranking.
    """
    base, space = work.session.recipe, work.space.ranked(ranking)
    given = space.project(work.plan(base), base)
    trials = [(given, {"origin": "given"})]
    for name in shipped_recipes():
        recipe = load_recipe(name)
        if recipe.model.family != base.model.family or not recipe.quantizes or recipe.trainings:
            continue
        with suppress(UserError):  # it may ask for an attention that this model cannot have
            shipped = {"origin": "shipped", "shipped": name}
            trials.append((space.project(work.plan(recipe), recipe), shipped))
    units = len(space.units)
    everything = given | {"frame": "all", "keep": 0, "flip_1": 0, "flip_2": 0}
    high = {"attention_keep": len(space.attention)} if space.attention else {}
    trials.append((everything | high | {"keep": units}, {"origin": "unquantized"}))
    for part in PREFIXES:
        trials.append((everything | {"keep": max(1, round(units / part))} | high, {"origin": "ranking"}))
    if space.attention:
        half = {"keep": max(1, round(units / 4)), "attention_keep": len(space.attention) // 2}
        trials.append((everything | half, {"origin": "ranking"}))
    return trials


def rank_units(work: workspace.Workspace, file: Path | None) -> Ranking:
    session = work.session
    if file is not None:
        units, attention = workspace.rank_by_rows(work.space, read_ranking(session, file).rows, str(file))
        return Ranking(units=units, attention=attention, file=file.name)
    whole = work.space.assemble(set(work.space.units), set(work.space.attention), workspace.PLAIN)
    config = session.config.model_copy(update={"recipe": disable_bias_correction(whole)})
    measured = Measurement(Session(config, session.folder), min(RANKED_SAMPLES, work.samples))
    with reporting_to(Within()):
        rows = measured.run().rows
    units, attention = workspace.rank_by_rows(work.space, rows, "the sensitivity")
    return Ranking(units=units, attention=attention, samples=measured.samples)


def read_ranking(session: Session, file: Path) -> Sensitivity:
    measured = read_sensitivity(file)
    task = session.config.task.model_dump(mode="json")
    if measured.model["sha256"] != session.model_sha256 or measured.task != task:
        raise UserError(
            f"{file} is of another model or task; run `qdqbench sensitivity` on this one, or leave "
            "--sensitivity out"
        )
    return measured
