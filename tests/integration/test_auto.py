"""`qdqbench auto` on a tiny model: every step, the report, a resume after a kill, what is refused."""

import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from qdqbench.eval.metrics.results import GateIssue
from qdqbench.eval.selection.auto import run
from qdqbench.eval.selection.auto.results import Auto
from qdqbench.quantize.recipe.schema import load_recipe

from .cases import edited
from .tiny import Given, ended, listing, results

pytestmark = pytest.mark.slow
OUT = "auto"


@pytest.fixture
def clipped(tmp_path):
    """A recipe that clips what a model says most with: a far better one is easily found."""
    section = {"samples": 64, "method": "percentile/60", "smoothing": "none", "bias_correction": False}
    return edited(tmp_path / "clipped.yaml", {"name": "clipped", "calibration": section})


def read_auto(folder):
    return Auto.model_validate_json((folder / "auto.json").read_text())


def options(given, out, *more):
    return ["auto", *given.options, "--out", str(out), *map(str, more)]


@pytest.mark.long
def test_every_step_is_taken(sst2, clipped, tmp_path, qdqbench, monkeypatch):
    """No step holds before the training."""
    real, held = run.list_drops, []

    def never_before(scores, metric, max_drop, stage=""):
        known = {"stage": stage, "metric": metric, "value": 1, "stderr": 0, "limit": 0}
        unmet = GateIssue(code="accuracy", state="failed", **known)
        return real(scores, metric, max_drop, stage) or ([] if held else [unmet])

    monkeypatch.setattr(run, "list_drops", never_before)
    monkeypatch.setattr(run, "ISLANDS", 3 / 4)  # no few linears of the tiny model make most of its error
    run_step = run.AutoRun.run

    def run_last(self, step, before):
        if step.name == "qat":
            held.append(step.name)
        return run_step(self, step, before)

    monkeypatch.setattr(run.AutoRun, "run", run_last)
    out = tmp_path / OUT
    words = options(sst2, out, clipped, "--samples", 96, "--trials", 8)
    done = qdqbench(*words)
    found = read_auto(out)
    told = {step.name: (step.status, step.failure) for step in found.steps}
    assert [*told] == ["clipped", "methods", "islands", "search", "qat"]
    assert {status for status, _ in told.values()} == {"done"}, told
    assert done.code == (0 if found.choice.passed else 2), done.err
    first, methods, islands, search, qat = found.steps
    assert first.run.vs_previous == {}
    assert [step.run.previous for step in found.steps[1:]] == ["clipped", "methods", "islands", "search"]
    assert first.recipe.calibration != methods.recipe.calibration
    assert load_recipe(str(out / f"{methods.run.folder}.yaml")) == methods.recipe
    assert islands.run.int8_linears < methods.run.int8_linears
    assert islands.proposal.linears
    assert search.proposal.trial is not None
    assert qat.recipe.qat is not None
    assert qat.run.nested is not None
    assert results(out / qat.run.folder)["training"] is not None
    assert [step.estimate_s for step in found.steps] == [None, *(step.seconds for step in found.steps[:-1])]
    assert found.elapsed_s == pytest.approx(sum(step.seconds for step in found.steps))
    reused = results(out / methods.run.folder)["timings"]["baseline"]["reused"]
    assert reused  # FP32 was evaluated once


def test_the_first_recipe_that_holds_is_deployed_and_repeated(sst2, tmp_path, qdqbench):
    """And the same command again takes no step; more is told by --json."""
    out = tmp_path / OUT
    words = options(sst2, out, "int8-linears")
    done = ended(qdqbench(*words))
    found = read_auto(out)
    assert [step.status for step in found.steps] == ["done", *["skipped"] * 4]
    assert {step.skipped for step in found.steps[1:]} == {"holds"}
    choice = found.choice
    assert choice.passed
    assert Path(choice.engine).is_file()
    assert load_recipe(choice.recipe).gate.max_drop == found.gate.max_drop == 0.005
    assert "note: split 'train' has 256 rows: 128 calibrate" in " ".join(done.out.split())
    for name in ("auto.html", "auto.md"):
        assert choice.command in (out / name).read_text()
    page = (out / "auto.html").read_text()
    assert "http" not in page.replace("http://www.w3.org/", "")
    before = {name: (out / name).stat().st_mtime_ns for name in listing(out) if "/run/" in name}
    again = qdqbench(*words, "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["steps"] == json.loads(found.model_dump_json())["steps"]
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before


@pytest.mark.long
def test_the_embedded_default_without_any_option(tmp_path, qdqbench, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = qdqbench("auto")
    found = read_auto(tmp_path / "runs" / "auto-embedded")
    assert done.code == (0 if found.choice.passed else 2), done.err
    assert found.steps[0].kind == "shipped"  # which one, and whether it holds, is the machine's
    assert found.choice.command == "qdqbench run runs/auto-embedded/best.yaml"


def test_labels_in_another_order_end_it_at_once(sst2, tmp_path, qdqbench):
    """No recipe can hold where FP32 is wrong: each run ends at its baseline, and the reason is said once."""
    table = pyarrow.parquet.read_table(sst2.data / "sst2" / "validation.parquet").to_pydict()
    table["label"] = [1 - label for label in table["label"]]
    data = tmp_path / "sst2"
    shutil.copytree(sst2.data / "sst2", data)
    (data / "validation.parquet").unlink()
    pyarrow.parquet.write_table(pyarrow.table(table), data / "validation.parquet")
    names = ("bert-int8-attention", "bert-int8-linears")
    given = Given(sst2.model, sst2.task, tmp_path)
    done = ended(qdqbench(*options(given, tmp_path / OUT, *names)), 2)
    assert done.err.count("the model's 0 is the data's 1, 1 is the data's 0, which makes accuracy") == 1
    assert f"{', '.join(names)}: FP32 accuracy" in done.err
    assert not list((tmp_path / OUT).rglob("model.int8.onnx"))
    kept = [json.loads((tmp_path / OUT / name / "run" / "stages.json").read_text()) for name in names]
    assert kept[0]["stages"]["baseline"] == kept[1]["stages"]["baseline"]  # evaluated once
