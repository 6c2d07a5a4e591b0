"""The commands `run`, `qat`, `compare`, `timings`, and one for each stage of a run."""

from functools import partial
from pathlib import Path

from qdqbench import _runs
from qdqbench._options import QatOptions, ReportOptions, StageOptions
from qdqbench.cli.answer import Answer
from qdqbench.eval.runs.gate import issue_sentence
from qdqbench.eval.runs.report.report import run_report, stages_report, where_to_begin
from qdqbench.eval.runs.results import Results
from qdqbench.quantize.deployment.write import DEPLOY
from qdqbench.quantize.utils.errors import CheckFailed
from qdqbench.quantize.utils.system.process import find_python


def run(recipe: str | None, options: QatOptions) -> Answer:
    return answer(*_runs.start_run(recipe, options))


def answer(results: Results, folder: Path) -> Answer:
    """Return the results of a run, whose gate is the exit status."""
    failures = "; ".join(map(issue_sentence, results.gate.failures))
    if results.until is None:
        begin = where_to_begin(folder / DEPLOY, folder / DEPLOY, python=find_python())
        lines = [f"report: {folder / 'report.html'}", *([f"deploy: {begin}"] if begin else [])]
        shown, failures = run_report(results), f"the gate does not hold: {failures}"
    else:
        shown, lines = stages_report(results, folder), [f"the gate is judged by: qdqbench report {folder}"]
    return Answer(results, shown, lines, None if results.gate.passed else CheckFailed(failures))


def _resume(until: str, *, options: StageOptions) -> Answer:
    return answer(_runs.resume(options.folder, until), options.folder)


quantize, export, evaluate, verify = (
    partial(_resume, until) for until in ("quantize", "export", "evaluate", "verify")
)


def build(options: StageOptions) -> Answer:
    return answer(_runs.build(options.folder), options.folder)


def report(options: ReportOptions) -> Answer:
    if options.fp16:
        _runs.resume(options.folder, "fp16")
    return answer(_runs.resume(options.folder), options.folder)
