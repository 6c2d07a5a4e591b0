"""What quantization changed in a whole run, and FP16 beside it where it is asked for."""

import csv
import json

import pandas
import pytest

from qdqbench.eval.runs.report.sections import EVALUATE_FP16

from .tiny import fine, results


def test_a_run_says_what_it_changed(finished_run, given):
    found = results(finished_run)
    deployed = [name for name, row in found["stages"].items() if row["status"] == "done"][-1]
    versus = found["stages"][deployed]["vs_fp32"]
    changed, classes = found["changed_predictions"], found["classes"]
    assert (changed["stage"], changed["n"], changed["count"]) == (deployed, 96, versus["disagreements"])
    regressed, fixed = (changed["counts"].get(name, 0) for name in ("regressed", "fixed"))
    assert (fixed - regressed) / 96 == pytest.approx(versus["delta"]["accuracy"])
    assert sum(row["regressed"] for row in classes["rows"]) == regressed
    for side in ("fp32", "confusion"):
        counts = classes[side]
        stage = "fp32" if side == "fp32" else deployed
        assert sum(map(sum, counts)) == 96
        right = (counts[0][0] + counts[1][1]) / 96
        assert right == pytest.approx(found["stages"][stage]["metrics"]["accuracy"])
    texts = pandas.read_parquet(given("sst2").data / "sst2" / "validation.parquet")["sentence"]
    with (finished_run / changed["file"]).open(encoding="utf-8", newline="") as stream:
        rows = [*csv.DictReader(stream)]
    assert len(rows) == changed["count"]
    assert all(row["text"] == " ".join(texts[int(row["sample"])].split()) for row in rows)


def test_a_run_knows_the_error_of_its_layers_and_what_was_done_to_them(finished_run):
    found = results(finished_run)
    linears = [row["name"] for row in found["layer_errors"]["rows"] if row["what"] == "linear"]
    assert linears == found["quantized_layers"]
    assert all(0 < row["isolated"] < 1 for row in found["layer_errors"]["rows"] if row["what"] == "linear")
    record = json.loads((finished_run / "calibration.json").read_text())
    counts = {change["what"]: change["count"] for change in found["model_changes"]}
    assert counts.get("bias correction", 0) == len(record["biases"])
    assert counts.get("smoothing", 0) == len(record["smoothing"]["inputs"])


def test_fp16_is_evaluated_once_it_is_asked_for_and_kept(finished_run, a_run, qdqbench):
    assert results(finished_run)["fp16"] is None
    assert "fp16" not in results(finished_run)["timings"]
    assert EVALUATE_FP16 in (finished_run / "report.html").read_text(encoding="utf-8")
    done = fine(qdqbench("report", a_run, "--fp16", "--json"))
    found = json.loads(done.out)
    assert found["fp16"]["n"] == found["vs_fp16"]["n"] == 96
    deployed = [row for row in found["stages"].values() if row["status"] == "done"][-1]
    gained = deployed["metrics"]["accuracy"] - found["fp16"]["metrics"]["accuracy"]
    assert found["vs_fp16"]["delta"]["accuracy"] == pytest.approx(gained)
    assert "against FP16" in (a_run / "report.html").read_text(encoding="utf-8")
    again = json.loads(qdqbench("report", a_run, "--json").out)
    assert again["fp16"] == found["fp16"]
    assert again["timings"]["fp16"]["reused"]
