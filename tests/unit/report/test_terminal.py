"""What every command prints as a table is whole in a terminal of 80 columns: no cut word, no lost cell."""

import json
import re
from collections import Counter
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qdqbench.eval.bench.report import bench_report
from qdqbench.eval.bench.results import Bench, read_bench
from qdqbench.eval.runs.comparison import comparison_report
from qdqbench.eval.runs.report.report import run_report
from qdqbench.eval.runs.report.training import finetuning_report
from qdqbench.eval.runs.study import Study, study_report
from qdqbench.eval.selection.auto.report import auto_report
from qdqbench.eval.selection.calibration_comparison import calibration_report
from qdqbench.eval.selection.search.report import search_report
from qdqbench.eval.selection.sensitivity.report import sensitivity_report
from qdqbench.quantize.report.document import Report
from qdqbench.quantize.report.render import render_screen, write_report

from ...support.compared import sample_comparison
from ...unit.bench.test_results import sample_bench
from ...unit.runs.report.test_report import mnli
from ...unit.runs.report.test_report import sample as sample_run
from ...unit.runs.report.test_training_report import failed_run, finetuning, run_of
from ...unit.selection.auto.test_report import sample as sample_auto
from ...unit.selection.search.test_results import sample_search
from ...unit.selection.sensitivity.test_report import sample as sample_sensitivity
from ...unit.selection.test_calibration_comparison import table

MEASURED = Path(__file__).parents[3] / "docs" / "measured"
FRAME = re.compile(r"[─-╿]")  # of panels


def many_shapes() -> Bench:
    """Twelve shapes."""
    bench = sample_bench()
    lengths = [(cell, cell.length // part) for part in (1, 2, 4, 8) for cell in bench.configs]
    cells = [cell.model_copy(update={"length": length}) for cell, length in lengths]
    return bench.model_copy(update={"configs": cells})


def measured_study() -> Study:
    """A study whose rows are not kept."""
    fields = json.loads((MEASURED / "mrpc-qat" / "summary.json").read_text(encoding="utf-8"))
    del fields["kind"]
    return Study(**fields, data="glue", seeds=[0, 1, 2], rows=[])


MNLI = ("validation_matched", "validation_mismatched")
SHOWN: dict[str, Callable[[], Report]] = {
    "run": lambda: run_report(sample_run()),
    "run of two splits": lambda: run_report(mnli()),
    "sensitivity": lambda: sensitivity_report(sample_sensitivity()),
    "auto": lambda: auto_report(sample_auto()),
    "search": lambda: search_report(sample_search()),
    "methods": lambda: calibration_report(table()),
    "methods, two splits": lambda: calibration_report(table(splits=MNLI)),
    "bench": lambda: bench_report(sample_bench()),
    "bench of many shapes": lambda: bench_report(many_shapes()),
    "bench, measured": lambda: bench_report(read_bench(MEASURED / "base-recipes" / "bench.json")),
    "finetune": lambda: finetuning_report(finetuning([run_of(0), run_of(1), failed_run(2)])),
    "study": lambda: study_report(measured_study()),
    "compare": lambda: comparison_report(sample_comparison()),
}


def printed(shown: Any, width: int) -> str:
    stream = StringIO()
    Console(file=stream, width=width).print(shown)
    return stream.getvalue()


@pytest.mark.parametrize("name", SHOWN)
def test_80_columns_hold_every_word_of_it(name: str) -> None:
    shown = render_screen(SHOWN[name]())
    narrow, wide = (FRAME.sub(" ", printed(shown, width)) for width in (80, 400))
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow
    assert Counter(wide.split()) - Counter(narrow.split()) == Counter()


@pytest.mark.parametrize("name", ["auto", "methods", "sensitivity"])
def test_what_is_only_to_know_is_no_warning(name: str, tmp_path: Path) -> None:
    report = SHOWN[name]()
    shown = printed(render_screen(report), 80)
    assert 0 < shown.index("\nwarning: a warning") < shown.index("\nnote: a note")
    pages = {path.suffix: path.read_text() for path in write_report(report, tmp_path, "report")}
    warned = pages[".html"].partition('id="warnings"')[2].partition("</section>")[0]
    assert "a warning" in warned
    assert "a note" not in warned
    assert "a note" in pages[".html"].lower()
    assert "a warning" in pages[".md"]
