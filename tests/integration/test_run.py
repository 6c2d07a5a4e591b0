"""The whole path, recipe to report, on a tiny model: `qdqbench run` and the stage commands."""

import html
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from qdqbench.eval.metrics.results import GateIssue
from qdqbench.eval.runs.gate import issue_sentence
from qdqbench.eval.runs.results import Results
from qdqbench.eval.stages import stages as engine_stages
from qdqbench.quantize.engine import backend as engine_backend
from qdqbench.quantize.engine import layers as tables
from qdqbench.quantize.pipeline import pipeline
from qdqbench.quantize.pipeline.data_profiles import engine_profiles
from qdqbench.quantize.utils.errors import MissingDevice, UserError

from ..support.long import mark_long
from .cases import edited
from .tiny import LAYERS, files_of, fine, listing, results

STAGES = ["baseline", "quantize", "fake_quant", "export", "check", "parity", "onnxruntime"]
STAGES += ["build", "verify", "engine"]
needs_rtx = pytest.mark.skipif(
    "not __import__('importlib').util.find_spec('tensorrt_rtx')",
    reason="needs tensorrt_rtx: pip install 'qdqbench[rtx]'",
)
pytestmark = pytest.mark.slow
NO_ENGINE = "no engine can be built here, so the run will continue without one"


GOLDEN = Path(__file__).parents[1] / "golden"
DEPLOYED = [f"deploy/{name}" for name in (GOLDEN / "deployed.txt").read_text().split()]  # for TensorRT-RTX
RERUN = {  # a change of the recipe, or options; and the stages that depend on it
    "gate": ({"gate": {"max_drop": 0.5}}, "verify"),
    "description": ({"description": "other words"}, ""),
    "seed": (["--seed", "7"], "parity verify"),
    "calibration": ({"calibration": {"seed": 5, "samples": 64}}, " ".join(STAGES[1:])),
    "shapes": (
        {"engine": {"shapes": {"batch": [1, 8, 64], "length": [16, 128, 128]}}},
        "build verify engine",
    ),
    "weights": (
        {"export": {"weight_scales": "channel"}},
        "export check parity onnxruntime build verify engine",
    ),
    "limit": (["--limit", "32"], "baseline fake_quant parity onnxruntime verify engine"),
}


def rerun_of(out):
    """The stages that a call did not take from an earlier one."""
    return {name for name, row in results(out)["timings"].items() if not row["reused"]}


@needs_rtx
@pytest.mark.parametrize("case", mark_long(RERUN, ["seed", "limit"]))
def test_a_change_reruns_what_depends_on_it(case, a_run, sst2, tmp_path, qdqbench):
    change, rerun = RERUN[case]
    options, change = (change, {}) if isinstance(change, list) else ([], change)
    recipe = edited(tmp_path / "changed.yaml", change)
    assert qdqbench("run", recipe, *sst2.options, "--out", a_run, *options).code == 0
    assert rerun_of(a_run) == {*rerun.split()}


@needs_rtx
def test_profiles_follow_the_data_and_the_warning_goes(a_run, sst2, qdqbench, monkeypatch):
    monkeypatch.setattr(engine_stages, "engine_profiles", engine_profiles)  # all of them
    assert any("--shapes auto" in line for line in results(a_run)["warnings"])
    fine(qdqbench("run", "int8-linears", *sst2.options, "--shapes", "auto", "--out", a_run))
    found = results(a_run)
    assert rerun_of(a_run) == {"build", "verify", "engine"}
    assert not any("opt shape" in line for line in found["warnings"])
    told = found["lengths"]
    assert told["tokens"] == sum(length * rows for length, rows in told["histogram"])
    assert told["tokens"] == sum(bucket["tokens"] for bucket in told["buckets"])
    edges = [bucket["length"] for bucket in told["buckets"]]
    assert edges == sorted(edges)
    assert edges[-1] >= told["longest"]
    sidecar = json.loads((a_run / "engine" / "model.int8.engine.json").read_text())
    assert [profile["opt"] for profile in sidecar["profiles"]] == [[32, edge] for edge in [*edges, 128]]
    assert len(told["profiles"]) == len(sidecar["profiles"])
    tokens = sum(bucket["length"] * bucket["rows"] for bucket in told["buckets"])
    assert told["padding"] == pytest.approx(1 - told["tokens"] / tokens)
    for shown in ("report.md", "report.html"):
        assert "shapes: auto" in (a_run / shown).read_text()


@needs_rtx
def test_stage_commands_take_up_a_run(sst2, tmp_path, qdqbench):
    out = tmp_path / "run"
    fine(qdqbench("run", "int8-linears", *sst2.options, "--out", out, "--until", "quantize"))
    assert listing(out) == ["calibration.json", "recipe.yaml", "run.json", "stages.json"]
    steps = {
        "quantize": [],
        "export": ["model.fp16.onnx", "model.fp32.onnx", "model.int8.onnx", "rewrites.json"],
        "build": [
            *("build.json", "engine/model.int8.engine", "engine/model.int8.engine.json"),
            *("engine/texts.json", "layers.json"),
        ],
        "evaluate": [
            "engine.json",
            *(f"logits/{name}.npz" for name in ("fake_quant", "fp32", "onnxruntime")),
            "verify.json",
        ],
        "report": [
            *("changed.csv", "check.json", *DEPLOYED, "layer_errors.json", "parity.json"),
            *("report.html", "report.md", "results.json"),
        ],
    }
    for command, written in steps.items():
        before = files_of(out)
        told = json.loads(fine(qdqbench(command, out, "--json")).out)
        if command != "report":
            made = Results.model_validate(told)
            assert made.until is not None
            assert made.gate.failures == []
            assert {row.name for row in made.files} >= {*written}
            assert all(row.bytes == (out / row.name).stat().st_size for row in made.files)
            said = qdqbench(command, out).out
            assert all(stage in said for stage in made.timings)
            assert f"{len(made.files)} file" in said
        assert sorted({*listing(out)} - {*before, "run.json", "recipe.yaml"}) == written, command
        assert {name: files_of(out)[name] for name in before if name != "stages.json"} == {
            name: time for name, time in before.items() if name != "stages.json"
        }
    found = Results.model_validate(results(out))
    assert found.gate.passed
    made = Results.model_validate_json(qdqbench("evaluate", out, "--json").out)
    assert (made.stages, made.engine, made.verification) == (found.stages, found.engine, found.verification)
    for field in ("quantized_layers", "quantized_attention", "high_precision_layers", "quantizers"):
        assert getattr(made, field) == getattr(found, field)
    told = made.stages["onnxruntime"]
    said = " ".join(qdqbench("evaluate", out).out.split())
    assert f"accuracy {told.metrics['accuracy']:.4f} ± {told.stderr['accuracy']:.4f}, n = 96" in said
    assert qdqbench("run", "int8-linears", *sst2.options, "--out", out).code == 0
    assert rerun_of(out) == set()


def test_json_prints_the_results(a_run, qdqbench):
    done = fine(qdqbench("report", a_run, "--json"))
    assert json.loads(done.out) == results(a_run)


def as_edited(folder, recipe):
    """What a recipe becomes when somebody edits the default one: another under the same name."""
    return edited(folder / "edited.yaml", {"name": "bert-int8-linears"}, recipe)


def test_a_run_directory_can_take_an_edited_recipe(a_run, sst2, tmp_path, qdqbench):
    fine(qdqbench("run", as_edited(tmp_path, "bert-fp16"), *sst2.options, "--out", a_run))
    found = results(a_run)
    assert found["engine"]["file"] == "model.fp16.engine"
    assert found["engine"]["expected_int8_gemms"] == 0
    assert [row["name"] for row in found["files"]] == ["model.fp32.onnx", "model.fp16.onnx"]
    assert not [name for name in listing(a_run) if "int8" in name]


# The gate does not hold: exit 2, and the report is there and says why.


def failed(done, out):
    """The gate's failures; the report was written all the same."""
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert done.err.startswith("qdqbench: the gate does not hold: ")
    assert {"results.json", "report.md", "report.html"} <= {*listing(out)}
    gate = results(out)["gate"]
    assert not gate["passed"]
    report = html.unescape((out / "report.md").read_text().replace("\\", ""))  # Markdown's escapes
    issues = [GateIssue.model_validate(issue) for issue in gate["issues"]]
    failures = [issue_sentence(issue) for issue in issues if issue.state == "failed"]
    for failure in failures:
        assert failure in report
        assert failure in done.err
    return failures


def test_a_drop_fails_the_gate(a_run, sst2, tmp_path, qdqbench, monkeypatch):
    real = engine_stages.onnxruntime_runner
    monkeypatch.setattr(engine_stages, "onnxruntime_runner", lambda path: lambda batch: -real(path)(batch))
    (a_run / "logits" / "onnxruntime.npz").unlink()
    recipe = edited(tmp_path / "strict.yaml", {"gate": {"max_drop": 0.0}})
    failures = failed(qdqbench("run", recipe, *sst2.options, "--out", a_run), a_run)
    found = results(a_run)
    scored = found["stages"]
    drop = scored["fp32"]["metrics"]["accuracy"] - scored["onnxruntime"]["metrics"]["accuracy"]
    assert drop > 0.5
    assert any(f.startswith("onnxruntime: accuracy") and f"{drop:.4f}" in f for f in failures)
    assert not [failure for failure in failures if failure.startswith("fp32")]


def test_a_layer_that_is_not_int8_fails_the_gate(a_run, sst2, qdqbench, monkeypatch):
    real = tables.measure_coverage

    def one_less(layers, expected, gemms):
        changed = [
            row.model_copy(update={"inputs": ["Half"] * len(row.inputs)})
            if any("intermediate/dense/MatMul" in name for name in row.onnx)
            else row
            for row in layers
        ]
        return real(changed, expected, gemms)

    monkeypatch.setattr(tables, "measure_coverage", one_less)
    (a_run / "build.json").unlink()
    failures = failed(qdqbench("run", "int8-linears", *sst2.options, "--out", a_run), a_run)
    engine = results(a_run)["engine"]
    assert engine["expected_int8_gemms"] - engine["int8_gemms"] == len(engine["not_int8"]) == LAYERS
    assert len(failures) == 1
    assert all(name in failures[0] for name in engine["not_int8"])


def test_without_tensorrt_rtx_nothing_is_proven(a_run, sst2, qdqbench, monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("tensorrt_rtx", "tensorrt"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    out = a_run
    failures = failed(qdqbench("run", "int8-linears", *sst2.options, "--out", out), out)
    assert len(failures) == 1
    assert re.match(r"INT8 is not proven, no engine was built: .*pip install", failures[0])
    found = results(out)
    assert found["engine"] is None
    assert found["stages"]["engine"]["status"] == "skipped"
    assert "not installed" in found["stages"]["engine"]["reason"]
    assert found["stages"]["onnxruntime"]["status"] == "done"
    (out / "calibration.json").unlink()
    done = qdqbench("run", "int8-linears", *sst2.options, "--out", out)
    first, _, rest = done.err.partition("\n")
    assert re.match(rf"{NO_ENGINE}: tensorrt_rtx is not installed; pip install", first)
    assert failed(replace(done, err=rest), out) == failures
    monkeypatch.undo()
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx: pip install 'qdqbench[rtx]'")
    assert qdqbench("run", "int8-linears", *sst2.options, "--out", out).code == 0  # once it is installed
    assert rerun_of(out) == {"build", "verify", "engine"}


@pytest.mark.parametrize("backend", ["cuda", "tensorrt", "tensorrt_rtx"])
def test_a_missing_builder_is_named_before_anything_is_computed(
    backend, sst2, tmp_path, qdqbench, monkeypatch
):
    def missing():
        raise MissingDevice("no NVRTC")

    def compute(*_):
        raise UserError("a stage runs")

    monkeypatch.setattr(engine_backend, "load_nvrtc", missing)
    monkeypatch.setattr(pipeline, "_run_stage", compute)
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, None)
    options = [*sst2.options, "--backend", backend, "--out", tmp_path / "run"]
    why = "no NVRTC" if backend == "cuda" else f"{backend} is not installed; pip install"
    done = qdqbench("run", "int8-linears", *options, "--until", "build")  # which is all that was asked
    assert (done.code, done.err.startswith(f"qdqbench: {why}"), done.err.count("\n")) == (3, True, 1)
    assert not (tmp_path / "run").exists()
    for command in (["run", "int8-linears"], ["qat"]):
        done = qdqbench(*command, *options)
        first, last = done.err.splitlines()
        assert first.startswith(f"{NO_ENGINE}: {why}")
        assert last == "qdqbench: a stage runs"
    done = qdqbench("run", "int8-linears", *options, "--until", "parity")
    assert done.err.splitlines() == [last]  # no engine is asked for


def test_a_wrong_graph_fails_parity(a_run, sst2, qdqbench, monkeypatch):
    """One activation scale is doubled in the graph: only the layer-local comparison can say where."""
    real = engine_stages.compare_layers

    def tampered(graph, model, batches, *rest):
        names = {i.name: i for i in graph.graph.initializer}
        node = next(n for n in graph.graph.node if n.op_type == "QuantizeLinear" and "layer.1" in n.name)
        scale = names[node.input[1]]
        scale.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(scale), scale.name))
        return real(graph, model, batches, *rest)

    monkeypatch.setattr(engine_stages, "compare_layers", tampered)
    (a_run / "parity.json").unlink()
    failures = failed(qdqbench("run", "int8-linears", *sst2.options, "--out", a_run), a_run)
    assert len(failures) == 1
    assert "encoder.layer.1" in failures[0]
    assert "encoder.layer.0" not in failures[0]


def test_limit_warns_in_the_report(a_run, sst2, qdqbench):
    done = fine(qdqbench("run", "int8-linears", *sst2.options, "--out", a_run, "--limit", "20"))
    found = results(a_run)
    assert found["stages"]["onnxruntime"]["n"] == 20
    assert any(warning.startswith("--limit 20:") for warning in found["warnings"])
    for shown in (done.out, (a_run / "report.md").read_text(), (a_run / "report.html").read_text()):
        assert "--limit 20:" in " ".join(shown.split())


@needs_rtx
@pytest.mark.long  # the pages for Python run it too
@pytest.mark.parametrize("second", ["bert-fp16", "bert-int8-attention"])
def test_embedded_default(second, tmp_path, qdqbench):
    out = tmp_path / "run"
    fine(qdqbench("run", "int8-linears", "--out", out))
    found = Results.model_validate(results(out))
    assert found.stages["fp32"].metrics["accuracy"] > 0.9
    assert found.stages["fp32"].n >= 1000
    assert found.engine.int8_gemms == found.engine.expected_int8_gemms == len(found.quantized_layers) > 0
    assert found.parity.passed
    assert found.gate.passed
    assert found.model["embedded"]
    assert any("built-in BERT" in warning for warning in found.warnings)
    again = fine(qdqbench("run", as_edited(tmp_path, second), "--out", out, "--until", "baseline", "--json"))
    assert json.loads(again.out)["timings"]["embedded"]["reused"]  # the trained model
