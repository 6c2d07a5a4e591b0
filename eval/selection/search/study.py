"""The Optuna study of a search, and its trials; workers on any machine share it through its database."""

import gc
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from qdqbench.eval.selection.search import workspace
from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.results import Ranking, SearchTrial, Source, choose_trial, mark_trials
from qdqbench.eval.selection.sensitivity.measure import Measurement
from qdqbench.eval.selection.sensitivity.results import Sensitivity, read_sensitivity, sensitivity_file
from qdqbench.eval.selection.trials.results import DRAW, Failure, failure_of
from qdqbench.eval.selection.trials.store import hash_of
from qdqbench.quantize.calibration.record import disable_bias_correction
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.schema import load_recipe, shipped_recipes
from qdqbench.quantize.recipe.sections import GateSettings
from qdqbench.quantize.tasks.data.splits import source_fingerprint
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.names import hide_credentials
from qdqbench.quantize.utils.progress import Within, reporter, reporting_to
from qdqbench.quantize.utils.system.environment import get_code_identity
from qdqbench.quantize.utils.system.quiet import quiet

HEARTBEAT_S, GRACE_S = 10, 60  # a worker that is silent for so long is dead
MOST_RETRIES = 1  # of a trial whose worker died: the second death is a result, such as out of memory
POLL_S, SETUP_S = 1.0, 20.0
LOCK_S = 120.0  # SQLite makes workers wait for each other
OPENINGS = 10  # workers that create one database at the same time trip over each other's tables
MOST_REPEATS = 3  # times its trials, after which a search ends whose small space has no new recipe
RANKED_SAMPLES = 128  # enough to tell the worst units from the others
PREFIXES = (8, 4, 2)  # of the ranking: an eighth, a quarter and half of the units out of INT8


class _Interrupted(BaseException):
    """Ctrl-C in a trial; at a KeyboardInterrupt Optuna would let the trial fail."""


class TrialFailed(Exception):
    """A trial ended without values; its failure is in the study."""


@dataclass
class Worker:
    work: workspace.Workspace
    options: SearchOptions
    source: Source
    measure: workspace.Measure
    study: optuna.Study
    ranking: Ranking

    @property
    def gate(self) -> GateSettings:
        return self.work.session.recipe.gate


def open_worker(session: Session, options: SearchOptions, stack: ExitStack) -> Worker:
    """Join or start the study.

    Raises:
        MissingDevice: latency is asked for, and the engine does not run here.
        UserError: the recipe does not fit, too few train rows are left, or the study is of other settings.
    """
    if options.sensitivity is not None:  # before a study is made for it
        read_ranking(session, options.sensitivity)
    model = session.fp32_model
    space = workspace.make_space(session.recipe, module_table(model), model.base_model_prefix)
    work = workspace.Workspace(session, space, options.samples)
    work.trials.drawn  # noqa: B018  (too few rows, too)
    source, measure = workspace.open_source(session, options, work, stack)
    settings = _settings(session, options, source)
    work.identity = hash_of(
        {name: settings[name] for name in ("model", "data", "task", *get_code_identity())}
    )
    with quiet("optuna"):
        study = _open_study(work, options, settings)
    ranking = Ranking.model_validate(study.user_attrs["ranking"])
    work.space = space.ranked(ranking)
    return Worker(work, options, source, measure, study, ranking)


def _settings(session: Session, options: SearchOptions, source: Source) -> dict[str, Any]:
    """Return what the trials of one study have in common; the gate may change, it only chooses."""
    recipe, task, file = session.recipe, session.config.task, options.sensitivity
    return {
        **get_code_identity(),
        "model": session.model_sha256,
        "task": task.model_dump(mode="json"),
        "data": source_fingerprint(task, session.data_source, recipe.calibration.split),
        "family": recipe.model.family,
        "recipe": recipe.model_dump(mode="json", exclude={"name", "description", "gate"}),
        "samples": options.samples,
        "seed": session.config.seed,
        "objective": options.objective,
        "speed": source.mode,
        "device": [source.gpu or source.cpu, source.backend, source.version, source.baseline_precision],
        "batch and length": [options.batch, options.length],
        "sensitivity file": files.sha256(sensitivity_file(file)) if file else None,
    }


def open_storage(url: str) -> optuna.storages.RDBStorage:
    """Open a database whose silent trials fail and are queued again."""
    lock = {"connect_args": {"timeout": LOCK_S}} if url.startswith("sqlite") else {}
    for opening in range(1, OPENINGS + 1):
        try:
            return optuna.storages.RDBStorage(
                url,
                engine_kwargs=lock,
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
                heartbeat_stale_trial_callback=_queue_again(),
            )
        except (SQLAlchemyError, ImportError, ValueError, optuna.exceptions.OptunaError) as error:
            if isinstance(error, DatabaseError) and opening < OPENINGS:
                time.sleep(POLL_S * opening / OPENINGS)  # another worker may be creating its tables
                continue
            reason = hide_credentials(" ".join(str(error).split()))[:200]
            raise UserError(
                f"the study cannot be kept in {hide_credentials(url)} ({reason}); give --storage a "
                "SQLAlchemy URL such as sqlite:///study.db, with its driver installed"
            ) from error
    raise AssertionError("unreachable")


def _queue_again() -> optuna.storages.RetryHeartbeatStaleTrialCallback:
    return optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=MOST_RETRIES)


def _open_study(work: workspace.Workspace, options: SearchOptions, settings: dict[str, Any]) -> optuna.Study:
    """Create a study and set it up, or join one.

    Units are ranked before the study exists, so that whoever creates it sets it up at once. Workers that
    start at the same moment each rank; one of these rankings is used.
    """
    session = work.session
    storage = open_storage(options.storage or f"sqlite:///{session.folder.parent.resolve() / 'study.db'}")
    name = options.study_name or f"{session.recipe.name}-{session.config.task.name}"
    known = name in optuna.get_all_study_names(storage)
    setup, is_new = None if known else rank_units(work, options.sensitivity), False
    if setup is not None:
        with suppress(optuna.exceptions.DuplicatedStudyError):
            optuna.create_study(study_name=name, storage=storage, directions=["minimize"] * 2)
            is_new = True
    # a resumed worker must not propose again what it did, nor two workers the same
    seed = session.config.seed if is_new else None
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=8)
    study = optuna.load_study(study_name=name, storage=storage, sampler=sampler)
    deadline = time.monotonic() + SETUP_S
    while not is_new and "ranking" not in study.user_attrs and time.monotonic() < deadline:
        time.sleep(POLL_S / 10)
    if "ranking" not in study.user_attrs:  # of a new study, or its creator died within that time
        ranking = setup or rank_units(work, options.sensitivity)
        study.set_user_attr("settings", settings)
        for params, attributes in first_trials(work, ranking):
            study.enqueue_trial(params, user_attrs=attributes, skip_if_exists=True)
        study.set_user_attr("ranking", ranking.model_dump(mode="json"))
    made = study.user_attrs["settings"]
    if differing := [key for key in {*made, *settings} if made.get(key) != settings.get(key)]:
        raise UserError(
            f"study {name!r} was made with other settings ({', '.join(sorted(differing))}); give "
            "--study-name a new name, or another --out"
        )
    if options.storage is None:  # this process alone has the folder: whoever ran a trial of it is dead
        for trial in study.get_trials(states=[TrialState.RUNNING]):
            _take_over(study, trial)
    return study


def _take_over(study: optuna.Study, trial: FrozenTrial) -> None:
    """Put a dead worker's trial back at once; its second death is a result."""
    deaths = trial.system_attrs.get("deaths", 0) + 1
    study._storage.set_trial_system_attr(trial._trial_id, "deaths", deaths)
    if deaths > MOST_RETRIES:
        study.tell(trial.number, state=TrialState.FAIL)
    else:
        _put_back(study, trial)


def _put_back(study: optuna.Study, trial: FrozenTrial) -> None:
    """Let a trial wait under its number: run again, it makes what it would have made."""
    study._storage.set_trial_system_attr(trial._trial_id, "failed_trial", trial.number)
    study._storage.set_trial_state_values(trial._trial_id, state=TrialState.WAITING)


def first_trials(
    work: workspace.Workspace, ranking: Ranking
) -> list[tuple[workspace.Params, dict[str, str]]]:
    """Return parameters and origins of the trials that every search starts with.

    These are the given recipe, the shipped ones in this space, nothing in INT8, and prefixes of the ranking.
    """
    base, space = work.session.recipe, work.space.ranked(ranking)
    given = space.project(work.plan(base), base)
    trials = [(given, {"origin": "given"})]
    for name in shipped_recipes():
        recipe = load_recipe(name)
        if recipe.model.family != base.model.family or not recipe.quantizes or recipe.qat:
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


def run_trials(worker: Worker) -> None:
    """Run trials until the study has as many as asked for, or the budget of time is spent.

    Trials of other workers are waited for: where a worker dies, Optuna queues its trial again.

    Raises:
        CheckFailed, MissingDevice: the device cannot be used any more; finished trials are kept.
    """
    study, wanted, budget = worker.study, worker.options.trials, worker.options.budget
    start = time.monotonic()
    with quiet("optuna"):
        while True:
            optuna.storages.fail_stale_trials(study)
            done, active, queued_again = count_trials(study)
            text = f"{min(done, wanted)} of {wanted} trials; {_describe_best(worker)}"
            reporter().begin(text, min(done, wanted), wanted)
            if budget is not None and done and time.monotonic() - start >= budget:
                return
            if done + active < wanted or queued_again:
                _run_one(worker)
            elif active:
                time.sleep(POLL_S)
            else:
                return


def count_trials(study: optuna.Study) -> tuple[int, int, int]:
    """Return how many trials are done, in progress, and queued again after their worker died.

    Trials that repeat the recipe of another one cost nothing and do not count.
    """
    finished = list_finished(study)
    new = sum("duplicate_of" not in trial.user_attrs for trial in finished)
    active = len(study.get_trials(deepcopy=False, states=[TrialState.RUNNING]))
    waiting = study.get_trials(deepcopy=False, states=[TrialState.WAITING])
    again = sum("failed_trial" in trial.system_attrs for trial in waiting)
    return max(new, len(finished) // MOST_REPEATS), active, again


def list_finished(study: optuna.Study) -> list[FrozenTrial]:
    trials = study.get_trials(deepcopy=False)
    again = {number for trial in trials for number in trial.system_attrs.get("retry_history", [])}
    return [
        trial
        for trial in trials
        if trial.state == TrialState.COMPLETE
        or (trial.state == TrialState.FAIL and trial.number not in again)
    ]


def _run_one(worker: Worker) -> None:
    study, numbers = worker.study, list[int]()

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        numbers.append(trial.number)
        try:
            return _try_point(worker, trial)
        except KeyboardInterrupt as error:
            raise _Interrupted from error

    try:
        study.optimize(objective, n_trials=1, catch=(TrialFailed,))
    except _Interrupted as error:
        _put_back(study, study.get_trials()[numbers[0]])
        raise KeyboardInterrupt from error
    except BaseException as error:
        if not numbers:
            raise
        trials = study.get_trials(deepcopy=False)
        again = any(numbers[0] in trial.system_attrs.get("retry_history", []) for trial in trials)
        finished = trials[numbers[0]].state == TrialState.COMPLETE
        if (again or finished) and isinstance(error, Exception):
            return  # another worker took this one for dead, or took it too: SQLite locks no rows
        _queue_again()(study, study.get_trials()[numbers[0]])  # interrupted, not decided
        raise


def _try_point(worker: Worker, point: optuna.Trial) -> tuple[float, float]:
    """Return both objectives of a point; everything that is known of it goes into an attribute."""
    work, attributes = worker.work, point.user_attrs
    start = time.monotonic()
    trial = SearchTrial(
        number=point.number,
        recipe=None,
        origin=attributes.get("origin", "tpe"),
        shipped=attributes.get("shipped", ""),
        params=work.space.suggest(point),
    )
    try:
        trial = _try_recipe(worker, point, trial)
    except MissingDevice:
        raise
    except Exception as error:
        trial.failure = failure_of(error)
    trial.seconds = time.monotonic() - start
    point.set_user_attr("trial", trial.model_dump(mode="json"))
    if trial.failure is not None:
        gc.collect()
        torch.cuda.empty_cache()
        if "CUDA error" in trial.failure.text and "out of memory" not in trial.failure.text:
            raise CheckFailed(
                "the GPU failed and this process cannot use it any more "
                f"({trial.failure.text}); run the same command again to resume"
            )
        raise TrialFailed
    point.set_constraint("gate", trial.violation(worker.gate))
    # milliseconds of other hours and cards do not compare, ratios of engines timed in turns do
    speed = 1 / trial.speedup.value if trial.speedup else 1 - trial.int8_share
    return trial.loss(worker.options.objective), speed


def _try_recipe(worker: Worker, point: optuna.Trial, trial: SearchTrial) -> SearchTrial:
    """Return a trial with its scores and its speed, those of an earlier one with the same recipe."""
    work = worker.work
    text = f"Found by `qdqbench search`, trial {trial.number}."
    recipe = work.session.recipe if trial.origin == "given" else work.space.recipe(trial.params, text)
    plan = work.plan(recipe)
    trial.recipe = recipe
    trial.int8_linears, trial.int8_attention = len(plan.int8), len(plan.attention)
    trial.int8_share = work.int8_share(plan, worker.options.length)
    key = workspace.plan_key(disable_bias_correction(recipe), plan)
    earlier = [frozen for frozen in list_finished(worker.study) if frozen.user_attrs.get("key") == key]
    point.set_user_attr("key", key)
    if earlier and "trial" in earlier[0].user_attrs:
        known = SearchTrial.model_validate(earlier[0].user_attrs["trial"])
        trial.duplicate_of = known.number if known.duplicate_of is None else known.duplicate_of
        point.set_user_attr("duplicate_of", trial.duplicate_of)
        fields = ("scores", "calibration", "speedup", "failure")
        return trial.model_copy(update={name: getattr(known, name) for name in fields})
    scored = work.score(work.trials, recipe, trial.origin, in_full=False)
    trial.scores, trial.calibration, trial.failure = scored.scores, scored.calibration, scored.failure
    if trial.failure is None:
        trial.speedup = worker.measure(recipe, plan)
    return trial


def list_trials(worker: Worker) -> list[SearchTrial]:
    died = Failure(code="error", text="its process died")
    trials = []
    for frozen in list_finished(worker.study):
        known = frozen.user_attrs
        lost = {"recipe": None, "origin": known.get("origin", "tpe"), "shipped": known.get("shipped", "")}
        lost |= {"params": frozen.params, "failure": died}
        trials.append(SearchTrial.model_validate(known.get("trial", lost) | {"number": frozen.number}))
    mark_trials(trials, worker.gate, worker.options.objective)
    return trials


def _describe_best(worker: Worker) -> str:
    trials = list_trials(worker)
    number = choose_trial(trials, worker.gate).chosen
    chosen = next((trial for trial in trials if trial.number == number), None)
    if chosen is None:
        return "none holds the gate yet"
    speed = f"{chosen.gain:.2f}x" if chosen.speedup else f"{chosen.gain:.0%} in INT8"
    return f"best so far: trial {chosen.number}, drop {100 * chosen.scores[DRAW].drop:.2f} points, {speed}"
