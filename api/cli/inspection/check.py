"""The command `check`: what TensorRT would run of an ONNX file. Everything heavy is imported inside."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench.cli.inspection.diagnose import print_one
from qdqbench.cli.terminal import Json, console, plain, print_json

if TYPE_CHECKING:
    from qdqbench.quantize.graph.check.check import CheckReport


def check(
    target: Annotated[Path, typer.Argument(help="ONNX file of any origin, or run directory.")],
    recipe: Annotated[
        str | None, typer.Option(help="Hold the quantized set to this recipe; none: that of the run.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Leave this finding out; may be repeated.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every place, not one finding for equal ones.")
    ] = False,
    json: Json = False,
) -> None:
    """Check any ONNX file: what will run in INT8, and what an engine would refuse or get wrong."""
    from qdqbench._models import check as check_onnx
    from qdqbench.quantize.graph.check.check import to_json
    from qdqbench.quantize.pipeline.inspect_target import find_checked_graph

    report = check_onnx(target, recipe, allow=allow or ())
    if json:
        print_json(to_json(report))
    else:
        _print(report, find_checked_graph(target)[0], every)
    if report.errors:
        raise typer.Exit(2)


def _print(report: "CheckReport", path: Path, every: bool) -> None:
    """Kinds of findings, the worst first, and the figures last, where a terminal still shows them."""
    from qdqbench.quantize.engine.diagnose.findings import WORST_FIRST, group_finding
    from qdqbench.quantize.graph.check.check import summary

    out = console()
    told: dict[str, int] = {}
    found = [group_finding(report, group, path) for group in report.groups]
    found.sort(key=lambda each: WORST_FIRST.index(each.effect))
    for number, each in enumerate(found, 1):
        print_one(number, each, told)
        for row in (row for row in report.findings if every and row.code == each.code):
            out.print(f"   - [bold]{plain(row.node)}[/]: {plain(row.why)}", highlight=False)
        out.print()
    colour = "red" if report.refusals else "yellow" if report.errors else "green"
    for line in summary(report):
        out.print(f"[{colour}]{plain(line)}[/]", highlight=False)
        colour = "default"
