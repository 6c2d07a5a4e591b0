"""`qdqbench search` on a tiny model with a made-up cost model: outcome, interruption, and two workers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from qdqbench.eval.placement.cost_fit import fit_costs
from qdqbench.eval.search import confirm
from qdqbench.eval.search import trials as search_module
from qdqbench.eval.search.results import read_search
from qdqbench.quantize.core.errors import CheckFailed
from qdqbench.quantize.core.progress import duration
from qdqbench.quantize.recipe.schema import dump_recipe, load_recipe

from ..support.cost_rows_made import made_rows
from .tiny import MAIN, Outcome, call_alone, environment, listing

pytestmark = pytest.mark.slow
TRIALS = 10


@pytest.fixture(scope="module", autouse=True)
def _few_rivals():
    """Of the shipped recipes: one of each kind."""
    names = ["bert-fp16", "bert-int8-attention", "bert-int8-ffn", "bert-int8-linears"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confirm, "shipped_recipes", lambda: names)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A cost model, and a recipe whose calibration leaves train rows to search on."""
    root = tmp_path_factory.mktemp("files")
    (root / "cost.json").write_text(fit_costs(made_rows()).model_dump_json())
    recipe = load_recipe("bert-int8-linears")
    section = recipe.calibration.model_copy(update={"samples": 64, "bias_correction": False})
    gate = recipe.gate.model_copy(update={"max_drop": 0.05})
    changed = recipe.model_copy(update={"name": "mine", "calibration": section, "gate": gate})
    (root / "mine.yaml").write_text(dump_recipe(changed))
    fast = changed.model_copy(update={"gate": gate.model_copy(update={"min_speedup": 50.0})})
    (root / "fast.yaml").write_text(dump_recipe(fast))
    return root


MODEL = ("--latency", "model")  # in a process of its own "auto" times engines of the CPU at hand


def options(given, files, out, *more, recipe="mine.yaml", trials=TRIALS):
    sst2 = given("sst2")
    words = [files / recipe, *sst2.options, "--out", out, "--trials", trials, "--samples", 96]
    return [str(word) for word in ("search", *words, "--cost-model", files / "cost.json", *more)]


@pytest.fixture(scope="module")
def searched(given, files, made_once, tmp_path_factory):
    """A finished search, to go on with, and how the command ended."""

    def search(folder):
        told = call_alone(*options(given, files, folder / "out", "--json"))
        (folder / "told.json").write_text(json.dumps(asdict(told)))

    made = shutil.copytree(made_once("searched", search), tmp_path_factory.mktemp("searched") / "made")
    return made / "out", Outcome(**json.loads((made / "told.json").read_text()))


def test_the_plan_says_about_what_it_takes(searched, given, files, tmp_path, qdqbench):
    """Of a machine that other tests use too: right to within a factor."""
    out, _ = searched
    fresh = tmp_path / "fresh"
    told = qdqbench(*options(given, files, fresh, "--plan", "--json"))
    assert (told.code, told.err) == (0, "")
    plan = json.loads(told.out)
    assert not fresh.exists()
    found = read_search(out / "search.json")
    took = [trial.seconds for trial in found.trials if trial.seconds]
    assert (plan["trials"], plan["done"], plan["confirmed"]) == (TRIALS, 0, len(found.confirmed))
    assert sum(took) / 12 < plan["trials_s"] < 12 * sum(took)
    parts = plan["ranking_s"] + plan["trials_s"] + plan["confirm_s"]
    assert plan["total_s"] == pytest.approx(parts)
    assert plan["source"]["mode"] == "model"
    kept = sum((out / name).stat().st_size for name in listing(out))
    assert kept / 10 < plan["disk_bytes"] < 100 * kept
    # what an earlier call has done says more
    more = options(given, files, out, "--plan", trials=TRIALS + 5)
    plan = json.loads(qdqbench(*more, "--json").out)
    assert (plan["done"], plan["ranking_s"]) == (TRIALS, 0)
    assert plan["trials_s"] == pytest.approx(5 * sum(took) / len(took))
    assert plan["basis"] == f"{len(took)} trials of this study"
    said = " ".join(qdqbench(*more).out.split())
    assert f"5 trials of about {duration(plan['trial_s'])}" in said
    assert f"{TRIALS} of {TRIALS + 5} are done" in said
    assert "nothing was tried" in said
    assert len(read_search(out / "search.json").trials) == len(found.trials)
    # and what cannot be searched is no plan, and no study
    for more in (["--plan"], []):
        refused = qdqbench("search", "bert-int8-linears", *given().options, "--out", fresh, *more)
        assert (refused.code, "are left to measure on" in refused.err) == (1, True)
        assert not fresh.exists()


def test_the_outcome_is_whole(searched):
    out, done = searched
    assert (done.code, done.err) == (0, "")
    found = read_search(out / "search.json")
    assert json.loads(done.out) == json.loads(found.model_dump_json())
    tried = [trial for trial in found.trials if trial.duplicate_of is None]
    assert len(tried) == TRIALS
    assert {"given recipe", "nothing in INT8", "ranking"} <= {trial.origin for trial in found.trials}
    assert any(trial.on_front for trial in tried)
    high = next(trial for trial in found.trials if trial.origin == "nothing in INT8")
    assert (high.accuracy.divergence, high.accuracy.drop, high.latency.speedup) == (0, 0, 1)
    assert all(t.accuracy.divergence > 0 for t in tried if t.int8_linears)
    assert all(t.accuracy.n == 96 for t in tried)
    assert found.source.mode == "model"
    assert "modelled, not measured" in found.warnings[0]
    assert any(line.endswith("split_outliers 64 (measured: 0)") for line in found.warnings)


def test_the_chosen_recipe_is_confirmed_on_validation(searched):
    out, _ = searched
    found = read_search(out / "search.json")
    recipe = load_recipe(str(out / "recipe.yaml"))
    assert recipe.name == "mine-searched"
    assert recipe.gate.max_drop == 0.05
    chosen, *others = found.confirmed
    assert chosen.name == recipe.name
    assert chosen.fake_quant["validation"].n == 96
    assert chosen.recipe == recipe.model_dump(mode="json")
    names = {row.name for row in others}
    assert {"mine", "bert-fp16", "bert-int8-linears", "bert-int8-attention"} <= names
    assert all(row.status == "done" for row in others), [row.reason for row in others]
    assert found.agreement is not None
    for row in others:
        better = row.metrics["accuracy"] >= chosen.metrics["accuracy"] and row.latency.ms <= chosen.latency.ms
        assert not row.dominates or (row.shipped and better)


def test_the_search_rows_are_not_those_that_calibrate(given, files):
    from qdqbench.eval.placement.space import make_space
    from qdqbench.eval.search.trial import Workspace
    from qdqbench.quantize.encoders.modules import module_table
    from qdqbench.quantize.rundir.session import RunConfig, Session
    from qdqbench.quantize.tasks.task import get_task

    sst2 = given("sst2")
    recipe = load_recipe(str(files / "mine.yaml"))
    config = RunConfig(recipe=recipe, model=str(sst2.model), task=get_task("sst2"), data=str(sst2.data))
    session = Session(config, files)
    model = session.fp32_model
    work = Workspace(session, make_space(recipe, module_table(model), model.base_model_prefix), 192)
    texts = session.split("train", limit=64 + 192, seed=0).dataset["sentence"]
    assert len(work.draw.labels) == 192
    calibrating = session.calibration_batches().split.dataset["sentence"]
    assert list(calibrating) == list(texts[:64])


def test_the_chosen_recipe_runs(searched, given, qdqbench, tmp_path):
    out, _ = searched
    done = qdqbench("run", out / "recipe.yaml", *given("sst2").options, "--out", tmp_path / "run",
                    "--until", "export")  # fmt: skip
    assert done.code == 0, done.err


def test_the_same_command_again_adds_nothing(searched, given, files, qdqbench):
    out, _ = searched
    before = read_search(out / "search.json")
    done = qdqbench(*options(given, files, out))
    assert done.code == 0, done.err
    assert "modelled" in done.out
    again = read_search(out / "search.json")
    assert again.trials == before.trials
    assert again.confirmed == before.confirmed


def test_more_trials_go_on(searched, given, files, qdqbench):
    out, _ = searched
    before = read_search(out / "search.json").trials
    done = qdqbench(*options(given, files, out, trials=TRIALS + 2))
    assert done.code == 0, done.err
    found = read_search(out / "search.json").trials
    assert sum(trial.duplicate_of is None for trial in found) == TRIALS + 2
    kept = {trial.number: trial.accuracy for trial in found}
    assert all(kept[trial.number] == trial.accuracy for trial in before)


def test_bad_files_are_told_before_a_study_is_made(searched, given, files, tmp_path, qdqbench):
    out = tmp_path / "out"
    done = qdqbench(*options(given, files, out, "--sensitivity", tmp_path / "nowhere.json"))
    assert done.code == 1
    assert "nowhere.json" in done.err
    assert "unexpected" not in done.err
    assert not out.exists()
    words = options(given, files, out)
    words[words.index("--cost-model") + 1] = str(tmp_path / "no-model.json")
    done = qdqbench(*words)
    assert (done.code, "qdqbench cost fit" in done.err) == (1, True)
    assert not out.exists()


def test_a_finished_search_is_not_replaced_by_another(searched, given, files, qdqbench):
    out, _ = searched
    before = (out / "search.json").read_bytes()
    done = qdqbench(*options(given, files, out, "--study-name", "another"))
    assert done.code == 1
    assert "holds the finished search" in done.err
    assert (out / "search.json").read_bytes() == before


@pytest.mark.long
def test_a_budget_of_time_ends_it_with_a_report(given, files, tmp_path, qdqbench):
    done = qdqbench(*options(given, files, tmp_path / "out", "--budget", "0"))
    found = read_search(tmp_path / "out" / "search.json")
    assert done.code == (0 if found.outcome.passed else 2), done.err
    assert len(found.trials) == 1
    assert f"1 of {TRIALS} trials fitted into 0 s; the same command goes on" in found.warnings


def test_a_study_of_other_settings_is_refused(searched, given, files, qdqbench):
    out, _ = searched
    done = qdqbench(*options(given, files, out, "--batch", 8))
    assert done.code == 1
    assert "made with other settings (batch and length)" in done.err
    assert done.err.count("\n") == 1


def test_a_gate_that_nothing_holds(given, files, searched, qdqbench):
    """The same study: the gate only chooses."""
    out, _ = searched
    done = qdqbench(*options(given, files, out, "--study-name", "mine-sst2", recipe="fast.yaml"))
    assert done.code == 2
    assert "none is 50x as fast" in done.err
    assert "the best was trial" in done.err
    assert not (out / "recipe.yaml").exists()


def test_no_cost_model_names_what_makes_one(given, files, tmp_path, qdqbench, monkeypatch):
    monkeypatch.setattr("qdqbench.eval.placement.cost_model.DATA", "no-such-file.json")
    words = options(given, files, tmp_path / "out")
    done = qdqbench(*words[: words.index("--cost-model")], "--latency", "model")
    assert done.code == 3
    assert "qdqbench cost measure" in done.err


def test_other_files_in_the_folder_are_left_alone(given, files, tmp_path, qdqbench):
    (tmp_path / "mine.txt").write_text("mine")
    done = qdqbench(*options(given, files, tmp_path))
    assert done.code == 1
    assert listing(tmp_path) == ["mine.txt"]


def test_too_few_rows_say_what_to_lower(given, files, tmp_path, qdqbench):
    words = options(given, files, tmp_path / "out")
    words[1] = "bert-int8-linears"  # 512 calibration samples of 256 rows
    done = qdqbench(*words)
    assert done.code == 1
    assert "calibration.samples" in done.err


@pytest.mark.long
def test_trials_that_fail_are_recorded_and_skipped(given, files, tmp_path, qdqbench, monkeypatch):
    judged = search_module.Workspace.accuracy

    def fail_sometimes(self, recipe, plan, **more):
        if more:  # the chosen one
            return judged(self, recipe, plan, **more)
        if len(plan.attention) and len(plan.int8):
            raise CheckFailed("the logits are NaN")
        if recipe.name == "mine":
            raise MemoryError("out of memory")
        return judged(self, recipe, plan)

    monkeypatch.setattr(search_module.Workspace, "accuracy", fail_sometimes)
    done = qdqbench(*options(given, files, tmp_path / "out", trials=6))
    assert done.code in (0, 2), done.err
    found = read_search(tmp_path / "out" / "search.json")
    failed = {trial.origin: trial.reason for trial in found.trials if trial.state == "failed"}
    assert failed["given recipe"] == "MemoryError: out of memory"
    assert "the logits are NaN" in failed.values()
    assert any(trial.state == "complete" for trial in found.trials)
    assert "trials failed" in done.out


def finished(storage):
    import optuna

    from qdqbench.eval.search.study import decided
    from qdqbench.quantize.machine.quiet import quiet

    with quiet("optuna"):
        try:
            return len(decided(optuna.load_study(study_name="mine-sst2", storage=storage)))
        except (KeyError, optuna.exceptions.OptunaError, Exception):  # the tables are not there yet
            return 0


@pytest.mark.long
def test_a_killed_search_loses_nothing(given, files, tmp_path, qdqbench):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *options(given, files, out, *MODEL, trials=8)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    storage, deadline = f"sqlite:///{out / 'study.db'}", time.monotonic() + 300
    while not (out / "study.db").exists() or finished(storage) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = finished(storage)
    done = qdqbench(*options(given, files, out, *MODEL, trials=8))
    assert done.code == 0, done.err
    found = read_search(out / "search.json").trials
    assert sum(trial.duplicate_of is None for trial in found) == 8
    assert before >= 2
    assert [trial.state for trial in found] == ["complete"] * len(found)
    origins = [trial.origin for trial in found if trial.origin == "given recipe"]
    assert origins == ["given recipe"]


@pytest.mark.long
def test_two_workers_share_a_study(given, files, tmp_path):
    storage = f"sqlite:///{tmp_path / 'shared.db'}"
    commands = [
        [sys.executable, "-c", MAIN, *options(given, files, tmp_path / name, *MODEL, "--storage", storage)]
        for name in ("a", "b")
    ]
    workers = [
        subprocess.Popen(c, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for c in commands
    ]
    ended = [worker.communicate(timeout=500) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], ended
    reports = [tmp_path / name / "search.json" for name in ("a", "b")]
    found = [read_search(path) for path in reports if path.is_file()]
    assert found  # the one that ended last, or both
    trials = found[-1].trials
    assert TRIALS <= sum(trial.duplicate_of is None for trial in trials) <= TRIALS + 1
    import optuna

    from qdqbench.quantize.machine.quiet import quiet

    with quiet("optuna"):
        study = optuna.load_study(study_name="mine-sst2", storage=storage)
    assert len({trial.user_attrs["worker"][1] for trial in study.get_trials()}) == 2
