"""`qdqbench sensitivity` on a tiny model: what it writes, what it refuses, and that a kill loses nothing."""

import json
import shutil
from collections import Counter

import pytest

from qdqbench.eval.selection.sensitivity import measure
from qdqbench.eval.selection.sensitivity.results import ranking, read_sensitivity
from qdqbench.eval.selection.trials.store import Trials
from qdqbench.quantize.recipe.schema import load_recipe

from ..support.pages import offline
from .tiny import LAYERS, Given, ended, fine, listing

FILES = [
    *("recipe.yaml", "sensitivity.html", "sensitivity.json", "sensitivity.md"),
    *("sensitivity.trials.fp32.npz", "sensitivity.trials.jsonl"),
]
VOLATILE = {"created", "command", "timings"}


def lasting(folder):
    """What does not depend on when it was measured."""
    found = json.loads((folder / "sensitivity.json").read_text())
    return {name: value for name, value in found.items() if name not in VOLATILE}


def test_everything_is_measured_and_written(qdqbench, sst2, recipe, tmp_path):
    out = tmp_path / "out"
    options = [*sst2.options, "--out", out, "--samples", 96]
    done = fine(qdqbench("sensitivity", recipe("bert-int8-attention"), *options))
    assert listing(out) == FILES
    found = read_sensitivity(out)
    assert found == read_sensitivity(out / "sensitivity.json")
    groups = Counter(row.group for row in found.rows)
    assert groups == {"linear": 6 * LAYERS + 2, "attention": LAYERS, "block": LAYERS, "kind": 9}
    assert len(found.int8) == 7 * LAYERS
    assert len(ranking(found.rows)) == 6 * LAYERS
    assert found.data["samples"] == 96
    # the same choice, reached on two ways: a layer's linears, and every kind, are part of everything
    assert found.curve[0].comparison == found.full
    worst = ranking(found.rows)[0]
    assert worst.name in done.out.replace("layer.", "encoder.layer.")
    assert offline((out / "sensitivity.html").read_text()).tags.count("svg") == 3
    assert f"`{worst.name}`" in (out / "sensitivity.md").read_text()


def test_written_recipe_runs(qdqbench, sst2, recipe, tmp_path, monkeypatch):
    """With linears kept out."""
    monkeypatch.setattr(measure, "point_holds", lambda point, full, limit: point.kept >= 3)
    out = tmp_path / "out"
    options = [*sst2.options, "--out", out, "--samples", 32]
    ended(qdqbench("sensitivity", recipe("bert-int8-attention"), *options))
    found = read_sensitivity(out)
    assert (found.choice.kept, found.choice.reached) == (3, True)
    assert [point.kept for point in found.curve] == [0, 1, 2, 3, 4, 8]
    fine(qdqbench("run", out / "recipe.yaml", *sst2.options, "--out", tmp_path / "run", "--until", "check"))
    quantizers = json.loads((tmp_path / "run" / "calibration.json").read_text())["quantizers"]
    modules = {name.rpartition(".")[0] for name in quantizers}
    chosen = found.curve[3]
    assert modules == {*found.int8} - {*chosen.linears, *chosen.attention}


@pytest.mark.long
def test_killed_run_goes_on(qdqbench, given, recipe, tmp_path, monkeypatch):
    """Killed twice, with a torn line, against one that was not; a regression, in other batches of 7."""
    task, path = given("stsb"), recipe()
    options = ["sensitivity", path, *task.options, "--samples", 40, "--batch-size", 7]
    assert qdqbench(*options, "--out", tmp_path / "whole").code == 0
    real, limit, measured = Trials.compare, [9], []

    def compare(*arguments):
        if len(measured) == limit[0]:
            raise KeyboardInterrupt
        measured.append(1)
        return real(*arguments)

    monkeypatch.setattr(Trials, "compare", compare)
    out = tmp_path / "killed"
    done = qdqbench(*options, "--out", out)
    assert (done.code, listing(out)) == (130, ["sensitivity.trials.fp32.npz", "sensitivity.trials.jsonl"])
    assert "resumes" in done.err
    with (out / "sensitivity.trials.jsonl").open("a") as stream:
        stream.write('{"key": "only')
    limit[0] = 25
    assert qdqbench(*options, "--out", out).code == 130
    limit[0] = -1
    done = ended(qdqbench(*options, "--out", out))
    assert "resuming after" in done.err
    assert lasting(out) == lasting(tmp_path / "whole")
    assert (out / "recipe.yaml").read_text() == (tmp_path / "whole" / "recipe.yaml").read_text()
    count = len(measured)
    assert qdqbench(*options, "--out", out).code == 0  # all is there
    assert len(measured) == count
    lines = (out / "sensitivity.trials.jsonl").read_text().splitlines()
    assert len(lines) == count + 1  # settings


def test_validation_is_not_read(qdqbench, sst2, recipe, tmp_path):
    """The folder has no validation split; a train split that is too small is said."""
    data = tmp_path / "data"
    shutil.copytree(sst2.data / "sst2", data / "sst2")
    (data / "sst2" / "validation.parquet").unlink()
    out = tmp_path / "out"
    given, path = Given(sst2.model, "sst2", data), recipe(samples=226)
    done = qdqbench("sensitivity", path, *given.options, "--out", out, "--json", "--samples", 64)
    found = json.loads(done.out)
    assert found["data"]["samples"] == 30
    assert any("measured on 30 samples, not 64" in note for note in found["notes"])


@pytest.mark.long
def test_bias_correction_is_left_out_and_said(qdqbench, sst2, recipe, tmp_path):
    """FP32 stays FP32; the written recipe corrects."""
    found = {}
    for name, changed in (("with", {"bias_correction": True}), ("without", {})):
        out = tmp_path / name
        ended(qdqbench("sensitivity", recipe(**changed), *sst2.options, "--out", out, "--samples", 16))
        found[name] = read_sensitivity(out)
    assert found["with"].rows == found["without"].rows
    assert any("bias correction" in note for note in found["with"].notes)
    assert load_recipe(str(tmp_path / "with" / "recipe.yaml")).calibration.bias_correction


def test_gate_that_cannot_hold_is_status_2(qdqbench, sst2, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "point_holds", lambda point, full, limit: False)
    out = tmp_path / "out"
    done = ended(qdqbench("sensitivity", recipe(), *sst2.options, "--out", out, "--samples", 16), 2)
    assert "no measured number of linears" in done.err
    assert listing(out) == FILES
    assert read_sensitivity(out).choice.reached is False
