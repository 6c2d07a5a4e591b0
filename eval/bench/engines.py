"""Engines of a search: export, build, prove INT8, and time against a twin without INT8 in turns.

The twin is built once and stays bound. It is measured again beside each engine, so that a speed-up is a ratio
of two latencies that were taken in the same process within the same seconds.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from qdqbench.eval.bench import loop
from qdqbench.eval.bench.clocks import gpu_uuid
from qdqbench.eval.bench.lanes import CudaTimer, DeviceLane, HostLane, WallTimer, session_sets, to_device
from qdqbench.eval.bench.loop import Contestant, Effort, Lane, Timer
from qdqbench.quantize.core.errors import CheckFailed, UserError
from qdqbench.quantize.core.limits import CPU_BACKENDS
from qdqbench.quantize.core.strict import Strict
from qdqbench.quantize.engine.build import attention_count, build, gemm_names, require_int8
from qdqbench.quantize.engine.profiles import choose_profile
from qdqbench.quantize.engine.sidecar import sidecar_path
from qdqbench.quantize.graph.export import ExportSettings, trace, write_graph
from qdqbench.quantize.graph.index import module_of
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.rundir.artifacts import backend_of, cpu_compute, engine_profiles
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.runtime.cpu import CpuRunner
from qdqbench.quantize.runtime.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qdqbench.quantize.core.results import EngineResult
    from qdqbench.quantize.engine.profiles import Profile

SEARCH_INPUT_SETS = 4
# rounds are balanced for two contestants; on a CPU, which others use too, more of them
ON_GPU = Effort(8, 0.4, streams=())
ON_CPU = Effort(16, 4.0, streams=(), least=2)
Shape = tuple[int, int]  # batch, length


class Latency(Strict):
    """Latency of one recipe and of its twin without INT8."""

    ms: float
    twin_ms: float
    speedup: float  # twin_ms / ms
    low: float | None = None  # 95% interval of the speed-up over rounds; None when modelled
    high: float | None = None
    int8_gemms: int | None = None  # proven by the engine's layer table; None when modelled
    expected_int8_gemms: int | None = None


@dataclass(frozen=True)
class ReadyGraph:
    """A graph that is ready to be built."""

    path: Path
    gemms: list[str]  # ONNX nodes that must run in INT8
    attention: int  # attentions that must run in INT8


def write_engine_graph(
    session: Session, model: "PreTrainedModel", recipe: Recipe, plan: Plan, path: Path
) -> ReadyGraph:
    """Write the typed graph of a recipe's model: INT8, or the twin where the plan has no INT8.

    Raises:
        UserError, CheckFailed: the export fails.
    """
    settings = ExportSettings.of(recipe, backend_of(session.recipe))
    write_graph(trace(model, settings.opset, session.config.task.kind.outputs), plan, settings, path)
    modules = {*plan.int8, *plan.attention}
    gemms = [name for name in gemm_names(path) if module_of(name) in modules]
    return ReadyGraph(path, gemms, attention_count(gemms, plan.attention))


def build_and_prove(session: Session, exported: ReadyGraph, path: Path) -> Path:
    """Build an engine that is kept, and hold it to INT8.

    Raises:
        CheckFailed: something that the recipe asks for does not run in INT8.
    """
    result = build_graph(build, session, exported, path, engine_profiles(session))
    require_int8(result)
    return path


def build_graph(
    builder: "Callable[..., EngineResult]",
    session: Session,
    exported: ReadyGraph,
    path: Path,
    profiles: "Sequence[Profile]",
) -> "EngineResult":
    """Build an engine with the recipe's backend; its layer table goes beside it."""
    return builder(
        exported.path,
        path,
        backend=session.recipe.engine.backend,
        profiles=profiles,
        expected_gemms=exported.gemms,
        expected_attention=exported.attention,
        layers_path=path.with_suffix(".layers.json"),
        compute=cpu_compute(session.recipe),
    )


@dataclass(frozen=True)
class Devices:
    """What touches the device that engines run on; replaced in tests."""

    build: Callable[..., "EngineResult"]
    load: Callable[..., Any]  # engine, graph, runtime_cache=file -> a loaded engine
    lane: Callable[[Any, Shape, Sequence[Any]], Lane]  # loaded engine, shape, input sets
    place: Callable[[Any], Any]  # arrays to the device
    timer: Timer
    effort: Effort


def gpu_devices() -> Devices:
    """CUDA graphs, timed on the GPU."""
    return Devices(
        build,
        Engine,
        lambda engine, shape, sets: DeviceLane(engine.bind(*shape), sets),
        to_device,
        CudaTimer(),
        ON_GPU,
    )


def cpu_devices(outputs: Iterable[str]) -> Devices:
    """Inferences with these outputs on the CPU at hand, wall time."""
    return Devices(
        build,
        lambda path, graph, runtime_cache: CpuRunner(path, graph, pad_id=0, outputs=outputs),
        lambda runner, _, sets: HostLane(runner, [[batch] for batch in sets]),
        lambda batch: batch,
        WallTimer(),
        ON_CPU,
    )


def alone_on_gpu() -> contextlib.AbstractContextManager[None]:
    """Nothing else of qdqbench times engines on this GPU meanwhile; UserError where something does."""
    mend = "give each worker a GPU of its own with CUDA_VISIBLE_DEVICES"
    return _alone("GPU", gpu_uuid() or "gpu", mend)


def alone_on_cpu() -> contextlib.AbstractContextManager[None]:
    """Nothing else of qdqbench times engines on this CPU meanwhile; UserError where something does."""
    return _alone("CPU", "cpu", "run this when it has ended, or workers on machines of their own")


@contextlib.contextmanager
def _alone(kind: str, name: str, mend: str) -> Iterator[None]:
    # one for each user: the kernel refuses the files of others in the temporary folder
    lock = FileLock(Path(tempfile.gettempdir()) / f"qdqbench-{name}-{os.getuid()}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"another process times engines on this {kind}, and both would measure each other; {mend}"
        ) from error
    except OSError as error:
        raise UserError(f"cannot lock {lock.lock_file} ({error.strerror}); remove it") from error
    try:
        yield
    finally:
        lock.release()


class EngineTimer:
    """Times engines against one twin without INT8, in a `with` statement.

    Args:
        session: its recipe names the backend and the profiles, its model the vocabulary.
        twin: graph of the twin; what is not INT8 computes in the same datatype in all engines.
        folder: for engines, which are deleted once they are measured.
        shapes: (batch, length) to measure; the recipe's profiles must hold them.

    Raises:
        MissingDevice: the backend or the GPU that it needs is not there.
        UserError, CheckFailed: the twin cannot be built or run.
    """

    def __init__(
        self,
        session: Session,
        twin: Path,
        folder: Path,
        shapes: Sequence[Shape],
        devices: Devices | None = None,
    ) -> None:
        self.session, self.folder, self.shapes = session, folder, list(shapes)
        if devices is None:
            on_cpu = backend_of(session.recipe) in CPU_BACKENDS
            devices = cpu_devices(session.config.task.kind.outputs) if on_cpu else gpu_devices()
        self.devices = devices
        # each profile has kernels of its own, so those that take none of the shapes only cost time to build
        known = engine_profiles(session)
        self.profiles = [
            known[index] for index in sorted({choose_profile(known, *shape) for shape in self.shapes})
        ]
        self._inputs = {
            shape: list(map(self.devices.place, session_sets(session, *shape, SEARCH_INPUT_SETS)))
            for shape in self.shapes
        }
        with contextlib.ExitStack() as stack:
            _, self._twin = self._open(ReadyGraph(twin, [], 0), "twin", stack)
            self._stack = stack.pop_all()

    def measure(
        self,
        exported: ReadyGraph,
        done: Callable[[Shape], None] = lambda shape: None,
        shapes: Sequence[Shape] | None = None,
    ) -> dict[Shape, Latency]:
        """Build, prove and time one engine.

        Args:
            done: called after each shape.
            shapes: some of those that it was made for; None: all.

        Raises:
            CheckFailed: INT8 is not proven, an output is NaN or constant, or it fails while it runs.
            UserError: it cannot be built.
        """
        found = {}
        with contextlib.ExitStack() as stack:
            result, lanes = self._open(exported, "trial", stack)
            require_int8(result)
            for shape in self.shapes if shapes is None else shapes:
                ours = Contestant("the engine", "int8", [lanes(shape)], self.devices.timer)
                twin = Contestant("its twin", "fp16", [self._twin(shape)], self.devices.timer)
                for contestant in (twin, ours):
                    _, error = loop.read_outputs(contestant)
                    if error:
                        raise CheckFailed(
                            f"{contestant.name} gives {error} at batch {shape[0]}, length {shape[1]}"
                        )
                measured = loop.measure([ours, twin], self.devices.effort)
                own, base = measured["the engine"], measured["its twin"]
                ratio = loop.speedup(base.round_ms, own.round_ms, self.session.config.seed)
                found[shape] = Latency(
                    ms=own.median_ms,
                    twin_ms=base.median_ms,
                    speedup=ratio.value,
                    low=ratio.low,
                    high=ratio.high,
                    int8_gemms=result.int8_gemms,
                    expected_int8_gemms=result.expected_int8_gemms,
                )
                done(shape)
        return found

    def _open(
        self, exported: ReadyGraph, name: str, stack: contextlib.ExitStack
    ) -> "tuple[EngineResult, Callable[[Shape], Lane]]":
        """Build and load an engine; a function makes its lane for a shape, bound when first asked for."""
        path = self.folder / f"{name}.engine"
        stack.callback(sidecar_path(path).unlink, missing_ok=True)
        stack.callback(path.unlink, missing_ok=True)
        result = build_graph(self.devices.build, self.session, exported, path, self.profiles)
        # most kernels of an engine are those of the one before: compiled once, they serve all
        cache = self.folder / f"{name}.cache"
        engine = stack.enter_context(self.devices.load(path, exported.path, runtime_cache=cache))
        made: dict[Shape, Lane] = {}
        stack.callback(made.clear)  # lanes go before the engine that they run

        def lane(shape: Shape) -> Lane:
            if shape not in made:
                made[shape] = self.devices.lane(engine, shape, self._inputs[shape])
            return made[shape]

        return result, lane

    def __enter__(self) -> "EngineTimer":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
