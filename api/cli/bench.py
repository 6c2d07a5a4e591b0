"""The command `bench`; registered in cli.py. Everything heavy is imported inside."""

from pathlib import Path
from typing import Annotated

import typer

from qdqbench._options import BenchOptions
from qdqbench.cli.options import command, note
from qdqbench.cli.progress import status
from qdqbench.cli.terminal import Json, command_line, say, show, show_json


@command
def bench(
    target: Annotated[Path | None, typer.Argument(help="Run directory.", show_default=False)] = None,
    *,
    options: BenchOptions,
    json: Json = False,
) -> None:
    """Measure INT8 against other engines, PyTorch and other quantizers: interleaved, verified, GPU or CPU."""
    from qdqbench._bench import bench as measure
    from qdqbench.eval.bench.report import bench_report
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.runs.report.report import too_slow
    from qdqbench.quantize.utils.errors import CheckFailed

    written: list[Path] = []
    with status() as announce:
        found = measure(
            target,
            **vars(options),
            note=note,
            progress=announce,
            written=written.append,
            command=command_line(),
        )
    if options.build_only and json:
        show_json(found)
        return
    if options.build_only:
        say("engines and compiled models are kept: run the same command without --build-only")
        return
    show(
        found,
        json,
        lambda bench: render_screen(bench_report(bench)),
        *(f"report: {path}" for path in written),
    )
    if found.errors:
        raise CheckFailed(f"{len(found.errors)} measurements failed: {'; '.join(found.errors)}")
    if target is not None and (slow := too_slow(target)):
        raise CheckFailed(f"the gate does not hold: {'; '.join(slow)}")
