"""Options that several commands share, and what they mean together."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench.quantize.cli.terminal import command_line

if TYPE_CHECKING:
    from qdqbench.quantize.recipe.schema import Recipe
    from qdqbench.quantize.rundir.session import RunConfig
    from qdqbench.quantize.tasks.task import Task

DEFAULT_RECIPE = "bert-int8-linears"

RecipeName = Annotated[str, typer.Argument(help="Shipped name or YAML file.")]
ModelName = Annotated[str | None, typer.Option(help="Folder or hub id; none: the embedded default.")]
Revision = Annotated[
    str | None, typer.Option(help="Of a hub model: branch, tag or commit; none: its default branch.")
]
TaskName = Annotated[str | None, typer.Option(help="GLUE task, or a free name with --text-column.")]
Data = Annotated[str, typer.Option(help="hub, hub:OWNER/NAME[:CONFIG], either with @REVISION, or a folder.")]
TextColumn = Annotated[list[str] | None, typer.Option(help="Text column of your own data; twice for pairs.")]
LabelColumn = Annotated[str | None, typer.Option(help="Label column of your own data.")]
NumLabels = Annotated[int | None, typer.Option(min=1, help="Classes of your own data; 1 is regression.")]
Metrics = Annotated[list[str] | None, typer.Option(help="Metrics of your own data, the first decides.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Evaluation batch size.")]


def find_task(  # noqa: PLR0913
    *,
    model: str | None,
    task: str | None,
    text_column: list[str] | None,
    label_column: str | None,
    num_labels: int | None,
    metric: list[str] | None,
) -> "Task":
    """The task of the options; without model and task that of the embedded default.

    Raises:
        UserError: a model without a task, a task without a model, or as `eval.tasks.get_task`.
    """
    from qdqbench.quantize.core.errors import UserError
    from qdqbench.quantize.tasks.task import EMBEDDED, get_task

    if (model is None) != (task is None):
        raise UserError("--model and --task belong together; give both, or neither for the embedded default")
    if task is None:
        return EMBEDDED
    return get_task(
        task,
        text_columns=text_column or (),
        label_column=label_column,
        num_labels=num_labels,
        metrics=metric or (),
    )


def run_config(  # noqa: PLR0913
    recipe: "Recipe",
    *,
    model: str | None,
    task: str | None,
    data: str,
    text_column: list[str] | None,
    label_column: str | None,
    num_labels: int | None,
    metric: list[str] | None,
    batch_size: int,
    seed: int,
    limit: int | None = None,
    revision: str | None = None,
) -> "RunConfig":
    """What a command with these options was asked to do.

    Raises:
        UserError: as `find_task`, or a revision without a model.
    """
    from qdqbench.quantize.core.errors import UserError
    from qdqbench.quantize.rundir.session import RunConfig

    chosen = find_task(
        model=model,
        task=task,
        text_column=text_column,
        label_column=label_column,
        num_labels=num_labels,
        metric=metric,
    )
    if revision is not None and model is None:
        raise UserError(f"--revision {revision} belongs to --model with a hub id; give that too")
    return RunConfig(
        recipe=recipe,
        model=model,
        revision=revision,
        task=chosen,
        data=data,
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        command=command_line(),
    )


def check_out(folder: Path, marker: str, what: str, *, without_marker: Collection[str]) -> None:
    """Refuse an --out folder that is not an earlier call's; hidden files do not count.

    Args:
        folder: given by --out.
        marker: file that an earlier call wrote.
        what: the folder should hold.
        without_marker: what a call that was cut short may have left.

    Raises:
        UserError: it is a file, or holds something else.
    """
    from qdqbench.quantize.core import files
    from qdqbench.quantize.core.errors import UserError

    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give --out a folder")
    files.require_writable(folder)
    there = {path.name for path in folder.iterdir() if path.name[0] != "."} if folder.is_dir() else set()
    if there - {*without_marker} and marker not in there:
        raise UserError(f"{folder} holds other files than {what}; give --out an empty or new folder")
