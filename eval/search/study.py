"""The Optuna study of a search: shared by workers through its database, and whole after any of them dies."""

import json
import os
import socket
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.eval.search.space import Params, Space
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.machine.secrets import hide_credentials

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

First = tuple[str, Params, dict[str, Any]]  # origin, parameters, attributes
HEARTBEAT_S, GRACE_S = 20, 120  # a worker on another machine that is silent for so long is dead
MOST_ATTEMPTS = 2  # of a trial whose process dies: the second death is a result, such as out of memory
WAIT_S, CLAIM_PAUSE_S, CLAIM_S = 1.0, 0.2, 1800.0  # for the ranking that another worker makes
UNMARKED = timedelta(seconds=15)  # the first thing that a trial does is to say who runs it
LOCK_S = 120.0  # SQLite makes workers wait for each other
MOST_OPENINGS = 10  # workers that create one database at the same time trip over each other's tables
MOST_REPEATS = 3  # times its trials, after which a search ends whose small space has no new recipe


def open_study(storage: str, name: str, settings: dict[str, Any]) -> "optuna.Study":
    """Create or join a study.

    Args:
        storage: SQLAlchemy URL.
        settings: what its trials depend on; JSON.

    Raises:
        UserError: the database cannot be used, or the study is of other settings.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    try:
        study = optuna.create_study(
            study_name=name,
            storage=_open_storage(storage),
            directions=["minimize", "minimize"],
            load_if_exists=True,
        )
    except (SQLAlchemyError, ImportError, ValueError, optuna.exceptions.OptunaError) as error:
        what = hide_credentials(" ".join(str(error).split()))[:200]
        raise UserError(
            f"the study cannot be kept in {hide_credentials(storage)} ({what}); give --storage a SQLAlchemy "
            "URL such as sqlite:///study.db, with its driver installed"
        ) from error
    known = study.user_attrs.get("settings")
    if known is None:
        study.set_user_attr("settings", settings)
    elif differing := [key for key in {*known, *settings} if known.get(key) != settings.get(key)]:
        raise UserError(
            f"study {name!r} was made with other settings ({', '.join(sorted(differing))}); give "
            "--study-name a new name, or another --out"
        )
    return study


def use_sampler(study: "optuna.Study", seed: int) -> None:
    """Multivariate TPE with a stream of this worker's own.

    Two workers with one seed would propose the same, and a resumed one must not propose again what it did:
    only the worker that ranked a fresh study draws from the plain seed, so that it can be repeated.
    """
    import optuna

    first = study.user_attrs.get("ranking_by", [])[:3] == _me() and not decided(study)
    own = 0 if first else zlib.crc32(json.dumps([*_me(), time.time()]).encode())
    stream = (seed * 1_000_003 + own) % 2**31
    study.sampler = optuna.samplers.TPESampler(seed=stream, multivariate=True, n_startup_trials=8)


def _open_storage(storage: str) -> "optuna.storages.RDBStorage":
    """The database, with its tables; Optuna creates them without regard to others that do the same."""
    import optuna
    from sqlalchemy.exc import DatabaseError

    lock = {"connect_args": {"timeout": LOCK_S}} if storage.startswith("sqlite") else {}
    for opening in range(1, MOST_OPENINGS + 1):
        try:
            return optuna.storages.RDBStorage(
                storage,
                engine_kwargs=lock,
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
                heartbeat_stale_trial_callback=_retry,
            )
        except DatabaseError:
            if opening == MOST_OPENINGS or not _has_tables(storage):
                raise  # nobody else is making them
            time.sleep(WAIT_S * opening / MOST_OPENINGS)
    raise AssertionError("unreachable")


def _has_tables(storage: str) -> bool:
    """Whether the database holds a table, which another worker made a moment ago."""
    from sqlalchemy import create_engine, inspect
    from sqlalchemy.exc import SQLAlchemyError

    engine = create_engine(storage)
    try:
        return bool(inspect(engine).get_table_names())
    except SQLAlchemyError:
        return False
    finally:
        engine.dispose()


def prepare_study(
    study: "optuna.Study",
    rank: Callable[[], tuple[Space, str]],
    first: Callable[[Space], list[First]],
    space: Space,
) -> tuple[Space, str]:
    """The ranking and the first trials of a study, made by one worker while the others wait.

    The claim stands in the database, and is no file lock: workers on several machines share nothing else.

    Args:
        study: just opened.
        rank: the ranked space, and where the ranking comes from.
        first: trials to start with.
        space: in any order.

    Returns:
        The space in the order of the study, and where that comes from.
    """
    while "ranking" not in study.user_attrs:
        claim = study.user_attrs.get("ranking_by")
        if claim is not None and _alive(claim):
            time.sleep(WAIT_S)
            continue
        study.set_user_attr("ranking_by", [*_me(), time.time()])
        time.sleep(CLAIM_PAUSE_S)  # of several that claim at the same time, the last one has it
        if study.user_attrs["ranking_by"][:3] != _me():
            continue
        ranked, source = rank()
        for origin, params, attributes in first(ranked):
            study.enqueue_trial(params, user_attrs={"origin": origin, **attributes}, skip_if_exists=True)
        study.set_user_attr("ranking", {"order": ranked.ranking, "source": source})
    found = study.user_attrs["ranking"]
    return space.ranked(found["order"]), found["source"]


def mark_worker(trial: "optuna.Trial") -> None:
    """Say who runs a trial, so that its end can be noticed."""
    trial.set_user_attr("worker", _me())


def revive(study: "optuna.Study") -> int:
    """Fail the trials of dead processes of this machine and queue them again; returns how many.

    Optuna's heartbeat decides about other machines; here it would let a killed worker's trial, and all who
    wait for it, lie for GRACE_S, where the process table knows at once.
    """
    import optuna

    optuna.storages.fail_stale_trials(study)
    found = 0
    for trial in _running(study):
        worker = trial.user_attrs.get("worker")
        if not worker:
            if trial.datetime_start and datetime.now() - trial.datetime_start < UNMARKED:
                continue  # it is about to say who it is
        elif worker[0] != _here():
            continue  # the heartbeat decides
        elif _started(worker[1]) == worker[2] and worker[1] != os.getpid():
            continue
        try:
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        except (ValueError, optuna.exceptions.OptunaError):
            continue  # another worker was faster
        _retry(study, trial)
        found += 1
    return found


def others_run(study: "optuna.Study") -> bool:
    """Whether other workers are at a trial; one whose worker is not known yet is waited for."""
    while True:
        revive(study)
        trials = _running(study)
        if all("worker" in trial.user_attrs for trial in trials):
            return bool(trials)
        time.sleep(WAIT_S)


def requeue(study: "optuna.Study", trial: "optuna.Trial | FrozenTrial") -> None:
    """Queue a trial again that was interrupted and not decided."""
    _enqueue(study, trial, int(trial.user_attrs.get("attempt", 1)))


def _retry(study: "optuna.Study", trial: "FrozenTrial") -> None:
    """Queue a dead process's trial again; Optuna's callback would copy who ran it."""
    attempt = int(trial.user_attrs.get("attempt", 1))
    if attempt < MOST_ATTEMPTS:
        _enqueue(study, trial, attempt + 1)


def _enqueue(study: "optuna.Study", trial: "optuna.Trial | FrozenTrial", attempt: int) -> None:
    """Queue its parameters, also those of a queued trial that had not come to read them, and their origin."""
    params = trial.params or getattr(trial, "system_attrs", {}).get("fixed_params", {})
    known = trial.user_attrs
    kept = ("origin", "recipe") if known.get("origin") == "given recipe" else ("origin",)
    again = {key: known[key] for key in kept if key in known}
    again |= {"attempt": attempt, "retry_of": trial.number}
    study.enqueue_trial(dict(params), user_attrs=again)


def decided(study: "optuna.Study") -> "list[FrozenTrial]":
    """Trials that came to an end: complete, or failed and not queued again."""
    import optuna

    state = optuna.trial.TrialState
    trials = study.get_trials(deepcopy=False)
    again = {trial.user_attrs.get("retry_of") for trial in trials}
    return [
        t for t in trials if t.state == state.COMPLETE or (t.state == state.FAIL and t.number not in again)
    ]


def counted(study: "optuna.Study") -> int:
    """Trials that count: those that repeat the recipe of another one cost nothing and do not."""
    found = decided(study)
    new = sum("duplicate_of" not in trial.user_attrs for trial in found)
    return max(new, len(found) // MOST_REPEATS)


def running(study: "optuna.Study") -> int:
    """Number of trials in progress, of all workers."""
    return len(_running(study))


def _running(study: "optuna.Study") -> "list[FrozenTrial]":
    import optuna

    return study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))


def _me() -> list[Any]:
    return [_here(), os.getpid(), _started(os.getpid())]


def _here() -> str:
    """Where a process number means this process: containers may share a host's name, and not its numbers."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # Linux has both
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _alive(claim: list[Any]) -> bool:
    """Whether a worker that said it would do something may still be at it."""
    host, pid, started, since = claim
    if host == _here():
        return _started(pid) == started and started is not None
    return bool(time.time() - since < CLAIM_S)


def _started(pid: int) -> float | None:
    """When a process of this machine started; None when there is none. A number alone is used again."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time(), 1)
    except psutil.Error:
        return None


def default_storage(folder: Path) -> str:
    """SQLite in the output folder."""
    return f"sqlite:///{folder.resolve() / 'study.db'}"
