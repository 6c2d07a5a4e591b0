"""Trials of one worker beside others."""

from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from qdqbench.eval.search import trials
from qdqbench.eval.search.study import open_study
from qdqbench.quantize.machine.quiet import quiet

FAIL = optuna.trial.TrialState.FAIL


@pytest.fixture
def study(tmp_path):
    with quiet("optuna"):
        yield open_study(f"sqlite:///{tmp_path / 'study.db'}", "x", {})


def worker_of(study: Any) -> Any:
    return SimpleNamespace(study=study)


@pytest.mark.parametrize("late", ["returns", "writes", "raises"])
def test_a_trial_that_another_worker_took_for_dead_is_left_to_it(study, monkeypatch, late):
    def objective(worker, trial):
        study.tell(trial.number, state=FAIL)
        if late == "writes":
            trial.set_user_attr("seconds", 1.0)
        if late == "raises":
            raise RuntimeError("broken")
        return 1.0, 1.0

    monkeypatch.setattr(trials, "_objective", objective)
    trials._run_one(worker_of(study))
    assert [trial.state for trial in study.get_trials()] == [FAIL]


def test_other_failures_of_the_study_are_not_hidden(study, monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("Cannot tell a FAIL trial.")

    monkeypatch.setattr(study, "ask", broken)
    with pytest.raises(ValueError, match="Cannot tell"):
        trials._run_one(worker_of(study))

    monkeypatch.undo()
    monkeypatch.setattr(trials, "_objective", lambda worker, trial: (1.0, 1.0))
    monkeypatch.setattr(study._storage, "set_trial_state_values", broken)
    with pytest.raises(AssertionError) as caught:  # Optuna's, in the place of the storage's error
        trials._run_one(worker_of(study))
    assert "Cannot tell" in str(caught.value.__context__)
