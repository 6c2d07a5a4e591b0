"""What holds for the reports of all four commands, whatever names they are given."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qdqbench.eval.selection.auto.report import auto_report
from qdqbench.eval.selection.calibration_comparison import calibration_report
from qdqbench.eval.selection.search.report import search_report
from qdqbench.eval.selection.sensitivity.report import sensitivity_report
from qdqbench.eval.selection.trials.results import write_result
from qdqbench.quantize.report.document import Report
from qdqbench.quantize.report.render import render_screen

from ...support.choices import sample_auto, sample_calibrations, sample_search, sample_sensitivity
from ...support.pages import HOSTILE, offline, plain

SEARCH = sample_search(model=HOSTILE, warnings=[HOSTILE], notes=[HOSTILE])
CASES: list[tuple[Any, Report, int]] = [  # with the number of charts
    (sample_auto(HOSTILE), auto_report(sample_auto(HOSTILE)), 1),
    (sample_calibrations(name=HOSTILE), calibration_report(sample_calibrations(name=HOSTILE)), 2),
    (SEARCH, search_report(SEARCH), 1),
    (sample_sensitivity(HOSTILE), sensitivity_report(sample_sensitivity(HOSTILE)), 3),
]


@pytest.mark.parametrize(("result", "report", "charts"), CASES, ids=[case[1].page.kind for case in CASES])
def test_names_of_others_are_only_text_and_the_file_is_read_back(
    result: Any, report: Report, charts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, markdown, page = write_result(result, report, tmp_path)
    assert type(result).model_validate_json(record.read_text()) == result
    assert offline(page.read_text()).tags.count("svg") == charts
    assert plain(markdown.read_text())
    Console(width=80).print(render_screen(report))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[red]" in shown
