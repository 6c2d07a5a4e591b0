"""The commands `check`, `diagnose` and `fix`: files of any origin. Everything heavy is imported inside."""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from qdqbench._options import CheckOptions, FixCommandOptions
from qdqbench._progress import displayed
from qdqbench.cli.options import command
from qdqbench.cli.terminal import Html, Json, show_found
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.progress import reporter


@command
def check(
    target: Annotated[Path, typer.Argument(help="ONNX file of any origin, or run directory.")],
    *,
    options: CheckOptions,
    every: Annotated[
        bool, typer.Option("--all", help="List every place; equal findings are one row otherwise.")
    ] = False,
    json: Json = False,
    html: Html = None,
) -> None:
    """Check any ONNX file: what will run in INT8, and what an engine would refuse or get wrong."""
    from qdqbench._models import check as check_onnx
    from qdqbench.quantize.lint.check import to_json
    from qdqbench.quantize.lint.inspect_target import find_checked_graph
    from qdqbench.quantize.lint.reports import check_report

    report = check_onnx(target, options.recipe, allow=options.allow)
    path = find_checked_graph(target)[0]
    show_found(to_json(report), json, html, check_report(report, path, every))
    if report.errors:
        raise typer.Exit(2)


def diagnose(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files of one build: ONNX, log, layers, profile, engine, cache; - is stdin."),
    ],
    load_engine: Annotated[
        bool, typer.Option("--load-engine", help="Load the engine to read its layers, if you trust it.")
    ] = False,
    json: Json = False,
    html: Html = None,
) -> None:
    """Find why INT8 is slow, wrong or missing: files of any origin, read together, worst finding first."""
    from qdqbench.quantize.lint.diagnose import diagnose as diagnosed
    from qdqbench.quantize.lint.reports import diagnosis_report

    with displayed(), TemporaryDirectory() as folder:
        reporter().begin("reading")
        piped = Path(folder, "stdin")
        if Path("-") in files:
            with piped.open("wb") as stream:
                shutil.copyfileobj(sys.stdin.buffer, stream)
        given = [piped if path == Path("-") else path for path in files]
        found = diagnosed(given, load_engine=load_engine)
    told = found.model_dump(mode="json") | {"errors": len(found.errors)}
    show_found(told, json, html, diagnosis_report(found))
    if found.errors:
        raise typer.Exit(2)


@command
def fix(
    onnx_file: Annotated[Path, typer.Argument(help="ONNX file of any origin.")],
    *,
    options: FixCommandOptions,
    json: Json = False,
    html: Html = None,
) -> None:
    """Rewrite what keeps INT8 from working in an ONNX file, and prove it: outputs, check, layer tables.

    Samples come from --inputs, or from --data with --model and --task. By default they are random tokens.
    """
    from qdqbench.quantize.lint.fix import FixOptions
    from qdqbench.quantize.lint.fix import fix as fix_file
    from qdqbench.quantize.lint.reports import fix_report

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
    with displayed():
        reporter().begin("fixing, and building engines before and after")
        report = fix_file(onnx_file, options.out, settings)
    told = report.model_dump(mode="json") | {"failures": report.failures}
    show_found(told, json, html, fix_report(report))
    if report.failures:
        raise CheckFailed(f"{options.out} is written, and not all is fixed: {'; '.join(report.failures[:4])}")
