"""The commands `check`, `diagnose` and `fix`: files of any origin."""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from qdqbench._options import CheckCommandOptions, DiagnoseOptions, FixCommandOptions
from qdqbench.cli.answer import Answer
from qdqbench.quantize.lint import diagnose as lint
from qdqbench.quantize.lint.check import to_json
from qdqbench.quantize.lint.inspect_target import find_checked_graph
from qdqbench.quantize.lint.reports import check_report, diagnosis_report, fix_report
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.progress import reporter


def check(options: CheckCommandOptions) -> Answer:
    from qdqbench._models import check as check_onnx

    report = check_onnx(options.target, options.recipe, allow=options.allow)
    path = find_checked_graph(options.target)[0]
    error = typer.Exit(2) if report.errors else None
    return Answer(to_json(report), check_report(report, path, options.all), error=error)


def diagnose(options: DiagnoseOptions) -> Answer:
    reporter().begin("reading")
    with TemporaryDirectory() as folder:
        piped = Path(folder, "stdin")
        if Path("-") in options.files:
            with piped.open("wb") as stream:
                shutil.copyfileobj(sys.stdin.buffer, stream)
        given = [file for path in options.files for file in _files_of(piped if path == Path("-") else path)]
        found = lint.diagnose(given, load_engine=options.load_engine)
    told = found.model_dump(mode="json") | {"errors": len(found.errors)}
    return Answer(told, diagnosis_report(found), error=typer.Exit(2) if found.errors else None)


def _files_of(path: Path) -> list[Path]:
    """Return the graph and the layer table of a run directory, or the file that it is."""
    if not path.is_dir():
        return [path]
    table = path / "layers.json"
    return [find_checked_graph(path)[0], *([table] if table.is_file() else [])]


def fix(options: FixCommandOptions) -> Answer:
    from qdqbench.quantize.lint.fix import FixOptions
    from qdqbench.quantize.lint.fix import fix as fix_file

    inputs: Any = options.inputs
    if options.model is not None or options.task is not None:
        from qdqbench.quantize.lint.runs import sample_feeds

        if inputs is not None:
            raise UserError("--inputs and --model both give samples; give one of them")
        task, count = options.find_task(), options.samples
        inputs = sample_feeds(str(options.model), options.revision, task, options.data, count, options.seed)
    settings = FixOptions(
        options.compute,
        options.weights,
        inputs,
        f"{options.samples} rows of {options.task} in {options.data}, seed {options.seed}",
        seed=options.seed,
        max_error=options.max_error,
        engine=not options.no_engine,
    )
    reporter().begin("fixing, and building engines before and after")
    report = fix_file(options.onnx_file, options.out, settings)
    told = report.model_dump(mode="json") | {"failures": report.failures}
    left = f"{options.out} is written, and not all is fixed: {'; '.join(report.failures[:4])}"
    return Answer(told, fix_report(report), error=CheckFailed(left) if report.failures else None)
