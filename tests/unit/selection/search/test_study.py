"""The study of a search: shared, resumed, and whole after any of its workers dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

from qdqbench.eval.selection.search import worker as study_module
from qdqbench.eval.selection.search.worker import count_new, open_storage
from qdqbench.eval.selection.trials.results import Failure
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.system.quiet import quiet

from ....support.searches import GIVEN, SETTINGS, Measurement, open_search, raising

FAIL, RUNNING = optuna.trial.TrialState.FAIL, optuna.trial.TrialState.RUNNING


@pytest.fixture(autouse=True)
def silent():
    with quiet("optuna"):
        yield


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture(params=["alone", "shared"])
def kept(request, tmp_path, url):
    """How to open the search of a folder, alone or by a database."""
    shared = {"storage": url} if request.param == "shared" else {}
    return lambda **options: open_search(tmp_path, **shared | options)


def run(search, plan=None):
    measurement = Measurement(plan)
    search.run(measurement)
    return measurement.tried


def points(search):
    return [trial.params["keep"] for trial in search.list_finished()]


def test_a_search_resumes(kept):
    run(kept(trials=3))
    again = kept(trials=5)
    assert len(points(again)) == 3
    assert run(again) == [3, 4]
    assert len({*points(again)}) > 3  # nothing is proposed again
    assert [trial.origin for trial in again.list_finished()] == ["given", *["tpe"] * 4]  # one point once
    assert run(kept(trials=5)) == []


def test_a_search_repeats_by_its_seed(tmp_path):
    found = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / folder).mkdir()
        search = open_search(tmp_path / folder, seed=seed)
        run(search)
        found.append(points(search))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MissingDevice])
def test_an_interrupted_search_ends_as_an_undisturbed_one(tmp_path, error):
    for folder, at in (("whole", ()), ("stopped", (1, 1, 1, 11))):
        (tmp_path / folder).mkdir()
        for number in at:
            with pytest.raises(error):
                run(open_search(tmp_path / folder, trials=13), {number: raising(error)})
        run(open_search(tmp_path / folder, trials=13))
    whole, stopped = (open_search(tmp_path / name).list_finished() for name in ("whole", "stopped"))
    assert stopped == whole
    files = [
        {path.name: path.read_bytes() for path in tmp_path.glob(f"{name}/*")} for name in ("whole", "stopped")
    ]
    assert files[0] == files[1]


def test_the_second_death_in_a_trial_is_its_result(tmp_path):
    dead = []

    def die(number):
        dead.append(open_search(tmp_path).store.attempt(number))  # whose end never comes
        dead[-1].__enter__()

    die("0")
    assert run(open_search(tmp_path, trials=1)) == [0]  # and is forgotten
    die("1")
    die("1")
    assert run(open_search(tmp_path, trials=3)) == [2]
    died = open_search(tmp_path).list_finished()[1]
    assert (died.number, died.failure.text) == (1, "its process died")
    assert died.params["keep"] in range(51)
    die("7")
    assert run(open_search(tmp_path, trials=4)) == [3]


def test_a_study_whose_creator_died_before_it_was_set_up(tmp_path, url):
    optuna.create_study(study_name="x", storage=url, directions=["minimize"] * 2)
    assert open_search(tmp_path, storage=url).study.user_attrs["settings"] == SETTINGS


def test_other_settings_are_refused_in_one_sentence(kept):
    run(kept(trials=1))
    with pytest.raises(UserError, match=r"made with other settings \(batch and length\)") as caught:
        kept(settings=SETTINGS | {"batch and length": [8, 128]})
    assert "\n" not in str(caught.value)
    assert len(points(kept())) == 1  # it is as it was


@pytest.mark.parametrize(
    "bad", ["nonsense", "postgresql://me:secret@nowhere.invalid/db", "sqlite:////no/such/x.db"]
)
def test_a_database_that_cannot_be_used(bad):
    with pytest.raises(UserError, match="SQLAlchemy URL") as caught:
        open_storage(bad)
    assert "secret" not in str(caught.value)


@pytest.mark.long
def test_a_shared_trial_is_queued_once_after_its_worker_died(tmp_path, url, monkeypatch):
    monkeypatch.setattr(study_module, "HEARTBEAT_S", 1)
    monkeypatch.setattr(study_module, "GRACE_S", 1)
    search = open_search(tmp_path, storage=url, trials=1)
    for deaths in (1, 2):
        trial = search.study.ask()
        search.study._storage.record_heartbeat(trial._trial_id)
        time.sleep(2.1)  # whole seconds of the database
        optuna.storages.fail_stale_trials(search.study)
        assert len(search.list_finished()) == deaths - 1
    (died,) = search.list_finished()
    assert (died.number, died.origin, died.failure.text) == (1, "given", "its process died")


@pytest.mark.parametrize("finished", [True, False])
def test_a_trial_that_another_worker_took_for_dead_is_left_to_it(tmp_path, url, finished):
    search = open_search(tmp_path, storage=url, trials=2)

    def taken(trial):
        if finished:
            search.study.tell(trial.number, (1.0, 1.0))
        else:
            search.study.tell(trial.number, state=FAIL)
            optuna.storages.RetryHeartbeatStaleTrialCallback()(search.study, search.study.trials[0])

    run(search, {0: taken})
    assert points(search).count(GIVEN) == 1
    assert not search.study.get_trials(states=[RUNNING])
    assert count_new(search.list_finished()) >= 2


def test_other_failures_of_the_study_are_not_hidden(kept):
    search = kept()
    search.study.ask = lambda **_: raising(ValueError("the database is gone"))(None)
    with pytest.raises(ValueError, match="is gone"):
        run(search)


def test_repeated_recipes_do_not_count_but_end_a_small_search(kept):
    search = kept(trials=3)
    repeated = lambda trial: trial.model_copy(update={"duplicate_of": 0 if trial.number else None})  # noqa: E731
    assert len(run(search, repeated)) == 9
    assert count_new(search.list_finished()) == 3


def test_failed_trials_count_and_a_budget_ends_a_search(kept):
    failure = Failure(code="error", text="no more")
    failed = lambda trial: trial.model_copy(update={"failure": failure})  # noqa: E731
    assert run(kept(trials=2), failed) == [0, 1]
    search = kept(trials=9, budget=1e-9)
    assert run(search) == []
    assert [trial.failure for trial in search.list_finished()] == [failure] * 2
    assert points(search)[0] == GIVEN


WORKER = """
import sys, time
from pathlib import Path
from qdqbench.eval.selection.search import worker as study
from qdqbench.quantize.utils.system.quiet import quiet
from tests.support.searches import Measurement, open_search

def slow(trial):
    time.sleep(0.4)
    return trial.model_copy(update={"shipped": sys.argv[2]})

study.HEARTBEAT_S, study.GRACE_S, study.POLL_S = 1, 2, 0.2
folder = Path(sys.argv[1].removeprefix("sqlite:///")).parent
search = open_search(folder, storage=sys.argv[1], trials=10)
(folder / sys.argv[2]).touch()
while not ((folder / "a").exists() and (folder / "b").exists()):
    time.sleep(0.05)  # neither does all trials before the other starts
search.run(Measurement(slow))
"""


@pytest.mark.long
def test_one_of_two_processes_is_killed_and_every_trial_gets_done(tmp_path, url):
    open_search(tmp_path, storage=url)  # workers that create one database at the same time trip
    search = open_search(tmp_path, storage=url)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, url, name],
            cwd=Path(__file__).parents[4],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    try:
        deadline = time.monotonic() + 90
        while {trial.shipped for trial in search.list_finished()} != {"a", "b"}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(workers[0].pid, signal.SIGKILL)
        workers[0].wait()
        _, errors = workers[1].communicate(timeout=90)
        assert workers[1].returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    trials = search.list_finished()
    assert 10 <= count_new(trials) <= 11
    assert not search.study.get_trials(states=[RUNNING])
    assert not any(trial.failure for trial in trials)
    assert [trial.origin for trial in trials].count("given") == 1
