"""The commands `finetune` and `study`; registered in cli.py. Everything heavy is imported inside."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdqbench.cli import options as given
from qdqbench.cli import progress
from qdqbench.cli.options import grouped
from qdqbench.cli.terminal import Json, command_line, show

if TYPE_CHECKING:
    from accelerate import Accelerator

    from qdqbench.quantize.recipe.training import Training
    from qdqbench.quantize.tasks.task import Task


@dataclass(frozen=True)
class Optimization:
    """How `finetune` trains."""

    seed: Annotated[int, typer.Option(min=0, help="Of head, held-out rows, order and dropout.")] = 0
    epochs: Annotated[float, typer.Option(help="Passes over the training rows.")] = 4
    max_steps: Annotated[int | None, typer.Option(min=1, help="Ends the epochs early.")] = None
    learning_rate: Annotated[float, typer.Option(help="After warm-up, of AdamW.")] = 5e-5
    batch_size: Annotated[int, typer.Option(help="Samples of a step, over all GPUs and parts.")] = 32
    gradient_accumulation_steps: Annotated[
        int, typer.Option(help="Parts that a GPU's share is split into.")
    ] = 1
    warmup_ratio: Annotated[float, typer.Option(help="Share of the steps.")] = 0.1
    lr_scheduler_type: Annotated[str, typer.Option(help="linear, cosine or constant, after warm-up.")] = (
        "linear"
    )
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.01
    dropout: Annotated[float | None, typer.Option(help="None: the model's own.")] = None
    precision: Annotated[str, typer.Option(help="bf16, tf32, fp32 or auto: bf16 where the GPU has it.")] = (
        "auto"
    )
    num_evals: Annotated[int, typer.Option(help="On the held-out rows, each with a checkpoint.")] = 10
    patience: Annotated[int, typer.Option(min=0, help="Evaluations without gain that end it; 0: none.")] = 5
    holdout: Annotated[float, typer.Option(help="Share of the train split to judge on.")] = 0.1


@dataclass(frozen=True)
class ShortOptimization:
    """What of the fine-tunings of `study` can be chosen."""

    epochs: Annotated[float, typer.Option(help="Of the fine-tuning.")] = 4
    max_steps: Annotated[int | None, typer.Option(min=1, help="Of the fine-tuning.")] = None
    learning_rate: Annotated[float, typer.Option(help="Of the fine-tuning.")] = 5e-5
    batch_size: Annotated[int, typer.Option(help="Of the fine-tuning.")] = 32


@grouped
def finetune(  # noqa: PLR0913  (a command's options)
    *,
    subject: given.BaseSubject,
    out: Annotated[Path | None, typer.Option(help="Folder; none: runs/finetune-MODEL-TASK.")] = None,
    replace: given.Replace = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs, with seeds from --seed on.")] = 1,
    optimization: Optimization,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of a sample.")] = 128,
    limit: Annotated[int | None, typer.Option(min=4, help="Train rows; the report warns.")] = None,
    keep_head: Annotated[
        bool, typer.Option("--keep-head", help="Go on with the model's own classifier.")
    ] = False,
    json: Json = False,
) -> None:
    """Fine-tune an encoder: the FP32 baseline of a task, over seeds, on one GPU or many."""
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.runs.report.training import finetuning_report, write_finetuning
    from qdqbench.quantize.pipeline.ownership import default_folder
    from qdqbench.quantize.training.finetune import RESULT, FinetuneRequest, finetune
    from qdqbench.quantize.training.record import require_all

    settings = _settings(**asdict(optimization) | {"patience": optimization.patience or None})
    chosen = subject.found_task()
    folder = out or default_folder("finetune", subject.model, chosen.name)
    with (
        _claimed("finetune", subject, chosen, folder, replace=replace),
        _processes(settings.precision) as accelerator,
    ):
        base, source = _base(subject, folder, accelerator)
        with progress.seeds(seeds, quiet=not accelerator.is_main_process) as report:
            request = FinetuneRequest(
                base=base,
                task=chosen,
                data=source,
                folder=folder,
                settings=settings,
                seeds=seeds,
                max_length=max_length,
                keep_head=keep_head,
                limit=limit,
                command=command_line(),
                report=report,
                revision=subject.revision,
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


@grouped
def study(  # noqa: PLR0913  (a command's options)
    recipe: Annotated[list[str], typer.Option(help="Shipped name or YAML file, with QAT; several.")],
    *,
    subject: given.BaseSubject,
    out: Annotated[Path | None, typer.Option(help="Folder; none: runs/study-MODEL-TASK.")] = None,
    replace: given.Replace = False,
    seeds: Annotated[int, typer.Option(min=1, help="Fine-tunings, each with PTQ and QAT.")] = 3,
    optimization: ShortOptimization,
    limit: Annotated[int | None, typer.Option(min=4, help="Train rows of the fine-tuning.")] = None,
    json: Json = False,
) -> None:
    """FP32, PTQ and QAT over seeds: mean and standard deviation of a task, from a base encoder."""
    from qdqbench.eval.runs.study import STUDY_FILE, StudyPlan, study
    from qdqbench.eval.runs.study_screen import study_summary
    from qdqbench.quantize.pipeline.ownership import default_folder
    from qdqbench.quantize.training.finetune import FinetuneRequest
    from qdqbench.quantize.training.record import require_all

    recipes = [subject.recipe(name) for name in recipe]
    settings = _settings(**asdict(optimization), patience=5)
    chosen = subject.found_task()
    folder = out or default_folder("study", subject.model, chosen.name)
    with (
        _claimed("study", subject, chosen, folder, replace=replace),
        _processes(settings.precision) as accelerator,
        progress.status() as say,
    ):
        base, source = _base(subject, folder, accelerator)
        request = FinetuneRequest(
            base=base,
            task=chosen,
            data=source,
            folder=folder,
            settings=settings,
            seeds=seeds,
            max_length=max(each.export.max_length for each in recipes),
            keep_head=False,
            limit=limit,
            command=command_line(),
            revision=subject.revision,
        )
        found = study(StudyPlan(request, recipes, folder, say), accelerator)
    show(found, json, study_summary, f"results: {folder / STUDY_FILE}")
    failed = [f"seed {row.seed} with {row.recipe}" for row in found.rows if row.status == "failed"]
    require_all(failed, folder / STUDY_FILE)


def _settings(**values: Any) -> "Training":
    """Checked settings.

    Raises:
        UserError: a value out of range.
    """
    from pydantic import ValidationError

    from qdqbench.quantize.recipe.training import Training
    from qdqbench.quantize.utils.errors import UserError

    try:
        return Training(**values)
    except ValidationError as error:
        found = [f"--{str(e['loc'][0]).replace('_', '-')}: {e['msg'].lower()}" for e in error.errors()]
        raise UserError("; ".join(found)) from error


def _claimed(
    kind: str, subject: given.BaseSubject, task: "Task", folder: Path, *, replace: bool
) -> AbstractContextManager[None]:
    """The folder of a training that begins with a base encoder, once that and its data are known to fit."""
    from qdqbench.quantize.pipeline.ownership import owned_folder, training_identity
    from qdqbench.quantize.training.finetune import require_base

    def ready() -> None:
        if subject.model is not None:
            require_base(subject.model, subject.revision, task, subject.data)

    identity = training_identity(kind, subject.model, subject.revision, task.name)
    return owned_folder(folder, identity, replace=replace, ready=ready, say=given.note)


def _base(subject: given.BaseSubject, folder: Path, accelerator: "Accelerator") -> tuple[str, str]:
    """Model and data; those of the embedded default are made by the main process."""
    if subject.model is not None:
        return subject.model, subject.data
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
