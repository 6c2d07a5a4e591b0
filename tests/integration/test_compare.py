"""`compare` of finished runs, its page in a real browser."""

import fcntl
import json

import numpy as np
import pandas
import pytest

from .tiny import ended, refused


@pytest.fixture
def changed_run(a_run):
    """A copy of the finished run in which three answers became the other ones; two of them were right."""
    (a_run / "stages.json").unlink()  # which holds answers to their hashes
    for name in ("onnxruntime", "engine"):
        path = a_run / "logits" / f"{name}.npz"
        if not path.is_file():
            continue
        with np.load(path) as arrays:
            held = dict(arrays)
        logits = held["validation.logits"]
        right = logits.argmax(1) == held["validation.labels"]
        flipped = [*np.flatnonzero(right)[:2], np.flatnonzero(~right)[0]]
        logits[flipped] = logits[flipped][:, ::-1]
        np.savez(path, **held)
    return a_run, sorted(map(int, flipped))


@pytest.fixture
def compared(finished_run, changed_run, tmp_path, qdqbench):
    folder, flipped = changed_run
    done = ended(qdqbench("compare", finished_run, folder, "--out", tmp_path / "page"))
    assert "points" not in done.err
    return tmp_path / "page", flipped


def test_what_changed_is_found_with_its_text_and_counted(compared, given):
    folder, flipped = compared
    found = json.loads((folder / "compare.json").read_text())
    [pair] = found["pairs"]
    versus = pair["comparison"]
    assert versus["disagreements"] == 3
    assert versus["delta"]["accuracy"] == pytest.approx(-1 / 96)
    rows = {row["sample"]: row for row in found["samples"]}
    texts = pandas.read_parquet(given("sst2").data / "sst2" / "validation.parquet")["sentence"]
    for sample in flipped:
        assert rows[sample]["text"] == texts[sample]
        predictions = rows[sample]["predictions"]
        assert predictions["bert-int8-linears"]["prediction"] != predictions["run"]["prediction"]
        assert predictions["bert-int8-linears"]["margin"] == pytest.approx(predictions["run"]["margin"])
    assert {row["what"] for row in found["layers"]} >= {"amax", "output error"}


def test_runs_that_cannot_be_compared_are_named(finished_run, a_run, qdqbench, tmp_path):
    (a_run / "results.json").unlink()
    refused(
        qdqbench("compare", a_run, tmp_path / "nothing", "--out", tmp_path / "page"),
        "has no results.json",
        "is no run directory",
    )
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize("held", ["labels", "logits"])
def test_runs_of_other_samples_are_side_by_side_and_not_paired(finished_run, a_run, qdqbench, tmp_path, held):
    damaged = a_run / "logits" / "fp32.npz"
    original = damaged.read_bytes()
    damaged.write_bytes(original + b" ")
    refused(
        qdqbench("compare", finished_run, a_run, "--out", tmp_path / "page"),
        "fp32.npz changed after its stage",
    )
    damaged.write_bytes(original)
    (a_run / "stages.json").unlink()
    for path in (a_run / "logits").glob("*.npz"):
        with np.load(path) as arrays:
            kept = dict(arrays)
        name = f"validation.{held}"
        kept[name] = 1 - kept[name] if held == "labels" else np.roll(kept[name], 1, axis=0)
        np.savez(path, **kept)
    done = ended(qdqbench("compare", finished_run, a_run, "--out", tmp_path / "page", "--json"))
    found = json.loads(done.out)
    assert "other samples" in found["pairs"][0]["not_paired"]
    assert [run["name"] for run in found["runs"]] == ["bert-int8-linears", "run"]


def test_a_bench_of_other_files_is_left_out_and_said(finished_run, a_run, tmp_path, qdqbench):
    target = {"kind": "run", "name": "run", "random_weights": False, "calibration": "sst2", "shape": {}}
    settings = {"batches": [1], "lengths": [32], "dataset": None, "streams": [1], "rounds": 1}
    settings |= {"duration_s": 1.0, "iterations": None, "input_sets": 1}
    settings |= {"engine_shapes": "recipe", "seed": 0}
    empty = {name: [] for name in ("systems", "configs", "notes", "warnings", "errors")}
    bench = {"created": "", "command": "", "complete": True, "device": "cpu", "compute_capability": None}
    bench |= {"target": target | {"files": {"model.int8.onnx": "0" * 64}}, "settings": settings, **empty}
    (a_run / "bench.json").write_text(json.dumps(bench | {"recipe": {}, "environment": {}}))
    done = ended(qdqbench("compare", finished_run, a_run, "--out", tmp_path / "page", "--json"))
    assert "the bench of run is of other files: no latency is shown" in done.out


def test_its_folder_is_claimed(finished_run, a_run, qdqbench, tmp_path):
    """As those of other commands: of a comparison alone, of one process at a time, and nothing is left."""
    page = tmp_path / "page"
    assert qdqbench("compare", finished_run, finished_run, "--out", page).code == 1
    assert not page.exists()
    for _ in range(2):  # the second writes over the first
        assert qdqbench("compare", finished_run, a_run, "--out", page).code == 0
    with (page / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another process has it
        busy = qdqbench("compare", finished_run, a_run, "--out", page)
    refused(busy, "is in use by")
    other = qdqbench("run", "bert-int8-linears", "--out", page)
    refused(other, "holds a finished comparison of finished runs")
    refused(qdqbench("compare", finished_run, a_run, "--out", a_run), "holds a finished run")
