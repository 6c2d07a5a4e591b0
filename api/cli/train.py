"""The commands `finetune` and `study`; registered in cli.py. Everything heavy is imported inside."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench._options import FinetuneOptions, StudyOptions, TrainingOptions
from qdqbench.cli import progress
from qdqbench.cli.options import command, note
from qdqbench.cli.terminal import Json, command_line, show

if TYPE_CHECKING:
    from accelerate import Accelerator

    from qdqbench.quantize.tasks.task import Task


@command
def finetune(*, options: FinetuneOptions, json: Json = False) -> None:
    """Fine-tune an encoder: the FP32 baseline of a task, over seeds, on one GPU or many."""
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.runs.report.training import finetuning_report, write_finetuning
    from qdqbench.quantize.pipeline.ownership import default_folder
    from qdqbench.quantize.training.finetune import RESULT, FinetuneRequest, finetune
    from qdqbench.quantize.training.record import require_all

    task = options.find_task()
    folder = options.out or default_folder("finetune", options.model, task.name)
    with _own_folder("finetune", options, task, folder), _processes(options.precision) as accelerator:
        base, source = _base(options, folder, accelerator)
        with progress.seeds(options.seeds, quiet=not accelerator.is_main_process) as report:
            request = FinetuneRequest(
                base=base,
                task=task,
                data=source,
                folder=folder,
                settings=options.training,
                seeds=options.seeds,
                max_length=options.max_length,
                keep_head=options.keep_head,
                limit=options.limit,
                command=command_line(),
                report=report,
                revision=options.revision,
            )
            result = finetune(request, accelerator)
        if accelerator.is_main_process:
            write_finetuning(result, folder)
    if accelerator.is_main_process:
        written = [f"report: {folder / 'finetune.html'}"]
        if result.best_seed is not None:
            written.append(f"model: {folder / f'seed-{result.best_seed}' / 'model'}")
        show(result, json, lambda each: render_screen(finetuning_report(each)), *written)
    failed = [f"seed {run.seed}" for run in result.runs if run.status == "failed"]
    require_all(failed, folder / RESULT)


@command
def study(
    recipe: Annotated[list[str], typer.Option(help="Shipped name or YAML file, with QAT; repeatable.")],
    *,
    options: StudyOptions,
    json: Json = False,
) -> None:
    """Measure FP32, PTQ and QAT over seeds: mean and standard deviation of a task, from a base encoder."""
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.runs.study import STUDY_FILE, study, study_report
    from qdqbench.quantize.pipeline.config import find_recipe
    from qdqbench.quantize.pipeline.ownership import default_folder
    from qdqbench.quantize.training.finetune import FinetuneRequest
    from qdqbench.quantize.training.record import require_all

    recipes = [find_recipe(name, options.model, options.revision) for name in recipe]
    task = options.find_task()
    folder = options.out or default_folder("study", options.model, task.name)
    with (
        _own_folder("study", options, task, folder),
        _processes(options.precision) as accelerator,
        progress.status() as say,
    ):
        base, source = _base(options, folder, accelerator)
        request = FinetuneRequest(
            base=base,
            task=task,
            data=source,
            folder=folder,
            settings=options.training,
            seeds=options.seeds,
            max_length=max(each.export.max_length for each in recipes),
            keep_head=False,
            limit=options.limit,
            command=command_line(),
            revision=options.revision,
        )
        found = study(request, recipes, accelerator, say)
    show(found, json, lambda each: render_screen(study_report(each)), f"results: {folder / STUDY_FILE}")
    failed = [f"seed {row.seed} with {row.recipe}" for row in found.rows if row.status == "failed"]
    require_all(failed, folder / STUDY_FILE)


def _own_folder(
    kind: str, options: TrainingOptions, task: "Task", folder: Path
) -> AbstractContextManager[None]:
    """Own the folder of a training that begins with a base encoder, once that and its data fit."""
    from qdqbench.quantize.pipeline.ownership import owned_folder, training_identity
    from qdqbench.quantize.training.finetune import require_base

    def ready() -> None:
        if options.model is not None:
            require_base(options.model, options.revision, task, options.data)

    identity = training_identity(kind, options.model, options.revision, task.name)
    return owned_folder(folder, identity, overwrite=options.overwrite, ready=ready, say=note)


def _base(options: TrainingOptions, folder: Path, accelerator: "Accelerator") -> tuple[str, str]:
    """Return model and data; the main process writes those of the embedded default."""
    if options.model is not None:
        return options.model, options.data
    from qdqbench.quantize.tasks.embedded import write_embedded

    with accelerator.main_process_first():
        run = write_embedded(folder / "embedded")
    return str(run.model_dir), str(run.data_dir)


@contextmanager
def _processes(precision: str) -> "Iterator[Accelerator]":
    """Accelerate on the processes that are here; the group ends with the block."""
    from qdqbench.quantize.training.processes import join_group, new_accelerator

    with join_group():
        yield new_accelerator(precision)
