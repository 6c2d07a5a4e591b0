"""Trainings of other tools side by side: all run, and each is judged like PTQ."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ...support.tiny_bert import VOCABULARY, new_bert, write_tiny_bert

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
def test_each_system_trains_and_is_judged(tmp_path):
    write_tiny_bert(tmp_path / "model", new_bert(labels=2))
    words = VOCABULARY[5:30]
    for name, count in (("train", 64), ("validation", 12)):
        rows = [f"{words[number % 25]} {words[number // 3]},{number % 2}" for number in range(count)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["sentence,label", *rows, ""]))
    out = tmp_path / "found.json"
    systems = "reconstruction,without-weight,modelopt-qat,modelopt-qad"
    given = ["bert-int8-linears", "--model", tmp_path / "model", "--task", "sst2", "--data", tmp_path]
    options = ["--systems", systems, "--steps", "2", "--rates", "1e-5", "--out", out]
    # a process of its own, as ModelOpt's trainers patch transformers
    command = [sys.executable, "-W", "ignore", "-m", "tools.measure_training", *given, *options]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [row["system"] for row in found["trainings"]] == ["ptq", *systems.split(",")]
    assert (found["n"], found["steps"]) == (12, 2)
    assert all(row["sqnr_db"] > 5 and 0 <= row["accuracy"] <= 1 for row in found["trainings"])
    sqnr = {row["system"]: row["sqnr_db"] for row in found["trainings"]}
    assert len({*sqnr.values()}) >= 3  # two steps may win nothing
    assert sqnr["without-weight"] > sqnr["ptq"]
