"""Run a session's stages, and write the report at the end."""

from dataclasses import replace
from functools import partial

from qdqbench.eval.bench.quick import bench_quickly
from qdqbench.eval.metrics.answers import FILE
from qdqbench.eval.runs.collect import collect, score_stage
from qdqbench.eval.runs.gate import cannot_hold, issue_sentence, judge_baseline
from qdqbench.eval.runs.report.report import hand_off, write_reports
from qdqbench.eval.runs.results import RESULTS_FILE, Results, write_results
from qdqbench.eval.stages.stages import FP16_STAGE, RECONSTRUCTED, stages
from qdqbench.quantize.deployment.write import DEPLOY, remove
from qdqbench.quantize.engine.backend import find_missing_builder
from qdqbench.quantize.engine.profiles import require_room
from qdqbench.quantize.pipeline import pipeline
from qdqbench.quantize.pipeline.data_profiles import engine_profiles
from qdqbench.quantize.pipeline.pipeline import Timing
from qdqbench.quantize.pipeline.session import CONFIG, Session
from qdqbench.quantize.recipe.schema import dump_recipe
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.progress import reporter

BASELINE = "baseline"
EVALUATED = (BASELINE, "ptq", RECONSTRUCTED, "fake_quant", "onnxruntime", "engine")
REPORT = (RESULTS_FILE, "report.md", "report.html", FILE)
REPORTED = (None, "report")


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
    compared = ["ptq", RECONSTRUCTED] if until in ("fake_quant", "engine") else []  # with what was trained
    targets = [*(name for name in compared if name in listed), until]
    if until == "evaluate":
        targets = [name for name in EVALUATED if name in listed]
    if unknown := [name for name in targets if name not in listed]:
        raise UserError(
            f"this run has no stage {unknown[0]!r}; it has {', '.join(listed)}, evaluate and report"
        )
    return pipeline.select_stages(listed, targets)


def run_until(session: Session, until: str | None = None, *, quick_bench: bool = True) -> Results:
    """Run up to a stage, "evaluate" for all evaluations; with None or "report" everything and the report.

    Args:
        session: in a folder that this process holds.
        quick_bench: time the engine too, where it runs here and was not timed yet.

    Raises:
        UserError: no such stage in this run, or data that the recipe's engine would not take.
        MissingDevice: it ends with the engine, and nothing here can build it.
    """
    timings = run_stages(session, until)
    if until not in REPORTED:
        results = collect(session, timings, until)
        if until in ("build", "verify") and results.engine is None:
            raise MissingDevice(results.skipped["build"])
        return results
    count = len(timings)
    reporter().begin("report", count, count + 1)
    if quick_bench and (why := bench_quickly(session)):
        session.notes.append(why)
    results = collect(session, timings)
    results.warnings[:0] = hand_off(session, results)
    write_results(session.folder, results)
    write_reports(results, session.folder)
    return results


def run_stages(session: Session, until: str | None, *, leads: bool = False) -> dict[str, Timing]:
    """Run up to a stage as `run_until` does, without results; return the cost of its stages.

    `leads` says that the whole run follows.
    """
    needed = planned(session, until)
    names = [stage.name for stage in needed]
    # another run may have been here since this one was opened
    files.write_json(session.folder / CONFIG, session.config.model_dump(mode="json"))
    pipeline.remove_other_stages(session.folder, stages(session))
    files.write_text(session.folder / "recipe.yaml", dump_recipe(session.recipe))
    if said := pipeline.explain_stale(session.folder, names):
        reporter().log(said)
    if said := cannot_hold(session.recipe):
        reporter().log(said, alarm=True)
    before_build = _before_build(session, [each.name for each in planned(session, None)] if leads else names)

    def announce(name: str, reused: bool) -> None:
        if name in before_build and not reused and not session.sought_builder:
            session.sought_builder = True
            if missing := find_missing_builder(session.target.backend):
                if until in ("build", "verify"):  # before what would be for nothing
                    raise MissingDevice(missing)
                text = f"no engine can be built here, so the run will continue without one: {missing}"
                reporter().log(text)
        reporter().begin(name, names.index(name), len(names) + (until in REPORTED), reused=reused)
        if not reused:  # an interrupted run must not leave the report of another one next to its files
            for file in REPORT:
                (session.folder / file).unlink(missing_ok=True)
            remove(session.folder / DEPLOY)

    first = [stage for stage in needed if stage.name == "embedded"]  # the data, where it is not given
    timings = pipeline.run_stages(session, first, announce)
    _require_room(session, {*names})
    rest = (
        replace(stage, recorded=partial(_judge_labels, whole=until in REPORTED))
        if stage.name == BASELINE
        else stage
        for stage in needed[len(first) :]
    )
    return timings | pipeline.run_stages(session, rest, announce)


def _judge_labels(session: Session, *, whole: bool) -> None:
    """Log that FP32 is no better than a constant; CheckFailed ends a run with labels in another order."""
    issue = judge_baseline(session, score_stage(session, "fp32"))
    if issue is None or issue.state != "failed":
        return
    if whole and issue.reorder:
        raise CheckFailed(f"{issue_sentence(issue)}; the run stopped after its baseline")
    reporter().log(issue_sentence(issue), alarm=True)


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
