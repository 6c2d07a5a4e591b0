"""What the commands of a run print at their end, and the exit status that follows from it."""

from pathlib import Path
from typing import TYPE_CHECKING

from qdqbench.quantize.cli.terminal import show

if TYPE_CHECKING:
    from qdqbench.eval.runs.made import Made
    from qdqbench.quantize.core.results import Results


def answer(found: "Results | Made", folder: Path, *, json: bool) -> None:
    """Print what a run came to.

    Raises:
        CheckFailed: something of it does not hold.
    """
    from qdqbench.eval.runreport.handoff import where_to_begin
    from qdqbench.eval.runreport.report import summary_lines
    from qdqbench.eval.runs.made_lines import made_lines
    from qdqbench.quantize.core.errors import CheckFailed
    from qdqbench.quantize.core.results import Results
    from qdqbench.quantize.deploy.write import DEPLOY

    if isinstance(found, Results):
        begin = where_to_begin(folder, folder / DEPLOY)
        told = {"report": str(folder / "report.html"), **({"deploy": str(begin)} if begin else {})}
        show(found, json, summary_lines, *(f"{name}: {text}" for name, text in told.items()))
        if not found.gate.passed:
            raise CheckFailed(f"the gate does not hold: {'; '.join(found.gate.failures)}")
        return
    show(found, json, made_lines, f"the gate is judged by `qdqbench report {folder}`")
    if found.failures:
        raise CheckFailed("; ".join(found.failures))
