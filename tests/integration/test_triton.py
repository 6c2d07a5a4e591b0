"""A run as a model repository of Triton: its model under a stub of Triton's API, and in a real Triton."""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml

from qdqbench.quantize.deployment import triton
from qdqbench.quantize.deployment.triton import export_triton
from qdqbench.quantize.utils.errors import UserError

from ..support.triton_stub import Loaded, column
from .tiny import refused

GOLDEN = Path(__file__).parents[1] / "golden" / "triton.json"
# an environment of its own: Triton's Python backend there needs NumPy 1
SCRIPT = Path(__file__).parents[1] / "support" / "real_triton.py"
PYTHON = os.environ.get("TRITON_PYTHON") or (sys.executable if find_spec("pytriton") else "")


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("triton") / "out"
    export_triton(finished_run / "deploy", out, "sst2")
    return out


@pytest.fixture(scope="module")
def model(exported):
    return Loaded(exported / "models" / "sst2")


def test_a_text_that_cannot_be_read_has_an_error_of_its_own(model):
    bad, long = np.array([[b"\xff\xfe"]], dtype=np.object_), column(["a" * 300_000])
    answers = model.ask({"TEXT": bad}, {"TEXT": column(["a"])}, {"TEXT": long})
    assert [answer.error() is not None for answer in answers] == [True, False, True]
    assert "cannot be answered" in str(answers[0].error())


@pytest.mark.skipif(not PYTHON, reason="needs nvidia-pytriton: TRITON_PYTHON names a Python that has it")
def test_clients_get_the_answers_of_a_real_triton(exported, finished_run):
    texts = ["a good film", "awful plot"]
    command = [PYTHON, SCRIPT, exported, *texts]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    script = finished_run / "deploy" / "run_onnxruntime.py"
    known = subprocess.run([sys.executable, script, *texts], capture_output=True, text=True, check=True)
    labels = [json.loads(line)["label"] for line in known.stdout.splitlines()]
    for protocol in ("http", "grpc"):
        lines = done.stdout.partition(f"{protocol} ")[2].splitlines()[:2]
        assert [json.loads(line)["label"] for line in lines] == labels


def test_deployment_files_are_as_recorded(exported):
    """Probes, ports, limits and who may ask whom; RECORD_GOLDEN=1 records them: read the diff."""
    files = sorted([*exported.glob("*.y*ml"), *exported.glob("kubernetes/*.yaml")])
    found = {path.name: [*yaml.safe_load_all(path.read_text())] for path in files}
    start = found["Dockerfile"] = (exported / "Dockerfile").read_text().partition("CMD ")[2]
    if os.environ.get("RECORD_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
        pytest.skip(f"recorded {GOLDEN}")
    assert found == json.loads(GOLDEN.read_text())
    assert subprocess.run(["sh", "-n", "-c", start], check=False).returncode == 0
    for protocol in ("http", "grpc"):
        assert ast.get_docstring(ast.parse((exported / f"client_{protocol}.py").read_text()))


def test_files_that_come_into_the_folder_meanwhile_stay(finished_run, tmp_path, monkeypatch):
    out, write = tmp_path / "out", triton._render

    def write_meanwhile(template, context):
        if template == "config.pbtxt":
            out.mkdir()
            (out / "mine.txt").write_text("mine")
        return write(template, context)

    monkeypatch.setattr(triton, "_render", write_meanwhile)
    with pytest.raises(UserError, match="got files of somebody else meanwhile; give an empty or new folder"):
        export_triton(finished_run / "deploy", out, "sst2")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


def test_what_cannot_be_exported_is_told(finished_run, tmp_path, qdqbench):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    refused(
        qdqbench("export-triton", finished_run, "--out", tmp_path / "full"),
        "holds files; give an empty or new folder",
    )
    with pytest.raises(UserError, match="other signs than letters"):
        export_triton(finished_run / "deploy", tmp_path / "out", "../../x")
    assert not (tmp_path / "out").exists()
