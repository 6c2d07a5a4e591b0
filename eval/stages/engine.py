"""The stages that need an engine: build it, verify what it computes, evaluate it."""

from pathlib import Path
from typing import Any

from qdqbench.eval.accuracy.logits import evaluate
from qdqbench.eval.verify.engine import verify_engine
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import MissingDevice
from qdqbench.quantize.core.gpu import find_gpu
from qdqbench.quantize.engine.build import build as build_engine
from qdqbench.quantize.engine.build import sidecar_path
from qdqbench.quantize.engine.profiles import notes_on_data
from qdqbench.quantize.rundir.artifacts import engine_profiles, expected_gemms, graph_path
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.runtime.runner import EngineRunner


def build(session: Session) -> list[Path]:
    """Build the engine and prove its INT8 layers, or record why there is none."""

    settings, record = session.recipe.engine, session.folder / "build.json"
    folder = session.folder / "engine"
    path = folder / graph_path(session).with_suffix(".engine").name
    try:
        result = build_engine(
            graph_path(session),
            path,
            backend=settings.backend,
            profiles=engine_profiles(session),
            expected_gemms=expected_gemms(session),
            expected_attention=len(session.plan.attention),
            compute_capability=settings.compute_capability,
            layers_path=session.folder / "layers.json",
            timing_cache=folder / "timing.cache",  # no output of the stage: it changes and may go
            note=session.notes.append,
            progress=lambda _, fraction: session.progress(round(1000 * fraction), 1000),
        )
    except MissingDevice as error:
        files.write_json(record, {"skipped": str(error)})
        return [record]
    files.write_json(record, result.model_dump(mode="json"))
    return [record, path, sidecar_path(path), session.folder / "layers.json"]


def verify(session: Session) -> list[Path]:
    """Judge what the engine computes where a GPU runs it, or record why not."""

    record = session.folder / "verify.json"
    reason = cannot_run(session)
    if reason is None:
        try:
            files.write_json(record, verify_engine(session).model_dump(mode="json"))
            return [record]
        except MissingDevice as error:
            reason = str(error)
    files.write_json(record, {"skipped": reason})
    return [record]


def cannot_run(session: Session) -> str | None:
    """Why the engine of this run cannot run here, or None."""

    built, gpu = files.read_json(session.folder / "build.json"), find_gpu()
    if "skipped" in built:
        return f"no engine was built: {built['skipped']}"
    if gpu is None:
        return "no GPU here to run it on"
    if gpu.compute_capability not in built["compute_capability"]:
        targets = ", ".join(built["compute_capability"])
        return f"it is for compute capability {targets} and the {gpu.name} has {gpu.compute_capability}"
    return None


def engine(session: Session) -> list[Path]:
    """Evaluate the engine where a GPU runs it, or record why not.

    One that gives NaN is not evaluated, so that its run still ends with a report that says so.
    """

    record = session.folder / "engine.json"
    for _, encoded in session.eval_splits.values():
        notes = notes_on_data(engine_profiles(session), encoded.lengths, session.config.batch_size)
        session.notes += [note for note in notes if note not in session.notes]
    reason = cannot_run(session)
    if reason is None and not _finite(files.read_json(session.folder / "verify.json")):
        reason = "its logits are NaN or infinite, see the verification"
    if reason is None:
        try:
            return _run_engine(session)
        except MissingDevice as error:
            reason = str(error)
    files.write_json(record, {"skipped": reason})
    return [record]


def _run_engine(session: Session) -> list[Path]:
    """Logits of the engine, and a record of its memory."""
    from dataclasses import asdict

    record, folder = session.folder / "engine.json", session.folder / "engine"
    built, gpu = files.read_json(session.folder / "build.json"), find_gpu()
    detail = f"{built['backend']} {built['version']} on {gpu.name if gpu else 'an unknown GPU'}"
    cache = folder / "runtime.cache"  # no output of the stage: it changes and may go
    with EngineRunner(folder / built["file"], graph_path(session), runtime_cache=cache) as runner:
        size = min(session.config.batch_size, runner.max_batch)
        logits = evaluate(session, "engine", runner, batch_size=size)
        memory = runner.engine.memory
    session.notes += [note for note in runner.engine.notes if note not in session.notes]
    files.write_json(record, {"detail": f"{detail}; {memory}", "memory": asdict(memory)})
    return [record, logits]


def _finite(verification: dict[str, Any]) -> bool:
    if "skipped" in verification:
        return True
    parts = [verification["padding"], verification["answers"], *verification["shapes"]]
    return not any(part["nonfinite"] for part in parts)
