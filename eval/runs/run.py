"""Run a session's stages with progress, and write the report at the end."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from qdqbench.eval.bench.quick import bench_quickly
from qdqbench.eval.metrics.answers import FILE
from qdqbench.eval.runs.collect import collect, score_stage
from qdqbench.eval.runs.gate import cannot_hold, issue_sentence, judge_baseline
from qdqbench.eval.runs.report.report import hand_off, write_reports
from qdqbench.eval.runs.results import RESULTS_FILE, Results, write_results
from qdqbench.eval.stages.stages import FP16_STAGE, stages
from qdqbench.quantize.deployment.write import DEPLOY, remove
from qdqbench.quantize.engine.backend import find_missing_builder
from qdqbench.quantize.engine.profiles import require_room
from qdqbench.quantize.pipeline import pipeline
from qdqbench.quantize.pipeline.data_profiles import engine_profiles
from qdqbench.quantize.pipeline.pipeline import Timing
from qdqbench.quantize.pipeline.session import CONFIG, Session
from qdqbench.quantize.recipe.schema import dump_recipe
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.trackers import LogRow

BASELINE = "baseline"
EVALUATED = (BASELINE, "ptq", "fake_quant", "onnxruntime", "engine")
REPORT = (RESULTS_FILE, "report.md", "report.html", FILE)
REPORTED = (None, "report")


@dataclass(frozen=True)
class StageProgress:
    """Progress of a run, as callbacks get it."""

    stage: str
    done: float = 0
    total: float = 0  # 0: the stage starts; 1: `done` is a part of it, no number of steps
    reused: bool = False  # what is there is used again
    row: LogRow | None = None  # of a training's log
    alarm: str = ""  # what makes the rest of the run worth nothing
    said: str = ""  # what is to know before it begins
    number: int = 1  # of the stage, among
    of: int = 1  # those that are gone through


def follow(
    session: Session, progress: Callable[[StageProgress], None], until: str | None = None
) -> Callable[[str, bool], None]:
    """Report to `progress` what the session does up to a stage; the result is called as each stage starts."""
    names = [stage.name for stage in planned(session, until)]
    names += ["report"] if until in REPORTED else []
    unsaid = _before_build(session, names)

    def start(name: str, reused: bool) -> None:
        number = names.index(name) + 1 if name in names else 1
        now = StageProgress(name, reused=reused, number=number, of=len(names))
        session.progress = lambda done, total: progress(replace(now, done=done, total=total))
        session.report = lambda row, steps: progress(replace(now, done=row.step, total=steps, row=row))
        if name in unsaid and not reused:
            unsaid.clear()
            if missing := find_missing_builder(session.target.backend):
                session.say(f"no engine can be built here, so the run will continue without one: {missing}")
        progress(now)

    session.alarm = lambda text: progress(StageProgress("", alarm=text))
    session.say = lambda text: progress(StageProgress("", said=text))
    return start


def _before_build(session: Session, names: list[str]) -> set[str]:
    """Return the stages before which it is to be known whether an engine can be built here.

    An engine that is there needs no builder, unless a stage that it is made from runs again.
    """
    if "build" not in names:
        return set()
    before = {*names[: names.index("build")]}
    if "build" in pipeline.read_finished(session.folder):
        before &= {stage.name for stage in pipeline.select_stages(stages(session), ["build"])}
    return before


def planned(session: Session, until: str | None) -> list[pipeline.Stage]:
    """Return the stages up to one, in order; "fp16" is among all of them once it was run.

    Raises:
        UserError: no stage of that name in this run.
    """
    listed = stages(session)
    if until in REPORTED:
        asked = pipeline.read_finished(session.folder)  # once it was asked for, it is kept up to date
        return [stage for name, stage in listed.items() if name != FP16_STAGE or name in asked]
    targets = [name for name in EVALUATED if name in listed] if until == "evaluate" else [until]
    if unknown := [name for name in targets if name not in listed]:
        raise UserError(
            f"this run has no stage {unknown[0]!r}; it has {', '.join(listed)}, evaluate and report"
        )
    return pipeline.select_stages(listed, targets)


def run_until(
    session: Session,
    until: str | None = None,
    show: Callable[[str, bool], None] = lambda name, reused: None,
    *,
    quick_bench: bool = True,
) -> Results:
    """Run up to a stage, "evaluate" for all evaluations; with None or "report" everything and the report.

    Args:
        session: in a folder that this process holds.
        show: called as a stage starts, with its name and whether it is reused.
        quick_bench: time the engine too, where it runs here and was not timed yet.

    Raises:
        UserError: no such stage in this run, or data that the recipe's engine would not take.
    """
    timings = run_to(session, until, show)
    if until not in REPORTED:
        return collect(session, timings, until)
    show("report", False)
    if quick_bench and (why := bench_quickly(session)):
        session.notes.append(why)
    results = collect(session, timings)
    results.warnings[:0] = hand_off(session, results)
    write_results(session.folder, results)
    write_reports(results, session.folder)
    return results


def run_to(
    session: Session, until: str | None, show: Callable[[str, bool], None] = lambda name, reused: None
) -> dict[str, Timing]:
    """Run up to a stage as `run_until` does, without results; return the cost of its stages."""
    needed = planned(session, until)
    # another run may have been here since this one was opened
    files.write_json(session.folder / CONFIG, session.config.model_dump(mode="json"))
    pipeline.remove_other_stages(session.folder, stages(session))
    files.write_text(session.folder / "recipe.yaml", dump_recipe(session.recipe))
    if said := pipeline.explain_stale(session.folder, [stage.name for stage in needed]):
        session.say(said)
    if said := cannot_hold(session.recipe):
        session.alarm(said)

    def announce(name: str, reused: bool) -> None:
        show(name, reused)
        if not reused:  # an interrupted run must not leave the report of another one next to its files
            for file in REPORT:
                (session.folder / file).unlink(missing_ok=True)
            remove(session.folder / DEPLOY)

    first = [stage for stage in needed if stage.name == "embedded"]  # the data, where it is not given
    timings = pipeline.run_stages(session, first, announce)
    _require_room(session, {stage.name for stage in needed})
    rest = (
        replace(stage, recorded=_warn_unreadable) if stage.name == BASELINE else stage
        for stage in needed[len(first) :]
    )
    return timings | pipeline.run_stages(session, rest, announce)


def _warn_unreadable(session: Session) -> None:
    issue = judge_baseline(session, score_stage(session, "fp32"))
    if issue is not None and issue.state == "failed":
        session.alarm(issue_sentence(issue))


def require_inputs(session: Session, until: str | None = None) -> None:
    """Check the inputs of a run up to a stage before anything is written.

    Raises:
        UserError: they cannot be loaded, or do not fit each other.
    """
    names = {stage.name for stage in planned(session, until)}
    evaluates = bool(names & {*EVALUATED})
    session.require_inputs(calibrates=bool(names & {"quantize", "ptq"}), evaluates=evaluates)
    if evaluates and session.config.model is not None:
        _require_room(session, names)


def _require_room(session: Session, names: set[str]) -> None:
    if {"verify", "engine"} & names:
        for _, encoded in session.eval_splits.values():
            require_room(engine_profiles(session), encoded.lengths, session.config.batch_size)
