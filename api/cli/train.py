"""The commands `finetune` and `study`; registered in cli.py. Everything heavy is imported inside."""

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench._options import FinetuneOptions, StudyOptions, TrainingOptions
from qdqbench.cli import progress
from qdqbench.cli.options import command, note
from qdqbench.cli.terminal import Json, command_line, show_report

if TYPE_CHECKING:
    from accelerate import Accelerator

    from qdqbench.quantize.tasks.task import Task
    from qdqbench.quantize.training.finetune import FinetuneRequest
    from qdqbench.quantize.utils.results import LogRow


@command
def finetune(*, options: FinetuneOptions, json: Json = False) -> None:
    """Fine-tune an encoder: the FP32 baseline of a task, over seeds, on one GPU or many."""
    from qdqbench.eval.runs.report.training import finetuning_report, write_finetuning
    from qdqbench.quantize.pipeline.ownership import default_folder
    from qdqbench.quantize.training.finetune import RESULT, finetune, require_all
    from qdqbench.quantize.training.loop import join_group, new_accelerator
    from qdqbench.quantize.utils.trackers import open_tracker, require_tracker, row_values

    task = options.find_task()
    folder = options.out or default_folder("finetune", options.model, task.name)
    require_tracker(options.report_to)
    with _own_folder("finetune", options, task, folder), join_group():
        accelerator = new_accelerator(options.precision)
        main = accelerator.is_main_process
        known = {"model": str(options.model), "task": task.name, **options.training.model_dump()}
        with (
            progress.seeds(options.seeds, quiet=not main) as show,
            open_tracker(options.report_to if main else None, folder, known) as log,
        ):

            def report(seed: int, row: "LogRow", steps: int) -> None:
                log(row_values(row, f"seed-{seed}/"), row.step)
                show(seed, row, steps)

            request = _request(options, task, folder, accelerator, options.max_length)
            result = finetune(replace(request, keep_head=options.keep_head, report=report), accelerator)
            last = max(run.steps for run in result.runs)
            log({f"validation/{name}": each.mean for name, each in result.spread.items()}, last)
        if main:
            write_finetuning(result, folder)
    if accelerator.is_main_process:
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
    from qdqbench.eval.runs.study import STUDY_FILE, study, study_report
    from qdqbench.quantize.pipeline.ownership import default_folder
    from qdqbench.quantize.recipe.schema import find_recipe
    from qdqbench.quantize.training.finetune import require_all
    from qdqbench.quantize.training.loop import join_group, new_accelerator

    recipes = [options.adapt(find_recipe(name, options.model, options.revision)) for name in recipe]
    task = options.find_task()
    folder = options.out or default_folder("study", options.model, task.name)
    with _own_folder("study", options, task, folder), join_group(), progress.status() as say:
        accelerator = new_accelerator(options.precision)
        longest = max(each.export.max_length for each in recipes)
        request = _request(options, task, folder, accelerator, longest)
        found = study(request, recipes, accelerator, say)
    show_report(found, json, study_report, f"results: {folder / STUDY_FILE}")
    failed = [f"seed {row.seed} with {row.recipe}" for row in found.rows if row.status == "failed"]
    require_all(failed, folder / STUDY_FILE)


def _own_folder(
    kind: str, options: TrainingOptions, task: "Task", folder: Path
) -> AbstractContextManager[None]:
    from qdqbench.quantize.models.identity import model_fingerprint
    from qdqbench.quantize.pipeline.ownership import RunIdentity, model_location, owned_folder
    from qdqbench.quantize.training.finetune import require_base

    def ready() -> None:
        if options.model is not None:
            require_base(options.model, options.revision, task, options.data)

    sha256 = None if options.model is None else model_fingerprint(options.model, options.revision)
    place = model_location(options.model, options.revision)
    identity = RunIdentity(kind=kind, model=place, model_sha256=sha256, task=task.name)
    return owned_folder(folder, identity, overwrite=options.overwrite, ready=ready, say=note)


def _request(
    options: TrainingOptions, task: "Task", folder: Path, accelerator: "Accelerator", max_length: int
) -> "FinetuneRequest":
    from qdqbench.quantize.training.finetune import FinetuneRequest

    base, data = options.model, options.data
    if base is None:
        from qdqbench.quantize.tasks.embedded import write_embedded

        with accelerator.main_process_first():
            run = write_embedded(folder / "embedded")
        base, data = str(run.model_dir), str(run.data_dir)
    return FinetuneRequest(
        base=base,
        task=task,
        data=data,
        folder=folder,
        settings=options.training,
        seeds=options.seeds,
        max_length=max_length,
        keep_head=False,
        limit=options.limit,
        command=command_line(),
        revision=options.revision,
    )
