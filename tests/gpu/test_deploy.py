"""The deployed script of TensorRT or TensorRT-RTX, as it is, gives the answers of the run's engine."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np

from qdqbench.quantize.pipeline.session import Session, read_config


def test_the_script_answers_as_the_engine_did(finished_run, tmp_path):
    run = finished_run("bert-int8-linears")
    folder = shutil.copytree(run / "deploy", tmp_path / "elsewhere")
    told = json.loads((folder / "model.json").read_text())
    assert told["ran"]
    split, _ = Session(read_config(run), run).eval_splits["validation"]
    lines = "".join(f"{text}\n" for text in split.dataset["sentence"])
    command = [sys.executable, folder / told["script"]]
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, cwd="/", env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    made = np.array([[*json.loads(line)["scores"].values()] for line in done.stdout.splitlines()])
    with np.load(run / "logits" / "engine.npz") as saved:
        logits = saved["validation.logits"].astype(np.float64)
    known = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    np.testing.assert_allclose(made, known, atol=2e-2)
    assert (made.argmax(axis=1) != known.argmax(axis=1)).mean() <= 0.01  # flips of rounding
