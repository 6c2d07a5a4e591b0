"""What the commands of a run print at their end, and the exit status that follows from it."""

from pathlib import Path
from typing import TYPE_CHECKING

from qdqbench.quantize.cli.terminal import plain, show

if TYPE_CHECKING:
    from qdqbench.eval.runs.made import Made
    from qdqbench.quantize.core.results import Results


def answer(found: "Results | Made", folder: Path, *, json: bool) -> None:
    """Print what a run came to.

    Raises:
        CheckFailed: something of it does not hold.
    """
    from qdqbench.eval.runreport.report import summary_lines
    from qdqbench.eval.runs.made_lines import made_lines
    from qdqbench.quantize.core.errors import CheckFailed
    from qdqbench.quantize.core.results import Results

    if isinstance(found, Results):
        show(found, json, summary_lines, f"report: {plain(str(folder / 'report.html'))}")
        if not found.gate.passed:
            raise CheckFailed(f"the gate does not hold: {'; '.join(found.gate.failures)}")
        return
    show(found, json, made_lines, f"the gate is judged by [bold]qdqbench report {plain(str(folder))}[/]")
    if found.failures:
        raise CheckFailed("; ".join(found.failures))
