"""The whole path with engines for the CPU at hand: built, proven, verified, run."""

import json
import shutil
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from qdqbench.eval.bench import measure
from qdqbench.eval.runs.report.report import deploy
from qdqbench.eval.selection.search import confirm, worker
from qdqbench.eval.selection.search.results import Ranking, read_search
from qdqbench.eval.stages import stages
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.engine.sidecar import check_sidecar
from qdqbench.quantize.pipeline import outcomes
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.schema import adapt_recipe
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.names import install_command
from qdqbench.quantize.utils.system.cpu import Cpu

from ..support import cpus
from ..support.deployed import answers
from ..support.interpreted import H200
from .cases import CASES, edited
from .served import evaluated, line_of, rows_of, value_of
from .tiny import ended, fine, refused, results

pytest.importorskip("openvino", reason="needs openvino: pip install 'qdqbench[openvino]'")


@pytest.mark.parametrize("backend", cpus.BACKENDS)
def test_an_engine_for_the_cpu_is_timed_and_takes_every_length(backend, whole_run, sst2, tmp_path, qdqbench):
    out = shutil.copytree(whole_run(f"cpu-{backend}"), tmp_path / "run")
    found = results(out)
    assert found["gpu_engine"] is None
    assert found["lengths"] is None
    for speed in found["speed"]:
        assert speed["quick"]
        assert speed["conditions"]["rounds"] > 1
        assert speed["baseline"].endswith(("FP32", "BF16"))
    assert {speed["config"].partition(" ")[0] for speed in found["speed"]} <= {"1", "8", "32"}
    assert found["speed"]
    measured = (out / "bench.json").read_bytes()
    with np.load(out / "logits" / "engine.npz") as before:
        shipped = before["validation.logits"]
    if backend == "openvino":
        assert_onnxruntime_is_deployed_as_it_was_evaluated(out, tmp_path)
    fine(qdqbench(*CASES[f"cpu-{backend}"].words(sst2, tmp_path), "--out", out, "--shapes", "auto"))
    assert (out / "bench.json").read_bytes() == measured  # of the same files
    told = results(out)["lengths"]
    assert (told["splits"], told["rows"], told["buckets"]) == (["validation"], len(shipped), [])
    assert 0 < told["padding"] < told["longest_padding"]
    assert len(told["profiles"]) == 1
    assert "kernels take every length" in (out / "report.md").read_text()
    with np.load(out / "logits" / "engine.npz") as after:
        np.testing.assert_allclose(after["validation.logits"], shipped, atol=0.1)


def assert_onnxruntime_is_deployed_as_it_was_evaluated(out, tmp_path):
    """With its optimizations, and without them where these lose."""
    found = outcomes.read_optimized(out)
    assert (found.int8_gemms, found.describe_loss(0.02)) == (12, "")
    assert found.metrics.keys() == found.exported.keys() == {"accuracy"}
    lines = [line_of(row) for row in rows_of(out, 40)]
    said = answers(out / "deploy" / "run_onnxruntime.py", tmp_path / "other", lines=lines)
    np.testing.assert_allclose([*map(value_of, said)], evaluated(out, 40, "engine"), atol=2e-2)
    for lost, level in (("", "ENABLE"), ("it is refused", "DISABLE")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(outcomes, "read_optimized", lambda _: found.model_copy(update={"failed": lost}))  # noqa: B023
            told = deploy(out, tmp_path / level)
        assert json.loads((told / "model.json").read_text())["onnxruntime"] == f"ORT_{level}_ALL"
        assert lost in (told / "README.md").read_text()


def test_what_optimizations_lose_is_recorded(sst2, tmp_path, monkeypatch):
    """Wrong answers, and a runtime that fails: the run continues."""
    config = sst2.config("bert-int8-linears")
    on_cpu = adapt_recipe(config.recipe, backend="openvino")
    session = Session(config.model_copy(update={"recipe": on_cpu}), tmp_path)
    exported = {"validation": np.eye(2, dtype=np.float32)[session.gold["validation"]]}
    built = SimpleNamespace(int8_gemms=11, expected_int8_gemms=12, not_int8=["x"])
    monkeypatch.setattr(stages, "build_engine", lambda *_, **__: built)
    monkeypatch.setattr(stages, "open_runner", lambda *_, **__: nullcontext(SimpleNamespace(max_batch=8)))
    monkeypatch.setattr(stages, "predict", lambda *_, **__: -exported["validation"])
    monkeypatch.setattr(stages.graphs, "expected_gemms", lambda _: [])
    found = stages._evaluate_optimized(session, tmp_path / "model.onnx", exported)
    assert (
        found.describe_loss(0.5)
        == "accuracy 0.0000, as exported 1.0000; 1 GEMM that should be in INT8 is not"
    )

    def fails(*_):
        raise UserError("it is refused")

    monkeypatch.setattr(stages, "evaluate_stage", lambda *_: tmp_path / "logits.npz")
    monkeypatch.setattr(stages, "read_logits", lambda _: exported)
    monkeypatch.setattr(stages, "onnxruntime_runner", lambda _: None)
    monkeypatch.setattr(stages, "_evaluate_optimized", fails)
    assert [path.name for path in stages.onnxruntime_stage(session)] == ["logits.npz", outcomes.OPTIMIZED]
    assert outcomes.read_optimized(tmp_path).describe_loss(0.5) == "it is refused"


def test_an_engine_that_did_not_load_is_tried_again(sst2, tmp_path, monkeypatch):
    session = Session(sst2.config("bert-int8-linears"), tmp_path)
    listed = stages.stages(session)
    built = EngineResult.model_construct(backend="cuda", compute_capability=["9.0"])
    monkeypatch.setattr(outcomes, "read_built", lambda _: built)
    for gpu, reason, kept in (
        (None, "no GPU here to run it on", True),
        (H200, "no GPU here to run it on", False),
        (H200, "it cannot load the engine", False),
    ):
        monkeypatch.setattr(stages, "find_gpu", lambda gpu=gpu: gpu)
        for name, file in (("verify", outcomes.VERIFY), ("engine", outcomes.ENGINE)):
            outcomes.write_outcome(tmp_path / file, outcomes.Skipped(skipped=reason))
            assert listed[name].holds(session) == kept
    assert listed["build"].holds(session)


def test_residuals_that_no_cpu_runs_are_told_first(sst2, tmp_path, qdqbench):
    given = ("run", "int8-residual", *sst2.options, "--backend", "openvino", "--out", tmp_path / "run")
    done = qdqbench(*given, "--until", "baseline")
    assert (done.code, done.err.count("give --backend")) == (0, 1)
    assert done.err.startswith("✗ the gate cannot hold here: bert-int8-residual wants INT8 residuals, which")


@pytest.mark.long
def test_a_search_measures_engines_of_this_cpu(sst2, tmp_path, qdqbench, monkeypatch):
    monkeypatch.setattr(confirm, "shipped_recipes", lambda: ["bert-int8-ffn"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a search beside the tests has the lock of all
    monkeypatch.setattr(measure, "ON_CPU", measure.Effort(5, 0.1, streams=()))

    def rank(work, file):
        return Ranking(units=[*work.space.units], attention=[*work.space.attention], samples=0)

    monkeypatch.setattr(worker, "rank_units", rank)
    mine = {
        "name": "mine",
        "calibration": {"samples": 64, "bias_correction": False},
        "gate": {"max_drop": 0.2},
    }
    path, out = edited(tmp_path / "mine.yaml", mine), tmp_path / "out"
    options = [path, *sst2.options, "--backend", "openvino", "--out", out, "--trials", 2, "--samples", 64]
    fine(qdqbench("search", *options, "--batch", 2, "--length", 16))
    found = read_search(out / "search.json")
    assert (found.source.mode, found.source.gpu, found.source.backend) == ("latency", None, "openvino")
    assert found.source.cpu in found.source.label
    assert f"over {found.source.baseline_precision}" in (out / "search.md").read_text()
    for timed in [row.speedup for row in [*found.trials, *found.confirmed]]:
        assert timed.system_ms > 0
        assert timed.ci95_low <= timed.value <= timed.ci95_high
    chosen = found.confirmed[0]
    assert chosen.engine["validation"].n == chosen.scores["validation"].n
    assert not list((out / "work").glob(".engines.*"))
    # the gate only chooses: the same study, and nothing holds it
    edited(path, mine | {"gate": {"min_speedup": 50.0}})
    done = ended(qdqbench("search", *options, "--batch", 2, "--length", 16), 2)
    assert "none is 50x as fast" in done.err
    assert "the best was trial" in done.err
    assert not (out / "recipe.yaml").exists()


@pytest.mark.long
def test_auto_without_a_gpu_proves_for_both(sst2, tmp_path, qdqbench, monkeypatch):
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx: pip install 'qdqbench[rtx]'")
    monkeypatch.setattr("qdqbench.quantize.engine.backend.WITHOUT_GPU", CPU_BACKENDS)
    out = tmp_path / "run"
    done = fine(qdqbench("run", "int8-linears", *sst2.options, "--out", out))
    told = " ".join(done.out.replace("│", "").split())
    assert "12 of 14 linears in INT8 in the TensorRT-RTX engine for GPUs, built ahead of time" in told
    found = results(out)
    assert (found["engine"]["backend"], found["gpu_engine"]["backend"]) == ("openvino", "tensorrt_rtx")
    assert found["gpu_engine"]["not_int8"] == []
    assert (out / "gpu" / "model.int8.onnx").is_file()
    page = (out / "report.html").read_text()
    assert "An engine for GPUs was built ahead of time too" in page
    assert "The engine on this CPU against" in page
    shown = fine(qdqbench("inspect", out, "--profile", "cpu", "--batch", 2, "--length", 16))
    assert "12 of 14, as the recipe wants" in shown.out
    assert "compute capability" not in shown.out
    refused(qdqbench("inspect", out, "--profile", "gpu"), "give --profile cpu")
    built = fine(qdqbench("build", out))
    told = " ".join(built.out.replace("unchanged", "").split())
    assert "4 of 4 blocks follow fake-quant; padding and answers hold" in told


def test_an_engine_of_another_cpu_or_version_is_refused(sst2, tmp_path, qdqbench, monkeypatch):
    out = tmp_path / "run"
    given = ("run", "int8-ffn", *sst2.options, "--backend", "onnxruntime", "--out", out)
    assert qdqbench(*given, "--until", "build").code == 0
    engine = next((out / "engine").glob("*.engine"))
    older = Cpu("Old CPU", 2, ())
    monkeypatch.setattr("qdqbench.quantize.engine.sidecar.find_cpu", lambda: older)
    with pytest.raises(UserError, match=r"this CPU lacks .*\bavx"):
        check_sidecar(engine)
    monkeypatch.setattr("qdqbench.quantize.engine.sidecar.available_backends", dict)
    with pytest.raises(UserError, match="onnxruntime is not installed"):
        check_sidecar(engine)


def test_a_runtime_that_is_not_there_is_said_before_any_work(sst2, tmp_path, qdqbench, monkeypatch):
    monkeypatch.setattr("qdqbench.quantize.engine.backend._import", lambda name: None)
    done = qdqbench("run", "int8-linears", *sst2.options, "--backend", "openvino", "--out", tmp_path / "run")
    refused(done, install_command("openvino"), code=3)
    assert not (tmp_path / "run").exists()
    refused(qdqbench("run", "int8-linears", *sst2.options, "--backend", "onednn"), "openvino")
