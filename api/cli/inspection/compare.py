"""The command `compare`: finished runs side by side. Everything heavy is imported inside."""

from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer

from qdqbench.cli import options
from qdqbench.cli.progress import status
from qdqbench.cli.terminal import Json, command_line, show


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for page, JSON and CSV.")] = Path("runs/compare"),
    replace: options.Replace = False,
    json: Json = False,
) -> None:
    """Runs side by side: accuracy paired on the same samples, speed, size, answers that flipped, layers."""
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.runs.compare.compare import compare_runs
    from qdqbench.eval.runs.compare.report import NAME, comparison_report, write_comparison
    from qdqbench.quantize.pipeline.ownership import RunIdentity, owned_folder

    compared = cache(partial(compare_runs, runs, command_line()))
    with status() as say:
        say("comparing")
        with owned_folder(out, RunIdentity(kind=NAME), replace=replace, ready=compared, say=options.note):
            found = compared()
            written = write_comparison(found, out)
    show(
        found,
        json,
        lambda each: render_screen(comparison_report(each)),
        *(f"page: {path}" for path in written if path.suffix == ".html"),
    )
