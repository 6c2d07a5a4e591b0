"""Whole runs with backend cuda: without a GPU, and with the interpreter in the place of a GPU's kernels."""

import json
import sys
import tempfile
from collections import Counter

import numpy as np
import pytest
import torch

from qdqbench.eval.bench import measure
from qdqbench.eval.bench.gpu import kernels_in
from qdqbench.eval.bench.measure import WallTimer
from qdqbench.eval.selection.search import confirm, workspace
from qdqbench.eval.selection.search.results import read_search
from qdqbench.quantize.deployment.server.batches import pad_to_shape
from qdqbench.quantize.deployment.server.served import open_served
from qdqbench.quantize.engine.cuda import file as files
from qdqbench.quantize.engine.cuda.compile import list_kernels
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.recipe.schema import dump_recipe, load_recipe
from qdqbench.quantize.utils.errors import MissingDevice
from qdqbench.quantize.utils.system.gpu import Gpu

from ..support.interpreted import H200, load_interpreted, use_host
from .tiny import EVAL_ROWS, fine, results


@pytest.fixture
def without_nvrtc(monkeypatch):
    def compile_kernels(plan):
        return {"gemm": "".join(f"\0.text.{name}\0" for name in sorted(list_kernels(plan))).encode()}

    monkeypatch.setattr(files, "compile_kernels", compile_kernels)
    monkeypatch.setattr(files, "find_products", lambda _: {})


@pytest.fixture
def hopper(monkeypatch, without_nvrtc):
    engine = "quantize.engine"
    for module in (
        "eval.stages.stages",
        "eval.verification.bisect",
        f"{engine}.sidecar",
        f"{engine}.runtime.runners",
        "quantize.pipeline.inspect_target",
    ):
        monkeypatch.setattr(f"qdqbench.{module}.find_gpu", lambda: H200)
    for module in (f"{engine}.runtime.runners", "eval.verification.bisect"):
        monkeypatch.setattr(f"qdqbench.{module}.load_kernels", load_interpreted)
    return monkeypatch


def bench_of(qdqbench, out, monkeypatch):
    """Measure on that GPU: what is built beforehand fails, and times are the host's."""
    use_host(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, stand_in in {
        "run.find_gpu": lambda: H200,
        "run.gpu_uuid": lambda: None,
        "gpu.find_gpu": lambda: H200,
        "gpu.load_nvrtc": lambda: None,
        "gpu.load_kernels": load_interpreted,
        "gpu.COMMAND": (sys.executable, "-c", ""),
        "gpu.kernels_of": lambda lane: kernels_in(Counter({"attention_64_fp16_short": 2})),
        "measure.CudaTimer": WallTimer,
    }.items():
        monkeypatch.setattr(f"qdqbench.eval.bench.{name}", stand_in)
    options = ["--no-baselines", "--no-fp32", "--engine-shapes", "recipe", "--length", 16, "--batch", 3]
    options += ["--dataset", "sst2", "--dataset-batch", 8, "--rounds", 2, "--iterations", 2]
    for name in ("fp16", "int8-tensorrt_rtx"):
        options += ["--exclude", name]
    done = qdqbench("bench", out, *options, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("recipe", ["int8-linears", "int8-ffn"])
def test_an_engine_is_proven_verified_evaluated_and_timed(recipe, sst2, tmp_path, qdqbench, hopper):
    out = tmp_path / "run"
    fine(qdqbench("run", recipe, *sst2.options, "--backend", "cuda", "--out", out))
    found = results(out)
    engine = found["engine"]
    assert (engine["backend"], engine["compute_capability"], engine["not_int8"]) == ("cuda", ["9.0"], [])
    assert engine["int8_gemms"] == engine["expected_int8_gemms"] > 0
    assert found["gpu_engine"] is None
    assert found["verification"]["passed"]
    assert len(found["verification"]["blocks"]) == 4
    stages = found["stages"]
    assert stages["engine"]["status"] == "done"
    assert stages["engine"]["n"] == EVAL_ROWS
    assert "GPU memory 1.0 MB" in stages["engine"]["detail"]
    with (
        np.load(out / "logits" / "engine.npz") as ours,
        np.load(out / "logits" / "onnxruntime.npz") as theirs,
    ):
        name = "validation.logits"
        np.testing.assert_allclose(ours[name], theirs[name], atol=0.05 * np.abs(theirs[name]).max())
    assert (out / "deploy" / "run_cuda.py").is_file()
    engines = (out / "deploy" / "cuda.engine", out / "engine" / "model.int8.engine")
    assert len({path.read_bytes() for path in engines}) == 1
    assert json.loads((out / "deploy" / "model.json").read_text())["script"] == "run_cuda.py"
    told = json.loads(fine(qdqbench("inspect", out, "--profile", "gpu", "--json")).out)
    assert told["time"]["total"] == pytest.approx(0.5 * len(engine["layers"]))
    assert qdqbench("inspect", out, "--profile", "cpu").code == 1
    told = fine(qdqbench("inspect", out, "--bisect")).out
    assert "no block is wrong" in told
    assert "every kernel makes what the interpreter makes" in " ".join(told.split())

    if recipe == "int8-ffn":
        return
    served = open_served(out, fp32=False)
    batch = Session(read_config(out), out).eval_splits["validation"][1].batch([*range(5)], served.pad_id)[1]
    sizes = served.sizes("engine", 8)
    said = served.open_model("engine")(pad_to_shape(batch, sizes, served.pad_id))
    with np.load(out / "logits" / "engine.npz") as ours:
        np.testing.assert_allclose(said[:5], ours["validation.logits"][:5], atol=1e-5)
    bench = bench_of(qdqbench, out, hopper)
    assert [system["label"] for system in bench["systems"]] == ["INT8 CUDA kernels"]
    for config in bench["configs"]:
        (row,) = config["rows"]
        assert (row["status"], row["int8_gemms"]) == ("done", engine["int8_gemms"])
        assert "packed tokens" in row["detail"]
        assert row["kernels"]["fused_attention"] == 2
    assert {rate["streams"] for rate in bench["configs"][0]["rows"][0]["throughput"]} == {1, 2}
    assert not [path for path in (out / "bench").iterdir() if path.suffix in (".engine", ".onnx")]


@pytest.mark.long
def test_a_search_and_auto_time_engines_and_their_twins(sst2, tmp_path, qdqbench, hopper):
    hopper.setattr(confirm, "shipped_recipes", lambda: ["bert-int8-ffn"])
    hopper.setattr(tempfile, "tempdir", str(tmp_path))  # a search next to the tests has the lock of all
    hopper.setattr(measure, "ON_GPU", measure.Effort(4, 0.1, streams=()))
    hopper.setattr(measure, "gpu_uuid", lambda: None)
    hopper.setattr(workspace, "find_gpu", lambda: H200)
    recipe = load_recipe("bert-int8-linears")
    section = recipe.calibration.model_copy(update={"samples": 64, "bias_correction": False})
    gate = recipe.gate.model_copy(update={"max_drop": 0.2})
    path, options = tmp_path / "mine.yaml", [*sst2.options, "--backend", "cuda", "--batch", 2, "--length", 16]
    changed = {"name": "mine", "calibration": section, "gate": gate}
    path.write_text(dump_recipe(recipe.model_copy(update=changed)))
    words = [path, *options, "--trials", 8, "--samples", 64]
    done = qdqbench("search", *words, "--out", tmp_path / "search")
    assert done.code in (0, 2), done.err
    found = read_search(tmp_path / "search" / "search.json")
    source = found.source
    assert (source.mode, source.gpu, source.backend) == ("latency", "NVIDIA H200", "cuda")
    assert not [trial.failure for trial in found.trials if trial.failure]  # heads of 16 are not tried in INT8
    assert all(row.speedup.system_ms > 0 for row in found.confirmed)
    chosen = found.confirmed[0]
    assert chosen.engine["validation"].n == chosen.scores["validation"].n
    done = qdqbench("auto", *words, "--max-drop", 0.3, "--min-speedup", 1e-6, "--out", tmp_path / "auto")
    assert done.code == 0, done.err
    step = json.loads((tmp_path / "auto" / "auto.json").read_text())["steps"][0]
    assert step["speedup"]["baseline"] == "fp16"
    assert step["run"]["source"]["backend"] == "cuda"
    second, auto = tmp_path / "second", tmp_path / "auto" / "mine" / "run"
    assert qdqbench("run", "int8-ffn", *sst2.options, "--backend", "cuda", "--out", second).code == 0
    done = qdqbench("compare", auto, second, "--out", tmp_path / "compared")
    assert [done.out.count(f"{count} of {count}, engine CUDA kernels") for count in (12, 4)] == [1, 1]
    few = ["--samples", 32, "--set", "calibration.samples=64", "--out", tmp_path / "ranked"]
    done = qdqbench("sensitivity", "int8-ffn", *sst2.options, "--backend", "cuda", *few)
    assert done.code == 0, done.err
    hopper.setattr(workspace, "find_gpu", lambda: Gpu("NVIDIA L4", "8.9", None))
    done = qdqbench("search", path, *options, "--speed", "latency", "--out", tmp_path / "other")
    assert (done.code, "GPU of compute capability 9.0" in done.err) == (3, True)


def test_without_a_gpu_the_engine_is_built_and_proven(sst2, tmp_path, qdqbench, without_nvrtc):
    out = tmp_path / "run"
    fine(qdqbench("run", "int8-linears", *sst2.options, "--backend", "cuda", "--out", out))
    found = results(out)
    assert found["engine"]["int8_gemms"] == found["engine"]["expected_int8_gemms"] > 0
    assert found["engine"]["ahead_of_time"]
    assert found["stages"]["engine"]["status"] == "skipped"
    assert "no GPU here" in found["skipped"]["verify"]
    for name in ("layers.json", "build.json"):
        (out / name).rename(out / f"{name}.away")
    rows = json.loads(fine(qdqbench("inspect", out / "engine" / "model.int8.engine", "--json")).out)
    assert rows["int8_gemms"] == found["engine"]["int8_gemms"]


def test_without_nvrtc_a_run_says_what_to_install(sst2, tmp_path, qdqbench, monkeypatch):
    def missing(_):
        raise MissingDevice("cuda compiles its kernels by NVRTC, which is not here")

    monkeypatch.setattr(files, "compile_kernels", missing)
    options = [*sst2.options, "--backend", "cuda", "--out", tmp_path / "run"]
    done = qdqbench("run", "int8-linears", *options, "--until", "build")
    assert (done.code, "NVRTC, which is not here" in done.err) == (3, True)
