"""A whole bench on a CPU with every contestant, on a tiny model: they run, agree, and prove their INT8."""

import importlib.metadata
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from qdqbench import _bench as api_bench
from qdqbench.eval.bench import cpu, peers, systems
from qdqbench.eval.bench.measure import MAX_REL_ERROR
from qdqbench.eval.bench.report import bench_report, clocks, hardware, ratio_rows
from qdqbench.eval.bench.results import headline_of, row_of
from qdqbench.quantize.engine import backend
from qdqbench.quantize.report.render import render_html, render_markdown, render_screen
from qdqbench.quantize.utils.system.cpu import Cpu, find_cpu

pytest.importorskip("openvino", reason="needs openvino: pip install 'qdqbench[openvino]'")

INT8 = ("int8", "int8-onnxruntime")


@pytest.fixture(scope="module")
def measured(tiny_bert, tmp_path_factory):
    """Every contestant in one cell; Inductor, which takes a minute, is left out, and NNCF changes nothing."""
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nncf", nncf)
        patch.setattr(systems, "_version", version)
        patch.setattr(systems.shutil, "which", lambda name: name)
        patch.setattr(peers, "compiled_forward", compiled_forward)
        patch.setattr(cpu.cpu_runtimes, "compile_model", opened)
        for module in (api_bench, backend):
            patch.setattr(module, "find_cpu", lambda: Cpu("any", 2, ()))
        folder = tmp_path_factory.mktemp("bench")
        found = api_bench.bench(
            model=str(tiny_bert), recipe="int8-linears", batch=[2], length=[16], rounds=1, iterations=2,
            cpu=True, out=folder,
        )  # fmt: skip
    return found, folder, seen


def test_every_contestant_is_measured_once(measured):
    found, folder, seen = measured
    assert found.errors == []
    (cell,) = found.configs
    absent = {row.system: row.reason for row in cell.rows if row.status != "done"}
    names = () if find_cpu().bf16 else ("bf16-openvino", "torch-bf16", "compile-bf16")
    assert absent == dict.fromkeys(names, "this CPU multiplies no BF16")
    assert len(cell.rows) == sum(system.device == "cpu" for system in systems.TABLE)
    assert cell.reference == "torch-fp32"
    assert all(row.cpu_ms and row.cpu_ms > 0 for row in cell.rows if row.system not in absent)
    times = cpu.COMPILED + 1  # once in two streams
    assert seen.opened == {"onnxruntime": 3 * times, "openvino": (4 - bool(names)) * times}
    assert list((folder / "work" / "bench").iterdir()) == []  # engines and graphs are gone


def test_both_int8_engines_are_proven(measured):
    (cell,) = measured[0].configs
    for name in INT8:
        row = row_of(cell, name)
        assert (row.int8_gemms, row.expected_int8_gemms, row.not_int8) == (12, 12, [])
        assert row.engine_bytes


def test_streams_share_the_threads_and_compiled_loops_have_one_stream(measured):
    found, _, seen = measured
    assert (found.settings.threads, found.settings.streams) == (2, [1, 2])
    for row in (row for row in found.configs[0].rows if row.status == "done"):
        streams = [rate.streams for rate in row.throughput]
        assert streams == ([1] if row.system.startswith("compile-") else [1, 2])
    assert set(seen.compiled) == {("default", False)}


def test_nncf_is_calibrated_on_single_samples_without_padding(measured):
    rows = measured[2].rows
    assert len(rows) == 32
    assert all(row["attention_mask"].shape[0] == 1 and row["attention_mask"].all() for row in rows)


def test_the_headline_is_the_fastest_contestant_without_int8_and_nncf(measured):
    found, _, _ = measured
    (cell,) = found.configs
    best = headline_of(found.systems, cell)
    floats = {about.name for about in found.systems if about.precision != "int8"}
    # by CPU time where other processes took cores, which can name another one than the medians
    ratios = {each.baseline: each.leading.value for each in cell.speedups if each.system == best.system}
    assert best.baseline == min(ratios.keys() & floats, key=ratios.__getitem__)
    labels = {about.name: about.label for about in found.systems}
    assert ratio_rows(found)[-1][0] == f"{labels['int8']} over NNCF INT8 in OpenVINO"
    (tile,) = bench_report(found).tiles
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
        runs = real(here, system)
        lanes = runs.lanes
        if system.name == "fp32-openvino":
            runs.lanes = lambda streams: [
                lambda batch, run=run: np.negative(run(batch)) for run in lanes(streams)
            ]
        return runs

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
