"""Times one engine against another: what a search and `auto` need of a bench.

The baseline is built once and stays bound. It is timed again with each engine, so that a speed-up is a ratio
of two latencies that were taken in the same process within the same seconds.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from qdqbench.eval.bench.results import compare_rounds
from qdqbench.eval.bench.rounds import (
    CudaTimer,
    DeviceLane,
    Effort,
    HostLane,
    Lane,
    ReadySystem,
    Timer,
    WallTimer,
    gpu_uuid,
    measure_rounds,
    read_outputs,
    session_sets,
    to_device,
)
from qdqbench.quantize.engine.build import build, count_attentions, list_gemms, require_int8
from qdqbench.quantize.engine.profiles import choose_profile
from qdqbench.quantize.engine.runtime.cpu import CpuRunner
from qdqbench.quantize.engine.runtime.engine import Engine
from qdqbench.quantize.engine.sidecar import sidecar_path
from qdqbench.quantize.graph.export import ExportSettings, trace, write_graph
from qdqbench.quantize.graph.index import module_of
from qdqbench.quantize.pipeline.artifacts import backend_of, cpu_compute, engine_profiles
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.speedup import Speedup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qdqbench.quantize.engine.profiles import Profile
    from qdqbench.quantize.utils.results import EngineResult

INPUT_SETS = 4
# rounds are balanced for two systems; on a CPU, which others use too, more of them
ON_GPU = Effort(8, 0.4, streams=())
ON_CPU = Effort(16, 4.0, streams=(), least=2)
Shape = tuple[int, int]  # batch, length


@dataclass(frozen=True)
class ReadyGraph:
    path: Path
    gemms: list[str]  # ONNX nodes that must run in INT8
    attention: int  # attentions that must run in INT8


@dataclass
class OpenEngine:
    """A loaded engine; its lanes are bound when they are first used."""

    session: Session
    result: "EngineResult"
    engine: Any
    lanes: dict[Shape, Lane] = field(default_factory=dict)

    def lane(self, shape: Shape) -> Lane:
        if shape not in self.lanes:
            self.lanes[shape] = make_lane(self.engine, shape, session_sets(self.session, *shape, INPUT_SETS))
        return self.lanes[shape]


def measure_speedup(engine: OpenEngine, baseline: OpenEngine, shape: Shape) -> Speedup:
    """Time an engine and its baseline in interleaved rounds; CheckFailed where one gives no sound outputs."""
    session, recipe = engine.session, engine.session.recipe
    on_cpu = backend_of(recipe) in CPU_BACKENDS
    timer, effort = timer_of(on_cpu=on_cpu)
    compute = cpu_compute(recipe) if on_cpu else recipe.precision.compute
    ours = ReadySystem("int8", "int8", [engine.lane(shape)], timer)
    theirs = ReadySystem(compute, compute, [baseline.lane(shape)], timer)
    config = f"b{shape[0]} s{shape[1]}"
    for system, what in ((theirs, f"the {compute.upper()} engine"), (ours, "the engine")):
        if error := read_outputs(system)[1]:
            raise CheckFailed(f"{what} gives {error} at {config}")
    measured = measure_rounds([ours, theirs], effort)
    rounds = [measured[system.name].round_ms for system in (ours, theirs)]
    return compare_rounds(ours.name, theirs.name, config, *rounds, session.config.seed)


@contextlib.contextmanager
def open_engine(
    session: Session, graph: ReadyGraph, stem: Path, shapes: Sequence[Shape]
) -> Iterator[OpenEngine]:
    """Build and load an engine; its files are deleted at the end, but not its runtime cache.

    Args:
        session: its recipe names the backend and the profiles, its model the vocabulary.
        stem: path without suffix. Engines opened one after the other at one path share compiled kernels.
        shapes: (batch, length) to measure; the recipe's profiles must take them.

    Raises:
        MissingDevice: the backend or the GPU that it needs is not there.
        UserError, CheckFailed: it cannot be built or loaded.
    """
    # each profile has kernels of its own, so those that take none of the shapes only cost time to build
    known = engine_profiles(session)
    profiles = [known[index] for index in sorted({choose_profile(known, *shape) for shape in shapes})]
    path = stem.with_suffix(".engine")
    with contextlib.ExitStack() as stack:
        stack.callback(sidecar_path(path).unlink, missing_ok=True)
        stack.callback(path.unlink, missing_ok=True)
        result = _build(session, graph, path, profiles)
        opened = OpenEngine(session, result, stack.enter_context(load_engine(session, path, graph.path)))
        stack.callback(opened.lanes.clear)  # lanes go before the engine that they run
        yield opened


def load_engine(session: Session, path: Path, graph: Path) -> Any:
    if backend_of(session.recipe) in CPU_BACKENDS:
        return CpuRunner(path, graph, pad_id=0, outputs=session.config.task.kind.outputs)
    return Engine(path, graph, runtime_cache=path.with_suffix(".cache"))


def make_lane(engine: Any, shape: Shape, sets: Sequence[Any]) -> Lane:
    """Return a lane of a loaded engine: a CUDA graph, or a function on the CPU."""
    if isinstance(engine, CpuRunner):
        return HostLane(engine, [[batch] for batch in sets])
    return DeviceLane(engine.bind(*shape), [to_device(batch) for batch in sets])


def timer_of(*, on_cpu: bool) -> tuple[Timer, Effort]:
    return (WallTimer(), ON_CPU) if on_cpu else (CudaTimer(), ON_GPU)


def write_engine_graph(
    session: Session, model: "PreTrainedModel", recipe: Recipe, plan: Plan, path: Path
) -> ReadyGraph:
    """Write the typed graph of a recipe's model: INT8, or the baseline where the plan has no INT8."""
    settings = ExportSettings.of(recipe, backend_of(session.recipe))
    write_graph(trace(model, settings.opset, session.config.task.kind.outputs), plan, settings, path)
    modules = {*plan.int8, *plan.attention}
    gemms = [name for name in list_gemms(path) if module_of(name) in modules]
    return ReadyGraph(path, gemms, count_attentions(gemms, plan.attention))


def build_and_prove(session: Session, graph: ReadyGraph, path: Path) -> Path:
    """Build an engine that is kept, and require INT8 where the recipe asks for it."""
    require_int8(_build(session, graph, path, engine_profiles(session)))
    return path


def _build(session: Session, graph: ReadyGraph, path: Path, profiles: "Sequence[Profile]") -> "EngineResult":
    return build(
        graph.path,
        path,
        backend=session.recipe.engine.backend,
        profiles=profiles,
        expected_gemms=graph.gemms,
        expected_attention=graph.attention,
        layers_path=path.with_suffix(".layers.json"),
        compute=cpu_compute(session.recipe),
    )


def alone_on_gpu() -> contextlib.AbstractContextManager[None]:
    """Lock this GPU against other timings by qdqbench; UserError where one runs."""
    fix = "give each worker a GPU of its own with CUDA_VISIBLE_DEVICES"
    return _alone("GPU", gpu_uuid() or "gpu", fix)


def alone_on_cpu() -> contextlib.AbstractContextManager[None]:
    """Lock this CPU against other timings by qdqbench; UserError where one runs."""
    return _alone("CPU", "cpu", "run this when it has ended, or workers on machines of their own")


@contextlib.contextmanager
def _alone(kind: str, name: str, fix: str) -> Iterator[None]:
    # one for each user: the kernel refuses the files of others in the temporary folder
    lock = FileLock(Path(tempfile.gettempdir()) / f"qdqbench-{name}-{os.getuid()}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"another process times engines on this {kind}, and both would measure each other; {fix}"
        ) from error
    except OSError as error:
        raise UserError(f"cannot lock {lock.lock_file} ({error.strerror}); remove it") from error
    try:
        yield
    finally:
        lock.release()
