"""Names of others stay text in every medium, and reports of odd results are whole."""

import math

import pytest

from qdqbench.eval.bench.report import bench_report
from qdqbench.eval.runs.comparison import comparison_report
from qdqbench.eval.runs.report.report import run_report
from qdqbench.eval.runs.report.training import finetuning_report
from qdqbench.eval.selection.auto.report import auto_report
from qdqbench.eval.selection.calibration_comparison import calibration_report
from qdqbench.eval.selection.search.report import search_report
from qdqbench.eval.selection.sensitivity.report import sensitivity_report
from qdqbench.quantize.report.render import render_html, render_markdown
from qdqbench.quantize.utils.trackers import LogRow

from ...support.benches import sample_bench
from ...support.choices import sample_auto, sample_calibrations, sample_search, sample_sensitivity
from ...support.compared import sample_comparison
from ...support.pages import HOSTILE, offline, on_terminal, plain
from ...support.runs import effects, hostile, long_names, unscored
from ...support.trainings import failed_run, finetuning, hostile_finetuning, hostile_qat, log_of, run_of

ALL = {name: [HOSTILE] for name in ("errors", "notes", "warnings")}


def hostile_bench():
    bench = sample_bench(**ALL, command=HOSTILE)
    bench.target.name = HOSTILE
    return bench_report(bench)


def hostile_comparison():
    found = sample_comparison().model_copy(update={"notes": [HOSTILE], "command": HOSTILE})
    for sample in found.samples:
        sample.text = sample.label = HOSTILE
    found.runs[0].name = HOSTILE
    return comparison_report(found)


HOSTILES = {
    "run": lambda: run_report(hostile()),
    "effects": lambda: run_report(effects(HOSTILE, notes=[HOSTILE])),
    "qat": lambda: run_report(hostile_qat()),
    "finetune": lambda: finetuning_report(hostile_finetuning()),
    "bench": hostile_bench,
    "compare": hostile_comparison,
    "auto": lambda: auto_report(sample_auto(HOSTILE)),
    "methods": lambda: calibration_report(sample_calibrations(name=HOSTILE)),
    "search": lambda: search_report(sample_search(model=HOSTILE, warnings=[HOSTILE], notes=[HOSTILE])),
    "sensitivity": lambda: sensitivity_report(sample_sensitivity(HOSTILE)),
}
BROKEN = [LogRow(step=10, epoch=0.1, loss=math.nan), LogRow(step=10, epoch=0.1, score=math.inf)]
ODD = {
    "no log": lambda: finetuning_report(finetuning([run_of(0).model_copy(update={"log": []})])),
    "many seeds": lambda: finetuning_report(finetuning([run_of(n, log=log_of(n, 20, 1)) for n in range(20)])),
    "nothing": lambda: finetuning_report(finetuning([])),
    "not numbers": lambda: finetuning_report(finetuning([failed_run(0, log=BROKEN), run_of(1)])),
    "long names": lambda: run_report(long_names()),
    "unscored": lambda: run_report(unscored()),
}


@pytest.mark.parametrize("name", [*HOSTILES, *ODD])
def test_a_report_is_whole_and_of_others_only_text(name):
    report = (HOSTILES | ODD)[name]()
    offline(render_html(report))
    assert plain(render_markdown(report))
    for width in (80, 4000):
        shown = on_terminal(report, width)
        assert "\x1b" not in shown
    assert ("[red]" in shown) == (name in HOSTILES)
