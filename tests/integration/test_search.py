"""`qdqbench search` on a tiny model without engines: outcome, interruption, and two workers."""

import json
import shutil
from dataclasses import asdict

import pytest

from qdqbench.eval.selection.search import confirm
from qdqbench.eval.selection.search.results import read_search
from qdqbench.eval.selection.search.workspace import Workspace
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.errors import CheckFailed

from .cases import edited
from .tiny import Outcome, call_alone, ended

pytestmark = pytest.mark.slow
TRIALS = 7


@pytest.fixture(scope="module", autouse=True)
def _few_rivals():
    """Of the shipped recipes: one of each kind."""
    names = ["bert-fp16", "bert-int8-attention", "bert-int8-ffn", "bert-int8-linears"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confirm, "shipped_recipes", lambda: names)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A recipe whose calibration leaves train rows to search on."""
    root = tmp_path_factory.mktemp("files")
    section = {"samples": 64, "bias_correction": False}
    edited(root / "mine.yaml", {"name": "mine", "calibration": section, "gate": {"max_drop": 0.05}})
    return root


def options(given, files, out, *more, trials=TRIALS):
    sst2 = given("sst2")
    words = [files / "mine.yaml", *sst2.options, "--out", out, "--trials", trials, "--samples", 96]
    return [str(word) for word in ("search", *words, "--speed", "int8-share", *more)]


@pytest.fixture(scope="module")
def searched(given, files, made_once, tmp_path_factory):
    """A finished search, to go on with, and how the command ended."""

    def search(folder):
        told = call_alone(*options(given, files, folder / "out", "--json"))
        (folder / "told.json").write_text(json.dumps(asdict(told)))

    made = shutil.copytree(made_once("searched", search), tmp_path_factory.mktemp("searched") / "made")
    return made / "out", Outcome(**json.loads((made / "told.json").read_text()))


def test_the_outcome_is_whole_and_confirmed_on_validation(searched):
    out, done = searched
    assert (done.code, done.err) == (0, "")
    found = read_search(out / "search.json")
    assert json.loads(done.out) == json.loads(found.model_dump_json())
    tried = [trial for trial in found.trials if trial.duplicate_of is None]
    assert len(tried) == TRIALS
    assert {"given", "unquantized", "ranking"} <= {trial.origin for trial in found.trials}
    assert any(trial.on_front for trial in tried)
    high = next(trial for trial in found.trials if trial.origin == "unquantized")
    assert (high.noise_power, high.scores["draw"].drop, high.int8_share) == (0, 0, 0)
    assert all(t.noise_power > 0 for t in tried if t.int8_linears)
    assert all(t.scores["draw"].n == 96 for t in tried)
    assert all(t.int8_share > 0 and t.speedup is None for t in tried if t.int8_linears)
    assert found.source.mode == "int8-share"
    assert "INT8 share" in found.warnings[0]
    recipe = load_recipe(str(out / "recipe.yaml"))
    assert recipe.name == "mine-searched"
    assert recipe.gate.max_drop == 0.05
    chosen, *others = found.confirmed
    assert chosen.name == recipe.name
    assert chosen.scores["validation"].n == 96
    assert chosen.recipe == recipe
    names = {row.name for row in others}
    assert {"mine", "bert-fp16", "bert-int8-linears", "bert-int8-attention"} <= names
    assert not any(row.failure for row in others), [row.failure for row in others]
    assert found.agreement is not None
    for row in others:
        better = row.score.drop <= chosen.score.drop and row.int8_share >= chosen.int8_share
        assert not row.dominates or (row.origin == "shipped" and better)


def test_the_chosen_recipe_runs(searched, given, qdqbench, tmp_path):
    out, _ = searched
    words = (*given("sst2").options, "--out", tmp_path / "run", "--until", "export")
    ended(qdqbench("run", out / "recipe.yaml", *words))


def test_the_same_command_again_adds_nothing(searched, given, files, qdqbench):
    out, _ = searched
    before = read_search(out / "search.json")
    done = ended(qdqbench(*options(given, files, out)))
    assert "INT8 share" in done.out
    again = read_search(out / "search.json")
    assert again.trials == before.trials
    assert again.confirmed == before.confirmed  # nothing is calibrated or scored again


@pytest.mark.parametrize(
    "case",
    [
        (["--study-name", "another"], "holds the finished search"),
        (["--batch", 8], "made with other settings (batch and length)"),
    ],
)
def test_a_finished_search_is_not_replaced_by_another(searched, given, files, qdqbench, case):
    (more, told), (out, _) = case, searched
    before = (out / "search.json").read_bytes()
    done = ended(qdqbench(*options(given, files, out, *more)), 1)
    assert told in done.err
    assert done.err.count("\n") == 1
    assert (out / "search.json").read_bytes() == before


@pytest.mark.long
def test_trials_that_fail_are_recorded_and_skipped(given, files, tmp_path, qdqbench, monkeypatch):
    calibrate = Workspace._calibrate

    def fail_sometimes(self, recipe, plan, *, in_full):
        if not in_full and plan.attention:
            raise CheckFailed("the logits are NaN")
        if not in_full and recipe.name == "mine":
            raise MemoryError("out of memory")
        return calibrate(self, recipe, plan, in_full=in_full)

    monkeypatch.setattr(Workspace, "_calibrate", fail_sometimes)
    done = qdqbench(*options(given, files, tmp_path / "out", trials=6))
    assert done.code in (0, 2), done.err
    found = read_search(tmp_path / "out" / "search.json")
    failed = {trial.origin: trial.failure.text for trial in found.trials if trial.failure}
    assert failed["given"] == "MemoryError: out of memory"
    assert "the logits are NaN" in failed.values()
    assert any(trial.is_scored for trial in found.trials)
    assert "trials failed" in done.out
