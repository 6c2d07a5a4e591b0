"""Proposals of Optuna and the trials that came of them: in a file of this search, or in a shared database."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.results import Ranking, SearchTrial
from qdqbench.eval.selection.trials.results import Failure
from qdqbench.eval.selection.trials.store import Store, require_same
from qdqbench.quantize.recipe.sections import GateSettings
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import hide_credentials
from qdqbench.quantize.utils.system.quiet import quiet

HEARTBEAT_S, GRACE_S = 10, 60  # a worker that is silent for so long is dead
MOST_RETRIES = 1  # of a trial whose process died: the second death is a result, such as out of memory
POLL_S = 1.0
LOCK_S = 120.0  # SQLite makes workers wait for each other
MOST_REPEATS = 3  # times its trials, after which a search ends whose small space has no new recipe
ORIGIN = ("origin", "shipped")  # attributes of a point
DIED = Failure(code="error", text="its process died")
NOTHING = float("nan")  # an objective of a trial that failed

Params = dict[str, Any]
Start = tuple[Params, dict[str, str]]  # parameters and origin of a trial that every search starts with
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
        suggest: Callable[[Any], Params],
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

    def _sampler(self) -> optuna.samplers.TPESampler:
        """Return a sampler that repeats its proposals if this process alone asks for them."""
        seed = self.seed + len(self._points()) if self.store is not None else None
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=8)

    def _run_one(self, attempt: Attempt) -> None:
        begun = list[int]()

        def objective(point: optuna.Trial) -> tuple[float, float]:
            begun.append(point.number)
            return self._try(point, attempt)

        self.study.sampler = self._sampler()
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


def _draft(point: optuna.Trial | FrozenTrial, params: Params) -> SearchTrial:
    origin = {"origin": "tpe"} | {name: point.user_attrs[name] for name in ORIGIN if name in point.user_attrs}
    return SearchTrial(number=point.number, recipe=None, params=params, **origin)


def _trial_of(point: FrozenTrial) -> SearchTrial:
    if "trial" in point.user_attrs:
        return SearchTrial.model_validate(point.user_attrs["trial"] | {"number": point.number})
    return _draft(point, point.params).model_copy(update={"failure": DIED})
