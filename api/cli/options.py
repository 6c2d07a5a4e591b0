"""Options that several commands share, and what they mean together."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from qdqbench.cli.terminal import command_line

if TYPE_CHECKING:
    from qdqbench.quantize.pipeline.session import RunConfig
    from qdqbench.quantize.recipe.schema import Recipe
    from qdqbench.quantize.tasks.task import Task


RecipeName = Annotated[str, typer.Argument(help="Shipped name, with or without the family, or YAML file.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Evaluation batch size.")]
MeasureSeed = Annotated[int, typer.Option(min=0, help="Seed of bootstrap and embedded default.")]
RunSeed = Annotated[int, typer.Option(min=0, help="Seed of bootstrap, parity draw and embedded default.")]
RunOut = Annotated[Path | None, typer.Option(help="Run directory; none: runs/MODEL-RECIPE-TASK.")]
Replace = Annotated[
    bool,
    typer.Option("--replace", help="Start over in a used --out; what it holds moves to OUT.old."),
]
MaxLength = Annotated[
    int | None,
    typer.Option(min=8, help="Tokens of a sample; none: as the recipe says. Its profiles follow."),
]
Backend = Annotated[
    str | None,
    typer.Option(help="Of the engine: tensorrt, tensorrt_rtx, openvino or onnxruntime; none: the recipe's."),
]
ShapesOfData = Annotated[
    str | None,
    typer.Option(
        "--shapes", help="auto: profiles of the lengths that the evaluation data has; none: the recipe's."
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Of a hub model: branch, tag or commit; none: its default branch.")
]
RunLimit = Annotated[int | None, typer.Option(min=1, help="Evaluate on this many samples; the report warns.")]


@dataclass(frozen=True)
class Subject:
    """The model, and the task with its data, that a command is about."""

    model: Annotated[str | None, typer.Option(help="Folder or hub id; none: the embedded default.")] = None
    revision: Revision = None
    task: Annotated[
        str | None,
        typer.Option(help="GLUE task, embed, tokens, qa, squad, squad_v2, or any name with --text-column."),
    ] = None
    data: Annotated[
        str,
        typer.Option(
            help="hub, hub:OWNER/NAME[:CONFIG], either with @REVISION, a folder, or a file with all samples."
        ),
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
    pooling: Annotated[
        str | None,
        typer.Option(help="Of a plain encoder as embedding model: mean, cls or last."),
    ] = None
    normalize: Annotated[bool, typer.Option("--normalize", help="To length 1; with --pooling.")] = False

    def recipe(
        self,
        name: str,
        max_length: int | None = None,
        backend: str | None = None,
        shapes: str | None = None,
    ) -> "Recipe":
        """A recipe for the model; errors are those of `find_recipe` and of `adapted` beside it."""
        from qdqbench.quantize.pipeline.config import adapt_recipe, find_recipe

        found = find_recipe(name, self.model, self.revision)
        return adapt_recipe(found, max_length=max_length, backend=backend, shapes=shapes)

    def found_task(self) -> "Task":
        """The task; errors are those of `rundir.config.find_task`."""
        from qdqbench.quantize.pipeline.config import find_task

        names = ("model", "task", "text_column", "label_column", "num_labels", "metric")
        return find_task(**{name: getattr(self, name) for name in names})

    def config(
        self, recipe: "Recipe", *, batch_size: int, seed: int, limit: int | None = None
    ) -> "RunConfig":
        """The configuration of a run; errors are those of `rundir.config.make_run_config`."""
        from qdqbench.quantize.pipeline.config import make_run_config

        return make_run_config(
            recipe, **asdict(self), batch_size=batch_size, seed=seed, limit=limit, command=command_line()
        )


@dataclass(frozen=True)
class BaseSubject(Subject):
    """The encoder that a training starts from, and the task with its data."""

    model: Annotated[
        str | None, typer.Option(help="Encoder: folder or hub id; none: the embedded default.")
    ] = None


def note(text: str) -> None:
    """A line on stderr, beside what is printed."""
    sys.stderr.write(f"{text}\n")


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose dataclass parameters are options, one for each field, in their place.

    Args:
        command: fields of its dataclasses are annotated as parameters of a command are. Two groups of one
            command must not share a name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {n: kind for n, kind in hints.items() if dataclasses.is_dataclass(kind)}
    shown: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            shown.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        told = get_type_hints(groups[name], include_extras=True)
        for field in dataclasses.fields(groups[name]):
            default = parameter.empty if field.default is dataclasses.MISSING else field.default
            shown.append(
                inspect.Parameter(
                    field.name, parameter.KEYWORD_ONLY, default=default, annotation=told[field.name]
                )
            )

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        command(**given)

    flat.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # what typer reads
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return flat
