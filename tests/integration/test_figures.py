"""One finished run, one set of figures: read from each page and command, and held to results.json."""

import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from qdqbench.eval.runs.report.report import run_report
from qdqbench.eval.runs.report.verdict import count_linears, part_text, run_verdict, worst_first
from qdqbench.eval.runs.results import Results, read_results
from qdqbench.quantize.report.formats import size
from qdqbench.quantize.report.render import render_screen


class Cells(HTMLParser):
    """Rows of tables, and the texts of tiles, as they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr" or (tag == "div" and ("class", "tile") in attrs):
            self.rows.append([])
        self.open = tag in {"td", "th", "span", "b"} or (self.open and tag in {"code", "br"})
        if tag in {"td", "th", "span", "b"} and self.rows:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.open and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.open = self.open and tag not in {"td", "th", "span", "b"}


@pytest.fixture(scope="module")
def pages(finished_run: Path) -> tuple[Results, list[list[str]], list[list[str]], str]:
    """Results; cells of report.html and of report.md; the summary of the terminal."""
    results = read_results(finished_run)
    parser = Cells()
    parser.feed((finished_run / "report.html").read_text(encoding="utf-8"))
    lines = (finished_run / "report.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split("|") for line in lines if line.startswith("|")]
    tables = [[cell.strip(" `*") for cell in row] for row in rows]
    stream = StringIO()
    Console(file=stream, width=200).print(render_screen(run_report(results)))
    return results, parser.rows, tables, stream.getvalue()


def row_with(rows: list[list[str]], *cells: str) -> list[str]:
    """The one row that begins with these texts."""
    found = [row for row in rows if [text.strip() for text in row[: len(cells)]] == list(cells)]
    assert found, cells
    return [text.strip() for text in found[0]]


def test_accuracy_is_one_figure(pages, finished_run, a_run, tmp_path, qdqbench) -> None:
    results, html, markdown, summary = pages
    said = "; ".join(text for _, text, _ in run_verdict(results).lines)
    for name, row in results.stages.items():
        if row.status != "done":
            continue
        metric, value = next(iter(row.metrics.items()))
        text = f"{value:.4f} ± {row.stderr[metric]:.4f}"
        for rows in (html, markdown):
            assert any(text in cell for found in rows for cell in found), (name, text)
        assert f"{metric} {text}" in summary
        if (versus := row.vs_fp32) is not None:
            paired = f"{versus.delta[metric]:+.4f} ± {versus.delta_stderr[metric]:.4f}"
            assert paired in summary
            assert f"{versus.disagreements} of {versus.n}" in summary
            for rows in (html, markdown):
                found = [cells for cells in rows if text in cells and paired in cells]
                assert any(str(versus.disagreements) in cells for cells in found), (name, paired)
    last = [row for row in results.stages.values() if row.status == "done"][-1]
    metric = next(iter(last.metrics))
    assert f"{last.metrics[metric]:.4f} ± {last.stderr[metric]:.4f}" in said
    done = qdqbench("compare", finished_run, a_run, "--out", tmp_path / "compared", "--json")
    for run in json.loads(done.out)["runs"]:
        assert (run["metrics"], run["stderr"]) == (last.metrics, last.stderr)
        assert run["engine_bytes"] == results.engine.bytes
        assert (run["int8"], run["linears"]) == count_linears(results, results.engine)


def test_int8_and_kernels_are_one_figure(pages, finished_run, qdqbench) -> None:
    results, html, _, summary = pages
    engine = results.engine
    assert engine is not None
    told = json.loads(qdqbench("inspect", finished_run, "--json").out)
    checked = json.loads(qdqbench("check", finished_run, "--json").out)
    assert (told["int8_gemms"], told["expected_int8_gemms"]) == (
        engine.int8_gemms,
        engine.expected_int8_gemms,
    )
    done, linears = count_linears(results, engine)
    assert (checked["counts"]["int8_linears"], checked["counts"]["linears"]) == (done, linears)
    assert checked["findings"] == [row.model_dump(mode="json") for row in results.findings]
    assert f"{done} of {linears} linears in INT8" in " ".join(summary.split())
    assert row_with(html, "INT8 linears")[1] == f"{done} of {linears}"
    assert (told["profiles"], sum(told["kernel_counts"].values())) == (engine.profiles, engine.kernels)
    counts = ", ".join(f"{count} {kind}" for kind, count in told["kernel_counts"].items())
    shown = " ".join(qdqbench("inspect", finished_run).out.split())
    assert f"INT8 linears {done} of {linears}" in shown
    assert f"{done} of {linears} linears in INT8" in qdqbench("check", finished_run).out
    for name in ("report.html", "report.md"):
        text = (finished_run / name).read_text(encoding="utf-8")
        assert f"{engine.kernels} kernels" in text
        for kind, count in told["kernel_counts"].items():
            assert re.search(rf"\b{count} {kind}\b", text), counts
    assert f"kernels {engine.kernels}: " in shown


def test_parity_is_one_figure_and_the_worst_comes_first(pages) -> None:
    results, html, markdown, _ = pages
    assert results.parity is not None
    rows = worst_first(results.parity)
    parts = [row.nearest[0] for row in rows]
    assert parts == sorted(parts, reverse=True)
    assert row_with(html, "layer parity")[1] == part_text(rows[0])
    for tables in (html, markdown):
        found = next(row for row in tables if row[0].strip() == rows[0].name and len(row) > 6)
        assert part_text(rows[0]) in [cell.strip() for cell in found]
        assert f"{100 * rows[0].limit:.3f}%" in [cell.strip() for cell in found]
        names = [row[0].strip() for row in tables if len(row) > 8]
        order = [name for name in names if name in {row.name for row in rows}]
        assert order == [row.name for row in rows]


def test_sizes_are_those_of_the_files(pages, finished_run) -> None:
    results, html, markdown, _ = pages
    for row in results.files:
        assert row.bytes == (finished_run / row.name).stat().st_size
        for tables in (html, markdown):
            assert row_with(tables, row.name)[1] == size(row.bytes)
    assert results.engine is not None
    assert row_with(html, "engine")[1] == size(results.engine.bytes)
    assert row_with(markdown, results.engine.file)[1] == size(results.engine.bytes)
