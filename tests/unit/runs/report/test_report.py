"""The reports say what the numbers say, whatever stages ran and whatever the names hold."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.eval.runs.report import charts, report
from qdqbench.quantize.report import formats
from qdqbench.quantize.report import svg as plots

from ....support.pages import on_terminal
from ....support.runs import sample, written


def test_reports_are_two_files_and_the_same_on_every_run(tmp_path):
    paths = report.write_reports(sample(), tmp_path)
    assert paths == [tmp_path / "report.md", tmp_path / "report.html"]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert tuple(path.read_text(encoding="utf-8") for path in paths) == written(sample(), tmp_path)


@pytest.mark.parametrize("error", [0.0004, 0.0021, 0.0032, 0.0091, 0.03])
def test_numbers_below_the_accuracy_chart_stand_apart(error):
    results = sample()
    for row in results.stages.values():
        row.metrics, row.stderr = dict.fromkeys(row.metrics, 0.9391), dict.fromkeys(row.metrics, error)
    svg = charts.accuracy_svg(results, formats.LABELS)
    ticks = re.findall(r'xtick_.*?<text [^>]* x="([\d.]+)"[^>]*>([^<]+)</text>', svg, re.DOTALL)
    middles = [(float(x), len(number) * plots.TEXT * 0.64 / 2) for x, number in ticks]  # DejaVu Sans
    assert len(middles) >= 2
    for (left, half), (right, other) in pairwise(middles):
        assert right - left > half + other or right < left  # the next metric's


@given(st.text())
def test_markdown_text_is_one_line_without_open_pipes_or_tags(value):
    for written_text in (formats.text(value), formats.code(value)):
        assert not {"\n", "\r"} & set(written_text)
        assert not re.search(r"(?<!\\)\|", written_text)
    assert not {"<", ">"} & set(formats.text(value))


@given(st.text(alphabet="`~a\n", max_size=30))
def test_no_text_closes_its_fence(value):
    fence, *body, last = formats.fenced(value).split("\n")
    assert fence == last
    assert all(fence not in line for line in body)


def test_the_terminal_shows_one_screen():
    results = sample(warnings=[f"warning number {index}" for index in range(30)])
    shown = on_terminal(report.run_report(results), 100)
    assert len(shown.splitlines()) <= 24
    assert "and 27 more in the report" in shown
