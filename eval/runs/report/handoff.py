"""The folder `deploy` of a finished run, with its verdict in words; and where to begin with it."""

import shlex
from pathlib import Path
from typing import NamedTuple

from qdqbench.eval.reporting.formats import cleaned
from qdqbench.eval.runs.report.verdict import run_verdict
from qdqbench.quantize.deployment.write import DEPLOY, TOLD, RunVerdict, write_deploy
from qdqbench.quantize.pipeline.ownership import locked_folder, locked_for_reading
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.results import RESULTS_FILE, Results, read_results


def hand_off(session: Session, results: Results) -> list[str]:
    """Write or refresh the folder of a finished run; why that could not be, as warnings."""
    try:
        _write(session, results, None)
    except UserError as error:  # the run is done, whatever lies in this folder
        return [str(error)]
    return []


def refresh(folder: Path, results: Results) -> list[str]:
    """As `hand_off`, of a run whose bench changed what it says; nothing where it has no such folder."""
    if not (folder / DEPLOY / TOLD).is_file():
        return []
    return hand_off(Session(read_config(folder), folder), results)


def deploy(folder: Path, out: Path | None = None) -> Path:
    """Write the folder of a finished run again, or copies of its files elsewhere; where it is.

    Raises:
        UserError: no finished run, or as `write_deploy`.
    """
    session = Session(read_config(folder), folder)
    if not (folder / RESULTS_FILE).is_file():
        raise UserError(f"{folder} is not finished; run `qdqbench report {folder}`, which makes it")
    results = read_results(folder)
    with locked_folder(folder) if out is None else locked_for_reading(folder):
        _write(session, results, out)
    return out or folder / DEPLOY


def _write(session: Session, results: Results, out: Path | None) -> None:
    results = cleaned(results)
    verdict = run_verdict(results)
    failed = "; ".join(verdict.failures) if verdict.state == "bad" else ""
    lines = [*verdict.notes] if failed else [*verdict.failures, *verdict.notes]
    write_deploy(session, results, RunVerdict(verdict.title, verdict.sentence, failed, lines), out)


class Begin(NamedTuple):
    """Where to begin with a folder of these."""

    folder: str
    mark: str  # what to know before; may be empty
    command: str

    def __str__(self) -> str:
        return f"{self.folder}; {self.mark}try it: {self.command}"


def where_to_begin(folder: Path, called: Path = Path(DEPLOY)) -> Begin | None:
    """The folder `deploy` of a run and the command to try it; None where there is none.

    Args:
        folder: of the run.
        called: path of the other as a reader has it; the report stands beside it.
    """
    return begin_in(folder / DEPLOY, called) if (folder / DEPLOY / TOLD).is_file() else None


def begin_in(place: Path, called: Path) -> Begin:
    """The same of a folder that is there, wherever it is."""
    told = files.read_json(place / TOLD)
    mark = "" if told["ran"] else "the engine never ran; "
    mark = "NOT FOR USE, the run failed; " if told["failed"] else mark
    return Begin(str(called), mark, f"python {shlex.quote(str(called / told['script']))} {told['example']}")
