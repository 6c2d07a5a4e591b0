"""The stages that need an engine: build it, verify what it computes, evaluate it."""

from dataclasses import asdict
from pathlib import Path

from qdqbench.eval.accuracy.logits import evaluate_stage
from qdqbench.eval.verify.engine import verify_engine
from qdqbench.quantize.activity.told import doing
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import MissingDevice
from qdqbench.quantize.core.limits import CPU_BACKENDS, BackendName
from qdqbench.quantize.core.results import EngineResult, Verification
from qdqbench.quantize.engine.backend import gpu_backend
from qdqbench.quantize.engine.build import attention_count
from qdqbench.quantize.engine.build import build as build_engine
from qdqbench.quantize.engine.profiles import notes_on_data
from qdqbench.quantize.engine.sidecar import sidecar_path
from qdqbench.quantize.machine.cpu import find_cpu
from qdqbench.quantize.machine.gpu import find_gpu
from qdqbench.quantize.rundir.artifacts import (
    GPU,
    GPU_INT8,
    backend_of,
    cpu_compute,
    engine_profiles,
    expected_gemms,
    graph_path,
)
from qdqbench.quantize.rundir.lengths import length_edges
from qdqbench.quantize.rundir.outcomes import (
    BUILD,
    ENGINE,
    VERIFY,
    Ran,
    Skipped,
    read_built,
    read_verified,
    record,
)
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.runtime.opened import open_runner


def build_stage(session: Session) -> list[Path]:
    """Build the engine and prove its INT8 layers; or record why there is none."""
    return _build(session, backend_of(session.recipe), graph_path(session), session.folder)


def gpu_build_stage(session: Session) -> list[Path]:
    """Build an engine for GPUs ahead of time, a proof of what runs in INT8, or record why there is none."""
    return _build(session, gpu_backend(), session.folder / GPU_INT8, session.folder / GPU)


def _build(session: Session, backend: BackendName, graph: Path, out: Path) -> list[Path]:
    """Build an engine of a graph into `out`; its files."""
    settings, folder = session.recipe.engine, out / "engine"
    gemms = expected_gemms(session)
    path, layers = folder / graph.with_suffix(".engine").name, out / "layers.json"
    files.require_room(folder, graph.stat().st_size, path.name)  # an engine holds the graph's weights
    try:
        result = build_engine(
            graph,
            path,
            backend=backend,
            profiles=engine_profiles(session),
            expected_gemms=gemms,
            expected_attention=attention_count(gemms, session.plan.attention),
            compute_capability=settings.compute_capability,
            layers_path=layers,
            timing_cache=folder / "timing.cache",  # no output of the stage: it changes and may go
            compute=cpu_compute(session.recipe),
            note=session.warnings.append,
            progress=lambda phase, fraction: doing(phase, fraction, 1),
        )
    except MissingDevice as error:
        return [record(out / BUILD, Skipped(skipped=str(error)))]
    return [record(out / BUILD, result), path, sidecar_path(path), layers]


def verify_stage(session: Session) -> list[Path]:
    """Verify what the engine computes where it runs, or record why not."""
    reason, found = cannot_run(session), None
    if reason is None:
        try:
            found = verify_engine(session)
        except MissingDevice as error:
            reason = str(error)
    return [record(session.folder / VERIFY, found or Skipped(skipped=str(reason)))]


def cannot_run(session: Session) -> str | None:
    """Why the engine of this run cannot run here, or None."""
    built, gpu = read_built(session.folder), find_gpu()
    if isinstance(built, Skipped):
        return f"no engine was built: {built.skipped}"
    if built.backend in CPU_BACKENDS:
        return None
    if gpu is None:
        return "no GPU here to run it on"
    if gpu.compute_capability not in built.compute_capability:
        targets = ", ".join(built.compute_capability)
        return f"it is for compute capability {targets} and the {gpu.name} has {gpu.compute_capability}"
    return None


def engine_stage(session: Session) -> list[Path]:
    """Evaluate the engine where it runs, or record why not.

    One that gives NaN is not evaluated, so that its run still ends with a report that says so.
    """
    # kernels of a CPU are tuned for no shape, and profiles of the data for its shapes
    tuned = backend_of(session.recipe) in CPU_BACKENDS or session.recipe.auto_shapes
    for _, encoded in () if tuned else session.eval_splits.values():
        doubts = notes_on_data(engine_profiles(session), encoded.lengths, session.config.batch_size)
        session.warnings += [line for line in doubts if line not in session.warnings]
    reason = cannot_run(session)
    if reason is None and not _finite(read_verified(session.folder)):
        reason = "its logits are NaN or infinite, see the verification"
    if reason is None:
        try:
            return _run_engine(session)
        except MissingDevice as error:
            reason = str(error)
    return [record(session.folder / ENGINE, Skipped(skipped=str(reason)))]


def _run_engine(session: Session) -> list[Path]:
    """Logits of the engine, and a record of its memory."""
    folder, gpu, built = session.folder / "engine", find_gpu(), read_built(session.folder)
    assert isinstance(built, EngineResult)  # `cannot_run` looked
    device = str(find_cpu()) if built.backend in CPU_BACKENDS else gpu.name if gpu else "an unknown GPU"
    detail = f"{built.backend} {built.version} on {device}"
    cache = folder / "runtime.cache"  # no output of the stage: it changes and may go
    graph, path, outputs = graph_path(session), folder / built.file, session.config.task.kind.outputs
    doing("loading the engine")
    with open_runner(path, graph, pad_id=session.pad_id, runtime_cache=cache, outputs=outputs) as runner:
        size = min(session.config.batch_size, runner.max_batch)
        logits = evaluate_stage(session, "engine", runner, batch_size=size, edges=length_edges(session))
        memory = runner.engine.memory
    session.warnings += [line for line in runner.engine.notes if line not in session.warnings]
    done = Ran(detail=f"{detail}; {memory}", memory=asdict(memory))
    return [record(session.folder / ENGINE, done), logits]


def _finite(found: Verification | Skipped) -> bool:
    if isinstance(found, Skipped):
        return True
    shapes = any(shape.nonfinite for shape in found.shapes)
    return not (shapes or found.padding.nonfinite or found.answers.nonfinite)
