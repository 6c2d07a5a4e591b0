"""`qdqbench inspect`: run directories, engines, saved tables; exit status; what a terminal shows."""

import json
import re
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from qdqbench.eval.verification import bisect
from qdqbench.quantize.engine import backend, sidecar
from qdqbench.quantize.engine.layers import read_table
from qdqbench.quantize.lint import inspect_target
from qdqbench.quantize.utils.system.gpu import Gpu

from ..support.layer_tables import bert, inspector_json
from .tiny import ended, fine, refused

HEAD = ["/bert/pooler/dense/Gemm", "/classifier/Gemm"]


@pytest.fixture
def saved(tmp_path):
    """A saved inspector table."""
    path = tmp_path / "table.json"
    path.write_text(inspector_json(bert(), 11))
    return path


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


# Saved tables.


def test_a_saved_table(saved, qdqbench):
    told = json.loads(fine(qdqbench("inspect", saved, "--json")).out)
    assert (told["gemms"], told["int8_gemms"], told["not_int8"]) == (14, 12, HEAD)
    assert (told["expected_int8_gemms"], told["failures"], told["time"]) == (None, [], None)
    assert len(told["kernels"]) == len(bert())
    assert {"name", "kind", "what", "block", "onnx", "inputs", "outputs", "ms"} <= set(told["kernels"][3])


def test_every_kernel_on_request(saved, qdqbench, wide):
    few, many = (qdqbench("inspect", saved, *options).out for options in ([], ["--all"]))
    assert re.search(r"layer.0-1 attention value +2x +MulAddReshTranReshMove +FP16 -> FP16", few)
    for number in (0, 1):
        assert re.search(rf"layer.{number} attention value +__myl_MulAddReshTranReshMove_myl0_\d+", many)
    kernels = sum(row.kind not in ("signal", "shape_call") for row in bert())
    assert len(re.findall(r"^\S.* -> (?:FP|INT)[A-Z0-9/]+ *$", many, re.MULTILINE)) == kernels


def test_nothing_of_the_file_reaches_the_terminal_as_a_command(tmp_path, qdqbench):
    rows = bert(1)
    rows[2].name = "__myl_\x1b[2JMul\x07[red]_myl0_2"
    rows[2].onnx = ["/bert/\x1b]0;title\x07Sub"]
    path = tmp_path / "evil.json"
    path.write_text(inspector_json(rows))
    done = ended(qdqbench("inspect", path))
    assert {character for character in done.out if not character.isprintable()} == {"\n"}
    assert "[red]" in done.out


# Profiles.


def test_a_saved_profile(saved, tmp_path, qdqbench, wide):
    rows = [row for row in bert() if row.kind != "shape_call"]
    times = [{"name": row.name, "ms": 0.5 if row.kind == "gemm" else 0.25} for row in rows]
    (tmp_path / "times.json").write_text(json.dumps([*times, {"name": "lost", "ms": 1}]))
    total = sum(row["ms"] for row in times) + 1
    done = qdqbench("inspect", saved, "--profile", tmp_path / "times.json", "--json")
    told = json.loads(done.out)["time"]
    assert (done.code, told["total"], told["unmatched"]) == (0, total, {"lost": 1.0})
    assert list(told["by_block"]) == ["embeddings", "layer.0", "layer.1", "head", "other"]
    shown = fine(qdqbench("inspect", saved, "--profile", tmp_path / "times.json"))
    assert f"{total:.3f} ms in all" in shown.out
    for kind, ms in told["by_kind"].items():
        assert re.search(rf"{kind} +{ms:.4f} +{ms / total:.1%}", shown.out)
    first = shown.out.split("share", 1)[1].split("\n")[1]
    assert re.match(r"layer.0-1 \S.* gemm .* 1.0000 ", first)  # the slowest comes first
    assert "1 names of the profile" in shown.out


def test_the_profile_of_trtexec(saved, tmp_path, qdqbench):
    name = bert()[3].name
    exported = [{"count": 20}, {"name": name, "timeMs": 40.0, "averageMs": 2.0, "percentage": 100}]
    (tmp_path / "times.json").write_text(json.dumps(exported))
    told = json.loads(qdqbench("inspect", saved, "--profile", tmp_path / "times.json", "--json").out)
    assert told["time"]["by_kernel"] == {name: 2.0}
    assert told["time"]["missing"] == len(bert()) - 2


# Runs and engines.


def test_a_run(finished_run, qdqbench, wide):
    done = fine(qdqbench("inspect", finished_run, "--json"))
    told, built = json.loads(done.out), json.loads((finished_run / "build.json").read_text())
    assert (told["int8_gemms"], told["expected_int8_gemms"], told["not_int8"]) == (12, 12, [])
    assert told["gemms"] == 14
    assert told["engine"]["version"] == built["version"]
    assert {row["name"] for row in told["kernels"]} == {row["name"] for row in built["layers"]}
    assert set(told["softmax_in_graph"].values()) == {"FP16"}
    shown = qdqbench("inspect", finished_run)
    assert shown.code == 0
    assert "12 of 14, as the recipe wants" in shown.out


def test_an_engine_or_table_held_to_a_recipe(finished_run, qdqbench):
    engine = finished_run / "engine" / "model.int8.engine"
    told = json.loads(qdqbench("inspect", engine, "--json").out)
    assert (told["expected_int8_gemms"], told["int8_gemms"]) == (12, 12)
    arguments = ["inspect", finished_run / "layers.json", "--onnx", finished_run / "model.int8.onnx"]
    for recipe, code in [("bert-int8-linears", 0), ("bert-int8-ffn", 0), ("bert-int8-attention", 2)]:
        assert qdqbench(*arguments, "--recipe", recipe, "--json").code == code


def test_a_recipe_that_the_engine_does_not_meet(finished_run, qdqbench, wide):
    done = ended(qdqbench("inspect", finished_run, "--recipe", "bert-int8-attention"), 2)
    assert "4 GEMMs that should be in INT8 are not and 0 of 2 attentions" in done.err
    assert "12 of 14, as the recipe wants" in done.out
    assert "not INT8 layer.0-1: attention MatMul, attention MatMul_1: runs as kgen on Half" in done.out


def test_a_run_whose_engine_lost_int8(a_run, qdqbench):
    path = a_run / "layers.json"
    table = json.loads(path.read_text())
    for row in table["layers"]:
        if "layer.1/output/dense/MatMul" in row["name"]:
            row["inputs"] = ["Half"]
            lost = row["name"].partition("_myl")[0].partition(" [profile")[0]
    path.write_text(json.dumps(table))
    done = ended(qdqbench("inspect", a_run, "--json"), 2)
    told = json.loads(done.out)
    assert told["not_int8"] == [lost]
    assert "no Q/DQ pair" not in told["why_not_int8"][lost]
    assert "1 GEMM that should be in INT8 is not" in done.err


@pytest.mark.parametrize("target", ["run", "engine"])
def test_an_engine_of_another_graph(target, a_run, qdqbench):
    shutil.copy(a_run / "model.fp16.onnx", a_run / "model.int8.onnx")
    refused(
        qdqbench("inspect", a_run if target == "run" else a_run / "engine" / "model.int8.engine"),
        "was built from another model.int8.onnx",
    )


def test_a_run_without_a_sidecar_or_an_engine(a_run, qdqbench):
    engine = a_run / "engine" / "model.int8.engine"
    sidecar.sidecar_path(engine).unlink()
    refused(qdqbench("inspect", engine), "so nothing says what model.int8.engine is")
    (a_run / "build.json").write_text(json.dumps({"skipped": "tensorrt_rtx is not installed"}))
    done = qdqbench("inspect", a_run)
    assert (done.code, done.out) == (3, "")
    assert "tensorrt_rtx is not installed" in done.err
    (a_run / "build.json").unlink()
    refused(qdqbench("inspect", a_run), "qdqbench build")


@pytest.fixture
def lone_engine(a_run, tmp_path):
    """An engine and its sidecar alone."""
    path = tmp_path / "lone" / "model.int8.engine"
    path.parent.mkdir()
    for name in (path.name, f"{path.name}.json"):
        shutil.copy(a_run / "engine" / name, path.parent / name)
    return path


def test_a_table_beside_two_engines_is_of_neither(lone_engine, a_run, qdqbench, monkeypatch):
    monkeypatch.setattr(inspect_target, "find_gpu", lambda: None)
    shutil.copy(a_run / "layers.json", lone_engine.with_name("layers.json"))
    assert qdqbench("inspect", lone_engine).code == 0
    lone_engine.with_name("other.engine").touch()
    assert qdqbench("inspect", lone_engine).code == 3


# Where there is a GPU: the parts of this command that need one, over fakes.

H200 = Gpu("NVIDIA H200", "8.9", "580.1")


def test_the_inspector_reads_an_engine_without_a_table(lone_engine, a_run, qdqbench, monkeypatch):
    rows, asked = read_table(a_run / "layers.json"), []
    for module in (inspect_target, sidecar, backend):
        monkeypatch.setattr(module, "find_gpu", lambda: H200)
    table = inspector_json(rows)
    monkeypatch.setattr(backend, "inspect_engine", lambda *given: asked.append(given[2]) or table)
    told = json.loads(qdqbench("inspect", lone_engine, "--json").out)
    assert asked == [lone_engine.read_bytes()]
    assert told["int8_gemms"] == 12
    monkeypatch.setattr(backend, "inspect_engine", lambda *given: None)
    done = ended(qdqbench("inspect", lone_engine), 3)
    assert "cannot load" in done.err


@pytest.mark.parametrize(("options", "shape"), [([], (4, 8)), (["--batch", 2, "--length", 6], (2, 6))])
def test_kernel_times_measured_here(options, shape, finished_run, qdqbench, monkeypatch):
    monkeypatch.setattr(inspect_target, "find_gpu", lambda: H200)
    seen = {}

    def open_engine(path, onnx_path=None):
        """The part of an Engine that profiling uses."""
        seen.update(path=path, onnx=onnx_path)
        times = lambda feeds: seen.update(feeds) or {"_gemm_mha_v2_myl0_1": 0.5}  # noqa: E731
        inputs, profiles = ["input_ids", "attention_mask"], [SimpleNamespace(opt=(4, 8))]
        return nullcontext(SimpleNamespace(inputs=inputs, profiles=profiles, kernel_times=times))

    monkeypatch.setattr(inspect_target, "Engine", open_engine)
    done = fine(qdqbench("inspect", finished_run, "--profile", "gpu", *options))
    assert f"0.500 ms in all at batch {shape[0]}, {shape[1]} tokens" in done.out
    assert seen["path"] == finished_run / "engine" / "model.int8.engine"
    assert seen["onnx"] == finished_run / "model.int8.onnx"
    np.testing.assert_array_equal(seen["attention_mask"], np.ones(shape, np.int64))
    np.testing.assert_array_equal(seen["input_ids"], np.zeros(shape, np.int64))


def test_without_a_gpu(finished_run, qdqbench, monkeypatch, lone_engine, a_run):
    monkeypatch.setattr(inspect_target, "find_gpu", lambda: None)
    done = qdqbench("inspect", finished_run, "--profile", "gpu")
    assert (done.code, done.out) == (3, "")
    refused(qdqbench("inspect", lone_engine), "model.int8.layers.json", code=3)
    shutil.copy(a_run / "layers.json", lone_engine.with_suffix(".layers.json"))
    told = json.loads(qdqbench("inspect", lone_engine, "--json").out)
    assert (told["int8_gemms"], told["expected_int8_gemms"]) == (12, None)


@pytest.mark.parametrize(("block", "code"), [(None, 0), ("layer.1", 2)])
def test_bisect(block, code, finished_run, qdqbench, monkeypatch):
    asked = []
    found = bisect.BisectResult.model_construct(block=block)
    monkeypatch.setattr(bisect, "bisect_run", lambda folder: asked.append(folder) or found)
    monkeypatch.setattr(bisect, "bisect_lines", lambda result: ["first [bad] block: x"])
    done = qdqbench("inspect", finished_run, "--bisect")
    assert (done.code, done.out) == (code, "first [bad] block: x\n")
    assert asked == [finished_run]
    assert bool(done.err) == bool(code)
