"""Training: an FP32 baseline over seeds, and a study of QAT over seeds."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qdqbench._options import FinetuneOptions, StudyOptions, TrainingOptions
from qdqbench._progress import displayed
from qdqbench._runs import Progress
from qdqbench.eval.runs.report.training import finetuning_report
from qdqbench.eval.runs.tracked import tracking
from qdqbench.quantize.models.identity import model_fingerprint
from qdqbench.quantize.pipeline.ownership import RunIdentity, default_folder, model_location, owned_folder
from qdqbench.quantize.recipe.schema import find_recipe
from qdqbench.quantize.report.render import write_report
from qdqbench.quantize.tasks.embedded import write_embedded
from qdqbench.quantize.training.results import Finetuning
from qdqbench.quantize.utils.options import take_options
from qdqbench.quantize.utils.system.process import invocation
from qdqbench.quantize.utils.trackers import require_tracker

if TYPE_CHECKING:
    from accelerate import Accelerator

    from qdqbench.eval.runs.study import Study
    from qdqbench.quantize.tasks.task import Task
    from qdqbench.quantize.training import finetune as tuning


@take_options
def finetune(*, options: FinetuneOptions, progress: Progress = None) -> Finetuning:
    """Fine-tune an encoder: the FP32 baseline of a task, over seeds.

    A seed that failed is in the result; the model of the best is `OUT/seed-N/model`.

    Args:
        progress: True for bars (default in notebooks), or a function that is called as seeds start and
            continue.

    Raises:
        UserError: input that cannot be used, or a folder of another model or task.
        CheckFailed: no seed was trained to its end.
    """
    with displayed(progress, "training"):
        return start_finetuning(options)[0]


def start_finetuning(options: FinetuneOptions) -> tuple[Finetuning, Path]:
    """Fine-tune on all processes of a launcher; return the result and the folder of its reports."""
    task = options.find_task().model_copy(update={"trained": True})
    folder = options.out or default_folder("finetune", options.model, task.name)
    require_tracker(options.report_to)
    from qdqbench.quantize.training import finetune as tuning
    from qdqbench.quantize.training.loop import join_group, new_accelerator

    known = {"model": str(options.model), "task": task.name, **options.training.model_dump()}
    with _own_folder("finetune", options, task, folder), join_group():
        accelerator = new_accelerator(options.precision)
        with tracking(options.report_to, folder, known) as tracked:
            request = _request_of(options, task, folder, accelerator, options.max_length)
            result = tuning.finetune(replace(request, keep_head=options.keep_head), accelerator)
            last = max(run.steps for run in result.runs)
            values = {f"validation/{name}": each.mean for name, each in result.spread.items()}
            tracked.log_values(values, last)
        if accelerator.is_main_process:
            write_report(finetuning_report(result), folder, "finetune")
    return result, folder


def start_study(recipe: Sequence[str], options: StudyOptions) -> "tuple[Study, Path]":
    """Measure FP32, PTQ and QAT over seeds; return the result and its folder."""
    recipes = [options.adapt(find_recipe(name, options.model, options.revision)) for name in recipe]
    task = options.find_task().model_copy(update={"trained": True})
    folder = options.out or default_folder("study", options.model, task.name)
    from qdqbench.eval.runs.study import study
    from qdqbench.quantize.training.loop import join_group, new_accelerator

    with _own_folder("study", options, task, folder), join_group():
        accelerator = new_accelerator(options.precision)
        longest = max(each.export.max_length for each in recipes)
        request = _request_of(options, task, folder, accelerator, longest)
        return study(request, recipes, accelerator), folder


def _own_folder(
    kind: str, options: TrainingOptions, task: "Task", folder: Path
) -> AbstractContextManager[None]:
    def ready() -> None:
        if options.model is not None:
            from qdqbench.quantize.training import finetune as tuning

            tuning.require_base(options.model, options.revision, task, options.data)

    sha256 = None if options.model is None else model_fingerprint(options.model, options.revision)
    place = model_location(options.model, options.revision)
    identity = RunIdentity(kind=kind, model=place, model_sha256=sha256, task=task.name)
    return owned_folder(folder, identity, overwrite=options.overwrite, ready=ready)


def _request_of(
    options: TrainingOptions, task: "Task", folder: Path, accelerator: "Accelerator", max_length: int
) -> "tuning.FinetuneRequest":
    from qdqbench.quantize.training import finetune as tuning

    base, data = options.model, options.data
    if base is None:
        with accelerator.main_process_first():
            run = write_embedded(folder / "embedded")
        base, data = str(run.model_dir), str(run.data_dir)
    return tuning.FinetuneRequest(
        base=base,
        task=task,
        data=data,
        folder=folder,
        settings=options.training,
        seeds=options.seeds,
        max_length=max_length,
        keep_head=False,
        limit=options.limit,
        command=invocation(),
        revision=options.revision,
    )
