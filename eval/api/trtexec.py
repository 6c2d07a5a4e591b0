"""A run on a machine where only trtexec is."""

from pathlib import Path

from qdqbench.eval.api.runs import StageCallback, silent
from qdqbench.eval.runs.run import follow, run_until
from qdqbench.eval.trtexec.ask import plan_for, require_tensorrt
from qdqbench.quantize.rundir.claim import taken_up
from qdqbench.quantize.trtexec.plan import SCRIPT


def trtexec_script(folder: str | Path, progress: StageCallback = silent) -> tuple[Path, bool]:
    """Write the script that builds, runs and times a run's engines with trtexec, and its inputs.

    Args:
        folder: run directory of backend tensorrt; stages up to the graph and its references are made.
        progress: called as stages start and go on.

    Returns:
        The script, and whether it is new: one of the same run stays, with what trtexec made beside it.

    Raises:
        UserError: no run directory, or one of another backend.
    """
    with taken_up(folder) as session:
        require_tensorrt(session)
        for stage in ("baseline", *(["fake_quant"] if session.recipe.quantizes else []), "export"):
            run_until(session, stage, follow(session, progress, stage))
        made, new = plan_for(session)
    return made / SCRIPT, new
