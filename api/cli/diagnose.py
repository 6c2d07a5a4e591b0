"""The commands `check`, `diagnose` and `fix`: files of any origin. Everything heavy is imported inside."""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdqbench._options import CheckOptions, FixCommandOptions
from qdqbench._progress import displayed
from qdqbench.cli.options import command
from qdqbench.cli.terminal import Json, console, plain, print_json
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.names import install_command
from qdqbench.quantize.utils.progress import reporter

if TYPE_CHECKING:
    from qdqbench.quantize.lint.check import CheckReport
    from qdqbench.quantize.lint.diagnose import Diagnosis
    from qdqbench.quantize.lint.findings import Finding
    from qdqbench.quantize.lint.fix import EngineRow, FixReport

_COLORS = {"error": "red", "warning": "yellow"}


@command
def check(
    target: Annotated[Path, typer.Argument(help="ONNX file of any origin, or run directory.")],
    *,
    options: CheckOptions,
    every: Annotated[
        bool, typer.Option("--all", help="List every place; equal findings are one row otherwise.")
    ] = False,
    json: Json = False,
) -> None:
    """Check any ONNX file: what will run in INT8, and what an engine would refuse or get wrong."""
    from qdqbench._models import check as check_onnx
    from qdqbench.quantize.lint.check import to_json
    from qdqbench.quantize.lint.inspect_target import find_checked_graph

    report = check_onnx(target, options.recipe, allow=options.allow)
    if json:
        print_json(to_json(report))
    else:
        _print_check(report, find_checked_graph(target)[0], every)
    if report.errors:
        raise typer.Exit(2)


def _print_check(report: "CheckReport", path: Path, every: bool) -> None:
    from qdqbench.quantize.lint.check import summary

    out, told = console(), dict[str, int]()
    for number, each in enumerate(report.grouped(path), 1):
        _print_finding(number, each, told)
        for row in (row for row in report.findings if every and row.code == each.code):
            out.print(f"   - [bold]{plain(row.node)}[/]: {plain(row.why)}")
        out.print()
    color = "red" if report.refusals else "yellow" if report.errors else "green"
    for line in summary(report):
        out.print(f"[{color}]{plain(line)}[/]")
        color = "default"


def diagnose(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files of one build: ONNX, log, layers, profile, engine, cache; - is stdin."),
    ],
    load_engine: Annotated[
        bool, typer.Option("--load-engine", help="Load the engine to read its layers, if you trust it.")
    ] = False,
    json: Json = False,
) -> None:
    """Find why INT8 is slow, wrong or missing: files of any origin, read together, worst finding first."""
    from qdqbench.quantize.lint.diagnose import diagnose as diagnosed

    with displayed(), TemporaryDirectory() as folder:
        reporter().begin("reading")
        piped = Path(folder, "stdin")
        if Path("-") in files:
            with piped.open("wb") as stream:
                shutil.copyfileobj(sys.stdin.buffer, stream)
        given = [piped if path == Path("-") else path for path in files]
        found = diagnosed(given, load_engine=load_engine)
    if json:
        print_json(found.model_dump(mode="json") | {"errors": len(found.errors)})
    else:
        _print_diagnosis(found)
    if found.errors:
        raise typer.Exit(2)


def _print_diagnosis(found: "Diagnosis") -> None:
    out = console()
    for row in found.files:
        out.print(f"[bold]{plain(row.name)}[/] {row.kind}: {plain(row.what)}")
    for text in found.joined:
        out.print(f"read together: {plain(text)}")
    told: dict[str, int] = {}  # fix -> number of the finding that told it
    for number, each in enumerate(found.findings, 1):
        out.print()
        _print_finding(number, each, told)
    out.print()
    if found.findings:
        out.print(f"Ranked: {plain(found.ranked_by)}.")
    else:
        out.print("Nothing was found.")


def _print_finding(number: int, found: "Finding", told: dict[str, int]) -> None:
    from qdqbench.quantize.lint.findings import EFFECTS

    out = console()
    effect = EFFECTS[found.effect]
    if found.share is not None:
        effect = f"{effect}, {found.share:.0%} of {found.basis}"
    color = _COLORS[found.severity]
    out.print(f"{number}. [{color}]{plain(found.what)}[/] [dim]({plain(effect)}; {found.code})[/]")
    out.print(f"   why: {plain(found.why)}")
    if found.where:
        out.print(f"   where: {plain(found.where)}")
    first = {fix: told.setdefault(fix, number) for fix in found.fixes}
    texts = [f"[bold]{plain(fix)}[/]" if seen == number else f"as {seen}" for fix, seen in first.items()]
    for text in dict.fromkeys(texts):
        out.print(f"   fix: {text}")


@command
def fix(
    onnx_file: Annotated[Path, typer.Argument(help="ONNX file of any origin.")],
    *,
    options: FixCommandOptions,
    json: Json = False,
) -> None:
    """Rewrite what keeps INT8 from working in an ONNX file, and prove it: outputs, check, layer tables.

    Samples come from --inputs, or from --data with --model and --task. By default they are random tokens.
    """
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
    with displayed():
        reporter().begin("fixing, and building engines before and after")
        report = fix_file(onnx_file, options.out, settings)
    if json:
        print_json(report.model_dump(mode="json") | {"failures": report.failures})
    else:
        _print_fix(report)
    if report.failures:
        raise CheckFailed(f"{options.out} is written, and not all is fixed: {'; '.join(report.failures[:4])}")


def _print_fix(report: "FixReport") -> None:
    from rich.table import Table

    out = console()
    for text in report.done or ["nothing had to be changed"]:
        out.print(f"[green]done[/] {plain(text)}")
    for text in report.left:
        out.print(f"[red]left[/] {plain(text)}")
    table = Table("", "before", "after", box=None, pad_edge=False)
    after = f"{report.int8_after} of {report.gemms}"
    table.add_row("GEMMs that run in INT8, by the graph", str(report.int8_before), after)
    for code in dict.fromkeys((*report.findings_before, *report.findings_after)):
        numbers = (each.get(code, 0) for each in (report.findings_before, report.findings_after))
        table.add_row(f"check: {code}", *map(str, numbers))
    first, second = report.engine_before, report.engine_after
    if first and second:
        table.add_row("linears in INT8 in the engine", _gemms(first), _gemms(second))
        table.add_row("attentions fused (in INT8)", _attentions(first), _attentions(second))
        table.add_row("kernels", *("-" if row.refused else str(row.kernels) for row in (first, second)))
    found = report.outputs
    own = "not run" if found.before_error is None else f"{found.before_error:.4f}"
    limit = f"{found.after_error:.4f} (limit {found.limit:.4f})"
    table.add_row("outputs, relative error to the file without Q/DQ", own, limit)
    out.print(table)
    if found.difference is not None:
        other = "" if found.disagreements is None else f", another class for {found.disagreements}"
        out.print(
            f"after against before: relative difference {found.difference:.4f}, largest {found.largest:.4f}"
            f"{other} (n = {found.n}, {plain(found.inputs)}, ONNX Runtime)"
        )
    for row, name in ((first, "before"), (second, "after")):
        if row and row.refused:
            out.print(f"engine {name}: {plain(row.refused)}")
    if second and not second.refused:
        out.print(f"engine: {plain(second.engine)}; read, not run")
    elif second is None:
        command = plain(install_command("rtx"))
        out.print(f"[yellow]note[/] no engine was built: {command} builds without a GPU")


def _gemms(row: "EngineRow") -> str:
    return "refused" if row.refused else f"{row.int8_gemms} of {row.gemms}"


def _attentions(row: "EngineRow") -> str:
    return "-" if row.refused else f"{row.attention_fused} of {row.attentions} ({row.attention_int8})"
