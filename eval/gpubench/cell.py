"""Contestants of one cell on a GPU: engines and peers, bound to its shape and ready to be measured."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qdqbench.eval.bench import peers
from qdqbench.eval.bench.cell import (
    BenchOptions,
    CellShape,
    Entry,
    Makers,
    gather,
    input_sets,
    profiles_of,
    shapes,
)
from qdqbench.eval.bench.engines import ReadyGraph, build_graph
from qdqbench.eval.bench.lanes import CudaTimer, DeviceLane, SplitLane, to_device
from qdqbench.eval.bench.loop import Contestant, Lane
from qdqbench.eval.bench.results import BenchContestant, BenchRow
from qdqbench.eval.bench.target import Target
from qdqbench.eval.gpubench.compiling import Late, compiling
from qdqbench.eval.gpubench.contestants import TABLE, Kind, contestants, table_of
from qdqbench.eval.gpubench.kernels import kernels_of
from qdqbench.quantize.core.errors import CheckFailed, QdqError
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.engine.sidecar import sidecar_path
from qdqbench.quantize.rundir import artifacts
from qdqbench.quantize.runtime.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qdqbench.quantize.core.results import EngineResult


@dataclass
class Shared:
    """What all cells of a bench share."""

    engines: dict[str, Engine] = field(default_factory=dict)  # for the recipe's shapes, by precision
    models: "dict[str, PreTrainedModel]" = field(default_factory=dict)  # by precision
    waits: list[Callable[[], Late]] = field(default_factory=list)  # for what compiles in the background
    late: Late = field(default_factory=dict)  # what was not compiled

    def wait(self) -> None:
        """Until nothing compiles."""
        while self.waits:
            self.late |= self.waits.pop()()


@dataclass(frozen=True)
class Work:
    """One cell to make contestants for."""

    target: Target
    options: BenchOptions
    shape: CellShape
    shared: Shared
    stack: ExitStack  # frees what the cell holds
    inputs: "Sequence[Mapping[str, Any]]"  # on the GPU
    forwards: dict[str, Callable[..., Any]] = field(default_factory=dict)  # by precision and mode

    def lanes(self, bind: Callable[[int, int, Any], Any]) -> tuple[list[Lane], str]:
        """One lane per stream from a function (batch, length, stream) -> Bound, and how it runs."""
        made: list[Lane] = []
        detail = ""
        for _ in range(1 if self.shape.real else max(self.options.streams)):
            stream, bounds = None, {}
            for pair in self.shape.bound:
                bounds[pair] = bound = bind(*pair, stream)
                stream = bound.stream  # all shapes of a lane share one stream
                detail = getattr(bound, "detail", None) or ("" if bound.captured else "no ") + "CUDA graph"
            only = bounds[self.shape.bound[0]]
            made.append(SplitLane(bounds, self.inputs) if self.shape.real else DeviceLane(only, self.inputs))
        return made, detail


def gpu_makers(backend: tuple[str, str], stack: ExitStack) -> Makers:
    """Who takes part in a bench on a GPU, and what makes them ready.

    Args:
        backend: builder of engines and its version.
        stack: ends what compiles in the background.
    """
    shared = Shared()

    def start(run: Path, options: BenchOptions) -> None:
        cells = [tuple(shape.bound) for shape in shapes(options)]
        shared.waits.append(
            stack.enter_context(compiling(run, _modes(options), cells, options.compile_seconds))
        )

    def ahead(target: Target, options: BenchOptions, announce: Callable[[str], None]) -> None:
        target.stack.callback(shared.models.clear)
        target.stack.callback(shared.engines.clear)
        if options.real:
            start(target.session.folder, replace(options, lengths=()))
        if backend[0] == "tensorrt":  # its builder times kernels, which nothing may disturb
            announce("compiling PyTorch's models")
            shared.wait()
        for shape in shapes(options):
            for kind in table_of(target, options).values():
                if kind.profile:
                    announce(f"building {kind.label}, {shape.stem}")
                    with suppress(QdqError, RuntimeError):  # the cell tries again, and says why
                        _build(target, options, shape, kind)
        announce("compiling PyTorch's models")
        shared.wait()

    def prepare(
        target: Target,
        options: BenchOptions,
        shape: CellShape,
        listed: Sequence[BenchContestant],
        stack: ExitStack,
    ) -> list[Entry]:
        inputs = [to_device(batch) for batch in input_sets(target, options, shape)]
        return _prepare(Work(target, options, shape, shared, stack, inputs), listed)

    return Makers(partial(contestants, backend=" ".join(backend)), prepare, start, ahead)


def _modes(options: BenchOptions) -> list[str]:
    """Modes of torch.compile that take part."""
    return list(dict.fromkeys(kind.mode for kind in TABLE if kind.mode)) if options.peers else []


def _prepare(work: Work, listed: Sequence[BenchContestant]) -> list[Entry]:
    """Bind every contestant to the cell's shape.

    Raises:
        MissingDevice: there is no GPU, or nothing that builds for it.
    """
    import torch

    kinds, timer = table_of(work.target, work.options), CudaTimer()
    work.stack.callback(torch.cuda.empty_cache)  # engines allocate beside what torch keeps for later
    work.stack.enter_context(peers.tf32_allowed())
    # past a limit of shapes dynamo falls back to eager without a word
    work.stack.callback(torch.compiler.reset)

    def make(about: BenchContestant) -> Entry:
        kind = kinds[about.name]
        if kind.profile:
            return _engine(work, kind, timer)
        made, detail = work.lanes(_peer(work, kind))
        row = BenchRow(contestant=kind.name, status="done", detail=detail)
        ready = Contestant(kind.name, kind.precision, made, timer)
        return Entry(row, ready, kernels=partial(kernels_of, made[0]))

    return gather(make, listed, peers=[name for name, kind in kinds.items() if not kind.profile])


def _peer(work: Work, kind: Kind) -> Callable[[int, int, Any], peers.TorchRun]:
    """How PyTorch is bound to a shape.

    Raises:
        CheckFailed: it was not compiled in time.
    """
    if reason := work.shared.late.get((kind.mode, tuple(work.shape.bound))):
        raise CheckFailed(reason)
    if kind.mode:
        each = ", for each shape" if work.shape.real else ""
        how = f"torch.compile mode {kind.mode}{each}"
    else:
        how = f"eager, SDPA{', TF32 allowed' if kind.precision == 'fp32' else ''}"
    key = f"{kind.precision} {kind.mode}"
    if key not in work.forwards:
        model = _model(work, cast("peers.PeerPrecision", kind.precision))
        work.forwards[key] = (
            peers.compiled_forward(model, kind.mode, dynamic=False)
            if kind.mode
            else peers.eager_forward(model)
        )
    return lambda batch, length, stream: peers.TorchRun(
        work.forwards[key],
        batch,
        length,
        inputs=work.target.family.inputs,
        how=how,
        graph=kind.graph,
        stream=stream,
    )


def _model(work: Work, precision: peers.PeerPrecision) -> "PreTrainedModel":
    known = work.shared.models
    if precision not in known:
        known[precision] = peers.sdpa_model(work.target.session.new_model(), precision, "cuda")
    return known[precision]


def _engine(work: Work, kind: Kind, timer: CudaTimer) -> Entry:
    path, built = _build(work.target, work.options, work.shape, kind)
    loaded = _load(work, kind, path)

    def bind(batch: int, length: int, stream: Any) -> Any:
        bound = loaded.bind(batch, length, stream=stream, graph=True)
        work.stack.callback(bound.close)
        return bound

    made, detail = work.lanes(bind)
    int8 = kind.precision == "int8"
    row = BenchRow(
        contestant=kind.name,
        status="done",
        detail=f"{detail}, {kind.profile} profile",
        int8_gemms=built.int8_gemms if int8 else None,
        expected_int8_gemms=built.expected_int8_gemms if int8 else None,
        not_int8=built.not_int8,
        engine_bytes=loaded.memory.engine_bytes,
        activation_bytes=loaded.memory.activation_bytes,
    )
    return Entry(row, Contestant(kind.name, kind.precision, made, timer), built.layers)


def _load(work: Work, kind: Kind, path: Path) -> Engine:
    """An engine for the recipe's shapes stays loaded for all cells, with the kernels that it compiled."""
    onnx = _owner(work.target, kind).twins[kind.precision]
    if kind.profile == "static":
        return work.stack.enter_context(Engine(path, onnx))
    if kind.name not in work.shared.engines:
        work.shared.engines[kind.name] = work.target.stack.enter_context(Engine(path, onnx))
    return work.shared.engines[kind.name]


def _build(
    target: Target, options: BenchOptions, shape: CellShape, kind: Kind
) -> "tuple[Path, EngineResult]":
    """Build a twin's engine; for the recipe's shapes once for all cells. Its layer table stays behind.

    The engine is deleted at the end of the bench, unless engines are kept.
    """
    owner, int8 = _owner(target, kind), kind.precision == "int8"
    session, stem = owner.session, "recipe" if kind.profile == "recipe" else shape.stem
    path = session.folder / "bench" / f"{kind.precision}.{stem}.engine"
    if str(path) in target.built:
        return path, target.built[str(path)]
    if not options.keep_engines:
        target.stack.callback(sidecar_path(path).unlink, missing_ok=True)
        target.stack.callback(path.unlink, missing_ok=True)
    gemms, attention = (artifacts.expected_gemms(session), len(session.plan.attention)) if int8 else ([], 0)
    graph = ReadyGraph(owner.twins[kind.precision], gemms, attention)
    result = build_graph(build, session, graph, path, profiles_of(owner, kind.profile, shape))
    target.built[str(path)] = result
    return path, result


def _owner(target: Target, kind: Kind) -> Target:
    """The target whose recipe an engine is of."""
    return target.also.get(kind.recipe, target)
