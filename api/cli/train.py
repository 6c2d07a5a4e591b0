"""The commands `finetune` and `study`."""

from pathlib import Path

from qdqbench._options import FinetuneOptions, StudyOptions
from qdqbench._train import start_finetuning, start_study
from qdqbench.cli.answer import Answer
from qdqbench.eval.runs.report.training import finetuning_report
from qdqbench.quantize.training.results import RESULT
from qdqbench.quantize.utils.errors import CheckFailed


def finetune(options: FinetuneOptions) -> Answer:
    result, folder = start_finetuning(options)
    lines = [f"report: {folder / 'finetune.html'}"]
    if result.best_seed is not None:
        lines.append(f"model: {folder / f'seed-{result.best_seed}' / 'model'}")
    failed = [f"seed {run.seed}" for run in result.runs if run.status == "failed"]
    return Answer(result, finetuning_report(result), lines, _untrained(failed, folder / RESULT))


def study(options: StudyOptions) -> Answer:
    found, folder = start_study(options.recipe, options)
    from qdqbench.eval.runs.study import STUDY_FILE, study_report

    failed = [f"seed {row.seed} with {row.recipe}" for row in found.rows if row.status == "failed"]
    error = _untrained(failed, folder / STUDY_FILE)
    return Answer(found, study_report(found), [f"results: {folder / STUDY_FILE}"], error)


def _untrained(failed: list[str], path: Path) -> CheckFailed | None:
    if not failed:
        return None
    return CheckFailed(f"not trained to the end: {', '.join(failed)}; {path} has the reasons, and the others")
