"""State is data: with every sentence in upper case, statuses, states, codes and numbers are the same.

A command is added by one line in `COMMANDS`, and its modules that make sentences in `MODULES`.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from qdqbench.cli.run import answer
from qdqbench.eval.bench.report import bench_of, bench_report
from qdqbench.eval.bench.results import Bench, BenchRow, write_bench
from qdqbench.eval.metrics.results import GateIssue
from qdqbench.eval.runs.comparison import comparison_report
from qdqbench.eval.runs.gate import judge_speed
from qdqbench.eval.runs.report.report import refresh_reports, run_report, too_slow
from qdqbench.eval.runs.results import read_results, write_results
from qdqbench.eval.selection.search.report import search_report
from qdqbench.eval.selection.search.results import SearchOutcome
from qdqbench.quantize.report.document import Columns, Fold, Report, Table
from qdqbench.quantize.utils.errors import CheckFailed

from ...support import runs
from ...support.benches import bench_that_is, sample_bench
from ...support.choices import NOTHING, sample_search
from ...support.compared import sample_comparison
from ...support.records import comparison, speedup
from ...support.runs import run_gate

MODULES = [
    "eval.metrics.figures",
    "eval.runs.gate",
    "eval.runs.report.report",
    "eval.runs.report.sections",
    "eval.runs.report.training",
    "eval.runs.report.verdict",
    "eval.runs.comparison",
    "eval.bench.report",
    "eval.selection.search.report",
    "eval.verification.checks",
]
NOT_SENTENCES = re.compile(r"_svg$|^write|^config_text$|_state$")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:E-?\d+)?")


class Outcome(NamedTuple):
    """What a command ends with."""

    report: Report
    record: BaseModel  # that its JSON file holds
    status: int = 0
    others: Any = None


def _run(changes, folder):
    """A run whose gate is judged from these differences, and reported."""
    speed = [speedup(1.4, 1.3, 1.5), speedup(0.9, 0.8, 0.95), speedup(1.0, 0.9, 1.1)]
    drops = comparison({"accuracy": -changes.pop("drop", 0.0)}, {"accuracy": 0.002}, n=872)
    gate = run_gate("sst2", 0.01, fake_quant=drops, engine=drops)
    gate = judge_speed(gate.model_copy(update={"min_speedup": changes.pop("min_speedup", None)}), speed)
    results = runs.sample(**({"gate": gate, "speed": speed} | changes))
    write_results(folder, results)
    error = answer(results, folder).error
    status = error.exit_code if isinstance(error, CheckFailed) else 0
    return Outcome(run_report(results), results, status, len(too_slow(folder)))


def _search(found):
    return Outcome(search_report(found), found, 0 if found.outcome.passed else 2)


def _bench(bench, folder, min_speedup=None):
    """A bench of a run directory, whose gate and report take its speed."""
    gate = runs.sample().gate.model_copy(update={"min_speedup": min_speedup})
    write_results(folder, runs.sample(gate=gate))
    write_bench(folder / "bench.json", bench)
    assert refresh_reports(folder)[1] is None
    status = CheckFailed.exit_code if bench.errors or too_slow(folder) else 0
    judged = read_results(folder)
    speeds = [(ratio.value, ratio.verdict) for ratio in judged.speed]
    codes = [(issue.code, issue.state) for issue in judged.gate.issues]
    view = bench_of(folder)
    assert isinstance(view, Bench)
    record = bench.model_copy(update={"errors": []}, deep=True)
    for row in (row for config in record.configs for row in config.rows):
        row.reason = None  # a sentence, as are the errors
    return Outcome(bench_report(bench), record, status, (speeds, codes, len(view.errors)))


def _failed_bench():
    bench = sample_bench(errors=[_shout("1 x 128: int8 engine: NaN for 2 of 2 inputs")], complete=False)
    bench.configs[0].rows[0] = BenchRow(system="int8", status="error", reason=_shout("NaN logits"))
    bench.configs[0].rows[5] = BenchRow(system="compile-fp16", status="skipped", reason=_shout("no g++"))
    bench.configs[0].speedups, bench.configs[0].headline = [], None
    return bench


DETAIL = [GateIssue(code="verification", state="failed", detail="Layer.1 is wrong")]
COMMANDS = {
    "run, passed": lambda folder: _run({}, folder),
    "run, a drop": lambda folder: _run({"drop": 0.05}, folder),
    "run, a drop within noise": lambda folder: _run({"drop": 0.011}, folder),
    "run, too slow": lambda folder: _run({"min_speedup": 1.2}, folder),
    "run, limited": lambda folder: _run({"warnings": [_shout("--limit 64: a part")]}, folder),
    "run, wrong": lambda folder: _run({"gate": runs.sample().gate.model_copy(
        update={"passed": False, "issues": DETAIL})}, folder),
    "run, failed": lambda folder: _run(dict(runs.failed()), folder),
    "run, no engine": lambda folder: _run(dict(runs.without_engine()), folder),
    "run, regression": lambda folder: _run(dict(runs.regression()), folder),
    "search, passed": lambda _: _search(sample_search()),
    "search, failed": lambda _: _search(sample_search(outcome=SearchOutcome(chosen=1, issues=DETAIL))),
    "search, nothing holds": lambda _: _search(sample_search(**NOTHING)),
    "bench, slower": lambda folder: _bench(sample_bench(), folder),
    "bench, faster": lambda folder: _bench(bench_that_is("faster"), folder),
    "bench, below the gate": lambda folder: _bench(bench_that_is("faster"), folder, 9.0),
    "bench, inconclusive": lambda folder: _bench(bench_that_is("unclear"), folder),
    "bench, failed": lambda folder: _bench(_failed_bench(), folder),
    "bench, nothing": lambda folder: _bench(sample_bench(configs=[], complete=False), folder),
    "compare": lambda _: Outcome(comparison_report(sample_comparison()), sample_comparison()),
}  # fmt: skip
LOUD = False


def _shout(value):
    """Return a sentence, or several, in upper case while the test rewrites them."""
    if not LOUD:
        return value
    if isinstance(value, str):
        return value.upper()
    return [_shout(each) for each in value] if isinstance(value, list | Iterator) else value


@pytest.fixture
def loud(monkeypatch):
    """Upper-case what every function of `MODULES` returns that is annotated as a text or as texts."""

    def rewrite():
        monkeypatch.setattr(sys.modules[__name__], "LOUD", True)
        known = {}
        for name in MODULES:
            module = import_module(f"qdqbench.{name}")
            for each in vars(module).values():
                if inspect.isfunction(each) and each.__module__ == module.__name__:
                    returns = str(inspect.signature(each).return_annotation)
                    if re.search(r"\bstr\b", returns) and "tuple" not in returns:
                        known[each] = each
        known = {each: each for each in known if not NOT_SENTENCES.search(each.__name__)}
        for module in [each for name, each in sys.modules.items() if name.startswith("qdqbench.")]:
            for name, each in [*vars(module).items()]:
                if inspect.isfunction(each) and each in known:
                    loud_one = lambda *a, _each=each, **k: _shout(_each(*a, **k))  # noqa: E731
                    monkeypatch.setattr(module, name, loud_one)
        return len(known)

    return rewrite


def _tables(blocks):
    for block in blocks:
        if isinstance(block, Table):
            yield block
        elif isinstance(block, Fold):
            yield from _tables([*block.blocks])
        elif isinstance(block, Columns):
            yield from _tables([each for part in block.parts for each in part])


def _numbers(text):
    return NUMBER.findall(text.upper())


def _cell(cell):
    return cell.state, _numbers(cell.text), _numbers(cell.note), cell.sort, cell.look, cell.bar


def states(outcome):
    """Return everything of an outcome that is no sentence."""
    report, verdict = outcome.report, outcome.report.verdict
    tables = [table for section in report.sections for table in _tables([*section.blocks])]
    return {
        "status": outcome.status,
        "others": outcome.others,
        "verdict": verdict and (verdict.state, len(verdict.failures), len(verdict.notes)),
        "tiles": [(tile.state, _numbers(tile.value)) for tile in report.tiles],
        "sections": [(section.anchor, section.state) for section in report.sections],
        "tables": [
            [(row.chosen, [_cell(cell) for cell in row.cells]) for row in table.rows] for table in tables
        ],
        "remarks": (len(report.warnings), len(report.notes)),
        "record": outcome.record.model_dump(mode="json", exclude={"warnings", "notes"}),
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.long] * (name.startswith("bench, ") and name != "bench, slower")
        )
        for name in COMMANDS
    ],
)
def test_sentences_in_upper_case_change_no_state_code_or_number(name, loud, tmp_path):
    before = COMMANDS[name](tmp_path)
    assert loud() > 30
    after = COMMANDS[name](tmp_path)
    assert states(after) == states(before)
    if before.report.verdict and after.report.verdict:
        assert after.report.verdict.title == before.report.verdict.title.upper()
        told = [after.report.verdict.sentence, *(text for _, text, _ in after.report.verdict.lines)]
        assert any(part.isupper() for line in told for part in line.split("; "))
