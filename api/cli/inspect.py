"""The command `inspect`: what an engine runs, kernel by kernel. Everything heavy is imported inside."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench._options import InspectOptions
from qdqbench._progress import displayed
from qdqbench.cli.options import command
from qdqbench.cli.terminal import Html, Json, plain, print_json, say, show_found
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.progress import reporter

if TYPE_CHECKING:
    from qdqbench.quantize.lint.inspect_target import InspectTarget


@command
def inspect(
    target: Annotated[Path, typer.Argument(help="Run directory, .engine file or saved inspector JSON.")],
    *,
    options: InspectOptions,
    json: Json = False,
    html: Html = None,
) -> None:
    """Show the kernel and datatypes of each ONNX layer: INT8 against the recipe, attention, time."""
    from qdqbench.quantize.engine.trtexec import read_profile
    from qdqbench.quantize.lint.inspect_target import MEASURED, inspect_target, measure_times, open_target
    from qdqbench.quantize.lint.reports import inspect_report

    batch, length, profile = options.batch, options.length, options.profile
    if (batch or length) and profile not in MEASURED:
        raise UserError("--batch and --length are shapes to measure at; give them with --profile gpu or cpu")
    found = open_target(target, options.onnx, options.recipe)
    if options.bisect:
        _bisect(found, json)
        return
    times, shape = None, ""
    if profile in MEASURED:
        with displayed():
            reporter().begin("measuring kernels")
            times, shape = measure_times(found, profile, batch, length)
    elif profile:
        times = read_profile(Path(profile))
    judged = inspect_target(found, times)
    show_found(judged, json, html, inspect_report(judged, found.sidecar, options.all, shape))
    if judged.failures:
        raise CheckFailed(f"{found.name}: {' and '.join(judged.failures)} as the recipe asks")


def _bisect(target: "InspectTarget", json: bool) -> None:
    if target.folder is None:
        raise UserError(
            f"--bisect needs a run directory, whose model is the reference; {target.name} is not in one"
        )
    from qdqbench.eval.verification.bisect import bisect_lines, bisect_run

    with displayed():
        reporter().begin("looking for the first wrong tensor")
        result = bisect_run(target.folder)
    if json:
        print_json(result.model_dump(mode="json"))
    else:
        for line in bisect_lines(result):
            say(plain(line))
    if result.block is not None:
        raise CheckFailed(f"{target.name}: block {result.block} is wrong on its own")
