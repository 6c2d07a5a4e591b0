"""Options that several commands share, and what they mean together."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
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
BatchSize = Annotated[int, typer.Option(min=1, help="Evaluation batch size.")]


@dataclass(frozen=True)
class Subject:
    """The model, and the task with its data, that a command is about."""

    model: Annotated[str | None, typer.Option(help="Folder or hub id; none: the embedded default.")] = None
    revision: Annotated[
        str | None, typer.Option(help="Of a hub model: branch, tag or commit; none: its default branch.")
    ] = None
    task: Annotated[str | None, typer.Option(help="GLUE task, or a free name with --text-column.")] = None
    data: Annotated[
        str, typer.Option(help="hub, hub:OWNER/NAME[:CONFIG], either with @REVISION, or a folder.")
    ] = "hub"
    text_column: Annotated[
        list[str] | None, typer.Option(help="Text column of your own data; twice for pairs.")
    ] = None
    label_column: Annotated[str | None, typer.Option(help="Label column of your own data.")] = None
    num_labels: Annotated[
        int | None, typer.Option(min=1, help="Classes of your own data; 1 is regression.")
    ] = None
    metric: Annotated[list[str] | None, typer.Option(help="Metrics of your own data, the first decides.")] = (
        None
    )

    def found_task(self) -> "Task":
        """The task; errors are those of `rundir.config.find_task`."""
        from qdqbench.quantize.rundir.config import find_task

        fields = asdict(self)
        del fields["revision"], fields["data"]
        return find_task(**fields)

    def config(
        self, recipe: "Recipe", *, batch_size: int, seed: int, limit: int | None = None
    ) -> "RunConfig":
        """The configuration of a run; errors are those of `rundir.config.run_config`."""
        from qdqbench.quantize.rundir.config import run_config

        return run_config(
            recipe, **asdict(self), batch_size=batch_size, seed=seed, limit=limit, command=command_line()
        )


@dataclass(frozen=True)
class BaseSubject(Subject):
    """The encoder that a training starts from, and the task with its data."""

    model: Annotated[
        str | None, typer.Option(help="Encoder: folder or hub id; none: the embedded default.")
    ] = None


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
