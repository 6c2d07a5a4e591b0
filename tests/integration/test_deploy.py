"""The folder `deploy` of a finished run: its scripts answer as the run did, without qdqbench."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qdqbench.eval.metrics.results import GateIssue
from qdqbench.eval.runs.gate import issue_sentence
from qdqbench.eval.runs.report.report import hand_off, refresh
from qdqbench.eval.runs.results import Results
from qdqbench.quantize.deployment import write
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.utils.system.process import find_python

from ..support.deployed import fresh, run_script
from ..support.http_client import Client, finished
from ..support.records import speedup
from .served import evaluated, rows_of, started, value_of
from .test_run import DEPLOYED
from .tiny import ended, fine, listing, refused, results

ROWS = 40


@pytest.fixture
def blocked(tmp_path):
    return tmp_path / "blocked"


def test_its_server_answers_as_the_run_did(finished_run, tmp_path, blocked):
    shutil.copytree(finished_run / "deploy", tmp_path / "elsewhere")
    texts = [text for (text,) in rows_of(finished_run, ROWS)]
    command = [sys.executable, tmp_path / "elsewhere/serve.py", "--port", "0", "--runtime", "onnxruntime"]

    async def ask(port):
        client = Client(port)
        asked = await client.post("/v1/predict", {"texts": texts})
        await client.close()
        return asked

    with started(*command, cwd="/", env=fresh(blocked)) as (process, port):
        status, _, body = finished(ask(port))
        process.terminate()
        assert (status, process.wait(30)) == (200, 0)
    made = [value_of(each) for each in body["answers"]]
    np.testing.assert_allclose(made, evaluated(finished_run, ROWS), atol=1e-4)


def test_it_holds_all_that_is_needed(finished_run):
    folder = finished_run / "deploy"
    assert [f"deploy/{name}" for name in listing(folder)] == DEPLOYED
    checked = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=folder, check=False)
    assert checked.returncode == 0
    for name, source in (
        ("model.onnx", "model.int8.onnx"),
        ("tensorrt_rtx.engine", "engine/model.int8.engine"),
    ):
        assert (folder / name).read_bytes() == (finished_run / source).read_bytes()
    written = [
        path for path in folder.rglob("*") if path.suffix in (".md", ".json", ".py", ".sh", ".txt", ".yaml")
    ]
    config = json.loads((finished_run / "run.json").read_text())
    for place in (str(finished_run), config["model"], config["data"]):
        assert [path for path in written if place in path.read_text()] == []
    script = (folder / "build_tensorrt.sh").read_text()
    assert "--onnx=model.onnx \\\n" in script
    assert "--maxShapes=input_ids:128x128,attention_mask:128x128,token_type_ids:128x128 \\\n" in script
    assert "--skipInference\nmv built.engine tensorrt.engine\nsha256sum tensorrt.engine >" in script
    assert subprocess.run(["sh", "-n", folder / "build_tensorrt.sh"], check=False).returncode == 0
    page, found = (folder / "README.md").read_text(), results(finished_run)
    stage = found["stages"]["onnxruntime"]
    assert f"{stage['metrics']['accuracy']:.4f} ± {stage['stderr']['accuracy']:.4f}" in page
    assert "12 of 14 linears in INT8" in page
    assert "NEVER RUN" in page  # it was built ahead of time
    for line in (folder / "requirements.txt").read_text().splitlines():
        assert line.startswith("#") or "==" in line


def test_the_line_for_trtexec_is_one_that_it_takes(finished_run, tmp_path):
    from qdqbench.quantize.engine.sidecar import read_sidecar

    folder = shutil.copytree(finished_run / "deploy", tmp_path / "deploy")
    said = tmp_path / "trtexec"
    said.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > said.txt\necho new > built.engine\n')
    kept = tmp_path / "engine"  # of the run; the folder has a link to it where it is TensorRT's
    kept.write_text("old")
    (folder / "tensorrt.engine").hardlink_to(kept)
    said.chmod(0o755)
    trtexec = {"TRTEXEC": str(said), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", folder / "build_tensorrt.sh"], env=trtexec, check=False)
    assert done.returncode == 0
    words = (folder / "said.txt").read_text().splitlines()
    assert (folder / words[0].removeprefix("--onnx=")).is_file()
    assert "--saveEngine=built.engine" in words
    assert ((folder / "tensorrt.engine").read_text(), kept.read_text()) == ("new\n", "old")
    profiles = read_sidecar(next((finished_run / "engine").glob("*.engine"))).profiles
    assert sum(word.startswith("--profile=") for word in words) >= len(profiles)


def test_the_summary_and_the_report_say_where_to_begin(a_run, qdqbench):
    done = fine(qdqbench("report", a_run))
    told = " ".join(done.out.split())
    script = a_run / "deploy" / "run_onnxruntime.py"
    assert (
        f'deploy: {a_run / "deploy"}; the engine never ran; try it: {find_python()} {script} "a text"' in told
    )
    page = (a_run / "report.md").read_text()
    assert '`deploy`; the engine never ran; try it with `python deploy/run_onnxruntime.py "a text"`' in page


def test_copies_go_elsewhere(finished_run, tmp_path, qdqbench, blocked):
    out = tmp_path / "there"
    done = fine(qdqbench("deploy", finished_run, "--out", out))
    assert f"python {out / 'run_onnxruntime.py'}" in " ".join(done.out.split())
    assert listing(out) == listing(finished_run / "deploy")
    assert not (out / "model.onnx").samefile(finished_run / "model.int8.onnx")


def replace_graph(run):
    (run / "model.int8.onnx").unlink()  # `deploy` of the run has a link to it
    shutil.copy(run / "model.fp32.onnx", run / "model.int8.onnx")


def damage_engine(run):
    engine = run / "engine" / "model.int8.engine"
    changed = engine.read_bytes()[:-1] + b"?"
    engine.unlink()
    engine.write_bytes(changed)


def turn_labels(run):
    path = Path(json.loads((run / "run.json").read_text())["model"]) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": {"0": "good", "1": "bad"}}))


def train_on(run):
    path = Path(json.loads((run / "run.json").read_text())["model"]) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace_graph, "model.int8.onnx changed since the run made it"),
        (damage_engine, "model.int8.engine changed since the run made it"),
        (turn_labels, "is not the one that the run was made of"),
        (train_on, "is not the one that the run was made of"),
    ],
)
def test_what_is_not_of_the_run_is_never_handed_on(  # noqa: PLR0917
    change, said, a_run, sst2, tmp_path, qdqbench
):
    config = json.loads((a_run / "run.json").read_text())
    config["model"] = str(shutil.copytree(sst2.model, tmp_path / "model"))
    (a_run / "run.json").write_text(json.dumps(config))
    fine(qdqbench("deploy", a_run))
    change(a_run)
    for words in (["deploy"], ["push", "me/int8"], ["serve", "--port", "0"], ["export-triton"]):
        command, *rest = words
        if command in ("deploy", "export-triton"):
            rest = ["--out", tmp_path / "there"]
        refused(qdqbench(command, a_run, *rest), said, f"`qdqbench report {a_run}`")
    assert not (tmp_path / "there").exists()


def test_names_are_no_markup_of_the_card(a_run, tmp_path, qdqbench, monkeypatch):
    evil = "ok\n\n# All gates passed\n\n<img src=x> [docs](javascript:alert(1)) ``` `x\x1b[2J"
    shown = "`ok # All gates passed <img src=x> [docs](javascript:alert(1)) QQQ Qx\ufffd[2J`"
    monkeypatch.setattr(write, "read_labels", lambda session: [evil, "b"])
    monkeypatch.setattr(write, "_base_name", lambda name: evil)
    fine(qdqbench("deploy", a_run, "--out", tmp_path / "there"))
    card = (tmp_path / "there" / "README.md").read_text()
    body = card.split("\n---\n", 1)[1]
    assert "\x1b" not in card
    assert "\n# All gates passed" not in body
    outside = re.sub("`[^`\n]+`", "", body)
    assert "<img" not in outside
    assert "[docs](" not in outside
    assert f"- Classes: {shown}, `b`.\n".replace("Q", "'") in body


def test_what_somebody_put_there_stays_and_is_told(a_run, qdqbench):
    mine = a_run / "deploy" / "run_onnxruntime.py"
    mine.write_text("# my own\n")
    fine(qdqbench("report", a_run))
    assert "run_onnxruntime.py in it is not of qdqbench or changed since" in results(a_run)["warnings"][0]
    assert mine.read_text() == "# my own\n"
    mine.unlink()
    assert qdqbench("deploy", a_run).code == 0
    assert mine.read_text() != "# my own\n"
    assert (a_run / "deploy" / "standalone" / "model.py").stat().st_nlink == 1  # not the package's own


def test_it_goes_as_soon_as_the_run_changes(a_run, qdqbench):
    (a_run / "parity.json").unlink()
    ended(qdqbench("evaluate", a_run))
    assert (a_run / "deploy" / "model.json").exists()  # parity is no part of it
    (a_run / "engine.json").unlink()
    assert qdqbench("evaluate", a_run).code == 0
    assert not (a_run / "deploy").exists()
    refused(qdqbench("deploy", a_run), "qdqbench report")


def test_a_failed_run_is_marked_and_each_use_warns(a_run, blocked):
    found = Results.model_validate(results(a_run))
    known = {"stage": "engine", "metric": "accuracy", "value": 0.2, "stderr": 0, "limit": 0}
    low = GateIssue(code="accuracy", state="failed", **known)
    gate = found.gate.model_copy(update={"passed": False, "issues": [low]})
    why = issue_sentence(low)
    assert refresh(a_run, found.model_copy(update={"gate": gate})) == []
    page = (a_run / "deploy" / "README.md").read_text()
    assert f"**NOT FOR USE. Gate failed: {why}**" in page
    done = run_script(a_run / "deploy" / "run_onnxruntime.py", blocked, "a good film")
    assert (done.returncode, done.stderr) == (0, f"warning: not for use, {why}\n")
    assert json.loads(done.stdout)["label"] in ("LABEL_0", "LABEL_1")
    assert refresh(a_run, found.model_copy(update={"engine": None})) == []
    page = (a_run / "deploy" / "README.md").read_text()
    assert "No engine was built, so nothing is proven." in page
    assert "run_tensorrt_rtx.py" not in {*listing(a_run / "deploy")}
    speed = speedup(1.5, 1.25, 1.75, baseline="FP32", config="1 x 16")
    assert hand_off(Session(read_config(a_run), a_run), found.model_copy(update={"speed": [speed]})) == []
    page = (a_run / "deploy" / "README.md").read_text()
    assert "NOT FOR USE" not in page
    assert "| 1 x 16 | 1 | FP32 | 1.50 [1.25, 1.75] |" in page
