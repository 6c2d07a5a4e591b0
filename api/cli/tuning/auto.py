"""The command `auto`; registered in app.py. Everything heavy is imported inside."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from qdqbench.cli import options, progress
from qdqbench.cli.options import grouped
from qdqbench.cli.terminal import Json, command_line, show


@dataclass(frozen=True)
class AutoSubject(options.Subject):
    """The model as an argument, and the task with its data."""

    model: Annotated[
        str | None, typer.Argument(help="Folder or hub id; none: the embedded default.", show_default=False)
    ] = None


@dataclass(frozen=True)
class Gate:
    """What must hold, and what may be spent on it."""

    budget: Annotated[
        str,
        typer.Option(help="Time for all steps, such as 90s, 30m or 2h; those that do not fit are left out."),
    ] = "30m"
    max_drop: Annotated[
        float, typer.Option(help="Largest drop of the primary metric, or noise: 0.005 is half a point.")
    ] = 0.005
    min_speedup: Annotated[
        float | None,
        typer.Option(
            help="Least speed-up, a factor, over the one system without INT8 that is timed: the FP16 engine "
            "of the same backend, on a CPU its FP32 or BF16 engine."
        ),
    ] = None
    samples: Annotated[
        int, typer.Option(min=32, help="Train rows that proposals are chosen on; none of them calibrates.")
    ] = 512
    trials: Annotated[int, typer.Option(min=8, help="Of the search, at most.")] = 24
    batch: Annotated[int, typer.Option(min=1, help="Batch size of the latency.")] = 32
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the latency; none: 128, or what the recipe takes.")
    ] = None


@grouped
def auto(  # noqa: PLR0913  (a command's options)
    *,
    subject: AutoSubject,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="To begin with, in this order; none: int8-attention, with --min-speedup on a GPU "
            "int8-residual-fused, and int8-linears."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; none: runs/auto-MODEL-TASK.")] = None,
    replace: options.Replace = False,
    gate: Gate,
    max_length: options.MaxLength = None,
    backend: options.Backend = None,
    limit: options.RunLimit = None,
    batch_size: options.BatchSize = 32,
    seed: options.RunSeed = 0,
    json: Json = False,
) -> None:
    """Find a recipe that holds: shipped ones, calibration, islands, search, QAT, as far as it takes."""
    from qdqbench._auto import auto as find_recipe
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.selection.auto.report import auto_report, unmet_lines
    from qdqbench.quantize.pipeline.ownership import default_folder
    from qdqbench.quantize.utils.errors import CheckFailed

    folder = out or default_folder("auto", subject.model, subject.found_task().name)
    with progress.status() as say:
        result = find_recipe(
            **asdict(subject),
            **asdict(gate),
            out=folder,
            replace=replace,
            note=options.note,
            recipe=recipe or (),
            max_length=max_length,
            backend=backend,
            batch_size=batch_size,
            seed=seed,
            limit=limit,
            progress=say,
            command=command_line(),
        )
    show(result, json, lambda each: render_screen(auto_report(each)), f"report: {folder / 'auto.html'}")
    if not result.choice.passed:
        raise CheckFailed(f"no recipe holds: {'; '.join(unmet_lines(result))}")
