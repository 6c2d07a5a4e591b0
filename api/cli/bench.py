"""The command `bench`; registered in cli.py. Everything heavy is imported inside."""

from pathlib import Path
from typing import Annotated

import typer

from qdqbench._options import BenchOptions
from qdqbench.cli.options import command, note
from qdqbench.cli.progress import status
from qdqbench.cli.terminal import Json, command_line, say, show_json, show_report
from qdqbench.quantize.utils.errors import CheckFailed


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
    from qdqbench.eval.runs.report.report import too_slow

    written: list[Path] = []
    with status() as announce:
        told = {"note": note, "progress": announce, "written": written.append, "command": command_line()}
        found = measure(target, **vars(options), **told)
    if options.build_only:
        if json:
            show_json(found)
        else:
            say("engines and compiled models are kept: run the same command without --build-only")
        return
    show_report(found, json, bench_report, *(f"report: {path}" for path in written))
    if found.errors:
        raise CheckFailed(f"{len(found.errors)} measurements failed: {'; '.join(found.errors)}")
    if target is not None and (slow := too_slow(target)):
        raise CheckFailed(f"the gate does not hold: {'; '.join(slow)}")
