"""What holds for the reports of all four commands, whatever names they are given."""

import pytest

from qdqbench.eval.selection.auto.report import auto_report
from qdqbench.eval.selection.calibration_comparison import calibration_report
from qdqbench.eval.selection.search.report import search_report
from qdqbench.eval.selection.sensitivity.report import sensitivity_report
from qdqbench.eval.selection.trials.results import write_result

from ...support.choices import sample_auto, sample_calibrations, sample_search, sample_sensitivity

RESULTS = [
    (sample_auto(), auto_report(sample_auto())),
    (sample_calibrations(), calibration_report(sample_calibrations())),
    (sample_search(), search_report(sample_search())),
    (sample_sensitivity(), sensitivity_report(sample_sensitivity())),
]


@pytest.mark.parametrize(("result", "report"), RESULTS, ids=[report.page.kind for _, report in RESULTS])
def test_a_result_is_read_back_from_beside_its_pages(result, report, tmp_path):
    record, markdown, page = write_result(result, report, tmp_path)
    assert type(result).model_validate_json(record.read_text()) == result
    assert (markdown.suffix, page.suffix) == (".md", ".html")
