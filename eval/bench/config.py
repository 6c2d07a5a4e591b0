"""Options of a bench and its configs, fixed shapes or a data set at a batch size, with their systems."""

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic import ConfigDict

from qdqbench.eval.bench.dataset import BatchedSplit
from qdqbench.eval.bench.lanes import random_sets
from qdqbench.eval.bench.results import BenchKernels, BenchRow, BenchSettings, BenchSystem, Device
from qdqbench.eval.bench.rounds import ReadySystem
from qdqbench.eval.bench.target import Target
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.pipeline.artifacts import engine_profiles
from qdqbench.quantize.utils.arrays import Batch
from qdqbench.quantize.utils.errors import MissingDevice, QdqError
from qdqbench.quantize.utils.progress import report_phase

if TYPE_CHECKING:
    from qdqbench.quantize.utils.results import LayerRow

Work = TypeVar("Work")


class BenchPlan(BenchSettings):
    """What is measured; `BenchSettings` of it are recorded."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    device: Device
    splits: tuple[BatchedSplit, ...] = ()  # of the data set, one for each batch size
    baselines: bool
    fp32: bool  # the FP32 engine too
    compile_seconds: float = 90.0  # for each shape and mode of torch.compile on a GPU
    keep_engines: bool = False
    exclude: tuple[str, ...] = ()  # names of systems
    build_only: bool = False


@dataclass(frozen=True)
class Config:
    batch: int
    length: int | None
    split: BatchedSplit | None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return self.split.shapes if self.split else [(self.batch, self.length or 0)]

    @property
    def sequences(self) -> int:
        return self.split.sequences if self.split else self.batch

    @property
    def stem(self) -> str:
        return f"b{self.batch}.{self.split.task}" if self.split else f"b{self.batch}.s{self.length}"


def configs_of(options: BenchPlan) -> list[Config]:
    fixed = [Config(batch, length, None) for length in options.lengths for batch in options.batches]
    return fixed + [Config(split.batch, None, split) for split in options.splits]


@dataclass(frozen=True)
class Preparation(Generic[Work]):
    target: Target
    options: BenchPlan
    config: Config
    work: Work  # what all configs of a bench share
    stack: ExitStack  # frees what the config holds
    torch: dict[str, Any] = field(default_factory=dict)  # models and functions of PyTorch, by what they are

    @property
    def folder(self) -> Path:
        return self.target.session.folder / "bench"

    @functools.cached_property
    def batches(self) -> list[Batch]:
        config, target = self.config, self.target
        if config.split:
            return config.split.batches
        return random_sets(
            inputs=target.family.inputs,
            batch=config.batch,
            length=config.length or 0,
            vocabulary=target.about.shape["vocabulary"],
            sets=self.options.input_sets,
            seed=self.options.seed,
        )


@dataclass
class Entry:
    """A system in a config: ready to be measured, or why not."""

    row: BenchRow
    system: ReadySystem | None = None
    layers: "list[LayerRow]" = field(default_factory=list)
    kernels: Callable[[], BenchKernels] | None = None  # of one inference; reads them, so only once measured


def prepare_each(
    prepare: Callable[[BenchSystem], Entry], systems: Sequence[BenchSystem], *, optional: Collection[str]
) -> list[Entry]:
    """Prepare every system; one that fails is an error, and of the `optional` (names) it is skipped.

    Raises:
        MissingDevice: what the bench is about cannot run here.
    """
    entries = []
    for system in systems:
        report_phase(f"preparing {system.name}")
        may_skip = system.name in optional
        try:
            entries.append(prepare(system))
        except Exception as error:
            if isinstance(error, MissingDevice) and not may_skip:
                raise
            # compilers fail in a hundred ways, and a missing baseline is a gap in the table; a missing engine
            # of ours is an error, whatever else is measured
            if not may_skip and not isinstance(error, (QdqError, RuntimeError)):
                raise
            reason = " ".join(f"{error}".split())[:300] or type(error).__name__
            status: Literal["error", "skipped"] = "skipped" if may_skip else "error"
            entries.append(Entry(BenchRow(system=system.name, status=status, reason=reason)))
    return entries


def profiles_of(target: Target, shapes: str, config: Config) -> list[Profile]:
    """Return the optimization profiles of a config's engines: the recipe's ("recipe"), or exactly its shapes.

    A split without buckets needs a range: from the smallest to the largest, best at the median.
    """
    if shapes == "recipe":
        return engine_profiles(target.session)
    if config.split is None or config.split.bucketed:
        return [Profile(min=pair, opt=pair, max=pair) for pair in config.shapes]
    rows, lengths = ([pair[axis] for pair in config.shapes] for axis in (0, 1))
    middle = sorted(batch["input_ids"].shape[1] for batch in config.split.batches)
    opt = (max(rows), middle[len(middle) // 2])
    return [Profile(min=(min(rows), min(lengths)), opt=opt, max=(max(rows), max(lengths)))]
