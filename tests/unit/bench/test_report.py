"""A bench is shown as it was measured: labelled, flagged where INT8 does not pay, on every kind of page."""

import xml.etree.ElementTree as ET

import pytest

from qdqbench.eval.bench import report
from qdqbench.eval.bench.results import (
    OURS,
    BenchSystem,
    compute_speedups,
    headline_of,
    read_earlier,
    write_bench,
)
from qdqbench.eval.runs.report.report import refresh_reports, write_reports
from qdqbench.quantize.pipeline.session import CONFIG, RunConfig
from qdqbench.quantize.recipe.schema import adapt_recipe, load_recipe
from qdqbench.quantize.tasks.task import EMBEDDED
from qdqbench.quantize.utils.files import sha256

from ...support.benches import bench_row, sample_bench
from ...support.runs import sample as sample_run


def bench_with(name, label):
    """The sample with another INT8 engine, of 0.6 ms at batch 1."""
    bench = sample_bench()
    bench.systems.insert(1, BenchSystem(name=name, label=label, precision="int8", backend=""))
    cell = bench.configs[0]
    cell.rows.insert(1, bench_row(name, 0.6, 1))
    cell.speedups = compute_speedups(cell.rows, "1 x 128", 0)
    return bench, cell


def test_the_fastest_int8_engine_is_the_one_that_is_compared():
    bench, cell = bench_with("int8-exact", "INT8 engine, exact shape")
    found = headline_of(bench.systems, cell)
    assert (found.system, found.baseline, found.value) == ("int8-exact", "fp16", pytest.approx(1.2))
    assert {s.baseline for s in cell.speedups if s.system == "int8-exact"} >= {"int8", "fp16", "torch-fp32"}
    assert report.headline_title(bench) == "INT8 over the fastest FP16"
    tile = report.bench_report(bench).tiles[0]
    assert (tile.title, tile.value) == ("1 x 128", "1.20x")
    assert report.slow_lines(bench)[0].startswith("1 x 128: INT8 engine is slower than FP16 engine, 0.90x")


def test_the_fastest_backend_leads_a_bench_and_does_not_judge_a_run():
    bench, cell = bench_with("int8-cuda", "INT8 CUDA kernels")
    assert headline_of(bench.systems, cell).system == "int8-cuda"
    assert headline_of(bench.systems, cell, OURS).system == "int8"
    lines = {line[0]: line[1] for line in report.bench_report(bench).verdict.lines}
    assert lines["Fastest"] == "INT8 CUDA kernels at 1 of 3 shapes, not this recipe's backend"


def test_another_recipe_is_compared_where_the_unpadded_encoder_is_the_only_fp16():
    rows = [
        bench_row(name, ms, 1) for name, ms in (("int8", 0.5), ("int8-mine", 0.6), ("unpadded-fp16", 0.9))
    ]
    found = {(each.system, each.baseline) for each in compute_speedups(rows, "1 x 128", 0)}
    assert ("int8-mine", "unpadded-fp16") in found


def test_a_slow_down_within_the_spread_is_inconclusive():
    bench = sample_bench()
    for ratio in bench.configs[0].speedups:
        ratio.ci95_high = 1.02 if ratio.verdict == "slower" else ratio.ci95_high
    assert report.slow_lines(bench) == []
    tile = report.bench_report(bench).tiles[0]
    assert (tile.value, tile.remark[:12], tile.state) == ("0.90x", "[0.90, 1.02]", "unclear")
    assert report.bench_report(bench).verdict.state == "unclear"


@pytest.mark.parametrize("chart", [report.latency_svg, report.speedup_svg, report.throughput_svg])
def test_charts_are_whole_and_the_same_every_time(chart):
    bench = sample_bench()
    svg = chart(bench)
    ET.fromstring(svg)
    assert svg == chart(bench)
    assert "torch.compile FP16" in svg
    assert "<metadata" not in svg
    assert chart(bench.model_copy(update={"configs": []})) == ""
    bench.configs += [cell.model_copy(update={"length": 64}) for cell in bench.configs]
    assert all(f"{length} tokens" in chart(bench) for length in (64, 128))
    assert (">2 streams</text>" in chart(bench)) == (chart is report.throughput_svg)
    for cell in bench.configs:
        cell.speedups = []
        for row in cell.rows:
            row.throughput = []
    assert bool(chart(bench)) == (chart is report.latency_svg)


def test_a_run_without_a_bench_has_no_section(tmp_path):
    assert report.bench_of(tmp_path) is None
    for path in write_reports(sample_run(), tmp_path):
        assert 'id="speed"' not in path.read_text(encoding="utf-8").replace("## Speed", 'id="speed"')


def test_a_bench_of_other_files_is_marked_stale(tmp_path):
    model = tmp_path / "model.int8.onnx"
    model.write_bytes(b"one")
    bench = sample_bench()
    bench.target.files = {model.name: sha256(model)}
    write_bench(tmp_path / "bench.json", bench)
    assert report.bench_of(tmp_path).errors == []
    model.write_bytes(b"another")
    assert "model.int8.onnx changed after this bench" in report.bench_of(tmp_path).errors[0]


def test_a_bench_of_another_engine_of_the_same_graph_is_marked_stale(tmp_path):
    """With precision.compute: fp32 on a CPU a run had the graph of one in BF16, and its speed."""
    made, path = load_recipe("bert-int8-linears"), tmp_path / "bench.json"
    bench = sample_bench(recipe=made.model_dump(mode="json"))
    write_bench(path, bench)
    for compute in ("fp16", "fp32"):
        asked = adapt_recipe(made, shapes="auto", fields={"precision.compute": compute})
        config = RunConfig(recipe=asked, model=None, task=EMBEDDED, data="hub")
        (tmp_path / CONFIG).write_text(config.model_dump_json())
        kept = read_earlier(path, bench.target.files, asked.model_dump(mode="json"))
        found = len(kept), report.stale_files(bench, tmp_path)
        assert found == ((1, []) if compute == "fp16" else (0, ["the recipe"]))


def test_an_unreadable_bench_does_not_take_the_report_with_it(tmp_path):
    (tmp_path / "bench.json").write_text("{}")
    for path in write_reports(sample_run(), tmp_path):
        assert "is no bench result of this version" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["{}", "no JSON"])
def test_results_of_another_version_do_not_lose_the_bench(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    written, why = refresh_reports(tmp_path)
    assert written == []
    assert why.startswith("results.json is not of this version")
