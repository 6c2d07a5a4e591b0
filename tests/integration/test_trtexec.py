"""A run proven, verified, evaluated and timed by trtexec alone: a stand-in with its options."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from ..support.fake_trtexec import Trtexec, run_script
from .tiny import call_alone, one_profile, results


@pytest.fixture(scope="module")
def asked(finished_run, made_once):
    """A run for TensorRT on a machine without it, and what trtexec is told; copied to be answered."""

    def make(folder):
        run = shutil.copytree(finished_run, folder / "run")
        config = json.loads((run / "run.json").read_text())
        config["recipe"]["engine"]["backend"] = "tensorrt"
        (run / "run.json").write_text(json.dumps(config))
        with one_profile():
            done = call_alone("build", run, "--print-trtexec")
        assert done.code == 0, done.err
        (folder / "said.txt").write_text(done.out)
        (folder / "told.txt").write_text(done.err)

    return made_once("asked-trtexec", make)


@pytest.fixture(scope="module")
def calls(asked, tmp_path_factory):
    """How the script calls trtexec."""
    folder = tmp_path_factory.mktemp("calls")
    copy = shutil.copytree(asked / "run" / "trtexec", folder / "run" / "trtexec")
    return run_script(copy / "run.sh", folder)


@pytest.fixture
def run(asked, tmp_path):
    return shutil.copytree(asked / "run", tmp_path / "run")


def answer(run, calls, **how):
    trtexec = Trtexec(run / "trtexec", **how)
    for folder in ("output", "times", "profile"):
        (run / "trtexec" / folder).mkdir(exist_ok=True)
    for call in calls:
        trtexec(call)


def test_the_script_is_printed_and_kept(asked, run, qdqbench):
    printed = (asked / "said.txt").read_text()
    assert printed == (run / "trtexec" / "run.sh").read_text()
    assert "run it where trtexec is" in (asked / "told.txt").read_text()
    assert subprocess.run(["sh", "-n", run / "trtexec" / "run.sh"], check=False).returncode == 0
    (run / "trtexec" / "output").mkdir()
    (run / "trtexec" / "output" / "0000.json").write_text("kept")
    again = qdqbench("build", run, "--print-trtexec")
    assert again.out == printed
    assert "kept" in again.err
    assert (run / "trtexec" / "output" / "0000.json").read_text() == "kept"


def test_builds_come_first_and_name_every_profile(calls, asked):
    plan = json.loads((asked / "run" / "trtexec" / "plan.json").read_text())
    builds = [call for call in calls if call[0].startswith("--onnx")]
    assert [call[0] for call in builds] == [
        f"--onnx=../model.{name}.onnx" for name in ("int8", "fp16", "fp32")
    ]
    for call in builds:
        assert call.count("--stronglyTyped") == 1
        assert [word for word in call if word.startswith("--profile=")] == [
            f"--profile={number}" for number in range(len(plan["profiles"]))
        ]
    assert sum("--exportOutput" in word for call in calls for word in call) == len(plan["answers"])
    assert sum("--exportTimes" in word for call in calls for word in call) == 3 * len(plan["timed"])


def test_a_run_is_proven_verified_evaluated_and_timed_without_tensorrt(run, calls, qdqbench):
    answer(run, calls)
    timed = qdqbench("bench", run, "--trtexec", "--json")
    assert timed.code == 0, timed.err
    done = qdqbench("report", run)
    found = results(run)
    assert done.code == 0, (done.err, found["gate"])
    assert found["engine"]["version"] == "10.16.0.72"
    assert found["engine"]["compute_capability"] == ["8.9"]
    assert found["engine"]["int8_gemms"] == found["engine"]["expected_int8_gemms"] > 0
    assert found["verification"]["passed"]
    assert "trtexec" in found["verification"]["blocks_not_checked"]
    stage = found["stages"]["engine"]
    assert stage["status"] == "done"
    assert "NVIDIA L4, run by trtexec" in stage["detail"]
    assert stage["n"] == found["stages"]["fp32"]["n"]
    bench = json.loads(timed.out)
    assert bench["environment"]["gpu"] == "NVIDIA L4"
    for cell in bench["cells"]:
        over = {row["over"]: row["value"] for row in cell["speedups"] if row["contestant"] == "int8"}
        assert over["fp16"] == pytest.approx(2, rel=0.03)
    page = (run / "report.html").read_text()
    assert "trtexec measured one engine after the other" in page
    looked = qdqbench("inspect", run, "--json")
    assert looked.code == 0, looked.err
    assert json.loads(looked.out)["engine"]["backend"] == "tensorrt"
    again = qdqbench("report", run)
    assert again.code == 0
    assert all(row["reused"] for row in results(run)["timings"].values())


@pytest.mark.long
def test_wrong_answers_and_lost_int8_are_told(run, calls, qdqbench):
    answer(run, calls, wrong=lambda made: made + 3 * np.sign(made))
    done = qdqbench("verify", run)
    assert done.code == 2
    assert "gives wrong outputs" in done.err
    gemm = json.loads((run / "layers.json").read_text())["layers"][0]["onnx"][0]
    answer(run, [call for call in calls if "--saveEngine=int8.engine" in call], not_int8=(gemm,))
    done = qdqbench("build", run)
    assert done.code == 2
    assert gemm in done.err


@pytest.mark.long
def test_nan_answers_end_in_a_report(run, calls, qdqbench):
    answer(run, calls, wrong=lambda made: np.full_like(made, np.nan))
    done = qdqbench("report", run)
    assert done.code == 2
    assert "NaN" in done.err
    assert "its logits are NaN" in results(run)["stages"]["engine"]["reason"]


def test_what_is_missing_or_of_another_graph_is_told(run, calls, qdqbench):
    done = qdqbench("bench", run, "--trtexec")
    assert done.code == 1
    assert "times/int8" in done.err
    assert "go on with its run.sh" in done.err
    answer(run, [call for call in calls if call[0].startswith("--onnx")])
    done = qdqbench("verify", run)
    assert done.code == 1
    assert "lacks" in done.err
    (run / "trtexec" / "int8.log").write_text("nothing")
    done = qdqbench("build", run)
    assert done.code == 1
    assert "does not tell the version and the GPU and the compute capability" in done.err
    plan = json.loads((run / "trtexec" / "plan.json").read_text())
    plan["sha256"]["int8"] = "0" * 64
    (run / "trtexec" / "plan.json").write_text(json.dumps(plan))
    done = qdqbench("build", run)
    assert done.code == 1
    assert "--print-trtexec` again" in done.err


def test_a_run_of_another_backend_is_told(a_run, qdqbench):
    done = qdqbench("build", a_run, "--print-trtexec")
    assert done.code == 1
    assert "--backend tensorrt" in done.err
