"""The commands `check` and `profile`, and what all commands share. Heavy libraries are imported inside."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Run = Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]


def check(
    onnx_file: Path,
    recipe: Annotated[str | None, typer.Option(help="Hold the quantized set to this recipe.")] = None,
    json: Json = False,
) -> None:
    """Check any ONNX file: what will run in INT8, and what an engine would refuse or get wrong."""
    from qdqbench.quantize.check import check_file, to_json
    from qdqbench.quantize.onnx_modules import recipe_modules

    expected = recipe_modules(onnx_file, recipe) if recipe else None
    report = check_file(onnx_file, expected_quantized=expected)
    if json:
        print_json(to_json(report))
    else:
        _print_check(report)
    if report.errors:
        raise typer.Exit(2)


def profile(folder: Run, json: Json = False) -> None:
    """Wall time and peak memory of each stage of a finished run."""
    from pydantic import ValidationError

    from qdqbench.eval.results import Results
    from qdqbench.quantize import files
    from qdqbench.quantize.errors import UserError

    path = folder / "results.json"
    try:
        timings = Results.model_validate(files.read_json(path)).model_dump()["timings"]
    except ValidationError as error:
        raise UserError(f"{path} is no report of this version; run `qdqbench report {folder}`") from error
    if json:
        print_json(timings)
        return
    from rich.table import Table

    table = Table("stage", "wall s", "peak MB", "", box=None)
    for name, row in timings.items():
        table.add_row(
            name,
            f"{row['wall_s']:.1f}",
            f"{row['peak_rss_bytes'] / 1e6:.0f}",
            "reused" if row["reused"] else "",
        )
    table.add_row(
        "total",
        f"{sum(row['wall_s'] for row in timings.values()):.1f}",
        f"{max(row['peak_rss_bytes'] for row in timings.values()) / 1e6:.0f}",
        "",
    )
    console().print(table)


def _print_check(report: Any) -> None:
    out = console()
    for row in report.findings:
        colour = "red" if row.severity == "error" else "yellow"
        out.print(f"[{colour}]{row.severity}[/] {row.code} at [bold]{plain(row.node)}[/]")
        out.print(f"  why: {plain(row.why)}\n  fix: {plain(row.fix)}", highlight=False)
    out.print(
        f"{len(report.quantized)} of {len(report.quantized) + len(report.not_quantized)} MatMul/Gemm nodes "
        f"in INT8, {len(report.findings)} findings",
        highlight=False,
    )


def plain(text: str) -> str:
    """Text without markup, and with nothing in it that a terminal would obey."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text))


def print_json(value: Any) -> None:
    """Strict JSON on stdout."""
    import json

    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def console() -> Any:
    """Rich console on stdout."""
    from rich.console import Console

    return Console()


def command_line() -> str:
    """What was typed, as a shell takes it."""
    import shlex

    return shlex.join(["qdqbench", *sys.argv[1:]])
