"""The commands `diagnose` and `fix`: files of any origin. Everything heavy is imported inside."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench.quantize.cli.terminal import Json, console, plain, print_json

if TYPE_CHECKING:
    from qdqbench.quantize.diagnose.found import Diagnosis, Found

_COLOURS = {"error": "red", "warning": "yellow"}


def diagnose(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Files of one build: ONNX, build log, layer table, kernel profile, query times, engine, "
            "cache."
        ),
    ],
    json: Json = False,
) -> None:
    """Why INT8 is slow, wrong or not there: files of any origin, read together, the worst finding first."""
    from qdqbench.quantize.diagnose.diagnose import diagnose as diagnosed

    found = diagnosed(files)
    if json:
        print_json(found.model_dump(mode="json") | {"errors": len(found.errors)})
    else:
        _print(found)
    if found.errors:
        raise typer.Exit(2)


def _print(found: "Diagnosis") -> None:
    out = console()
    for row in found.files:
        out.print(f"[bold]{plain(row.name)}[/] {row.kind}: {plain(row.what)}", highlight=False)
    for text in found.joined:
        out.print(f"read together: {plain(text)}", highlight=False)
    told: dict[str, int] = {}  # fix -> number of the finding that told it
    for number, each in enumerate(found.findings, 1):
        out.print()
        _print_one(number, each, told)
    out.print()
    if found.findings:
        out.print(f"Ranked: {plain(found.ranked_by)}.", highlight=False)
    else:
        out.print("Nothing was found.")


def _print_one(number: int, found: "Found", told: dict[str, int]) -> None:
    from qdqbench.quantize.diagnose.found import EFFECTS

    out = console()
    effect = EFFECTS[found.kind]
    if found.share is not None:
        effect = f"{effect}, {found.share:.0%} of {found.basis}"
    colour = _COLOURS[found.severity]
    out.print(
        f"{number}. [{colour}]{plain(found.what)}[/] [dim]({plain(effect)}; {found.code})[/]", highlight=False
    )
    out.print(f"   why: {plain(found.why)}", highlight=False)
    if found.where:
        out.print(f"   where: {plain(found.where)}", highlight=False)
    for fix in found.fixes:
        first = told.setdefault(fix, number)
        out.print(
            f"   fix: [bold]{plain(fix)}[/]" if first == number else f"   fix: as {first}", highlight=False
        )
