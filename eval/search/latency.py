"""Where a search's latencies come from: engines that run here, or a cost model that was fitted to engines."""

import os
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING

from qdqbench.eval.bench.measure import (
    OpenEngine,
    ReadyGraph,
    alone_on_cpu,
    alone_on_gpu,
    measure_speedup,
    open_engine,
    write_engine_graph,
)
from qdqbench.eval.placement.cost_model import Placement, load_cost_model, shape_of
from qdqbench.eval.search.results import Source
from qdqbench.eval.search.trial import Workspace
from qdqbench.quantize.core.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.core.limits import CPU_BACKENDS
from qdqbench.quantize.core.speedup import Speedup
from qdqbench.quantize.engine.backend import choose_backend
from qdqbench.quantize.engine.build import require_int8
from qdqbench.quantize.engine.profiles import choose_profile
from qdqbench.quantize.machine.cpu import find_cpu
from qdqbench.quantize.machine.gpu import find_gpu
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.rundir.artifacts import backend_of, cpu_compute, engine_profiles
from qdqbench.quantize.rundir.session import Session

if TYPE_CHECKING:
    from qdqbench.eval.search.worker import Measure, SearchOptions


def latency_source(
    session: Session, options: "SearchOptions", work: Workspace, stack: ExitStack
) -> "tuple[Source, Measure]":
    """Source of latencies, and the function that gives one.

    Raises:
        MissingDevice: the engine does not run here, and there is no cost model.
        UserError: the recipe's engine does not take the shape.
    """
    try:
        choose_profile(engine_profiles(session), options.batch, options.length)
    except CheckFailed as error:
        raise UserError(
            f"--batch {options.batch} --length {options.length}: {error}; the recipe's engine is timed"
        ) from error
    asked = options.latency
    engine = runs_here(session.recipe) if asked == "auto" else asked == "engine"
    return _engine(session, options, work, stack) if engine else modelled(session, options)


def runs_here(recipe: Recipe) -> bool:
    """Whether the recipe's engine runs on this machine."""
    return bool(find_gpu()) or backend_of(recipe) in CPU_BACKENDS


def modelled(session: Session, options: "SearchOptions") -> "tuple[Source, Measure]":
    """Latencies of the cost model.

    Raises:
        MissingDevice: there is none.
    """
    fitted = load_cost_model(options.cost_model)
    shape = shape_of(session.fp32_model.config)
    batch, length = options.batch, options.length
    twin = fitted.predict(shape, Placement.none(shape.layers), batch, length)
    source = Source(
        mode="model",
        label=fitted.label,
        gpu=fitted.gpu,
        backend=fitted.backend,
        version=fitted.version,
        batch=batch,
        length=length,
        outside=[*fitted.outside(shape, batch, length), *_split(session)],
        error=fitted.leave_one_out.model_dump(),
    )

    def measure(recipe: Recipe, plan: Plan) -> Speedup:
        ms = fitted.predict(shape, Placement.of_plan(plan, shape.layers), batch, length)
        return Speedup(
            system="int8",
            baseline=session.recipe.precision.compute,
            config=f"b{batch} s{length}",
            value=twin / ms,
            ci95_low=None,
            ci95_high=None,
            system_ms=ms,
            baseline_ms=twin,
        )

    return source, measure


def _split(session: Session) -> list[str]:
    """Channels that the recipe adds, of which the cost model does not know."""
    extra, plan = session.recipe.calibration.split_outliers, session.plan
    return [f"split_outliers {extra} (measured: 0)"] if extra and plan.family.splittable(plan.int8) else []


def measured_source(session: Session, options: "SearchOptions") -> Source:
    """Engines that run here.

    Raises:
        MissingDevice: they do not.
    """
    gpu, recipe = find_gpu(), session.recipe
    on_cpu = backend_of(recipe) in CPU_BACKENDS
    if gpu is None and not on_cpu:
        raise MissingDevice(
            f"--latency engine with {backend_of(recipe)} needs an NVIDIA GPU, CUDA shows none here; "
            "--latency model estimates, --backend openvino measures on this CPU"
        )
    chosen = choose_backend(recipe.engine.backend)
    device = str(find_cpu()) if on_cpu or gpu is None else gpu.name
    return Source(
        mode="engine",
        label=f"measured on {device}, {chosen.name} {chosen.version}",
        gpu=None if on_cpu else device,
        cpu=device if on_cpu else None,
        twin=(cpu_compute(recipe) if on_cpu else recipe.precision.compute).upper(),
        backend=chosen.name,
        version=chosen.version,
        batch=options.batch,
        length=options.length,
    )


def _engine(
    session: Session, options: "SearchOptions", work: Workspace, stack: ExitStack
) -> "tuple[Source, Measure]":
    source = measured_source(session, options)
    stack.enter_context(alone_on_cpu() if source.cpu else alone_on_gpu())
    folder = session.folder / f"engines-{os.getpid()}"
    shape = options.batch, options.length
    baseline: list[OpenEngine] = []
    known: list[Speedup] = []

    def measure(recipe: Recipe, plan: Plan) -> Speedup:
        if not baseline:  # minutes after the command started: a study of other settings is refused before
            twin = session.recipe.model_copy(update={"name": f"{session.recipe.name}-twin"})
            graph = write_engine_graph(
                session, session.fp32_model, twin, Plan(fp32=plan.fp32), folder / "twin.onnx"
            ).path
            ready = ReadyGraph(graph, [], 0)
            baseline.append(stack.enter_context(open_engine(session, ready, folder / "baseline", [shape])))
        if not plan.int8 and known:  # it is its own twin
            return known[0].model_copy(
                update={
                    "system_ms": known[0].baseline_ms,
                    "value": 1.0,
                    "ci95_low": None,
                    "ci95_high": None,
                }
            )
        work.progress("building and timing")
        exported = write_engine_graph(session, work.model(recipe, plan), recipe, plan, folder / "trial.onnx")
        with open_engine(session, exported, folder / "trial", [shape]) as engine:
            require_int8(engine.result)
            found = measure_speedup(engine, baseline[0], shape)
        known[:] = [found]
        return found

    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return source, measure
