"""A whole bench on a CPU with every contestant, on a tiny model: they run, agree, and prove their INT8."""

import importlib.metadata
import json
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from qdqbench import _bench as api_bench
from qdqbench.eval.bench import cpu, peers, systems
from qdqbench.eval.bench import target as bench_target
from qdqbench.eval.bench.measure import MAX_REL_ERROR
from qdqbench.eval.bench.report import bench_report, clocks, hardware, ratio_rows
from qdqbench.eval.bench.results import headline_of, read_bench, row_of, speedup_of
from qdqbench.quantize.engine import backend
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.report.render import render_html, render_markdown, render_screen
from qdqbench.quantize.utils.errors import CheckFailed
from qdqbench.quantize.utils.system.cpu import Cpu, find_cpu

from ...support.fake_bench import WORD_COUNTS, fake_target, invoke, write_texts

pytest.importorskip("openvino", reason="needs openvino: pip install 'qdqbench[openvino]'")

INT8 = ("int8", "int8-onnxruntime", "int8-uncentered")


@pytest.fixture(scope="module")
def measured(tiny_bert, tmp_path_factory):
    """Every contestant at a shape and on a split; Inductor, which takes a minute, and NNCF change nothing."""
    seen = SimpleNamespace(rows=[], compiled=[], opened=Counter())

    def quantize(model, rows, *, subset_size, **_):
        assert subset_size == len(rows)
        seen.rows += rows
        return model

    nncf = SimpleNamespace(
        Dataset=list,
        quantize=quantize,
        ModelType=SimpleNamespace(TRANSFORMER=1),
        QuantizationPreset=SimpleNamespace(MIXED=2),
    )

    def compiled_forward(model, mode, *, dynamic):
        seen.compiled.append((mode, dynamic))
        return peers.eager_forward(model)

    compile_model = cpu.cpu_runtimes.compile_model

    def opened(backend, *model, **options):
        seen.opened[backend] += 1
        return compile_model(backend, *model, **options)

    def version(name):
        return "3.4" if name == "nncf" else importlib.metadata.version(name)

    folder = tmp_path_factory.mktemp("bench")
    other = load_recipe("bert-int8-linears").model_dump(mode="json") | {"name": "uncentered"}
    other["calibration"]["centering"] = False
    (folder / "uncentered.yaml").write_text(json.dumps(other))
    split = ("--dataset", "sst2", "--dataset-batch", 8, "--data", write_texts(folder / "data"))
    extra, effort = ("--extra-recipe", folder / "uncentered.yaml"), ("--rounds", 1, "--iterations", 2)
    given = ("--model", tiny_bert, "--cpu", "--batch", 3, "--length", 16, "--out", folder / "out", "--json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nncf", nncf)
        patch.setattr(systems, "_version", version)
        patch.setattr(systems.shutil, "which", lambda name: name)
        patch.setattr(peers, "compiled_forward", compiled_forward)
        patch.setattr(cpu.cpu_runtimes, "compile_model", opened)
        for module in (api_bench, backend):
            patch.setattr(module, "find_cpu", lambda: Cpu("any", 2, ()))
        outcome = invoke("bench", *given, *effort, *split, *extra)
    assert outcome.exit_code == 0, outcome.exception
    seen.printed = json.loads(outcome.stdout)
    return read_bench(folder / "out" / "bench.json"), folder / "out", seen


def test_every_contestant_is_measured_once(measured):
    found, folder, seen = measured
    assert seen.printed == found.model_dump(mode="json")
    assert (found.device, found.complete, found.errors) == ("cpu", True, [])
    names = () if find_cpu().bf16 else ("bf16-openvino", "torch-bf16", "compile-bf16")
    for cell in found.configs:
        absent = {row.system: row.reason for row in cell.rows if row.status != "done"}
        assert absent == dict.fromkeys(names, "this CPU multiplies no BF16")
        assert len(cell.rows) == 1 + sum(system.device == "cpu" for system in systems.TABLE)
        done = [row for row in cell.rows if row.system not in absent]
        assert all(row.launches == 2 and row.median_ms > 0 and row.cpu_ms > 0 for row in done)
    times = 2 * (cpu.COMPILED + 1)  # once in two streams
    assert seen.opened == {"onnxruntime": 3 * times, "openvino": (5 - bool(names)) * times}
    assert list((folder / "work" / "bench").iterdir()) == []  # engines and graphs are gone


def test_a_shape_and_a_split_are_measured(measured):
    found, _, _ = measured
    shapes = [(cell.batch, cell.length, cell.reference) for cell in found.configs]
    assert shapes == [(3, 16, "torch-fp32"), (8, None, "torch-fp32")]
    split = found.configs[-1]
    assert (split.sequences, split.padded_to[0]) == (len(WORD_COUNTS), 11)
    assert row_of(split, "int8").sequences_per_s > 0
    assert found.cpu.name == find_cpu().name
    assert any("CPU" in note for note in found.notes)


def test_what_was_exported_is_told_and_reused(measured, tiny_bert, monkeypatch):
    found, folder, _ = measured
    assert not found.target.random_weights
    assert "random token ids" in found.target.calibration
    assert set(found.target.files) == {"model.int8.onnx", "model.fp16.onnx", "model.fp32.onnx"}
    graphs = [onnx.load(folder / "work" / f"model.{name}.onnx").graph for name in ("int8", "fp16")]
    int8, twin = ([node.op_type for node in graph.node].count("QuantizeLinear") for graph in graphs)
    assert (int8 >= 4, twin) == (True, 0)
    monkeypatch.setattr(bench_target, "_calibrate", lambda session: pytest.fail("calibrated again"))
    target = bench_target.model_target(str(tiny_bert), load_recipe("bert-int8-linears"), folder / "work", 0)
    assert list(target.graphs) == ["int8", "fp16", "fp32"]


def test_another_recipe_is_timed_next_to_the_first(measured):
    found, _, _ = measured
    system = next(each for each in found.systems if each.name == "int8-uncentered")
    assert system.recipe["calibration"]["centering"] is False
    assert found.recipe["calibration"]["centering"] == "auto"
    for cell in found.configs:
        assert speedup_of(cell, "int8", "int8-uncentered").cpu is not None


def test_errors_of_contestants_are_exit_status_2(measured, monkeypatch, tmp_path, tiny_bert):
    found = measured[0].model_copy(update={"errors": ["1 x 16: INT8: NaN"]})
    monkeypatch.setattr(api_bench, "run_bench", lambda *_, **__: found)
    monkeypatch.setattr(api_bench, "model_target", lambda *_, **__: fake_target(folder=tmp_path))
    outcome = invoke("bench", "--model", tiny_bert, "--out", tmp_path, "--cpu")
    assert isinstance(outcome.exception, CheckFailed)
    assert str(outcome.exception) == "1 measurements failed: 1 x 16: INT8: NaN"
    assert "NaN" in (tmp_path / "bench.md").read_text(encoding="utf-8")


def test_int8_engines_are_proven(measured):
    for cell in measured[0].configs:
        for row in (row_of(cell, name) for name in INT8):
            assert (row.int8_gemms, row.expected_int8_gemms, row.not_int8) == (12, 12, [])
            assert row.engine_bytes


def test_streams_share_the_threads_and_compiled_loops_have_one_stream(measured):
    found, _, seen = measured
    assert (found.settings.threads, found.settings.streams) == (2, [1, 2])
    for row in (row for cell in found.configs for row in cell.rows if row.status == "done"):
        streams = [rate.streams for rate in row.throughput]
        assert streams == ([1] if row.system.startswith("compile-") else [1, 2])
    assert set(seen.compiled) == {("default", False), ("default", True)}  # a split has many shapes


def test_nncf_is_calibrated_on_single_samples_without_padding(measured):
    rows = measured[2].rows
    assert len(rows) == 32
    assert all(row["attention_mask"].shape[0] == 1 and row["attention_mask"].all() for row in rows)


def test_nncf_sees_no_padding_of_a_run():
    mask = np.array([[1, 1, 0], [1, 1, 1]])
    batch = {"input_ids": np.arange(6).reshape(2, 3), "attention_mask": mask, "token_type_ids": 0 * mask}
    target = fake_target(kind="run", calibration_batches=lambda: [batch])
    assert [row["input_ids"].tolist() for row in cpu._calibration_rows(target)] == [[[0, 1]], [[3, 4, 5]]]


def test_the_headline_is_the_fastest_contestant_without_int8_and_nncf(measured):
    found, _, _ = measured
    cell = found.configs[0]
    best = headline_of(found.systems, cell)
    floats = {about.name for about in found.systems if about.precision != "int8"}
    # by CPU time where other processes took cores, which can name another one than the medians
    ratios = {each.baseline: each.leading.value for each in cell.speedups if each.system == best.system}
    assert best.baseline == min(ratios.keys() & floats, key=ratios.__getitem__)
    labels = {about.name: about.label for about in found.systems}
    assert ratio_rows(found)[-1][0] == f"{labels['int8']} over NNCF INT8 in OpenVINO"
    tile, _ = bench_report(found).tiles
    assert labels[best.baseline] in tile.remark
    assert "2 threads" in hardware(found)
    assert "load average" in clocks(found)
    report = bench_report(found)
    for text in (render_html(report), render_markdown(report)):
        assert "INT8 over the fastest FP32 or BF16" in text
        assert "GPU" not in text.replace("says nothing about a GPU", "")
    assert render_html(report).count("<svg") == 0  # one batch is no line
    assert render_screen(report)


def test_a_system_that_computes_something_else_is_an_error(tiny_bert, tmp_path, monkeypatch):
    real = cpu.RUNS["export"]

    def wrong(here, system):
        lanes, *more = real(here, system)
        if system.name != "fp32-openvino":
            return lanes, *more
        return lambda streams: [lambda batch, run=run: -run(batch) for run in lanes(streams)], *more

    names = ("fp32-onnxruntime", "fp32-openvino")
    monkeypatch.setattr(systems, "TABLE", [system for system in systems.TABLE if system.name in names])
    monkeypatch.setitem(cpu.RUNS, "export", wrong)
    short = {"batch": [1], "length": [16], "rounds": 1, "iterations": 1}
    found = api_bench.bench(model=str(tiny_bert), recipe="fp16", cpu=True, out=tmp_path, **short)
    (line,) = found.errors
    assert line.startswith(
        "1 x 16: OpenVINO FP32: its logits are 2 (relative) from those of fp32-onnxruntime"
    )
    assert MAX_REL_ERROR["fp32"] < 2
