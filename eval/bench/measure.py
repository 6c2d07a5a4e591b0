"""Time systems in interleaved rounds on a GPU or CPU; a search and `auto` time one engine against another.

Their baseline is built once and stays bound. It is timed again with each engine, so that a speed-up is a
ratio of two latencies that were taken in the same process within the same seconds.
"""

import contextlib
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from filelock import FileLock, Timeout

from qdqbench.eval.bench.results import BenchKernels, BenchRow, Shape, speedup_between
from qdqbench.eval.metrics.results import Speedup
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.engine.cpu_runtimes import Compute
from qdqbench.quantize.engine.profiles import Profile, choose_profile
from qdqbench.quantize.engine.results import EngineResult, LayerRow
from qdqbench.quantize.engine.runtime.engine import Engine
from qdqbench.quantize.engine.runtime.runners import EngineRunner, open_runner
from qdqbench.quantize.engine.sidecar import sidecar_path
from qdqbench.quantize.graph.export import ExportSettings, trace, write_graph
from qdqbench.quantize.graph.index import count_attentions
from qdqbench.quantize.models.inputs import MASK, TOKENS
from qdqbench.quantize.pipeline.data_profiles import engine_profiles
from qdqbench.quantize.pipeline.graphs import list_expected_gemms
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.tasks.kinds.kind import join_outputs
from qdqbench.quantize.utils.arrays import Array, Batch, Float32, Int64
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.limits import BackendChoice, has_profiles
from qdqbench.quantize.utils.progress import measuring, report_phase

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


SLOW_MS = 250.0  # a launch this long warms itself up
WARM_LAUNCHES = 3  # before every burst: caches, clocks and power state are then this system's own
MOST_LAUNCHES = 1000  # of a burst; CUDA queues about that many before it blocks the host
LEAST_FOR_P99 = 100  # with fewer launches the 99th percentile is just the maximum
MOST_TEXTS = 4096  # that rows begin with
LEAST_ROWS = 4  # to check: two can have the same logits in BF16
# A fast wrong answer is no result: INT8 q, k and v without an INT8 softmax gave 0.8.
MAX_REL_ERROR = {"int8": 0.5, "fp8": 0.5, "fp16": 0.1, "bf16": 0.1, "fp32": 0.1}
INPUT_SETS = 4


class Lane(Protocol):
    """One inference at a fixed shape, with buffers of its own (on a GPU: and a stream)."""

    input_sets: int  # different inputs that it rotates through

    def feed(self, number: int) -> None:
        """Put the input set `number` (modulo their count) into the buffers."""

    def launch(self) -> None:
        """Start one inference; need not wait for it."""

    def fetch(self) -> Float32:
        """Return the logits of the last launch, [sequences, num_labels]; waits for it."""


class Timer(Protocol):
    def latencies(self, lane: Lane, count: int) -> list[float]:
        """Return milliseconds of each of `count` launches in a row, each fed a new input set (not timed)."""

    def wall(self, lanes: Sequence[Lane], count: int) -> float:
        """Return seconds until `count` launches of every lane, all lanes at once, are done."""


@dataclass
class SystemRun:
    """Outcome of a system in a config; one that does not run, or not any more, has no lanes."""

    row: BenchRow
    precision: str  # int8, fp8, fp16, bf16 or fp32
    timer: Timer
    lanes: Sequence[Lane] = ()  # one per stream, all alike
    shared: Mapping[int, Sequence[Lane]] = field(default_factory=dict)  # CPU lanes, by how many share it
    again: Sequence[Sequence[Lane]] = ()  # of other compilations, which take turns with it by round
    layers: list[LayerRow] = field(default_factory=list)
    kernels: Callable[[], BenchKernels] | None = None  # of one inference; reads them, so only once measured

    @property
    def name(self) -> str:
        return self.row.system

    def fail(self, reason: str) -> None:
        self.row = BenchRow(system=self.name, status="error", reason=reason, detail=self.row.detail)
        self.lanes, self.shared, self.again, self.kernels = (), {}, (), None


@dataclass(frozen=True)
class Effort:
    rounds: int
    duration_s: float  # of latency launches per system, over all rounds
    iterations: int | None = None  # launches per round instead of a duration
    streams: tuple[int, ...] = (1,)
    least: int = 5  # launches per round, where they take at most twice the seconds
    rest_s: float = 0.0  # before each burst
    warm: int = WARM_LAUNCHES  # before every burst


# rounds are balanced for two systems; on a CPU, which others use too, more of them
ON_GPU = Effort(8, 0.4, streams=())
ON_CPU = Effort(16, 4.0, streams=(), least=2)


@dataclass(frozen=True)
class Burst:
    latencies_ms: list[float]
    launches_per_s: dict[int, float]  # by number of streams
    start: float  # time.monotonic(), for the clocks that were read meanwhile
    end: float
    cpu_ms: float = 0.0  # CPU time of all threads of this process, each launch of the latencies

    @property
    def median_ms(self) -> float:
        return float(np.median(self.latencies_ms))


def rotation(count: int, rounds: int) -> list[list[int]]:
    """Order `count` systems in each round: Williams designs (1949), balanced by place and neighbor.

    Over `count` rounds (twice that for an odd count) each system stands equally often at each place, and
    directly after each other one: what a predecessor does to clocks and caches falls on all alike.
    """
    # 0, 1, count - 1, 2, count - 2, ...
    first = [(place + 1) // 2 if place % 2 else -(place // 2) % count for place in range(count)]
    rows = [[(place + shift) % count for place in first] for shift in range(count)]
    if count % 2:
        rows += [row[::-1] for row in rows]
    return [rows[number % len(rows)] for number in range(rounds)]


def measure_rounds(systems: Sequence[SystemRun], effort: Effort) -> dict[str, list[Burst]]:
    """Time all systems in interleaved rounds; CheckFailed names one that fails while it runs."""
    if not systems:
        return {}
    pace = {}
    for system in systems:
        with _naming(system):
            pace[system.name] = _pace(system, effort)
    bursts: dict[str, list[Burst]] = {system.name: [] for system in systems}
    for number, order in enumerate(rotation(len(systems), effort.rounds)):
        for system in (systems[position] for position in order):
            report_phase("rounds", number, effort.rounds)
            with measuring(), _naming(system):
                lanes = (system.lanes, *system.again)[number % (1 + len(system.again))]
                bursts[system.name].append(_burst(system, lanes, pace[system.name], effort))
    return bursts


def read_outputs(system: SystemRun) -> tuple[list[Float32], str | None]:
    """Return the logits of each lane, of the same inputs, and what is wrong with them by themselves."""
    per_lane = []
    for lane in itertools.chain(system.lanes, *system.shared.values(), *system.again):
        parts: list[Float32] = []
        for number in range(lane.input_sets):
            if number >= 2 and sum(map(len, parts)) >= LEAST_ROWS:
                break
            lane.feed(number)
            lane.launch()
            parts.append(np.array(lane.fetch(), dtype=np.float32))
        per_lane.append(np.concatenate(parts))
    for values in per_lane:
        if bad := int((~np.isfinite(values)).any(axis=1).sum()):
            return per_lane, f"NaN or infinite logits for {bad} of {len(values)} inputs"
        if not np.ptp(values, axis=0).any():
            return per_lane, f"the same logits for all of {len(values)} different inputs"
    return per_lane, None


def check_outputs(
    systems: Sequence[SystemRun], references: Sequence[str]
) -> tuple[dict[str, str], dict[str, float], str | None]:
    """Return errors, relative errors of the sound ones, and the first sound one of the references."""
    outputs = {}
    for system in systems:
        with _naming(system):
            outputs[system.name] = read_outputs(system)
    errors = {name: error for name, (_, error) in outputs.items() if error}
    sound = [name for name in references if name in outputs and name not in errors]
    if not sound:
        return errors, {}, None
    reference, differences = sound[0], {}
    for system in systems:
        name, limit = system.name, MAX_REL_ERROR[system.precision]
        if name in errors:
            continue
        base = outputs[reference][0][0].astype(np.float64)
        norm = float(np.linalg.norm(base))
        distance = max(float(np.linalg.norm(each.astype(np.float64) - base)) for each in outputs[name][0])
        difference = distance / norm if norm else math.inf
        if name != reference:
            differences[name] = difference
        if not difference <= limit:
            where = f"{difference:.2g} (relative) from those of {reference}"
            errors[name] = f"its logits are {where}, the limit is {limit:g}"
    return errors, differences, reference


def _pace(system: SystemRun, effort: Effort) -> tuple[int, int]:
    """Return launches of every burst, warm ones and timed ones, from the time that a warm launch takes."""
    lane, timer = system.lanes[0], system.timer
    each = timer.latencies(lane, 1)[0]
    warm = effort.warm if each < SLOW_MS else 0
    if warm:
        timer.latencies(lane, warm)
    if effort.iterations is not None:
        return warm, effort.iterations
    if warm:
        each = max(float(np.median(timer.latencies(lane, warm))), 1e-6)
    share = 1000 * effort.duration_s / effort.rounds
    least = max(2, min(effort.least, math.ceil(2 * share / each)))
    wanted = math.ceil(share / each)
    return min(warm, wanted), max(min(least, effort.least), min(wanted, MOST_LAUNCHES))


def _burst(system: SystemRun, own: Sequence[Lane], pace: tuple[int, int], effort: Effort) -> Burst:
    timer, (warm, count) = system.timer, pace
    time.sleep(effort.rest_s)
    if warm:
        timer.latencies(own[0], warm)
    start, spent = time.monotonic(), time.process_time()
    latencies = timer.latencies(own[0], count)
    spent = time.process_time() - spent
    rates = {}
    for streams in effort.streams:
        if len(lanes := system.shared.get(streams, own[:streams])) < streams:
            continue
        each = max(min(count, effort.least), math.ceil(count / streams))
        if warm:
            timer.wall(lanes, 1)  # the other streams are cold
        rates[streams] = each * streams / timer.wall(lanes, each)
    return Burst(latencies, rates, start, time.monotonic(), 1000 * spent / count)


@contextlib.contextmanager
def _naming(system: SystemRun) -> Iterator[None]:
    """Name the system in an error: on a device it poisons the process, so it ends the bench."""
    try:
        yield
    except RuntimeError as error:
        what = " ".join(str(error).split())[:300]
        raise CheckFailed(f"{system.name} failed while it was measured: {what}") from error


class Bound(Protocol):
    """An inference at one shape with its own CUDA buffers and stream: an engine's, or PyTorch's."""

    inputs: "dict[str, torch.Tensor]"
    outputs: "dict[str, torch.Tensor]"
    stream: "torch.cuda.Stream"

    def launch(self) -> None: ...


def random_sets(
    inputs: Sequence[str], shape: tuple[int, int], vocabulary: int, sets: int, seed: int
) -> list[Batch]:
    """Draw input sets of random token ids in [0, vocabulary), int64 [batch, length], without padding.

    Of the model's other inputs the mask is 1 and the rest 0; sets of other shapes are drawn separately.
    """
    generators = (np.random.default_rng([seed, *shape, number]) for number in range(sets))
    return [_with_rest(inputs, rng.integers(0, vocabulary, shape)) for rng in generators]


def text_sets(
    inputs: Sequence[str], shape: tuple[int, int], texts: Sequence[Array], sets: int, seed: int
) -> list[Batch]:
    """Return input sets of whole texts, one behind the other, int64 [batch, length], without padding.

    INT8 scales hold for texts. On random token ids the INT8 logits of a sound engine can lie far from FP32's:
    0.61 (relative) for BERT-base on MRPC, in its bench at 128 x 128.

    Args:
        texts: token ids of each. A row begins where a text does, unless all begin with as many equal tokens.
    """
    ids, starts = np.concatenate(texts), np.cumsum([0, *map(len, texts)])[:-1]
    batch, length = shape

    def rows_at(first: Array) -> Array:
        return ids[(first[:, None] + np.arange(length)) % len(ids)]

    # sets have to differ, which is how broken outputs are found: no row comes again before all others came
    for places in (starts[:MOST_TEXTS], np.arange(len(ids))[:MOST_TEXTS]):
        _, different = np.unique(rows_at(places), axis=0, return_index=True)
        if len(different) > 1:
            break
    drawn = np.random.default_rng([seed, *shape]).permutation(places[different])
    return [_with_rest(inputs, rows_at(first)) for first in np.split(np.resize(drawn, sets * batch), sets)]


def _with_rest(inputs: Sequence[str], ids: Array) -> Batch:
    rest = {name: np.full(ids.shape, int(name == MASK), dtype=np.int64) for name in inputs if name != TOKENS}
    return {TOKENS: ids.astype(np.int64)} | rest


def session_sets(session: Session, batch: int, length: int, sets: int) -> list[Batch]:
    vocabulary = int(session.fp32_model.config.vocab_size)
    return random_sets(session.plan.family.inputs, (batch, length), vocabulary, sets, session.config.seed)


class DeviceLane:
    def __init__(self, bound: Bound, sets: "Sequence[Mapping[str, torch.Tensor]]") -> None:
        import torch

        self.torch, self.bound, self.sets, self.stream = torch, bound, sets, bound.stream
        self.input_sets = len(sets)
        first = sets[0]
        for name in bound.inputs:
            bound.inputs[name].copy_(first[name])
        torch.cuda.synchronize()
        # the mask and the types are the same in all sets: copying them would only disturb
        self.varying = [n for n in bound.inputs if any(not torch.equal(first[n], s[n]) for s in sets)]

    def feed(self, number: int) -> None:
        chosen = self.sets[number % len(self.sets)]
        with self.torch.cuda.stream(self.stream):
            for name in self.varying:
                self.bound.inputs[name].copy_(chosen[name], non_blocking=True)

    def launch(self) -> None:
        self.bound.launch()

    def fetch(self) -> Float32:
        self.bound.stream.synchronize()
        return _host_logits(self.bound.outputs)


@dataclass(frozen=True)
class Step:
    bound: Bound
    inputs: "Mapping[str, torch.Tensor]"  # in pinned memory of the host
    rows: Int64  # rows of the outputs that are answers, in the order of the split; the others are copies


class SplitLane:
    """A whole split in one launch on one stream, with its copies: inputs to the GPU, outputs to the host."""

    def __init__(self, steps: Sequence[Step]) -> None:
        import torch

        self.torch, self.steps = torch, steps
        self.stream, self.input_sets = steps[0].bound.stream, 1
        self.outputs = [
            {
                name: torch.empty_like(buffer, device="cpu").pin_memory()
                for name, buffer in step.bound.outputs.items()
            }
            for step in steps
        ]

    def feed(self, number: int) -> None:
        """Do nothing: the copies are part of the work."""

    def launch(self) -> None:
        for step, outputs in zip(self.steps, self.outputs, strict=True):
            with self.torch.cuda.stream(self.stream):
                for name, buffer in step.bound.inputs.items():
                    buffer.copy_(step.inputs[name], non_blocking=True)
            step.bound.launch()
            with self.torch.cuda.stream(self.stream):
                for name, buffer in outputs.items():
                    buffer.copy_(step.bound.outputs[name], non_blocking=True)

    def fetch(self) -> Float32:
        self.stream.synchronize()
        return np.concatenate(
            [_host_logits(outputs)[step.rows] for step, outputs in zip(self.steps, self.outputs, strict=True)]
        )


def _host_logits(outputs: "Mapping[str, torch.Tensor]") -> Float32:
    return by_row(np.array(join_outputs(outputs, outputs).float().cpu().numpy()))


def by_row(answers: Float32) -> Float32:
    """Return answers [B, width]; of tokens [B, L, width] those of the first ones, whatever the length."""
    return answers[:, 0] if answers.ndim == 3 else answers


class HostLane:
    """Inference on a CPU: a function from one batch to logits, over input sets or over a whole split."""

    def __init__(self, run: Callable[[Batch], Float32], sets: Sequence[Sequence[Batch]]) -> None:
        self.run, self.sets, self.input_sets = run, sets, len(sets)
        self.batches: Sequence[Batch] = sets[0]
        self.answers: list[Float32] = []

    def feed(self, number: int) -> None:
        self.batches = self.sets[number % len(self.sets)]

    def launch(self) -> None:
        self.answers = [self.run(batch) for batch in self.batches]

    def fetch(self) -> Float32:
        return np.concatenate([by_row(answers) for answers in self.answers])


class CudaTimer:
    def __init__(self) -> None:
        import torch

        self.cuda: Any = torch.cuda

    def latencies(self, lane: Any, count: int) -> list[float]:
        """See `Timer`: device time; for a launch that the host cannot keep up with, the time it waits too."""
        pairs = [
            (self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)) for _ in range(count)
        ]
        for number, (start, end) in enumerate(pairs):
            lane.feed(number)
            start.record(lane.stream)
            lane.launch()
            end.record(lane.stream)
        lane.stream.synchronize()
        return [float(start.elapsed_time(end)) for start, end in pairs]

    def wall(self, lanes: Sequence[Lane], count: int) -> float:
        self.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            for lane in lanes:
                lane.launch()
        self.cuda.synchronize()
        return time.perf_counter() - start


def to_gpu(batch: Mapping[str, Array]) -> "dict[str, torch.Tensor]":
    import torch

    return {name: torch.from_numpy(array).cuda() for name, array in batch.items()}


def to_pinned(batch: Mapping[str, Array]) -> "dict[str, torch.Tensor]":
    """Return arrays in pinned memory of the host, from which copies to the GPU do not wait."""
    import torch

    return {name: torch.from_numpy(array).pin_memory() for name, array in batch.items()}


class WallTimer:
    """Times on the host, for lanes whose launch waits for the result; several lanes in threads of a pool."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, pool: Executor | None = None) -> None:
        self.clock, self.pool = clock, pool

    def latencies(self, lane: Lane, count: int) -> list[float]:
        times = []
        for number in range(count):
            lane.feed(number)
            start = self.clock()
            lane.launch()
            times.append(1000 * (self.clock() - start))
        return times

    def wall(self, lanes: Sequence[Lane], count: int) -> float:
        def launch(lane: Lane) -> None:
            for _ in range(count):
                lane.launch()

        start = self.clock()
        list((self.pool.map if self.pool and len(lanes) > 1 else map)(launch, lanes))
        return self.clock() - start


def gpu_uuid() -> str | None:
    import torch

    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return f"GPU-{uuid}" if uuid else None


@dataclass
class OpenEngine:
    session: Session
    result: EngineResult
    engine: Any
    lanes: dict[Shape, Lane] = field(default_factory=dict)

    def lane(self, shape: Shape) -> Lane:
        if shape not in self.lanes:
            sets, engine = session_sets(self.session, *shape, INPUT_SETS), self.engine
            if isinstance(engine, EngineRunner):
                self.lanes[shape] = HostLane(engine, [[batch] for batch in sets])
            else:
                self.lanes[shape] = DeviceLane(engine.bind(*shape), [to_gpu(batch) for batch in sets])
        return self.lanes[shape]


def measure_speedup(engine: OpenEngine, baseline: OpenEngine, shape: Shape) -> Speedup:
    """Time an engine and its baseline in interleaved rounds; CheckFailed where one gives no sound outputs."""
    session, target = engine.session, engine.session.target
    # an engine without profiles packs its tokens on the host, which belongs to its time
    timer = CudaTimer() if has_profiles(target.backend) else WallTimer()
    effort = ON_CPU if target.on_cpu else ON_GPU
    ours, theirs = (
        SystemRun(BenchRow(system=name, status="done"), name, timer, [each.lane(shape)])
        for name, each in (("int8", engine), (target.baseline, baseline))
    )
    config = f"{shape[0]} x {shape[1]}"
    for system, what in ((theirs, f"the {theirs.name.upper()} engine"), (ours, "the engine")):
        if error := read_outputs(system)[1]:
            raise CheckFailed(f"{what} gives {error} at {config}")
    bursts = measure_rounds([ours, theirs], effort)
    for system in (ours, theirs):
        system.row.round_ms = [burst.median_ms for burst in bursts[system.name]]
    return speedup_between(ours.row, theirs.row, config, session.config.seed)


@contextlib.contextmanager
def open_engine(session: Session, graph: Path, plan: Plan, stem: Path, shape: Shape) -> Iterator[OpenEngine]:
    """Build and load an engine for a (batch, length); its runtime cache stays, its other files go."""
    # each profile has kernels of its own, so those that do not take the shape only cost time to build
    known, path = engine_profiles(session), stem.with_suffix(".engine")
    with contextlib.ExitStack() as stack:
        stack.callback(sidecar_path(path).unlink, missing_ok=True)
        stack.callback(path.unlink, missing_ok=True)
        backend, compute = session.recipe.engine.backend, session.target.compute
        profiles = [known[choose_profile(known, *shape)]]
        result = build_planned(graph, plan, path, backend, profiles, compute)
        opened = OpenEngine(session, result, stack.enter_context(load_engine(session, path, graph)))
        stack.callback(opened.lanes.clear)  # lanes go before the engine that they run
        yield opened


def load_engine(session: Session, path: Path, graph: Path) -> Any:
    if not has_profiles(session.target.backend):
        return open_runner(path, graph, pad_id=0, outputs=session.config.task.kind.outputs)
    return Engine(path, graph, runtime_cache=path.with_suffix(".cache"))


def write_engine_graph(
    session: Session, model: "PreTrainedModel", recipe: Recipe, plan: Plan, path: Path
) -> Path:
    """Write the typed graph of a recipe's model: INT8, or the baseline where the plan has no INT8."""
    settings = ExportSettings.of(recipe, session.target.backend)
    write_graph(trace(model, settings.opset, session.config.task.kind.outputs), plan, settings, path)
    return path


def build_planned(  # noqa: PLR0913, PLR0917
    graph: Path,
    plan: Plan,
    path: Path,
    backend: BackendChoice,
    profiles: Sequence[Profile],
    compute: Compute,
) -> EngineResult:
    """Build the engine of a graph, which has to run in INT8 what the plan says."""
    gemms = list_expected_gemms(graph, plan)
    return build(
        graph,
        path,
        backend=backend,
        profiles=profiles,
        expected_gemms=gemms,
        expected_attention=count_attentions(gemms, plan.attention),
        layers_path=path.with_suffix(".layers.json"),
        compute=compute,
    )


@contextlib.contextmanager
def alone(*, on_cpu: bool, wait_s: float = 0.0) -> Iterator[None]:
    """Lock this GPU or CPU against other timings by qdqbench; UserError if one still runs after `wait_s`."""
    if on_cpu:
        kind, name, fix = "CPU", "cpu", "run this when it has ended, or workers on machines of their own"
    else:
        kind, name = "GPU", gpu_uuid() or "gpu"
        fix = "give each worker a GPU of its own with CUDA_VISIBLE_DEVICES"
    # one for each user: the kernel refuses the files of others in the temporary folder
    lock = FileLock(Path(tempfile.gettempdir()) / f"qdqbench-{name}-{os.getuid()}.lock", timeout=wait_s)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except Timeout as error:
            raise UserError(
                f"another process times engines on this {kind}, and both would measure each other; {fix}"
            ) from error
        except OSError as error:
            raise UserError(f"cannot lock {lock.lock_file} ({error.strerror}); remove it") from error
        yield
