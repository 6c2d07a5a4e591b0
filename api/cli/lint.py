"""The commands `check`, `diagnose`, `fix`, `inspect` and `doctor`: files of any origin, and this machine."""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from qdqbench import _options as options_of
from qdqbench.cli.answer import Answer
from qdqbench.quantize.engine.trtexec import read_profile
from qdqbench.quantize.lint import diagnose as diagnosis
from qdqbench.quantize.lint import fix as repair
from qdqbench.quantize.lint import inspect_target as target
from qdqbench.quantize.lint import reports
from qdqbench.quantize.lint.check import to_json
from qdqbench.quantize.lint.doctor import anonymous, look
from qdqbench.quantize.report.render import render_markdown
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, QdqError, UserError
from qdqbench.quantize.utils.progress import reporter


def check(options: options_of.CheckCommandOptions) -> Answer:
    from qdqbench._models import check as check_onnx

    report = check_onnx(options.target, options.recipe, allow=options.allow)
    path = target.find_checked_graph(options.target)[0]
    error = typer.Exit(2) if report.errors else None
    return Answer(to_json(report), reports.check_report(report, path, options.all), error=error)


def diagnose(options: options_of.DiagnoseOptions) -> Answer:
    reporter().begin("reading")
    with TemporaryDirectory() as folder:
        piped = Path(folder, "stdin")
        if Path("-") in options.files:
            with piped.open("wb") as stream:
                shutil.copyfileobj(sys.stdin.buffer, stream)
        given = [file for path in options.files for file in _files_of(piped if path == Path("-") else path)]
        found = diagnosis.diagnose(given, load_engine=options.load_engine)
    told = found.model_dump(mode="json") | {"errors": len(found.errors)}
    return Answer(told, reports.diagnosis_report(found), error=typer.Exit(2) if found.errors else None)


def _files_of(path: Path) -> list[Path]:
    """Return the graph and the layer table of a run directory, or the file that it is."""
    if not path.is_dir():
        return [path]
    table = path / "layers.json"
    return [target.find_checked_graph(path)[0], *([table] if table.is_file() else [])]


def fix(options: options_of.FixCommandOptions) -> Answer:
    inputs: Any = options.inputs
    if options.model is not None or options.task is not None:
        from qdqbench.quantize.lint.runs import sample_feeds

        if inputs is not None:
            raise UserError("--inputs and --model both give samples; give one of them")
        task, count = options.find_task(), options.samples
        inputs = sample_feeds(str(options.model), options.revision, task, options.data, count, options.seed)
    settings = repair.FixOptions(
        options.compute,
        options.weights,
        inputs,
        f"{options.samples} rows of {options.task} in {options.data}, seed {options.seed}",
        seed=options.seed,
        max_error=options.max_error,
        engine=not options.no_engine,
    )
    reporter().begin("fixing, and building engines before and after")
    report = repair.fix(options.onnx_file, options.out, settings)
    told = report.model_dump(mode="json") | {"failures": report.failures}
    left = f"{options.out} is written, and not all is fixed: {'; '.join(report.failures[:4])}"
    return Answer(told, reports.fix_report(report), error=CheckFailed(left) if report.failures else None)


def inspect(options: options_of.InspectOptions) -> Answer:
    batch, length, profile = options.batch, options.length, options.profile
    if (batch or length) and profile not in target.MEASURED:
        raise UserError("--batch and --length are shapes to measure at; give them with --profile gpu or cpu")
    found = target.open_target(options.target, options.onnx, options.recipe)
    if options.bisect:
        return _bisect(found)
    times, shape = None, ""
    if profile in target.MEASURED:
        reporter().begin("measuring kernels")
        times, shape = target.measure_times(found, profile, batch, length)
    elif profile:
        times = read_profile(Path(profile))
    judged, error = target.inspect_target(found, times), None
    if judged.failures:
        error = CheckFailed(f"{found.name}: {' and '.join(judged.failures)} as the recipe asks")
    report = reports.inspect_report(judged, found.sidecar, options.all, shape)
    return Answer(judged.model_dump(mode="json"), report, error=error)


def _bisect(found: target.InspectTarget) -> Answer:
    if found.folder is None:
        raise UserError(
            f"--bisect needs a run directory, whose model is the reference; {found.name} is not in one"
        )
    from qdqbench.eval.verification.bisect import bisect_lines, bisect_run

    reporter().begin("looking for the first wrong tensor")
    result, error = bisect_run(found.folder), None
    if result.block is not None:
        error = CheckFailed(f"{found.name}: block {result.block} is wrong on its own")
    return Answer(result.model_dump(mode="json"), lines=[*bisect_lines(result)], error=error)


def doctor(options: options_of.DoctorOptions) -> Answer:
    error: QdqError | None = None
    found = look(offline=options.offline)
    report = reports.doctor_report(found)
    text = "\n".join(map(anonymous, render_markdown(report).split("\n")))
    if found.unmet:
        error = CheckFailed(f"{len(found.unmet)} requirements are not met: {'; '.join(found.unmet)}")
    if options.backend is not None:
        name = found.auto if options.backend == "auto" else options.backend
        state = found.backends[name]
        if not state.runs:
            error = MissingDevice(f"{name} cannot run here: {state.why}")
    return Answer(found.model_dump(mode="json"), text if options.report else report, error=error)
