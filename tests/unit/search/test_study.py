"""The study: shared, resumed, and whole after a worker dies."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import optuna
import pytest

from qdqbench.eval.search import study as study_module
from qdqbench.eval.search.study import (
    MOST_ATTEMPTS,
    counted,
    decided,
    mark_worker,
    open_study,
    others_run,
    prepare_study,
    requeue,
    revive,
    running,
    use_sampler,
)
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.machine.quiet import quiet

SETTINGS = {"model": "a", "batch and length": [32, 128]}


@pytest.fixture(autouse=True)
def no_log_lines():
    with quiet("optuna"):
        yield


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'study.db'}"


def opened(url, settings=SETTINGS, name="x"):
    study = open_study(url, name, settings)
    use_sampler(study, 0)
    return study


def objective(trial):
    keep = trial.suggest_int("keep", 0, 50)
    return float(keep), float(50 - keep)


def test_a_study_goes_on_where_it_was(url):
    first = opened(url)
    first.optimize(objective, n_trials=3)
    again = opened(url)
    assert counted(again) == 3
    again.optimize(objective, n_trials=2)
    assert counted(first) == 5
    proposals = [trial.params["keep"] for trial in again.get_trials()]
    assert len(set(proposals)) > 3  # a resumed sampler does not repeat what it proposed


def test_other_settings_are_refused_in_one_sentence(url):
    opened(url)
    with pytest.raises(UserError, match=r"made with other settings \(batch and length\)") as caught:
        opened(url, SETTINGS | {"batch and length": [8, 128]})
    assert "\n" not in str(caught.value)
    opened(url, {"model": "b"}, name="y")


@pytest.mark.parametrize(
    "bad", ["nonsense", "postgresql://me:secret@nowhere.invalid/db", "sqlite:////no/such/x.db"]
)
def test_a_database_that_cannot_be_used(bad):
    with pytest.raises(UserError, match="SQLAlchemy URL") as caught:
        opened(bad)
    assert "secret" not in str(caught.value)


def started_by(study, worker, **attributes):
    """A trial that runs in some process."""
    study.enqueue_trial({"keep": 7}, user_attrs={"origin": "ranking", **attributes})
    trial = study.ask()
    trial.suggest_int("keep", 0, 50)
    trial.set_user_attr("worker", worker)
    return trial


def test_a_dead_process_loses_no_trial(url):
    study = opened(url)
    started_by(study, [study_module._here(), 2**22 + 1, 1.0])  # no such process
    assert running(study) == 1
    assert revive(study) == 1
    assert (running(study), counted(study)) == (0, 0)
    study.optimize(objective, n_trials=1)
    done = study.get_trials()[-1]
    assert done.params == {"keep": 7}
    assert done.user_attrs["origin"] == "ranking"
    assert done.user_attrs["retry_of"] == 0
    assert [trial.number for trial in decided(study)] == [1]


def test_a_trial_that_kills_its_process_twice_has_failed(url):
    study = opened(url)
    started_by(study, [study_module._here(), 2**22 + 1, 1.0], attempt=MOST_ATTEMPTS)
    assert revive(study) == 1
    assert counted(study) == 1
    assert not study.get_trials(states=(optuna.trial.TrialState.WAITING,))


def test_a_trial_that_died_before_it_said_who_runs_it(url, monkeypatch):
    study = opened(url)
    study.ask()  # its process is killed here
    assert revive(study) == 0  # it may be about to say so
    monkeypatch.setattr(study_module, "WAIT_S", 0.0)
    monkeypatch.setattr(study_module, "UNMARKED", timedelta(0))
    assert not others_run(study)
    assert (running(study), counted(study)) == (0, 0)
    study.optimize(objective, n_trials=1)
    assert counted(study) == 1


def test_living_and_distant_workers_are_left_alone(url):
    study = opened(url)
    parent = os.getppid()
    started_by(study, [study_module._here(), parent, study_module._started(parent)])
    started_by(study, ["another-machine", 1, 1.0])
    assert revive(study) == 0
    assert running(study) == 2


def test_a_number_that_another_process_has_now_is_no_life_sign(url):
    study = opened(url)
    started_by(study, [study_module._here(), os.getppid(), 1.0])
    assert revive(study) == 1


def test_an_interrupted_trial_is_queued_again(url):
    study = opened(url)

    def interrupted(trial):
        mark_worker(trial)
        trial.suggest_int("keep", 0, 50)
        requeue(study, trial)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.optimize(interrupted, n_trials=1)
    assert counted(study) == 0
    kept = study.get_trials()[0].params
    study.optimize(objective, n_trials=1)
    assert study.get_trials()[-1].params == kept
    assert counted(study) == 1


def test_repeated_recipes_do_not_count_but_end_a_small_search(url):
    study = opened(url)

    def repeated(trial):
        if trial.number:
            trial.set_user_attr("duplicate_of", 0)
        return objective(trial)

    study.optimize(repeated, n_trials=5)
    assert counted(study) == 1
    study.optimize(repeated, n_trials=4)
    assert counted(study) == 3


def test_failures_count(url):
    study = opened(url)

    def failing(trial):
        objective(trial)
        raise RuntimeError("no")

    study.optimize(failing, n_trials=2, catch=(Exception,))
    assert counted(study) == 2


class Space:
    """Something that is ranked."""

    def __init__(self, ranking=None):
        self.ranking = ranking

    def ranked(self, order):
        return Space(order)


def test_one_worker_ranks_for_all(url):
    study, calls = opened(url), []

    def rank():
        calls.append(1)
        return Space(["b", "a"]), "measured"

    first = [("given recipe", {"keep": 3}, {"recipe": "text"}), ("ranking", {"keep": 3}, {})]
    for _ in range(2):
        space, source = prepare_study(study, rank, lambda space: first, Space())
        assert (space.ranking, source) == (["b", "a"], "measured")
    assert calls == [1]
    waiting = study.get_trials()
    assert [trial.user_attrs["origin"] for trial in waiting] == ["given recipe"]  # the same point once
    assert waiting[0].user_attrs["recipe"] == "text"


def test_a_ranking_whose_worker_died_is_made_anew(url, monkeypatch):
    study = opened(url)
    study.set_user_attr("ranking_by", [study_module._here(), 2**22 + 1, 1.0, 0.0])
    space, _ = prepare_study(study, lambda: (Space(["x"]), "anew"), lambda space: [], Space())
    assert space.ranking == ["x"]


def test_a_ranking_in_progress_is_waited_for(url, monkeypatch):
    study, parent = opened(url), os.getppid()
    study.set_user_attr("ranking_by", [study_module._here(), parent, study_module._started(parent), 0.0])

    def sleep(seconds):
        study.set_user_attr("ranking", {"order": ["theirs"], "source": "theirs"})

    monkeypatch.setattr(study_module.time, "sleep", sleep)
    space, _source = prepare_study(study, lambda: pytest.fail("ranked twice"), lambda space: [], Space())
    assert space.ranking == ["theirs"]


def test_only_who_ranked_a_fresh_study_draws_from_the_plain_seed(url, tmp_path):
    def proposals(study, me):
        study.set_user_attr("ranking_by", [*me, 0.0])
        use_sampler(study, 3)
        study.optimize(objective, n_trials=4)
        return [trial.params["keep"] for trial in study.get_trials()]

    me = study_module._me()
    first = proposals(open_study(url, "x", SETTINGS), me)
    assert proposals(open_study(f"sqlite:///{tmp_path / 'b.db'}", "x", SETTINGS), me) == first
    joined = [
        proposals(open_study(f"sqlite:///{tmp_path / name}", "x", SETTINGS), ["another", 1, 1.0])
        for name in ("c.db", "d.db")
    ]
    assert joined[0] != joined[1]
    assert first not in joined


def test_of_two_that_claim_the_ranking_the_last_one_makes_it(url, monkeypatch):
    study, made = opened(url), []

    def other(seconds):
        if not made:  # another worker claims at the same time, and ranks
            study.set_user_attr("ranking_by", ["another host", 1, 1.0, 2.0**40])
        made.append(seconds)
        if len(made) == 2:
            study.set_user_attr("ranking", {"order": ["theirs"], "source": "theirs"})

    monkeypatch.setattr(study_module.time, "sleep", other)
    space, _ = prepare_study(study, lambda: pytest.fail("ranked twice"), lambda space: [], Space())
    assert space.ranking == ["theirs"]


def test_workers_that_create_one_database_at_the_same_time(tmp_path):
    for attempt in range(3):  # whether they meet is chance
        together = threading.Barrier(6)

        def join(_, url=f"sqlite:///{tmp_path / f'{attempt}.db'}", together=together):
            together.wait()
            return opened(url)

        with ThreadPoolExecutor(6) as pool:
            studies = list(pool.map(join, range(6)))
        assert [study.user_attrs["settings"] for study in studies] == [SETTINGS] * 6
