"""The command `bench`; registered in cli.py. Everything heavy is imported inside."""

from pathlib import Path
from typing import Annotated

import typer

from qdqbench._options import BenchOptions
from qdqbench._progress import displayed
from qdqbench.cli.options import command
from qdqbench.cli.terminal import Json, say, show_json, show_report
from qdqbench.quantize.utils.errors import CheckFailed


@command
def bench(
    target: Annotated[Path | None, typer.Argument(help="Run directory.", show_default=False)] = None,
    *,
    options: BenchOptions,
    json: Json = False,
) -> None:
    """Measure INT8 against other engines, PyTorch and other quantizers: interleaved, verified, GPU or CPU."""
    from qdqbench._bench import start_bench
    from qdqbench.eval.bench.report import bench_report
    from qdqbench.eval.runs.report.report import too_slow

    with displayed():
        found, written = start_bench(target, options)
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
