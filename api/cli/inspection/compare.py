"""The command `compare`: finished runs side by side. Everything heavy is imported inside."""

from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer

from qdqbench._options import FolderOptions
from qdqbench.cli.options import command, note
from qdqbench.cli.progress import status
from qdqbench.cli.terminal import Json, command_line, show


@command
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.", show_default=False)],
    *,
    options: FolderOptions,
    json: Json = False,
) -> None:
    """Runs side by side: accuracy paired on the same samples, speed, size, answers that flipped, layers."""
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.runs.comparison import NAME, compare_runs, comparison_report, write_comparison
    from qdqbench.quantize.pipeline.ownership import RunIdentity, owned_folder

    out = options.out or Path("runs/compare")
    compared = cache(partial(compare_runs, runs, command_line()))
    with status() as say:
        say("comparing")
        with owned_folder(out, RunIdentity(kind=NAME), overwrite=options.overwrite, ready=compared, say=note):
            found = compared()
            written = write_comparison(found, out)
    show(
        found,
        json,
        lambda each: render_screen(comparison_report(each)),
        *(f"page: {path}" for path in written if path.suffix == ".html"),
    )
