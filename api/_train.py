"""Training: an FP32 baseline over seeds, and QAT that ends with an engine and a report."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench._options import FinetuneOptions, QatOptions, TrainingOptions
from qdqbench._progress import draw_seeds, draw_stages, shown
from qdqbench._runs import Progress, choose_recipe
from qdqbench.eval.runs.report.training import write_finetuning
from qdqbench.eval.runs.results import Results
from qdqbench.eval.runs.run import follow, require_inputs, run_to, run_until
from qdqbench.eval.runs.tracked import track_run
from qdqbench.quantize.models.identity import model_fingerprint
from qdqbench.quantize.pipeline.ownership import (
    RunIdentity,
    default_folder,
    identity_of,
    model_location,
    owned_folder,
    run_folder,
)
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.tasks.embedded import write_embedded
from qdqbench.quantize.training import finetune as tuning
from qdqbench.quantize.training.loop import join_group, new_accelerator
from qdqbench.quantize.training.qat import get_settings, train_on_all
from qdqbench.quantize.training.results import Finetuning
from qdqbench.quantize.utils.names import DEFAULT_QAT
from qdqbench.quantize.utils.options import take_options
from qdqbench.quantize.utils.progress import silent
from qdqbench.quantize.utils.system.process import is_main_process
from qdqbench.quantize.utils.trackers import LogRow, open_tracker, require_tracker, row_values

if TYPE_CHECKING:
    from accelerate import Accelerator

    from qdqbench.quantize.tasks.task import Task


@take_options
def finetune(
    *, options: FinetuneOptions, progress: Callable[[int, LogRow, int], None] | bool | None = None
) -> Finetuning:
    """Fine-tune an encoder: the FP32 baseline of a task, over seeds.

    A seed that failed is in the result; the model of the best is `OUT/seed-N/model`.

    Args:
        progress: True for bars (default in notebooks), or a function that is called with the seed, the row
            of its log and the number of its steps.

    Raises:
        UserError: input that cannot be used, or a folder of another model or task.
        CheckFailed: no seed was trained to its end.
    """
    with shown(progress, draw_seeds) as report:
        return start_finetuning(options, "qdqbench.finetune", report)[0]


def start_finetuning(
    options: FinetuneOptions,
    command: str,
    report: Callable[[int, LogRow, int], None] = silent,
    note: Callable[[str], None] = silent,
) -> tuple[Finetuning, Path]:
    """Fine-tune on all processes of a launcher; return the result and the folder of its reports."""
    task = options.find_task()
    folder = options.out or default_folder("finetune", options.model, task.name)
    require_tracker(options.report_to)
    with own_folder("finetune", options, task, folder, note), join_group():
        accelerator = new_accelerator(options.precision)
        tracker = options.report_to if accelerator.is_main_process else None
        known = {"model": str(options.model), "task": task.name, **options.training.model_dump()}
        with open_tracker(tracker, folder, known) as log:

            def report_row(seed: int, row: LogRow, steps: int) -> None:
                log(row_values(row, f"seed-{seed}/"), row.step)
                report(seed, row, steps)

            request = request_of(options, task, folder, accelerator, options.max_length, command)
            request = replace(request, keep_head=options.keep_head, report=report_row)
            result = tuning.finetune(request, accelerator)
            last = max(run.steps for run in result.runs)
            log({f"validation/{name}": each.mean for name, each in result.spread.items()}, last)
        if accelerator.is_main_process:
            write_finetuning(result, folder)
    return result, folder


@take_options
def qat(
    recipe: str | Path | Recipe = DEFAULT_QAT,
    options: QatOptions = QatOptions(),  # noqa: B008  (frozen)
    *,
    progress: Progress = None,
) -> Results:
    """Train with quantization, then continue to engine and report. A gate that fails is in the results.

    Args:
        recipe: shipped name or YAML file with a `qat` section, or what `load_recipe` gave.
        progress: True for bars (default in notebooks), or a function that is called as stages start and
            continue.

    Raises:
        UserError: input that cannot be used, or a recipe without `qat`.
        CheckFailed: a stage gives what no report can hold, such as NaN.
    """
    config = options.config(choose_recipe(options, recipe), "qdqbench.qat")
    stages: Any = partial(shown, progress, draw_stages)
    return start_qat(config, options, stages)[0]


def start_qat(
    config: RunConfig,
    options: QatOptions,
    stages: Callable[[], AbstractContextManager[Callable[..., None]]],
    note: Callable[[str], None] = silent,
) -> tuple[Results, Path]:
    """Train on all processes of a launcher and finish the run; the others than the main one end here."""
    folder = run_folder("run", config, options.out)
    session = Session(config, folder)
    get_settings(session)  # before anything is written
    require_tracker(options.report_to)
    identity, ready = identity_of("run", session), partial(require_inputs, session)
    with (
        owned_folder(folder, identity, overwrite=options.overwrite, ready=ready, say=note),
        track_run(options.report_to, session) as tracked,
    ):
        with stages() as show:
            start = follow(session, tracked.follow(show))
            train_on_all(session, lambda stage: run_to(session, stage, start))
            if not is_main_process():
                raise SystemExit(0)
            results = run_until(session, None, start)
        tracked.finish(results)
    return results, folder


def own_folder(
    kind: str, options: TrainingOptions, task: "Task", folder: Path, note: Callable[[str], None]
) -> AbstractContextManager[None]:
    def ready() -> None:
        if options.model is not None:
            tuning.require_base(options.model, options.revision, task, options.data)

    sha256 = None if options.model is None else model_fingerprint(options.model, options.revision)
    place = model_location(options.model, options.revision)
    identity = RunIdentity(kind=kind, model=place, model_sha256=sha256, task=task.name)
    return owned_folder(folder, identity, overwrite=options.overwrite, ready=ready, say=note)


def request_of(  # noqa: PLR0913, PLR0917
    options: TrainingOptions,
    task: "Task",
    folder: Path,
    accelerator: "Accelerator",
    max_length: int,
    command: str,
) -> tuning.FinetuneRequest:
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
        command=command,
        revision=options.revision,
    )
