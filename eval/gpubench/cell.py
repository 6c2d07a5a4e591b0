"""Contestants of one cell on a GPU: engines and peers, bound to its shape and ready to be measured."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qdqbench.eval.bench import peers
from qdqbench.eval.bench.cell import BenchOptions, CellShape, Entry, Makers, gather, input_sets, shapes
from qdqbench.eval.bench.lanes import CudaTimer, DeviceLane, SplitLane, to_device
from qdqbench.eval.bench.loop import Contestant, Lane
from qdqbench.eval.bench.results import BenchContestant, BenchRow
from qdqbench.eval.bench.target import Target
from qdqbench.eval.gpubench.ahead import Background, background
from qdqbench.eval.gpubench.contestants import Kind, contestants, table_of
from qdqbench.eval.gpubench.engines import EngineSpec, Pair, forget, make, marker, specs_of
from qdqbench.eval.gpubench.kernels import kernels_of
from qdqbench.quantize.core.errors import CheckFailed
from qdqbench.quantize.runtime.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUILD_S = 600.0  # of an engine with its kernels
SHAPES_AT_ONCE = 4  # of real lengths, that one process compiles
WAIT_S = 0.5


@dataclass
class Shared:
    """What all cells of a bench share."""

    background: Background
    models: "dict[str, PreTrainedModel]" = field(default_factory=dict)  # by precision
    compiles: dict[tuple[str, Pair], str] = field(default_factory=dict)  # task by mode and (batch, length)

    def late(self, mode: str, pairs: Sequence[Pair]) -> str:
        """Why a mode was not compiled for all of these; empty where it was, or was not tried."""
        tasks = (self.compiles.get((mode, pair), "") for pair in pairs)
        failed = self.background.failed
        return next((f"torch.compile: {failed[task]}" for task in tasks if task in failed), "")


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
    shared = Shared(stack.enter_context(background(os.cpu_count() or 1)))

    def start(run: Path, options: BenchOptions) -> None:
        wanted = [kind.mode for kind in table_of(None, options).values() if kind.mode]
        # the longest first
        for mode in sorted(set(wanted), key=len, reverse=True):
            for shape in shapes(options):
                _compile(shared, run, mode, shape, options.compile_seconds)

    def export(model: str, recipe: str, folder: Path, options: BenchOptions) -> Callable[[], None]:
        given = [str(folder), model, recipe, str(options.seed), str(max(options.lengths))]
        shared.background.add(f"export {folder}", ["export", *given], BUILD_S)
        return partial(shared.background.ended, f"export {folder}")

    def ahead(target: Target, options: BenchOptions, announce: Callable[[str], None]) -> None:
        target.stack.callback(shared.models.clear)
        if options.real:
            start(target.session.folder, replace(options, lengths=()))
        specs = _all_engines(target, options)
        if not options.keep_engines:
            target.stack.callback(_forget_markers, target.session.folder / "bench")
            for spec in specs:
                forget(spec, target.stack)
        if backend[0] != "tensorrt":  # whose builder times kernels, which nothing may disturb
            for spec in (each for each in specs if not (each.proof.is_file() and each.cache.is_file())):
                spec.engine.parent.mkdir(parents=True, exist_ok=True)
                shared.background.add(str(spec.engine), ["engine", spec.model_dump_json()], BUILD_S)
        while left := shared.background.left:
            announce(f"{left} builds and compilations are under way or wait")
            time.sleep(WAIT_S)

    def prepare(
        target: Target,
        options: BenchOptions,
        shape: CellShape,
        listed: Sequence[BenchContestant],
        stack: ExitStack,
    ) -> list[Entry]:
        inputs = [to_device(batch) for batch in input_sets(target, options, shape)]
        return _prepare(Work(target, options, shape, shared, stack, inputs), listed)

    return Makers(partial(contestants, backend=" ".join(backend)), prepare, start, export, ahead)


def _compile(shared: Shared, run: Path, mode: str, shape: CellShape, seconds: float) -> None:
    """Start to compile a cell's shapes, some in a process where it has many."""
    size, folder = SHAPES_AT_ONCE if shape.real else 1, run / "bench"
    left = [pair for pair in shape.bound if not marker(folder, mode, pair).is_file()]
    for first in range(0, len(left), size):
        pairs = left[first : first + size]
        task = f"{mode} {pairs}"
        shared.compiles |= {(mode, pair): task for pair in pairs}
        shared.background.add(task, ["compile", str(run), mode, json.dumps(pairs)], seconds * len(pairs))


def _forget_markers(folder: Path) -> None:
    for path in folder.glob("*.compiled"):
        path.unlink(missing_ok=True)


def _all_engines(target: Target, options: BenchOptions) -> list[EngineSpec]:
    """Every engine of a bench once, with all shapes that it will run; those of many profiles first."""
    found: dict[Path, EngineSpec] = {}
    for kind in table_of(target, options).values():
        for shape in shapes(options) if kind.profile else ():
            with suppress(CheckFailed):  # no profile of the recipe takes it: the cell says so
                for spec in specs_of(target, kind, shape).values():
                    known = found.setdefault(spec.engine, spec)
                    known.shapes += [pair for pair in spec.shapes if pair not in known.shapes]
    return list(found.values())


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

    return gather(
        make, listed, peers=[kind.name for kind in kinds.values() if not kind.profile or kind.recipe]
    )


def _peer(work: Work, kind: Kind) -> Callable[[int, int, Any], peers.TorchRun]:
    """How PyTorch is bound to a shape.

    Raises:
        CheckFailed: it was not compiled in time.
    """
    if reason := work.shared.late(kind.mode, work.shape.bound):
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
    specs = specs_of(work.target, kind, work.shape)
    single = {spec.engine: spec for spec in specs.values()}
    made = {path: make(spec) for path, spec in single.items()}
    loaded = {
        path: work.stack.enter_context(Engine(path, spec.onnx, runtime_cache=spec.cache))
        for path, spec in single.items()
    }

    def bind(batch: int, length: int, stream: Any) -> Any:
        engine = loaded[specs[batch, length].engine]
        return engine.bind(batch, length, stream=stream, graph=True)

    lanes, detail = work.lanes(bind)
    int8, proofs, (first, *more) = kind.precision == "int8", list(made.values()), loaded.values()
    row = BenchRow(
        contestant=kind.name,
        status="done",
        detail=f"{detail}, {kind.profile} profile",
        int8_gemms=min(proof.int8_gemms for proof in proofs) if int8 else None,
        expected_int8_gemms=proofs[0].expected_int8_gemms if int8 else None,
        not_int8=sorted({node for proof in proofs for node in proof.not_int8}),
        engine_bytes=None if more else first.memory.engine_bytes,
        activation_bytes=None if more else first.memory.activation_bytes,
    )
    return Entry(row, Contestant(kind.name, kind.precision, lanes, timer), proofs[0].layers)
