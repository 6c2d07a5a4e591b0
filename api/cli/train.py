"""The commands `finetune` and `study`; registered in cli.py. Everything heavy is imported inside."""

from typing import Annotated

import typer

from qdqbench._options import FinetuneOptions, StudyOptions
from qdqbench._progress import displayed
from qdqbench.cli.options import command
from qdqbench.cli.terminal import Json, show_report


@command
def finetune(*, options: FinetuneOptions, json: Json = False) -> None:
    """Fine-tune an encoder: the FP32 baseline of a task, over seeds, on one GPU or many."""
    from qdqbench._train import start_finetuning
    from qdqbench.eval.runs.report.training import finetuning_report
    from qdqbench.quantize.training.finetune import RESULT, require_all
    from qdqbench.quantize.utils.system.process import is_main_process

    with displayed(noun="training"):
        result, folder = start_finetuning(options)
    if is_main_process():
        written = [f"report: {folder / 'finetune.html'}"]
        if result.best_seed is not None:
            written.append(f"model: {folder / f'seed-{result.best_seed}' / 'model'}")
        show_report(result, json, finetuning_report, *written)
    failed = [f"seed {run.seed}" for run in result.runs if run.status == "failed"]
    require_all(failed, folder / RESULT)


@command
def study(
    recipe: Annotated[list[str], typer.Argument(help="Shipped names or YAML files, with QAT.")],
    *,
    options: StudyOptions,
    json: Json = False,
) -> None:
    """Measure FP32, PTQ and QAT over seeds: mean and standard deviation of a task, from a base encoder."""
    from qdqbench._train import start_study
    from qdqbench.eval.runs.study import STUDY_FILE, study_report
    from qdqbench.quantize.training.finetune import require_all

    with displayed():
        found, folder = start_study(recipe, options)
    show_report(found, json, study_report, f"results: {folder / STUDY_FILE}")
    failed = [f"seed {row.seed} with {row.recipe}" for row in found.rows if row.status == "failed"]
    require_all(failed, folder / STUDY_FILE)
