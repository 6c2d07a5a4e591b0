"""What holds for the reports of all four commands, whatever names they are given."""

import pytest

from qdqbench.eval.selection.auto.report import auto_report
from qdqbench.eval.selection.calibration_comparison import calibration_report
from qdqbench.eval.selection.search.report import search_report
from qdqbench.eval.selection.search.results import read_search
from qdqbench.eval.selection.sensitivity.report import sensitivity_report
from qdqbench.eval.selection.sensitivity.results import read_sensitivity
from qdqbench.eval.selection.trials.results import write_result
from qdqbench.quantize.utils.errors import UserError

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


def test_a_sensitivity_is_read_from_its_folder_too(tmp_path):
    write_result(sample_sensitivity(), sensitivity_report(sample_sensitivity()), tmp_path)
    for path in (tmp_path, tmp_path / "sensitivity.json"):
        assert read_sensitivity(path) == sample_sensitivity()


@pytest.mark.parametrize("text", ["{}", '{"schema_version": 1}', "nothing"])
@pytest.mark.parametrize("read", [read_search, read_sensitivity])
def test_other_files_are_refused(tmp_path, read, text):
    path = tmp_path / f"{read.__name__.removeprefix('read_')}.json"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"{path.stem}\.json"):
        read(path)
