"""Run a session's stages with progress, and write the report at the end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qdqbench.eval.effects.answers import FILE
from qdqbench.eval.runreport.report import write_reports
from qdqbench.eval.runs.collect import collect
from qdqbench.eval.stages.stages import stages
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.results import Timing
from qdqbench.quantize.engine.profiles import require_room
from qdqbench.quantize.machine.lock import held
from qdqbench.quantize.recipe.schema import dump_recipe
from qdqbench.quantize.rundir.artifacts import engine_profiles
from qdqbench.quantize.rundir.pipeline import Stage, ancestors, forget_others, run_stages
from qdqbench.quantize.rundir.session import CONFIG, Session

if TYPE_CHECKING:
    from qdqbench.quantize.core.results import Results
    from qdqbench.quantize.core.training_results import LogRow

EVALUATED = ("baseline", "ptq", "fake_quant", "onnxruntime", "engine")
REPORT = ("results.json", "report.md", "report.html", FILE)


@dataclass(frozen=True)
class StageProgress:
    """How far a run is."""

    stage: str
    done: int = 0
    total: int = 0  # 0: the stage starts
    reused: bool = False  # what is there is used again
    row: "LogRow | None" = None  # of a training's log


def follow(session: Session, progress: Callable[[StageProgress], None]) -> Callable[[str, bool], None]:
    """Tell `progress` what the session does; the result is to be told which stage starts."""
    stage = ""

    def start(name: str, reused: bool) -> None:
        nonlocal stage
        stage = name
        progress(StageProgress(name, reused=reused))

    session.progress = lambda done, total: progress(StageProgress(stage, done, total))
    session.report = lambda row, steps: progress(StageProgress(stage, row.step, steps, row=row))
    return start


def run_until(
    session: Session, until: str | None = None, show: Callable[[str, bool], None] = lambda name, reused: None
) -> "Results | None":
    """Run up to a stage; with `until` None or "report", everything and the report.

    Args:
        until: a stage, "evaluate" for the four evaluations, or "report".
        show: called with a stage's name as it starts, and whether what is there is used again.

    Returns:
        The results where the report was written, else None.

    Raises:
        UserError: no stage of that name in this run, data that the recipe's engine would not take, or
            another process is at this run.
    """
    listed = stages(session)
    if until in (None, "report"):
        targets = list(listed)
    elif until == "evaluate":
        targets = [name for name in EVALUATED if name in listed]
    elif until in listed:
        targets = [until]
    else:
        raise UserError(f"this run has no stage {until!r}; it has {', '.join(listed)}, evaluate and report")
    with held(session.folder):
        # another run may have been here since this one was opened
        files.write_json(session.folder / CONFIG, session.config.model_dump(mode="json"))
        forget_others(session.folder, listed)
        files.write_text(session.folder / "recipe.yaml", dump_recipe(session.recipe))
        timings = _run(session, ancestors(listed, targets), show)
        if until not in (None, "report"):
            return None
        show("report", False)
        results = collect(session, timings)
        files.write_text(session.folder / "results.json", results.model_dump_json(indent=2) + "\n")
        write_reports(results, session.folder)
        return results


def _run(session: Session, needed: list[Stage], show: Callable[[str, bool], None]) -> dict[str, Timing]:
    """Cost of the stages, in their order."""

    def announce(name: str, reused: bool) -> None:
        show(name, reused)
        if not reused:  # an interrupted run must not leave the report of another one beside its files
            for file in REPORT:
                (session.folder / file).unlink(missing_ok=True)

    made = [stage for stage in needed if stage.name == "embedded"]  # the data, where it is not given
    timings = run_stages(session, made, announce)
    if {"verify", "engine"} & {stage.name for stage in needed}:
        # data that engine.shapes does not take is told before anything is calibrated, not by the last stage
        for _, encoded in session.eval_splits.values():
            require_room(engine_profiles(session), encoded.lengths, session.config.batch_size)
    return timings | run_stages(session, needed[len(made) :], announce)
