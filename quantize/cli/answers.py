"""What the commands of a run print at their end, and the exit status that follows from it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qdqbench.quantize.cli.terminal import plain, show

if TYPE_CHECKING:
    from qdqbench.quantize.core.results import Results


def answer(results: "Results", folder: Path, *, json: bool) -> None:
    """Print the results of a run.

    Raises:
        CheckFailed: something of it does not hold.
    """
    from qdqbench.eval.runreport.handoff import where_to_begin
    from qdqbench.eval.runreport.report import summary_lines
    from qdqbench.eval.runs.stage_table import stage_table
    from qdqbench.quantize.core.errors import CheckFailed
    from qdqbench.quantize.deploy.write import DEPLOY

    failures = "; ".join(results.gate.failures)
    if results.until is None:
        begin = where_to_begin(folder, folder / DEPLOY)
        places = {"report": str(folder / "report.html"), **({"deploy": str(begin)} if begin else {})}
        show(results, json, summary_lines, *(f"{name}: {plain(text)}" for name, text in places.items()))
        failures = f"the gate does not hold: {failures}"
    else:
        judged = f"the gate is judged by [bold]qdqbench report {plain(str(folder))}[/]"
        show(results, json, partial(stage_table, folder=folder), judged)
    if not results.gate.passed:
        raise CheckFailed(failures)
