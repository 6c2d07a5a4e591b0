"""The command `bench`."""

from pathlib import Path

from qdqbench._bench import start_bench
from qdqbench._options import BenchOptions
from qdqbench.cli.answer import Answer
from qdqbench.eval.bench.report import bench_report
from qdqbench.eval.runs.report.report import too_slow
from qdqbench.quantize.utils.errors import CheckFailed


def bench(target: Path | None, options: BenchOptions) -> Answer:
    found, written = start_bench(target, options)
    if options.build_only:
        text = "engines and compiled models are kept: run the same command without --build-only"
        return Answer(found, None, [text])
    error = None
    if found.errors:
        error = CheckFailed(f"{len(found.errors)} measurements failed: {'; '.join(found.errors)}")
    elif target is not None and (slow := too_slow(target)):
        error = CheckFailed(f"the gate does not hold: {'; '.join(slow)}")
    return Answer(found, bench_report(found), [f"report: {path}" for path in written], error)
