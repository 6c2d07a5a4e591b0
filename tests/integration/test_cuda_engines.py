"""Whole runs with backend cuda: without a GPU, and with the interpreter in the place of a GPU's kernels."""

import json
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from qdqbench.eval.bench.gpu import kernels_in
from qdqbench.eval.bench.measure import WallTimer
from qdqbench.quantize.engine.cuda import file as files
from qdqbench.quantize.engine.cuda.compile import list_kernels
from qdqbench.quantize.utils.errors import MissingDevice

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
    monkeypatch.setattr("qdqbench.quantize.engine.runtime.runners.load_kernels", load_interpreted)
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
    assert "backend cuda, whose kernels write no tensors" in qdqbench("inspect", out, "--bisect").err

    if recipe == "int8-ffn":
        return
    bench = bench_of(qdqbench, out, hopper)
    assert [system["label"] for system in bench["systems"]] == ["INT8 CUDA kernels"]
    for config in bench["configs"]:
        (row,) = config["rows"]
        assert (row["status"], row["int8_gemms"]) == ("done", engine["int8_gemms"])
        assert "packed tokens" in row["detail"]
        assert row["kernels"]["fused_attention"] == 2
    assert {rate["streams"] for rate in bench["configs"][0]["rows"][0]["throughput"]} == {1, 2}
    assert not [path for path in (out / "bench").iterdir() if path.suffix in (".engine", ".onnx")]


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
