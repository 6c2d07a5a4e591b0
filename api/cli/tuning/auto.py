"""The command `auto`; registered in app.py. Everything heavy is imported inside."""

from qdqbench._options import AutoOptions
from qdqbench.cli import progress
from qdqbench.cli.options import command, note
from qdqbench.cli.terminal import Json, command_line, show


@command
def auto(*, options: AutoOptions, json: Json = False) -> None:
    """Find a recipe that holds: shipped ones, calibration, islands, search, QAT, as far as it takes."""
    from qdqbench._auto import auto as find_recipe
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.selection.auto.report import auto_report, unmet_lines
    from qdqbench.quantize.pipeline.ownership import default_folder
    from qdqbench.quantize.utils.errors import CheckFailed

    folder = options.out or default_folder("auto", options.model, options.find_task().name)
    with progress.status() as say:
        asked = vars(options) | {"out": folder}
        result = find_recipe(**asked, note=note, progress=say, command=command_line())
    show(result, json, lambda each: render_screen(auto_report(each)), f"report: {folder / 'auto.html'}")
    if not result.choice.passed:
        raise CheckFailed(f"no recipe holds: {'; '.join(unmet_lines(result))}")
