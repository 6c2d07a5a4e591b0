"""The command `inspect`: what an engine runs, kernel by kernel."""

from pathlib import Path

from qdqbench._options import InspectOptions
from qdqbench.cli.answer import Answer
from qdqbench.quantize.engine.trtexec import read_profile
from qdqbench.quantize.lint.inspect_target import (
    MEASURED,
    InspectTarget,
    inspect_target,
    measure_times,
    open_target,
)
from qdqbench.quantize.lint.reports import inspect_report
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.progress import reporter


def inspect(options: InspectOptions) -> Answer:
    batch, length, profile = options.batch, options.length, options.profile
    if (batch or length) and profile not in MEASURED:
        raise UserError("--batch and --length are shapes to measure at; give them with --profile gpu or cpu")
    found = open_target(options.target, options.onnx, options.recipe)
    if options.bisect:
        return _bisect(found)
    times, shape = None, ""
    if profile in MEASURED:
        reporter().begin("measuring kernels")
        times, shape = measure_times(found, profile, batch, length)
    elif profile:
        times = read_profile(Path(profile))
    judged, error = inspect_target(found, times), None
    if judged.failures:
        error = CheckFailed(f"{found.name}: {' and '.join(judged.failures)} as the recipe asks")
    report = inspect_report(judged, found.sidecar, options.all, shape)
    return Answer(judged.model_dump(mode="json"), report, error=error)


def _bisect(target: InspectTarget) -> Answer:
    if target.folder is None:
        raise UserError(
            f"--bisect needs a run directory, whose model is the reference; {target.name} is not in one"
        )
    from qdqbench.eval.verification.bisect import bisect_lines, bisect_run

    reporter().begin("looking for the first wrong tensor")
    result, error = bisect_run(target.folder), None
    if result.block is not None:
        error = CheckFailed(f"{target.name}: block {result.block} is wrong on its own")
    return Answer(result.model_dump(mode="json"), lines=[*bisect_lines(result)], error=error)
