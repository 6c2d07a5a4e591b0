"""The contestants of one cell: engines built for its shape, and the peers beside them, bound and ready."""

import importlib.metadata
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qdqbench.eval.bench import peers
from qdqbench.eval.bench.engines import ReadyGraph, build_graph
from qdqbench.eval.bench.lanes import (
    CudaTimer,
    DeviceLane,
    SplitLane,
    random_sets,
    to_device,
)
from qdqbench.eval.bench.loop import Contestant, Lane
from qdqbench.eval.bench.results import BenchContestant, BenchRow
from qdqbench.eval.bench.target import RealSplit, Target
from qdqbench.quantize.core.arrays import Batch
from qdqbench.quantize.core.errors import MissingDevice, QdqError
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.engine.sidecar import sidecar_path
from qdqbench.quantize.rundir import artifacts
from qdqbench.quantize.rundir.artifacts import engine_profiles
from qdqbench.quantize.runtime.engine import Engine

if TYPE_CHECKING:
    from qdqbench.quantize.core.results import EngineResult, LayerRow

INPUT_SETS = 8
TORCH_FP32, TORCH_FP16, COMPILED = "torch-fp32", "torch-fp16", "compile-fp16"
# whose logits are trusted, best first
REFERENCES = (TORCH_FP32, "fp32", "fp16", "fp32-onnxruntime", "fp32-openvino")


@dataclass(frozen=True)
class BenchOptions:
    """What the user asked for."""

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    real: RealSplit | None
    real_batch: int
    streams: tuple[int, ...]
    rounds: int
    seconds: float
    repeats: int | None
    peers: bool
    fp32: bool  # the FP32 twin too
    compile_mode: str
    profile: Literal["static", "recipe"]
    seed: int
    cpu: bool
    keep_engines: bool = False
    threads: int = 1  # of a contestant on a CPU


@dataclass(frozen=True)
class CellShape:
    """One cell to measure: a fixed shape, or a split with its real lengths."""

    batch: int
    length: int | None
    real: RealSplit | None

    @property
    def bound(self) -> list[tuple[int, int]]:
        """Every (batch, length) of one launch."""
        return self.real.shapes if self.real else [(self.batch, self.length or 0)]

    @property
    def sequences(self) -> int:
        """Sequences of one launch."""
        return self.real.sequences if self.real else self.batch

    @property
    def stem(self) -> str:
        """For file names."""
        return f"b{self.batch}.{self.real.task}" if self.real else f"b{self.batch}.s{self.length}"


@dataclass
class Entry:
    """A contestant of a cell: ready to be measured, or why not."""

    row: BenchRow
    contestant: Contestant | None = None
    layers: "list[LayerRow]" = field(default_factory=list)


@dataclass(frozen=True)
class Makers:
    """Who takes part, and what makes them ready for a shape; as `contestants` and `prepare`."""

    contestants: Callable[[Target, BenchOptions], list[BenchContestant]]
    prepare: Callable[[Target, BenchOptions, CellShape, Sequence[BenchContestant], ExitStack], list[Entry]]


def contestants(target: Target, options: BenchOptions, backend: str) -> list[BenchContestant]:
    """Who takes part, in the order of tables and charts; `backend` is the engine builder and its version."""
    torch = f"torch {importlib.metadata.version('torch')}"
    listed = [
        BenchContestant(
            name=name,
            label=f"{name.upper()} engine",
            precision=name,  # type: ignore[arg-type]
            backend=backend,
        )
        for name in target.twins
        if name != "fp32" or options.fp32
    ]
    if options.peers:
        for name, precision in ((TORCH_FP32, "fp32"), (TORCH_FP16, "fp16")):
            label = f"PyTorch {precision.upper()} SDPA"
            listed.append(
                BenchContestant(name=name, label=label, precision=precision, backend=torch)  # type: ignore[arg-type]
            )
        listed.append(listed[-1].model_copy(update={"name": COMPILED, "label": "torch.compile FP16"}))
    return listed


def prepare(
    target: Target,
    options: BenchOptions,
    shape: CellShape,
    listed: Sequence[BenchContestant],
    stack: ExitStack,
) -> list[Entry]:
    """Bind every contestant to a shape; `stack` holds what must be freed after the cell.

    Raises:
        MissingDevice: there is no GPU, or nothing that builds for it.
    """
    maker = _device_maker(target, options, shape, stack)
    return gather(maker, listed, peers=(TORCH_FP32, TORCH_FP16, COMPILED))


def gather(
    maker: Callable[[BenchContestant], Entry], listed: Sequence[BenchContestant], *, peers: Collection[str]
) -> list[Entry]:
    """Make every contestant; one that fails is an error, and of the `peers` (names) a gap.

    Raises:
        MissingDevice: what the bench is about cannot run here.
    """
    entries = []
    for about in listed:
        peer = about.name in peers
        try:
            entries.append(maker(about))
        except Exception as error:
            if isinstance(error, MissingDevice) and not peer:
                raise
            # compilers fail in a hundred ways, and a peer that is missing is a gap in the table; an engine of
            # ours that is missing is an error, whatever else is measured
            if not peer and not isinstance(error, (QdqError, RuntimeError)):
                raise
            reason = " ".join(f"{error}".split())[:300] or type(error).__name__
            status: Literal["error", "skipped"] = "skipped" if peer else "error"
            entries.append(Entry(BenchRow(contestant=about.name, status=status, reason=reason)))
    return entries


def profiles_of(target: Target, options: BenchOptions, shape: CellShape) -> list[Profile]:
    """The optimization profiles of a cell's engines: exactly its shape, or the recipe's.

    Real lengths need a range: from the smallest to the largest of the split, best at its median length.
    """
    if options.profile == "recipe":
        return engine_profiles(target.session)
    rows, lengths = ([pair[axis] for pair in shape.bound] for axis in (0, 1))
    if shape.real is None:
        only = shape.bound[0]
        return [Profile(min=only, opt=only, max=only)]
    middle = sorted(batch["input_ids"].shape[1] for batch in shape.real.batches)
    opt = (max(rows), middle[len(middle) // 2])
    return [Profile(min=(min(rows), min(lengths)), opt=opt, max=(max(rows), max(lengths)))]


def _device_maker(
    target: Target, options: BenchOptions, shape: CellShape, stack: ExitStack
) -> Callable[[BenchContestant], Entry]:
    import torch

    batches = [to_device(batch) for batch in input_sets(target, options, shape)]
    timer = CudaTimer()
    streams = 1 if shape.real else max(options.streams)
    stack.callback(torch.cuda.empty_cache)  # engines allocate beside what torch keeps for later
    stack.enter_context(peers.tf32_allowed())
    stack.callback(torch.compiler.reset)  # past a limit of shapes dynamo falls back to eager without a word

    def lanes(bind: Callable[[int, int, Any], Any]) -> tuple[list[Lane], str | None]:
        """One lane per stream from a function (batch, length, stream) -> Bound."""
        made: list[Lane] = []
        detail = None
        for _ in range(streams):
            stream, bounds = None, {}
            for pair in shape.bound:
                bounds[pair] = bound = bind(*pair, stream)
                stream = bound.stream  # all shapes of a lane share one stream
                detail = getattr(bound, "detail", None) or ("" if bound.captured else "no ") + "CUDA graph"
            made.append(
                SplitLane(bounds, batches) if shape.real else DeviceLane(bounds[shape.bound[0]], batches)
            )
        return made, detail

    def make(about: BenchContestant) -> Entry:
        if about.name in target.twins:
            return engine(about)
        model = peers.sdpa_model(target.session.new_model(), about.precision, "cuda")  # type: ignore[arg-type]
        dynamic, names = shape.real is not None, target.family.inputs
        if about.name == COMPILED:
            forward = peers.compiled_forward(model, options.compile_mode, dynamic=dynamic)
            how = f"torch.compile mode {options.compile_mode}{', dynamic shapes' if dynamic else ''}"
        else:
            tf32 = ", TF32 allowed" if about.precision == "fp32" else ""
            forward, how = peers.eager_forward(model), f"eager, SDPA{tf32}"
        made, detail = lanes(
            lambda batch, length, stream: peers.TorchRun(
                forward, batch, length, inputs=names, how=how, stream=stream
            )
        )
        row = BenchRow(contestant=about.name, status="done", detail=detail)
        return Entry(row, Contestant(about.name, about.precision, made, timer))

    def engine(about: BenchContestant) -> Entry:
        onnx = target.twins[about.precision]
        path, built = _build(target, options, shape, about.precision, stack)
        loaded = stack.enter_context(Engine(path, onnx))
        made, detail = lanes(
            lambda batch, length, stream: loaded.bind(batch, length, stream=stream, graph=True)
        )
        int8 = about.precision == "int8"
        row = BenchRow(
            contestant=about.name,
            status="done",
            detail=f"{detail}, {options.profile} profile",
            int8_gemms=built.int8_gemms if int8 else None,
            expected_int8_gemms=built.expected_int8_gemms if int8 else None,
            not_int8=built.not_int8,
            engine_bytes=loaded.memory.engine_bytes,
            activation_bytes=loaded.memory.activation_bytes,
        )
        return Entry(row, Contestant(about.name, about.precision, made, timer), built.layers)

    return make


def input_sets(target: Target, options: BenchOptions, shape: CellShape) -> list[Batch]:
    """Random input sets of a fixed shape, or the split's batches."""
    if shape.real:
        return shape.real.batches
    return random_sets(
        inputs=target.family.inputs,
        batch=shape.batch,
        length=shape.length or 0,
        vocabulary=target.vocabulary,
        sets=INPUT_SETS,
        seed=options.seed,
    )


def _build(
    target: Target, options: BenchOptions, shape: CellShape, precision: str, stack: ExitStack
) -> "tuple[Path, EngineResult]":
    """Build a twin's engine; for the recipe's shapes once for all cells. Its layer table stays behind.

    The engine is deleted after the cell or at the end of the bench, unless engines are kept.
    """
    session, int8 = target.session, precision == "int8"
    shared = options.profile == "recipe"
    path = session.folder / "bench" / f"{precision}.{'recipe' if shared else shape.stem}.engine"
    if shared and precision in target.built:
        return path, target.built[precision]
    owner = target.stack if shared else stack
    if not options.keep_engines:
        owner.callback(sidecar_path(path).unlink, missing_ok=True)
        owner.callback(path.unlink, missing_ok=True)
    gemms, attention = (artifacts.expected_gemms(session), len(session.plan.attention)) if int8 else ([], 0)
    graph = ReadyGraph(target.twins[precision], gemms, attention)
    result = build_graph(build, session, graph, path, profiles_of(target, options, shape))
    if shared:
        target.built[precision] = result
    return path, result
