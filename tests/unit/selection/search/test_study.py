"""The study of a search: shared, resumed, and whole after any of its workers dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import pytest

from qdqbench.eval.selection.search import study as study_module
from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.results import Ranking, Source
from qdqbench.eval.selection.search.study import count_trials, list_finished, list_trials, run_trials
from qdqbench.eval.selection.search.workspace import make_space, plan_key
from qdqbench.eval.selection.trials.results import Failure
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.calibration.record import select_record
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe.plan import resolve
from qdqbench.quantize.recipe.schema import Recipe, load_recipe
from qdqbench.quantize.recipe.sections import GateSettings
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.system.quiet import quiet

from ....support.tiny_bert import calibration_batches, padded_batch

SETTINGS = {"model": "a", "batch and length": [32, 128]}
FAIL = optuna.trial.TrialState.FAIL
SOURCE = Source(mode="int8-share", batch=1, length=8)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(study_module, "POLL_S", 0.01)
    monkeypatch.setattr(study_module, "SETUP_S", 0.1)
    with quiet("optuna"):
        yield


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture
def open_study(url, monkeypatch):
    """Open the study of a search without a model; a point is a number."""
    ranking = Ranking(units=[(0, "qkv")], attention=[], samples=8)
    first = [({"keep": 3}, {"origin": "given"}), ({"keep": 3}, {"origin": "ranking"})]
    monkeypatch.setattr(study_module, "rank_units", lambda work, file: ranking)
    monkeypatch.setattr(study_module, "first_trials", lambda work, ranking: first)

    def make(settings=SETTINGS, name="x", seed=0, storage=url):
        session = SimpleNamespace(config=SimpleNamespace(seed=seed), folder=Path("work"))
        options = SearchOptions(storage=storage, study_name=name)
        return study_module._open_study(SimpleNamespace(session=session), options, settings)

    return make


def objective(trial):
    keep = trial.suggest_int("keep", 0, 50)
    return float(keep), float(50 - keep)


def worker_of(study, trials=4, **options):
    work = SimpleNamespace(session=SimpleNamespace(recipe=SimpleNamespace(gate=GateSettings())))
    return study_module.Worker(work, SearchOptions(trials=trials, **options), SOURCE, None, study, None)


def run(study, monkeypatch, point=objective, **options):
    monkeypatch.setattr(study_module, "_try_point", lambda worker, trial: point(trial))
    monkeypatch.setattr(study_module, "_describe_best", lambda worker: "")
    run_trials(worker_of(study, **options))


def test_a_study_resumes(open_study, monkeypatch):
    first = open_study()
    run(first, monkeypatch, trials=3)
    again = open_study()
    assert count_trials(again) == (3, 0, 0)
    run(again, monkeypatch, trials=5)
    assert count_trials(first) == (5, 0, 0)
    assert len({trial.params["keep"] for trial in again.get_trials()}) > 3  # nothing is proposed again
    origins = [trial.user_attrs.get("origin") for trial in again.get_trials()]
    assert origins == ["given", None, None, None, None]  # the same point once


def test_a_fresh_study_repeats_by_its_seed(open_study, monkeypatch):
    proposals = []
    for name in ("a", "b"):
        study = open_study(name=name)
        run(study, monkeypatch)
        proposals.append([trial.params["keep"] for trial in study.get_trials()])
    assert proposals[0] == proposals[1]


def test_a_study_whose_creator_died_before_it_was_set_up(open_study, url):
    optuna.create_study(study_name="x", storage=url, directions=["minimize"] * 2)
    assert open_study().user_attrs["settings"] == SETTINGS


def test_other_settings_are_refused_in_one_sentence(open_study):
    open_study()
    with pytest.raises(UserError, match=r"made with other settings \(batch and length\)") as caught:
        open_study(SETTINGS | {"batch and length": [8, 128]})
    assert "\n" not in str(caught.value)
    open_study({"model": "b"}, name="y")


@pytest.mark.parametrize(
    "bad", ["nonsense", "postgresql://me:secret@nowhere.invalid/db", "sqlite:////no/such/x.db"]
)
def test_a_database_that_cannot_be_used(bad):
    with pytest.raises(UserError, match="SQLAlchemy URL") as caught:
        study_module.open_storage(bad)
    assert "secret" not in str(caught.value)


@pytest.mark.long
def test_a_trial_is_queued_once_after_its_worker_died(open_study, monkeypatch):
    monkeypatch.setattr(study_module, "HEARTBEAT_S", 1)
    monkeypatch.setattr(study_module, "GRACE_S", 1)
    study = open_study()
    for deaths in (1, 2):
        trial = study.ask()
        study._storage.record_heartbeat(trial._trial_id)
        assert count_trials(study) == (0, 1, 0)
        time.sleep(2.1)  # whole seconds of the database
        optuna.storages.fail_stale_trials(study)
        assert count_trials(study) == ((0, 0, 1) if deaths == 1 else (1, 0, 0))
    (died,) = list_trials(worker_of(study))
    assert (died.number, died.origin, died.failure.text) == (1, "given", "its process died")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MissingDevice])
def test_an_interrupted_trial_is_queued_again(open_study, monkeypatch, error):
    study = open_study()

    def interrupt(trial):
        objective(trial)
        raise error

    with pytest.raises(error):
        run(study, monkeypatch, interrupt)
    assert count_trials(study) == (0, 0, 1)
    run(study, monkeypatch, trials=1)
    assert [trial.params for trial in list_finished(study)] == [{"keep": 3}]


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupted_trial_keeps_its_number_and_parameters(open_study, monkeypatch, times):
    study = open_study()
    undisturbed = open_study(name="y")
    run(undisturbed, monkeypatch, trials=4)

    def interrupt(trial):
        objective(trial)
        raise KeyboardInterrupt

    run(study, monkeypatch, trials=1)
    for _ in range(times):
        with pytest.raises(KeyboardInterrupt):
            run(study, monkeypatch, interrupt)
        assert count_trials(study) == (1, 0, 1)
    run(study, monkeypatch, trials=4)
    assert [trial.number for trial in list_finished(study)] == [0, 1, 2, 3]
    assert study.get_trials()[1].params == undisturbed.get_trials()[1].params


def test_a_search_alone_in_its_folder_takes_over_at_once(open_study, url, monkeypatch):
    monkeypatch.setattr(study_module, "open_storage", lambda given, real=study_module.open_storage: real(url))
    for deaths in (1, 2):
        trial = open_study().ask()
        assert (trial.number, count_trials(open_study())) == (0, (0, 1, 0))  # its worker may be alive
        study = open_study(storage=None)
        assert count_trials(study) == ((0, 0, 1) if deaths == 1 else (1, 0, 0))
    (died,) = list_trials(worker_of(study))
    assert (died.number, died.failure.text) == (0, "its process died")


@pytest.mark.parametrize("late", ["returns", "writes", "raises"])
def test_a_trial_that_another_worker_took_for_dead_is_left_to_it(open_study, monkeypatch, late):
    study, taken = open_study(), []

    def slow(trial):
        if not taken:
            study.tell(trial.number, state=FAIL)
            study_module._queue_again()(study, study.get_trials()[trial.number])
            taken.append(trial.number)
            if late == "writes":
                trial.set_user_attr("seconds", 1.0)
            if late == "raises":
                raise RuntimeError("broken")
        return objective(trial)

    run(study, monkeypatch, slow, trials=1)
    assert count_trials(study) == (1, 0, 0)
    assert list_finished(study)[0].params == {"keep": 3}


def test_other_failures_of_the_study_are_not_hidden(open_study, monkeypatch):
    study = open_study()

    def broken(*_, **__):
        raise ValueError("the database is gone")

    monkeypatch.setattr(study, "ask", broken)
    with pytest.raises(ValueError, match="is gone"):
        run(study, monkeypatch)


def test_repeated_recipes_do_not_count_but_end_a_small_search(open_study, monkeypatch):
    study = open_study()

    def repeat(trial):
        if trial.number:
            trial.set_user_attr("duplicate_of", 0)
        return objective(trial)

    run(study, monkeypatch, repeat, trials=3)
    assert len(study.get_trials()) == 9
    assert count_trials(study) == (3, 0, 0)


def test_failed_trials_count_and_a_budget_ends_a_search(open_study, monkeypatch):
    study = open_study()

    def fail(trial):
        objective(trial)
        raise study_module.TrialFailed

    run(study, monkeypatch, fail, trials=2)
    assert count_trials(study) == (2, 0, 0)
    run(study, monkeypatch, trials=9, budget=1e-9)
    assert count_trials(study) == (2, 0, 0)


def test_a_point_that_another_worker_took_too_and_finished_is_not_told_twice(open_study, monkeypatch):
    study, taken = open_study(), []

    def finish_first(trial):
        values = objective(trial)
        if not taken:
            taken.append(trial.number)
            complete = optuna.trial.TrialState.COMPLETE
            study._storage.set_trial_state_values(trial._trial_id, complete, values)
        return values

    run(study, monkeypatch, finish_first, trials=2)
    assert taken == [0]
    assert {trial.state for trial in study.get_trials()} == {optuna.trial.TrialState.COMPLETE}
    assert [trial.number for trial in list_finished(study)] == [*range(len(study.get_trials()))]


def test_a_failed_point_is_recorded_with_its_reason(open_study, monkeypatch):
    def fail(worker, point, trial):
        raise MemoryError("no  more")

    study = open_study()
    worker = worker_of(study, trials=1)
    worker.work.space = SimpleNamespace(suggest=lambda point: {"keep": point.suggest_int("keep", 0, 50)})
    monkeypatch.setattr(study_module, "_try_recipe", fail)
    run_trials(worker)
    (trial,) = list_trials(worker)
    assert trial.failure == Failure(code="error", text="MemoryError: no more")
    assert (trial.origin, trial.params, trial.is_scored) == ("given", {"keep": 3}, False)


WORKER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from qdqbench.eval.selection.search import study
from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.results import Ranking, Source
from qdqbench.quantize.utils.system.quiet import quiet

def point(worker, trial):
    keep = trial.suggest_int("keep", 0, 50)
    trial.set_user_attr("worker", sys.argv[2])
    time.sleep(0.4)
    return float(keep), float(50 - keep)

ranking = Ranking(units=[(0, "qkv")], attention=[], samples=8)
study.HEARTBEAT_S, study.GRACE_S, study.POLL_S = 1, 2, 0.2
study.rank_units = lambda work, file: ranking
study.first_trials = lambda work, ranking: [({"keep": 3}, {"origin": "given"})]
study._try_point, study._describe_best = point, lambda worker: ""
with quiet("optuna"):
    work = SimpleNamespace(session=SimpleNamespace(config=SimpleNamespace(seed=0)))
    opened = study._open_study(work, SearchOptions(storage=sys.argv[1], study_name="x"), {})
    folder = Path(sys.argv[1].removeprefix("sqlite:///")).parent
    (folder / sys.argv[2]).touch()
    while not ((folder / "a").exists() and (folder / "b").exists()):
        time.sleep(0.05)  # neither does all trials before the other starts
    source = Source(mode="int8-share", batch=1, length=8)
    study.run_trials(study.Worker(None, SearchOptions(trials=10), source, None, opened, ranking))
"""


@pytest.mark.long
def test_one_of_two_processes_is_killed_and_every_trial_gets_done(url):
    """They start at the same time, on a database that neither has made yet."""
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, url, name], stderr=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    try:
        deadline = time.monotonic() + 90
        running = []
        while not running:  # a trial of the first worker, with another of the second one done
            assert time.monotonic() < deadline
            time.sleep(0.05)
            trials = _read(url)
            if "b" in {trial.user_attrs.get("worker") for trial in trials}:
                state = optuna.trial.TrialState.RUNNING
                running = [t for t in trials if t.state == state and t.user_attrs.get("worker") == "a"]
        os.kill(workers[0].pid, signal.SIGKILL)
        workers[0].wait()
        _, errors = workers[1].communicate(timeout=90)
        assert workers[1].returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    study = optuna.load_study(study_name="x", storage=url)
    done, active, queued_again = count_trials(study)
    assert 10 <= done <= 11
    assert (active, queued_again) == (0, 0)
    assert all(trial.state == optuna.trial.TrialState.COMPLETE for trial in list_finished(study))
    retried = [trial for trial in study.get_trials() if "retry_history" in trial.system_attrs]
    killed = {trial.number for trial in study.get_trials() if trial.state == FAIL}
    assert {trial.system_attrs["failed_trial"] for trial in retried} == killed
    assert [trial.user_attrs.get("origin") for trial in list_finished(study)].count("given") == 1


def _read(url):
    try:
        return optuna.load_study(study_name="x", storage=url).get_trials(deepcopy=False)
    except Exception:  # its tables, or the study, are not there yet
        return []


HOW = {"method": "max", "smoothing": "0.5", "weights_method": "max"}


@pytest.fixture(scope="module")
def space(tiny_bert):
    model = load_model(str(tiny_bert))
    base = load_recipe("bert-int8-linears").model_dump(mode="json")
    base["calibration"]["bias_correction"] = False
    base["export"]["gelu"] = "exact"
    return make_space(Recipe.model_validate(base), module_table(model), model.base_model_prefix)


def logits_of(folder, space, recipe, record=None):
    """Logits of a recipe's fake-quant model, calibrated alone or restored from a record."""
    plan = resolve(recipe, space.modules, space.prefix)
    model = load_model(str(folder))
    if record is None:
        ptq.calibrate(model, plan, calibration_batches(), recipe.calibration)
    else:
        ptq.restore(model, plan, select_record(plan, *record))
    return quantizers.forward(model, padded_batch()).numpy()


@pytest.fixture(scope="module")
def everything(tiny_bert, space):
    """Records that hold all candidates, smoothed: without INT8 attention, and with it."""
    found = []
    for attention in (set(), set(space.attention)):
        recipe = space.assemble(set(space.units), attention, HOW)
        model = load_model(str(tiny_bert))
        plan = resolve(recipe, space.modules, space.prefix)
        found.append(ptq.calibrate(model, plan, calibration_batches(), recipe.calibration))
    return found


@pytest.mark.parametrize(
    ("units", "attention"),
    [
        ([(0, "qkv"), (0, "output"), (1, "ffn-in")], []),
        ([(0, "output"), (1, "output")], [0, 1]),
        ([(1, "ffn-out")], []),
        ([(0, "qkv"), (0, "output"), (0, "ffn-in"), (0, "ffn-out"), (1, "qkv"), (1, "output")], [1]),
    ],
)
def test_a_part_of_a_shared_calibration_is_the_recipe_s_own(tiny_bert, space, everything, units, attention):
    recipe = space.assemble(set(units), set(attention), HOW)
    own, shared = logits_of(tiny_bert, space, recipe), logits_of(tiny_bert, space, recipe, everything)
    fp32 = quantizers.forward(load_model(str(tiny_bert)), padded_batch()).numpy()
    assert np.abs(own - fp32).max() > 0
    assert np.abs(shared - own).max() <= 1e-5  # the same codes


def test_nothing_of_other_linears_is_left(space, everything):
    recipe = space.assemble({(1, "qkv")}, set(), HOW)
    plan = resolve(recipe, space.modules, space.prefix)
    found = select_record(plan, *everything)
    assert {name.rpartition(".")[0] for name in found.quantizers} == set(plan.int8)
    assert set(found.smoothing.inputs) == set(plan.int8)


def test_keys_tell_apart_what_makes_another_model(space):
    def key(units, attention=(), **how):
        recipe = space.assemble(set(units), set(attention), HOW | how)
        return plan_key(recipe, resolve(recipe, space.modules, space.prefix))

    some = [(0, "output"), (1, "ffn-in")]
    assert key(some) == key(some[::-1])
    others = [key(some[:1]), key(some, [0]), key(some, method="mse"), key(some, weights_method="mse")]
    assert len({key(some), *others}) == 5
    assert key([], method="mse") == key([], method="max")  # nothing to calibrate
    # smoothing is of LayerNorm outputs: with other linears alone it changes nothing
    assert key(some[:1], smoothing="0.8") == key(some[:1], smoothing="none")
