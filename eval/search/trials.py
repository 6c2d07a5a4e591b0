"""Search: which layers in INT8, calibrated how, for this model, data and device."""

import gc
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from qdqbench.eval.accuracy.gate import limit
from qdqbench.eval.bench.engines import Latency
from qdqbench.eval.placement.cost_model import load_cost_model
from qdqbench.eval.placement.space import make_space
from qdqbench.eval.search.latency import latency_source
from qdqbench.eval.search.results import (
    Accuracy,
    Source,
    Trial,
    choose_trial,
    mark_front,
    objectives,
    trial_holds,
)
from qdqbench.eval.search.start import first_trials, rank, read_ranking
from qdqbench.eval.search.study import (
    counted,
    decided,
    default_storage,
    mark_worker,
    open_study,
    others_run,
    prepare_study,
    requeue,
    revive,
    running,
    use_sampler,
)
from qdqbench.eval.search.trial import Workspace, explained, hash_of, plan_key
from qdqbench.eval.search.worker import SearchOptions, Worker
from qdqbench.eval.sensitivity.results import sensitivity_file
from qdqbench.quantize.calibrate.narrow import without_corrections
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import CheckFailed, MissingDevice
from qdqbench.quantize.encoders.modules import module_table
from qdqbench.quantize.machine.environment import made_with
from qdqbench.quantize.machine.quiet import quiet
from qdqbench.quantize.recipe.schema import parse_recipe, short_yaml
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.tasks.sources import source_fingerprint

if TYPE_CHECKING:
    import optuna


def open_worker(
    session: Session,
    options: SearchOptions,
    stack: ExitStack,
    progress: Callable[[str], None] = lambda text: None,
) -> Worker:
    """Join or start the study.

    Raises:
        MissingDevice: latency can neither be measured nor modelled here.
        UserError: the recipe does not fit, too few train rows are left, or the study is of other settings.
    """
    if options.sensitivity is not None:  # before a study is made for it
        read_ranking(session, options.sensitivity)
    model = session.fp32_model
    space = make_space(session.recipe, module_table(model), model.base_model_prefix)
    work = Workspace(session, space, options.samples, progress)
    work.draw  # noqa: B018  (too few rows, too)
    source, measure = latency_source(session, options, work, stack)
    settings = _settings(session, options, source)
    work.identity = " ".join(str(settings[name]) for name in ("model", "data", "task"))
    storage = options.storage or default_storage(session.folder.parent)
    name = options.study or f"{session.recipe.name}-{session.config.task.name}"
    with quiet("optuna"):
        study = open_study(storage, name, settings)
        work.space, said = prepare_study(
            study, lambda: rank(work, options.sensitivity), lambda space: first_trials(work, space), space
        )
        use_sampler(study, session.config.seed)
    return Worker(work, options, source, measure, study, said)


def _settings(session: Session, options: SearchOptions, source: Source) -> dict[str, Any]:
    """What the trials of one study have in common; the gate may change, it only chooses."""
    recipe, task = session.recipe, session.config.task
    fitted = load_cost_model(options.cost_model) if source.mode == "model" else None
    return {
        **made_with(),
        "model": session.model_sha256,
        "task": task.model_dump(mode="json"),
        "data": source_fingerprint(task, session.data_source, recipe.calibration.split),
        "family": recipe.model.family,
        "recipe": recipe.model_dump(mode="json", exclude={"name", "description", "gate"}),
        "samples": options.samples,
        "seed": session.config.seed,
        "objective": options.objective,
        "latency": source.mode,
        "device": [source.gpu or source.cpu, source.backend, source.version, source.twin],
        "batch and length": [options.batch, options.length],
        "cost model": hash_of(fitted.model_dump(mode="json", include={"rows"})) if fitted else None,
        "sensitivity file": files.sha256(sensitivity_file(options.sensitivity))
        if options.sensitivity
        else None,
    }


def run_trials(worker: Worker, progress: Callable[[int, int, str], None] = lambda *_: None) -> bool:
    """Run trials until the study has as many as asked for, or the budget of time is spent.

    Args:
        progress: called with the trials that are done, their number, and what is best so far.

    Returns:
        Whether nothing is left: False when another worker still runs the last ones.

    Raises:
        CheckFailed, MissingDevice: the GPU cannot be used any more; finished trials are kept.
    """
    study, wanted, budget_s = worker.study, worker.options.trials, worker.options.budget_s
    start = time.monotonic()
    with quiet("optuna"):
        revive(study)
        while True:
            done = counted(study)
            progress(min(done, wanted), wanted, _best(worker))
            if done >= wanted or (budget_s is not None and done and time.monotonic() - start >= budget_s):
                return not others_run(study)
            enough = done + running(study) >= wanted
            if enough and others_run(study) and counted(study) + running(study) >= wanted:
                return False
            _run_one(worker)
            if worker.work.fatal is not None:
                raise worker.work.fatal


def _run_one(worker: Worker) -> None:
    """One trial, queued or new; its failure is recorded in the study."""
    number: int | None = None

    def objective(trial: "optuna.Trial") -> tuple[float, float]:
        nonlocal number
        number = trial.number
        return _objective(worker, trial)

    try:
        worker.study.optimize(objective, n_trials=1, catch=(Exception,))
    except Exception:
        # a trial that ended before its result was told: another worker took this one for dead, and runs it
        # again
        if number is None or not worker.study.get_trials(deepcopy=False)[number].state.is_finished():
            raise


def _objective(worker: Worker, trial: "optuna.Trial") -> tuple[float, float]:
    """Both objectives of a trial; what else is known of it goes into its attributes."""
    mark_worker(trial)
    start = time.monotonic()
    try:
        params = worker.work.space.suggest(trial)
        given = trial.user_attrs.get("recipe") if trial.user_attrs.get("origin") == "given recipe" else None
        recipe = (
            parse_recipe(given, "the given recipe")
            if given
            else worker.work.space.recipe(params, f"Found by `qdqbench search`, trial {trial.number}.")
        )
        plan = worker.work.plan(recipe)
        key = plan_key(without_corrections(recipe), plan)
        for name, value in (
            ("key", key),
            ("recipe", short_yaml(recipe)),
            ("int8_linears", len(plan.int8)),
            ("int8_attention", len(plan.attention)),
        ):
            trial.set_user_attr(name, value)
        same = next((t for t in decided(worker.study) if t.user_attrs.get("key") == key), None)
        if same is not None:
            return _repeat(worker, trial, same)
        accuracy = worker.work.accuracy(recipe, plan)
        trial.set_user_attr("accuracy", accuracy.model_dump(mode="json"))
        latency = worker.measure(recipe, plan)
        trial.set_user_attr("latency", latency.model_dump(mode="json"))
        trial.set_user_attr("seconds", time.monotonic() - start)
        return _judged(worker, trial, accuracy, latency)
    except KeyboardInterrupt:
        requeue(worker.study, trial)
        raise
    except MissingDevice as error:
        requeue(worker.study, trial)
        worker.work.fatal = error
        raise
    except Exception as error:
        reason = explained(error)
        trial.set_user_attr("reason", reason)
        if "CUDA error" in reason and "out of memory" not in reason:
            worker.work.fatal = CheckFailed(
                f"the GPU failed and this process cannot use it any more ({reason}); run the same command "
                "again, it goes on where this stopped"
            )
        _free_memory()
        raise


def _repeat(worker: Worker, trial: "optuna.Trial", same: Any) -> tuple[float, float]:
    """The values of an earlier trial with the same recipe; a failure is repeated too."""
    first = same.user_attrs.get("duplicate_of", same.number)
    trial.set_user_attr("duplicate_of", first)
    if "latency" not in same.user_attrs:
        raise CheckFailed(same.user_attrs.get("reason") or "it failed before")
    for name in ("accuracy", "latency"):
        trial.set_user_attr(name, same.user_attrs[name])
    accuracy = Accuracy.model_validate(same.user_attrs["accuracy"])
    return _judged(worker, trial, accuracy, Latency.model_validate(same.user_attrs["latency"]))


def _judged(
    worker: Worker, trial: "optuna.Trial", accuracy: Accuracy, latency: Latency
) -> tuple[float, float]:
    """Both objectives, and how far the trial is from the gate."""
    trial.set_constraint("gate", _violation(accuracy, latency, worker.gate))
    return objectives(accuracy, latency, worker.options.objective)


def _violation(accuracy: Accuracy, latency: Latency, gate: Any) -> float:
    """How far a trial is from satisfying the gate; at most 0 where it does."""
    if trial_holds(accuracy, latency, gate):
        return 0.0
    if gate.min_speedup is not None:
        return float(gate.min_speedup - latency.speedup)
    return float(accuracy.drop - limit(accuracy.drop_stderr, gate.max_drop))


def trials_of(worker: Worker) -> list[Trial]:
    """All trials that came to an end, with the front and the constraints marked."""
    found = []
    for frozen in decided(worker.study):
        known = frozen.user_attrs
        complete = frozen.values is not None and "latency" in known
        trial = Trial(
            number=frozen.number,
            state="complete" if complete else "failed",
            origin=known.get("origin", "TPE"),
            reason=None if complete else known.get("reason", "its process died"),
            params=frozen.params,
            recipe=known.get("recipe"),
            int8_linears=known.get("int8_linears", 0),
            int8_attention=known.get("int8_attention", 0),
            accuracy=known.get("accuracy") if complete else None,
            latency=known.get("latency") if complete else None,
            duplicate_of=known.get("duplicate_of"),
            seconds=known.get("seconds"),
        )
        if trial.accuracy is not None and trial.latency is not None:
            trial.holds = trial_holds(trial.accuracy, trial.latency, worker.gate)
        found.append(trial)
    mark_front(found, worker.options.objective)
    return found


def _best(worker: Worker) -> str:
    """One clause on the best trial so far."""
    chosen, _ = choose_trial(trials_of(worker), worker.gate)
    if chosen is None or chosen.accuracy is None or chosen.latency is None:
        return "none holds the gate yet"
    said = "modelled" if worker.source.mode == "model" else "measured"
    return (
        f"best so far: trial {chosen.number}, drop {100 * chosen.accuracy.drop:.2f} points, "
        f"{chosen.latency.speedup:.2f}x ({said})"
    )


def _free_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
