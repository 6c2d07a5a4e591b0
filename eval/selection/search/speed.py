"""Second objective of a search: latency of engines that run here, or INT8 share of multiply-adds."""

import os
import shutil
from contextlib import ExitStack

from qdqbench.eval.bench.measure import (
    OpenEngine,
    alone_on_cpu,
    alone_on_gpu,
    measure_speedup,
    open_engine,
    write_engine_graph,
)
from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.results import Source
from qdqbench.eval.selection.search.workspace import Measure, Workspace
from qdqbench.quantize.engine.backend import choose_backend
from qdqbench.quantize.engine.build import require_int8
from qdqbench.quantize.engine.profiles import choose_profile
from qdqbench.quantize.pipeline.artifacts import backend_of, cpu_compute, engine_profiles
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.speedup import Speedup
from qdqbench.quantize.utils.system.cpu import find_cpu
from qdqbench.quantize.utils.system.gpu import find_gpu


def open_source(
    session: Session, options: SearchOptions, work: Workspace, stack: ExitStack
) -> tuple[Source, Measure]:
    """Return the second objective of a search, and the function that times the engine of a recipe.

    Raises:
        MissingDevice: latency is asked for, by an option or by the gate, and the engine does not run here.
        UserError: the recipe's engine does not take the shape, or another process times engines.
    """
    try:
        choose_profile(engine_profiles(session), options.batch, options.length)
    except CheckFailed as error:
        raise UserError(
            f"--batch {options.batch} --length {options.length}: {error}; the recipe's engine is timed"
        ) from error
    wanted = options.speed
    if wanted == "auto":
        wanted = "latency" if runs_here(session.recipe) else "int8-share"
    if wanted == "latency":
        return _open_timer(session, options, work, stack)
    if session.recipe.gate.min_speedup is not None:
        raise MissingDevice(
            f"gate.min_speedup of recipe {session.recipe.name} needs a measured latency; search with "
            "--speed latency where its engine runs, or with --backend openvino on this CPU"
        )
    return Source(mode="int8-share", batch=options.batch, length=options.length), lambda recipe, plan: None


def runs_here(recipe: Recipe) -> bool:
    """Return whether the recipe's engine runs on this machine."""
    return bool(find_gpu()) or backend_of(recipe) in CPU_BACKENDS


def measured_source(session: Session, options: SearchOptions) -> Source:
    """Return the device and the backend that engines are timed with.

    Raises:
        MissingDevice: the engine does not run here.
    """
    gpu, recipe = find_gpu(), session.recipe
    on_cpu = backend_of(recipe) in CPU_BACKENDS
    if gpu is None and not on_cpu:
        raise MissingDevice(
            f"a latency with {backend_of(recipe)} needs an NVIDIA GPU, and CUDA shows none here; "
            "--backend openvino measures on this CPU, `search --speed int8-share` needs no engine"
        )
    chosen = choose_backend(recipe.engine.backend)
    return Source(
        mode="latency",
        gpu=gpu.name if gpu and not on_cpu else None,
        cpu=str(find_cpu()) if on_cpu else None,
        twin=(cpu_compute(recipe) if on_cpu else recipe.precision.compute).upper(),
        backend=chosen.name,
        version=chosen.version,
        batch=options.batch,
        length=options.length,
    )


def _open_timer(
    session: Session, options: SearchOptions, work: Workspace, stack: ExitStack
) -> tuple[Source, Measure]:
    source = measured_source(session, options)
    stack.enter_context(alone_on_cpu() if source.cpu else alone_on_gpu())
    folder = session.folder / f"engines-{os.getpid()}"
    shape = options.batch, options.length
    baseline: list[OpenEngine] = []
    known: list[Speedup] = []

    def measure(recipe: Recipe, plan: Plan) -> Speedup:
        if not baseline:  # minutes after the command started: a study of other settings is refused before
            twin = session.recipe.model_copy(update={"name": f"{session.recipe.name}-twin"})
            high = write_engine_graph(
                session, session.fp32_model, twin, Plan(fp32=plan.fp32), folder / "twin.onnx"
            )
            baseline.append(stack.enter_context(open_engine(session, high, folder / "baseline", [shape])))
        if not plan.int8 and known:  # it is its own baseline
            own = {"system_ms": known[0].baseline_ms, "value": 1.0, "ci95_low": None, "ci95_high": None}
            return known[0].model_copy(update=own)
        work.progress("building and timing")
        graph = write_engine_graph(session, work.model(recipe, plan), recipe, plan, folder / "trial.onnx")
        with open_engine(session, graph, folder / "trial", [shape]) as engine:
            require_int8(engine.result)
            known[:] = [measure_speedup(engine, baseline[0], shape)]
        return known[0]

    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return source, measure
