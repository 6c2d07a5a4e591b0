"""Options that several commands share, and what they mean together."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qdqbench.eval.tasks import Task

DEFAULT_RECIPE = "bert-int8-linears"

RecipeName = Annotated[str, typer.Argument(help="Shipped name or YAML file.")]
ModelName = Annotated[str | None, typer.Option(help="Folder or hub id; none: the embedded default.")]
TaskName = Annotated[str | None, typer.Option(help="GLUE task, or a free name with --text-column.")]
Data = Annotated[str, typer.Option(help="hub, hub:OWNER/NAME[:CONFIG] or a folder.")]
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
    from qdqbench.eval.tasks import EMBEDDED, get_task
    from qdqbench.quantize.errors import UserError

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
