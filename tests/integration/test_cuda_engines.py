"""Whole runs with backend cuda: without a GPU, and with the interpreter in the place of a GPU's kernels."""

import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from qdqbench.eval.bench import measure
from qdqbench.eval.bench.gpu import kernels_in
from qdqbench.eval.bench.measure import WallTimer
from qdqbench.eval.selection.search import confirm, workspace
from qdqbench.eval.selection.search.results import read_search
from qdqbench.quantize.deployment.opened import Answering
from qdqbench.quantize.engine import backend
from qdqbench.quantize.engine.cuda import file as files
from qdqbench.quantize.engine.cuda.compile import get_version
from qdqbench.quantize.engine.cuda.names import NAMES
from qdqbench.quantize.pipeline.pipeline import STAGES_FILE
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.utils.errors import MissingDevice
from qdqbench.quantize.utils.system.gpu import Gpu, find_gpu

from ..support.deployed import FORBIDDEN, run_script
from ..support.families import write_model
from ..support.interpreted import H200, load_interpreted, use_hopper, use_host, use_no_nvrtc
from ..support.long import mark_long
from .cases import edited
from .tiny import ended, entries, fine, refused, results

NOT_NEEDED = (*(name for name in FORBIDDEN if name != "torch"), "pydantic", "safetensors", "typer", "psutil")
PACKS = """
import json, sys
from pathlib import Path
from cuda_engine.errors import QdqError
from cuda_engine.reader import parse_engine
from cuda_engine.tokens import pack_tokens
from standalone.runtimes import read
from standalone.texts import Encoder, pad_rows
from tokenizers import Tokenizer
folder = Path(__file__).parent
version = json.loads((folder / "model.json").read_text())["cuda"]
plan, arrays, _ = parse_engine(read(folder, "cuda.engine"), "cuda.engine", version)
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
rows = [row for _, row in Encoder(tokenizer, 128).encode(sys.argv[1:])]
batch = pad_rows([row.ids for row in rows], [row.type_ids for row in rows], 0)
starts = pack_tokens(plan, arrays, batch).starts.tolist()
batch["input_ids"][0, 0] = 99999
try:
    pack_tokens(plan, arrays, batch)
except QdqError as error:
    print(json.dumps([starts, str(error)]))
"""


@pytest.fixture
def without_nvrtc(monkeypatch):
    use_no_nvrtc(monkeypatch)


@pytest.fixture
def hopper(monkeypatch):
    use_hopper(monkeypatch)
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
    done = ended(qdqbench("bench", out, *options, "--json"))
    return json.loads(done.out)


@pytest.mark.parametrize("case", mark_long(["cuda", "cuda-ffn"], ["cuda-ffn"]))
def test_an_engine_is_deployed_inspected_served_and_timed(case, whole_run, tmp_path, qdqbench, hopper):
    out = shutil.copytree(whole_run(case), tmp_path / "run")
    engine = results(out)["engine"]
    assert engine["compute_capability"] == [*NAMES[1:]]  # FP16 attention is not for 7.5
    assert "GPU memory 1.0 MB" in results(out)["stages"]["engine"]["detail"]
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

    if case == "cuda-ffn":
        refuses_engines_that_cannot_run(out, qdqbench, hopper)
        return
    batch = Session(read_config(out), out).eval_splits["validation"][1].batch([*range(5)], 0)[1]
    kept = batch["attention_mask"].astype(bool)
    model = Answering.of(out).open_engine()
    said = model.launch(batch["input_ids"][kept], batch["token_type_ids"][kept], kept.sum(axis=1)).read()
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
    hopper.setattr(measure, "ON_GPU", measure.Effort(5, 0.1, streams=()))
    hopper.setattr(measure, "gpu_uuid", lambda: None)
    hopper.setattr(workspace, "find_gpu", lambda: H200)
    mine = {
        "name": "mine",
        "calibration": {"samples": 64, "bias_correction": False},
        "gate": {"max_drop": 0.2},
    }
    path = edited(tmp_path / "mine.yaml", mine)
    options = [*sst2.options, "--backend", "cuda", "--batch", 2, "--length", 16]
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
    assert [done.out.count(f"{count} of 14, engine CUDA kernels") for count in (12, 4)] == [1, 1]
    few = ["--samples", 32, "--set", "calibration.samples=64", "--out", tmp_path / "ranked"]
    ended(qdqbench("sensitivity", "int8-ffn", *sst2.options, "--backend", "cuda", *few))
    hopper.setattr(workspace, "find_gpu", lambda: Gpu("NVIDIA V100", "7.0", None))
    done = qdqbench("search", path, *options, "--speed", "latency", "--out", tmp_path / "other")
    refused(done, "GPU of compute capability 7.5 or newer", code=3)


def refuses_engines_that_cannot_run(out, qdqbench, monkeypatch, serves=False):
    """Of another version, GPU or maker, or cut off: a sentence, and no file is written."""
    path = out / "engine" / "model.int8.engine"
    sidecar, stages = path.with_name(f"{path.name}.json"), out / STAGES_FILE
    data, about = path.read_bytes(), json.loads(sidecar.read_text())
    told = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    for bad, message in (
        (data[: len(data) // 2], "is no whole engine of backend cuda"),
        ((out / "model.int8.onnx").read_bytes(), "is no whole engine of backend cuda"),
        (save(load(data), told | {"version": "0.0.1-abc"}), "has version 0.0.1-abc, and this one is"),
        (None, "backend cuda runs on compute capability 7.5 and newer, not on 7.0"),
    ):
        path.unlink()  # the deployed one is a link to it
        path.write_bytes(bad or data)
        sums = {"engine_sha256": hashlib.sha256(bad or data).hexdigest()}
        sidecar.write_text(json.dumps(about | sums))
        if serves:  # as if another version of the program had made the run
            now = {path: sums["engine_sha256"], sidecar: hashlib.sha256(sidecar.read_bytes()).hexdigest()}
            for file, digest in now.items():
                recorded = f'("engine/{file.name}": )"[0-9a-f]+"'
                stages.write_text(re.sub(recorded, rf'\1"{digest}"', stages.read_text()))
        before = {each: each.stat().st_mtime_ns for each in out.rglob("*")}
        commands = [("inspect", out, "--profile", "gpu")]
        commands += [("serve", out, "--port", "0", "--no-fp32")] if serves and "0.0.1" in message else []
        with monkeypatch.context() as patch:
            if bad is None:
                patch.setattr("qdqbench.quantize.engine.sidecar.find_gpu", lambda: Gpu("V100", "7.0", None))
            for command in commands:
                refused(qdqbench(*command), message)
        assert {each: each.stat().st_mtime_ns for each in out.rglob("*")} == before
    path.write_bytes(data[:100])
    fine(qdqbench("build", out))  # stages see that the file is not the one that was built
    assert path.read_bytes() == data


@pytest.mark.long
def test_a_server_refuses_engines_that_cannot_run(whole_run, tmp_path, qdqbench, hopper):
    out = shutil.copytree(whole_run("cuda-stsb"), tmp_path / "run")
    refuses_engines_that_cannot_run(out, qdqbench, hopper, serves=True)


@pytest.mark.long
def test_a_graph_that_is_not_covered_is_refused_by_its_node(sst2, tmp_path, qdqbench, without_nvrtc):
    options = ["--model", write_model(tmp_path / "model", "deberta-v2", entries()), *sst2.options[2:]]
    done = qdqbench("run", "int8-linears", *options, "--backend", "cuda", "--out", tmp_path / "run")
    refused(done, "self/p2c/Transpose_1 (Transpose): expected Where; take tensorrt_rtx or tensorrt")
    assert not [*(tmp_path / "run").rglob("*.engine")]


def test_without_a_gpu_the_engine_is_deployed_and_inspected(whole_run, tmp_path, qdqbench, without_nvrtc):
    out = shutil.copytree(whole_run("cuda-without-gpu"), tmp_path / "run")
    found = results(out)
    assert "no GPU here" in found["skipped"]["verify"]
    for name in ("layers.json", "build.json"):
        (out / name).rename(out / f"{name}.away")
    rows = json.loads(fine(qdqbench("inspect", out / "engine" / "model.int8.engine", "--json")).out)
    assert rows["int8_gemms"] == found["engine"]["int8_gemms"]
    deployed_folder_needs_torch_alone(shutil.copytree(out / "deploy", tmp_path / "elsewhere"))


def deployed_folder_needs_torch_alone(folder):
    """The script reads its engine, and fails where there is no GPU; another process packs tokens."""
    modules = {path.name for path in (folder / "cuda_engine").iterdir()}
    assert {"runtime.py", "reader.py", "errors.py"} < modules
    assert all(f"  cuda_engine/{name}\n" in (folder / "SHA256SUMS").read_text() for name in modules)
    assert not [name for name in modules if "qdqbench." in (folder / "cuda_engine" / name).read_text()]
    torch = (folder / "requirements.txt").read_text().partition("# run_cuda.py:")[2].splitlines()[0]
    assert torch.strip().startswith("torch==")
    blocked = folder.parent / "blocked"
    if find_gpu() is None:
        done = run_script(folder / "run_cuda.py", blocked, "a film", forbidden=NOT_NEEDED)
        assert (done.returncode, done.stderr.count("\n"), done.stdout) == (1, 1, "")
        assert done.stderr.startswith(
            "backend cuda runs on a GPU of compute capability 8.0, 8.6, 8.9, 9.0, 12.0,"
        )
    (folder / "pack.py").write_text(PACKS)
    done = run_script(folder / "pack.py", blocked, "a film", "it is a good plot", forbidden=NOT_NEEDED)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [[0, 4, 11], "row 0 has the token 99999; the model has 21 of them"]
    told, version = (folder / "model.json").read_text(), get_version()
    (folder / "model.json").write_text(told.replace(version, "0.0.1-abc"))
    sums = (folder / "SHA256SUMS").read_text().splitlines()
    listed = [line for line in sums if not line.endswith("  model.json")]
    listed.append(f"{hashlib.sha256((folder / 'model.json').read_bytes()).hexdigest()}  model.json")
    (folder / "SHA256SUMS").write_text("\n".join(listed))
    done = run_script(folder / "run_cuda.py", blocked, "a film", forbidden=NOT_NEEDED)
    told = f"cuda.engine has version {version}, and this one is 0.0.1-abc; build it again"
    assert (done.returncode, done.stderr.startswith(told)) == (1, True)


def without_a_compiler(monkeypatch):
    def missing(*_):
        raise MissingDevice("cuda compiles its kernels by NVRTC, which is not here")

    monkeypatch.setattr(files, "compile_kernels", missing)
    monkeypatch.setattr(backend, "load_nvrtc", missing)


def test_an_engine_that_is_there_needs_no_nvrtc(sst2, tmp_path, qdqbench, monkeypatch, without_nvrtc):
    options = [*sst2.options, "--backend", "cuda", "--out", tmp_path / "run"]
    fine(qdqbench("run", "int8-linears", *options, "--until", "build"))
    without_a_compiler(monkeypatch)
    fine(qdqbench("run", "int8-linears", *options, "--until", "verify"))  # computes the baseline
    assert (tmp_path / "run" / "engine" / "model.int8.engine").is_file()
