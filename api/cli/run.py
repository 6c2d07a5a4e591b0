"""The commands `run`, `qat` and one for each stage of a run, `bench`, `finetune` and `study`."""

from functools import partial
from pathlib import Path

from qdqbench import _options, _runs
from qdqbench._bench import start_bench
from qdqbench._train import start_finetuning, start_study
from qdqbench.cli.answer import Answer
from qdqbench.eval.bench.report import bench_report
from qdqbench.eval.runs.gate import issue_sentence
from qdqbench.eval.runs.report.report import run_report, stages_report, too_slow, where_to_begin
from qdqbench.eval.runs.report.training import finetuning_report
from qdqbench.eval.runs.results import Results
from qdqbench.quantize.deployment.write import DEPLOY
from qdqbench.quantize.training.results import RESULT
from qdqbench.quantize.utils.errors import CheckFailed
from qdqbench.quantize.utils.system.process import find_python


def run(recipe: str | None, options: _options.QatOptions) -> Answer:
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


def _resume(until: str, *, options: _options.StageOptions) -> Answer:
    return answer(_runs.resume(options.folder, until), options.folder)


quantize, export, evaluate, verify = (
    partial(_resume, until) for until in ("quantize", "export", "evaluate", "verify")
)


def build(options: _options.StageOptions) -> Answer:
    return answer(_runs.build(options.folder), options.folder)


def report(options: _options.ReportOptions) -> Answer:
    if options.fp16:
        _runs.resume(options.folder, "fp16")
    return answer(_runs.resume(options.folder), options.folder)


def bench(target: Path | None, options: _options.BenchOptions) -> Answer:
    found, written = start_bench(target, options)
    if options.build_only:
        text = "engines and compiled models are kept: run the same command without --build-only"
        return Answer(found, None, [text])
    error = None
    if found.errors:
        error = CheckFailed(f"{len(found.errors)} measurements failed: {'; '.join(found.errors)}")
    elif target is not None and (slow := too_slow(target)):
        error = CheckFailed(f"the gate does not hold: {'; '.join(slow)}")
    return Answer(found, bench_report(found), [f"report: {path}" for path in written], error)


def finetune(options: _options.FinetuneOptions) -> Answer:
    result, folder = start_finetuning(options)
    lines = [f"report: {folder / 'finetune.html'}"]
    if result.best_seed is not None:
        lines.append(f"model: {folder / f'seed-{result.best_seed}' / 'model'}")
    failed = [f"seed {run.seed}" for run in result.runs if run.status == "failed"]
    return Answer(result, finetuning_report(result), lines, _untrained(failed, folder / RESULT))


def study(options: _options.StudyOptions) -> Answer:
    found, folder = start_study(options.recipe, options)
    from qdqbench.eval.runs.study import STUDY_FILE, study_report

    failed = [f"seed {row.seed} with {row.recipe}" for row in found.rows if row.status == "failed"]
    error = _untrained(failed, folder / STUDY_FILE)
    return Answer(found, study_report(found), [f"results: {folder / STUDY_FILE}"], error)


def _untrained(failed: list[str], path: Path) -> CheckFailed | None:
    if not failed:
        return None
    return CheckFailed(f"not trained to the end: {', '.join(failed)}; {path} has the reasons, and the others")
