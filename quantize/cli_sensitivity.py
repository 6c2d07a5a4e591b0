"""The command `sensitivity`; registered in cli.py. Everything heavy is imported inside."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench.quantize import cli_options as options
from qdqbench.quantize.cli_tools import Json, command_line, console

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
    from qdqbench.quantize.recipe import load_recipe
    from qdqbench.quantize.session import RunConfig

    loaded = load_recipe(recipe).ptq
    chosen = options.find_task(
        model=model,
        task=task,
        text_column=text_column,
        label_column=label_column,
        num_labels=num_labels,
        metric=metric,
    )
    config = RunConfig(
        recipe=loaded,
        model=model,
        task=chosen,
        data=data,
        batch_size=batch_size,
        seed=seed,
        command=command_line(),
    )
    folder = out or Path("runs") / f"sensitivity-{loaded.name}-{chosen.name}"
    _check_folder(folder)
    _finish(_measure(config, folder, samples, quiet=json), folder, json=json)


def _check_folder(folder: Path) -> None:
    from qdqbench.eval.sensitivity_ledger import FILE
    from qdqbench.quantize.errors import UserError

    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give --out a folder")
    if (
        folder.is_dir()
        and {path.name for path in folder.iterdir() if path.name[0] != "."} - {"embedded"}
        and not (folder / FILE).is_file()
    ):
        raise UserError(
            f"{folder} holds other files than a sensitivity run; give --out an empty or new folder"
        )


def _measure(config: "RunConfig", folder: Path, samples: int, *, quiet: bool) -> "Sensitivity":
    from qdqbench.eval.sensitivity import Measurement
    from qdqbench.eval.sensitivity_report import write_sensitivity
    from qdqbench.quantize import stages
    from qdqbench.quantize.session import Session

    with _progress(quiet=quiet) as show:
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


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[float, float, str], None]]:
    """A bar with the time that is left on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task("", total=None)
        yield lambda done, total, text: bars.update(bar, completed=done, total=total, description=text)
