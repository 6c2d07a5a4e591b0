"""A speed is one figure: in results.json, the verdict, the tile, the section, and the bench's own pages."""

import re
from pathlib import Path

from qdqbench.eval.bench.report import speedup_svg, write_bench_reports
from qdqbench.eval.bench.results import Bench, write_bench
from qdqbench.eval.runs.report.report import missing_engines, refresh_reports
from qdqbench.eval.runs.results import Results, read_results
from qdqbench.quantize.report.formats import size

from ...support.benches import sample_bench
from ...support.runs import sample as sample_run


def told(bench: Bench, folder: Path, own: bool = True, **changes) -> tuple[Results, dict[str, str]]:
    """Results after a bench, and every page by its name."""
    (folder / "results.json").write_text(sample_run(**changes).model_dump_json())
    write_bench(folder / "bench.json", bench)
    written = [*(write_bench_reports(bench, folder) if own else []), *refresh_reports(folder)[0]]
    found = read_results(folder)
    texts = {path.name: path.read_text(encoding="utf-8") for path in written}
    return found, {name: re.sub(r"\\([\[\]])", r"\1", text) for name, text in texts.items()}


def test_the_axes_of_the_bench_say_what_they_are(tmp_path: Path) -> None:
    _, pages = told(sample_bench(), tmp_path)
    for name in ("bench.html", "report.html"):
        for words in ("ms, log scale", "times as fast, log scale", "1 = as fast", "the fastest without INT8",
                      "sequences/s, log scale"):  # fmt: skip
            assert f">{words}</text>" in pages[name]
    ticks = re.findall(r'ytick_\d+".*?<text[^>]*>([^<]*)</text>', speedup_svg(sample_bench()), re.DOTALL)
    assert sum(bool(re.fullmatch(r"[\d.]+", tick)) for tick in ticks) >= 2


def test_an_engine_stands_beside_those_without_int8(tmp_path: Path) -> None:
    """Sizes are those that the bench built, and what was not built is said, with the command."""
    bench = sample_bench()
    for row in (row for cell in bench.configs for row in cell.rows):
        row.engine_bytes = None
    before, pages = told(bench, tmp_path, own=False)
    assert before.unquantized_engines == []
    tile = re.compile(r"<span>engine</span><b>(.*?)</b><span>(.*?)</span>")
    assert before.engine is not None
    own = size(before.engine.bytes)
    assert tile.findall(re.sub("</?code>", "`", pages["report.html"])) == [
        (own, "FP16 and FP32 not built: `qdqbench bench RUN` builds them")
    ]
    row = next(row for row in bench.configs[0].rows if row.system == "fp16")
    row.engine_bytes = 45_600_000
    results, pages = told(bench, tmp_path, own=False)
    assert [(row.precision, row.bytes) for row in results.unquantized_engines] == [("fp16", 45_600_000)]
    [(number, remark)] = tile.findall(re.sub("</?code>", "`", pages["report.html"]))
    assert number == own
    assert remark == "FP16 45.6 MB, FP32 not built: `qdqbench bench RUN` builds them"
    for text in (pages["report.html"], pages["report.md"]):
        assert "45.6 MB" in text
        assert own in text


def test_a_bench_on_a_cpu_is_not_promised_to_build_engines() -> None:
    """It compiles the others in memory, so that a note on files of them would stay for ever."""
    results = sample_run()
    assert results.engine is not None
    assert missing_engines(results)
    results.engine.backend = "openvino"
    assert missing_engines(results) == ""
