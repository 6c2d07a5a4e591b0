"""The command `methods`; registered in cli.py. Everything heavy is imported inside."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench.quantize import cli_options as options
from qdqbench.quantize.cli_tools import Json, command_line, console

if TYPE_CHECKING:
    from qdqbench.eval.methods_results import Methods
    from qdqbench.quantize.session import RunConfig

Method = Annotated[
    list[str] | None, typer.Option(help="max, percentile/P, mse or entropy; several. None: all of them.")
]
Smooth = Annotated[
    list[str] | None, typer.Option(help="none, gain or an alpha; several. None: none and 0.65.")
]


def methods(  # noqa: PLR0913, PLR0917  (a command's options)
    recipe: options.RecipeName = options.DEFAULT_RECIPE,
    model: options.ModelName = None,
    task: options.TaskName = None,
    data: options.Data = "hub",
    out: Annotated[Path | None, typer.Option(help="Folder; none: runs/methods-RECIPE-TASK.")] = None,
    method: Method = None,
    smooth: Smooth = None,
    samples: Annotated[int, typer.Option(min=2, help="Training samples to compare on.")] = 1024,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Validate on this many samples; the report warns.")
    ] = None,
    text_column: options.TextColumn = None,
    label_column: options.LabelColumn = None,
    num_labels: options.NumLabels = None,
    metric: options.Metrics = None,
    batch_size: options.BatchSize = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of bootstrap and embedded default.")] = 0,
    json: Json = False,
) -> None:
    """Compare calibration methods in one table; writes the recipe with the best one."""
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
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        command=command_line(),
    )
    folder = out or Path("runs") / f"methods-{loaded.name}-{chosen.name}"
    _check_folder(folder)
    found = _compare(config, folder, samples, method or [], smooth or [], quiet=json)
    if json:
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
        return
    from qdqbench.eval.methods_report import summary
    from qdqbench.eval.methods_results import RECIPE

    console().print(summary(found))
    console().print(f"recipe: {folder / RECIPE}", highlight=False, soft_wrap=True)
    console().print(f"report: {folder / 'methods.html'}", highlight=False, soft_wrap=True)


def _check_folder(folder: Path) -> None:
    from qdqbench.eval.methods_results import FILE, RECIPE
    from qdqbench.quantize.errors import UserError

    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give --out a folder")
    there = {path.name for path in folder.iterdir() if path.name[0] != "."} if folder.is_dir() else set()
    if there - {"embedded", RECIPE} and FILE not in there:
        raise UserError(
            f"{folder} holds other files than a table of methods; give --out an empty or new folder"
        )


def _compare(  # noqa: PLR0913
    config: "RunConfig", folder: Path, samples: int, methods: list[str], smooths: list[str], *, quiet: bool
) -> "Methods":
    from qdqbench.eval.methods import Comparing
    from qdqbench.eval.methods_report import write_methods
    from qdqbench.eval.methods_sections import sections
    from qdqbench.quantize import stages
    from qdqbench.quantize.session import Session

    sections(config.recipe.calibration, methods, smooths)  # a wrong name is told before anything is loaded
    with _progress(quiet=quiet) as show:
        session = Session(config, folder, progress=lambda done, total: show(done, total, "embedded default"))
        if config.model is None:
            stages.embedded(session)
        found = Comparing(session, samples, methods, smooths, show).run()
    write_methods(found, folder)
    return found


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
