"""The command `sensitivity`; registered in cli.py. Everything heavy is imported inside."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench.quantize import cli_options as options
from qdqbench.quantize.cli_tools import Json, console
from qdqbench.quantize.progress import time_left

if TYPE_CHECKING:
    from qdqbench.eval.sensitivity_results import Sensitivity
    from qdqbench.quantize.session import RunConfig


def sensitivity(  # noqa: PLR0913, PLR0917  (a command's options)
    recipe: options.RecipeName = options.DEFAULT_RECIPE,
    model: options.ModelName = None,
    task: options.TaskName = None,
    data: options.Data = "hub",
    out: Annotated[Path | None, typer.Option(help="Folder; none: runs/sensitivity-RECIPE-TASK.")] = None,
    samples: Annotated[int, typer.Option(min=2, help="Training samples to measure on.")] = 512,
    text_column: options.TextColumn = None,
    label_column: options.LabelColumn = None,
    num_labels: options.NumLabels = None,
    metric: options.Metrics = None,
    batch_size: options.BatchSize = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of bootstrap and embedded default.")] = 0,
    json: Json = False,
) -> None:
    """Which layer costs the accuracy: each alone in INT8, and everything but it; writes a recipe."""
    from qdqbench.eval.sensitivity_ledger import FILE
    from qdqbench.quantize.recipe import load_recipe

    config = options.run_config(
        load_recipe(recipe).ptq,
        model=model,
        task=task,
        data=data,
        text_column=text_column,
        label_column=label_column,
        num_labels=num_labels,
        metric=metric,
        batch_size=batch_size,
        seed=seed,
    )
    folder = out or Path("runs") / f"sensitivity-{config.recipe.name}-{config.task.name}"
    options.check_out(folder, FILE, "a sensitivity run", without_marker=("embedded",))
    _finish(_measure(config, folder, samples, quiet=json), folder, json=json)


def _measure(config: "RunConfig", folder: Path, samples: int, *, quiet: bool) -> "Sensitivity":
    from qdqbench.eval.sensitivity import Measurement
    from qdqbench.eval.sensitivity_report import write_sensitivity
    from qdqbench.quantize import stages
    from qdqbench.quantize.session import Session

    with time_left(quiet=quiet) as show:
        session = Session(config, folder, progress=lambda done, total: show(done, total, "embedded default"))
        if config.model is None:
            stages.embedded(session)
        measurement = Measurement(session, samples, show)
        ledger = measurement.ledger
        if ledger.anew:
            sys.stderr.write(f"{ledger.path}: of other settings, data or code; measuring anew\n")
        elif ledger.resumed:
            sys.stderr.write(f"{ledger.path}: going on after {ledger.resumed} finished measurements\n")
        found = measurement.run()
    write_sensitivity(found, folder)
    return found


def _finish(found: "Sensitivity", folder: Path, *, json: bool) -> None:
    from qdqbench.eval.sensitivity_report import summary
    from qdqbench.quantize.errors import CheckFailed

    if json:
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    else:
        console().print(summary(found))
        console().print(f"recipe: {folder / found.choice.file}", highlight=False, soft_wrap=True)
        console().print(f"report: {folder / 'sensitivity.html'}", highlight=False, soft_wrap=True)
    if not found.choice.reached:
        raise CheckFailed(found.choice.reason)
