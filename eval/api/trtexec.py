"""A run on a machine where only trtexec is."""

from collections.abc import Callable
from pathlib import Path

from qdqbench.eval.api.bench import report_bench
from qdqbench.eval.api.runs import StageCallback, silent
from qdqbench.eval.bench.results import BENCH_FILE, Bench, write_bench
from qdqbench.eval.runs.run import follow, run_until
from qdqbench.eval.trtexec.ask import plan_for, require_tensorrt
from qdqbench.eval.trtexec.times import bench_of_times
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.machine.lock import held
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


def trtexec_bench(
    folder: str | Path,
    *,
    written: Callable[[Path], None] = silent,
    command: str = "qdqbench.trtexec_bench",
) -> Bench:
    """The times that trtexec exported for a run as a bench; bench.json and its reports are written.

    Args:
        folder: run directory whose `trtexec` folder came back.
        written: called with each report.
        command: recorded in the result.

    Raises:
        UserError: times are missing, or of other files.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{path} is no run directory; give one whose trtexec folder came back")
    found = bench_of_times(path, command)
    with held(path):
        write_bench(path / BENCH_FILE, found)
        return report_bench(found, path, written)
