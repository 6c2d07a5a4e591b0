"""One cell of a bench: what was asked for, its shape and inputs, and contestants that are ready or not."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qdqbench.eval.bench.lanes import random_sets
from qdqbench.eval.bench.loop import Contestant
from qdqbench.eval.bench.real import RealSplit
from qdqbench.eval.bench.results import BenchContestant, BenchKernels, BenchRow
from qdqbench.eval.bench.target import Target
from qdqbench.quantize.core.arrays import Batch
from qdqbench.quantize.core.errors import MissingDevice, QdqError
from qdqbench.quantize.core.progress import report_phase
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.rundir.artifacts import engine_profiles

if TYPE_CHECKING:
    from qdqbench.quantize.core.results import LayerRow

INPUT_SETS = 8
TORCH_FP32 = "torch-fp32"
# whose logits are trusted, best first
REFERENCES = (TORCH_FP32, "fp32", "fp16", "fp32-onnxruntime", "fp32-openvino")


@dataclass(frozen=True)
class BenchOptions:
    """What the user asked for."""

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    real: tuple[RealSplit, ...]  # one for each batch size
    streams: tuple[int, ...]
    rounds: int
    seconds: float
    repeats: int | None
    peers: bool
    fp32: bool  # the FP32 twin too
    profile: Literal["both", "static", "recipe"]  # shapes that engines are built for, on a GPU
    seed: int
    cpu: bool
    keep_engines: bool = False
    threads: int = 1  # of a contestant on a CPU
    without: tuple[str, ...] = ()  # names of contestants on a GPU
    measured: bool = True  # else only what comes before
    compile_seconds: float = 90.0  # for each shape and mode of torch.compile on a GPU


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


def shapes(options: BenchOptions) -> list[CellShape]:
    """The grid, batches inside lengths, then the real lengths."""
    fixed = [CellShape(batch, length, None) for length in options.lengths for batch in options.batches]
    return fixed + [CellShape(real.batch, None, real) for real in options.real]


@dataclass
class Entry:
    """A contestant of a cell: ready to be measured, or why not."""

    row: BenchRow
    contestant: Contestant | None = None
    layers: "list[LayerRow]" = field(default_factory=list)
    kernels: Callable[[], BenchKernels] | None = None  # of one inference; reads them, so only once measured


@dataclass(frozen=True)
class Makers:
    """Who takes part, and what makes them ready for a shape; some work can be done before."""

    contestants: Callable[[Target, BenchOptions], list[BenchContestant]]
    prepare: Callable[[Target, BenchOptions, CellShape, Sequence[BenchContestant], ExitStack], list[Entry]]
    # beside the export, from a run directory whose model can be loaded
    start: Callable[[Path, BenchOptions], None] = lambda run, options: None
    # beside that: exports a model by another recipe into a folder, and gives a function that waits for it
    export: Callable[[str, str, Path, BenchOptions], Callable[[], None]] = (
        lambda model, recipe, folder, options: lambda: None
    )
    # for all shapes, once it is exported
    ahead: Callable[[Target, BenchOptions, Callable[[str], None]], None] = lambda target, options, say: None


def gather(
    maker: Callable[[BenchContestant], Entry], listed: Sequence[BenchContestant], *, peers: Collection[str]
) -> list[Entry]:
    """Make every contestant; one that fails is an error, and of the `peers` (names) a gap.

    Raises:
        MissingDevice: what the bench is about cannot run here.
    """
    entries = []
    for about in listed:
        report_phase(f"making {about.name}")
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


def profiles_of(target: Target, profile: str, shape: CellShape) -> list[Profile]:
    """The optimization profiles of a cell's engines: the recipe's ("recipe"), or exactly its shapes.

    Real lengths without buckets need a range: from the smallest to the largest, best at the median.
    """
    if profile == "recipe":
        return engine_profiles(target.session)
    if shape.real is None or shape.real.bucketed:
        return [Profile(min=pair, opt=pair, max=pair) for pair in shape.bound]
    rows, lengths = ([pair[axis] for pair in shape.bound] for axis in (0, 1))
    middle = sorted(batch["input_ids"].shape[1] for batch in shape.real.batches)
    opt = (max(rows), middle[len(middle) // 2])
    return [Profile(min=(min(rows), min(lengths)), opt=opt, max=(max(rows), max(lengths)))]


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
