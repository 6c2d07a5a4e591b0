"""Schema of `bench.json`, every number of one `qdqbench bench` (documented in docs/results.md)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from qdqbench.eval.bench.rounds import compare_rounds
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.frames import Tabular
from qdqbench.quantize.utils.schema import Strict, read
from qdqbench.quantize.utils.speedup import Speedup

BENCH_FILE = "bench.json"
OURS = ("int8", "int8-exact")  # INT8 engines that a bench is about
Device = Literal["gpu", "cpu"]
Precision = Literal["int8", "fp16", "bf16", "fp32"]
EngineShapes = Literal["both", "exact", "recipe"]


class BenchTarget(Strict):
    """The model that was measured."""

    kind: Literal["run", "model", "shape"]  # run directory, a model folder, or a built-in shape
    name: str
    random_weights: bool  # the weights mean nothing: latency is real, accuracy is not
    calibration: str  # data that set the INT8 scales
    shape: dict[str, int]  # layers, hidden, heads, intermediate, vocabulary, parameters
    files: dict[str, str]  # ONNX file -> sha256


class BenchSettings(Strict):
    """Settings of the measurement."""

    batches: list[int]
    lengths: list[int]
    dataset: str | None  # task whose evaluation split was timed too
    streams: list[int]
    rounds: int
    duration_s: float
    iterations: int | None
    input_sets: int  # different random inputs that each system rotates through
    engine_shapes: EngineShapes
    seed: int
    threads: int | None = None  # of a system on a CPU; null on a GPU


class BenchSystem(Strict):
    """Something that was measured: an engine, PyTorch, another quantizer."""

    name: str
    label: str
    precision: Precision
    backend: str  # library and version
    recipe: dict[str, Any] | None = None  # of `--extra-recipe`; null: the bench's own


class BenchThroughput(Strict):
    """Sequences per second with several inferences at once."""

    streams: int
    sequences_per_s: float  # median over rounds
    low: float  # slowest round
    high: float


class BenchKernels(Strict):
    """Kernels that one inference of a PyTorch baseline ran, by torch.profiler."""

    names: dict[str, int]  # launches of each, most frequent first
    fused_attention: int  # launches of kernels that compute a whole attention
    fp32_gemms: int  # launches of matrix products that are not in half precision


class BenchRow(Strict):
    """One system in one config."""

    system: str
    status: Literal["done", "error", "skipped"]
    reason: str | None = None  # of an error, or why it was skipped
    detail: str | None = None  # how it ran: CUDA graph, compile mode, attention mask
    launches: int = 0
    median_ms: float | None = None  # median over rounds of the rounds' medians
    p50_ms: float | None = None  # of all launches
    p90_ms: float | None = None
    p99_ms: float | None = None  # null below 100 launches
    round_ms: list[float] = Field(default_factory=list)
    cpu_ms: float | None = None  # CPU time of all threads of one launch, median over rounds; on a CPU only
    sequences_per_s: float | None = None  # of one inference after the other: sequences / median_ms
    throughput: list[BenchThroughput] = Field(default_factory=list)
    clock_mhz: float | None = None  # medians while this system ran; null where nothing reads them
    power_w: float | None = None
    temperature_c: float | None = None
    rel_error: float | None = None  # of its logits, against the config's reference
    int8_gemms: int | None = None  # of the INT8 engine, from its layer table
    expected_int8_gemms: int | None = None
    not_int8: list[str] = Field(default_factory=list)
    engine_bytes: int | None = None
    activation_bytes: int | None = None
    kernels: BenchKernels | None = None  # of PyTorch on a GPU; null where they were not read

    @property
    def in_best_form(self) -> bool:
        """Return whether its kernels fuse attention, as far as they were read."""
        return self.kernels is None or self.kernels.fused_attention > 0

    def fp32_gemms(self, precision: str) -> int:
        """Return how many products a system of a precision below FP32 ran in FP32."""
        return self.kernels.fp32_gemms if self.kernels and precision != "fp32" else 0


class BenchConfig(Strict):
    """One shape, or one task's evaluation split at one batch size."""

    kind: Literal["fixed", "dataset"]
    batch: int
    length: int | None  # tokens; null for a data set
    sequences: int  # of one launch: the batch, or the whole split
    shapes: int  # different (batch, length) in one launch
    padded_to: list[int] = []  # tokens of a batch; of a data set
    real_tokens: int  # without padding
    padded_tokens: int
    reference: str | None  # system whose logits the others are checked against
    rows: list[BenchRow]
    speedups: list[Speedup]
    headline: Speedup | None = None  # fastest INT8 engine over the fastest system without INT8
    slow_reasons: list[str] = []  # where INT8 is slower than its FP16 engine, read from the layers
    elapsed_s: float | None = None  # wall time of preparing and measuring it


class BenchCpu(Strict):
    """The CPU of a bench on one."""

    name: str
    cores: int  # that the process may use
    features: list[str]  # instruction sets for INT8 and BF16
    load_before: float | None  # load average of the last minute; null where the system has none
    load_after: float | None


class Bench(Tabular):
    """Every number of one bench."""

    schema_version: Literal[2] = 2
    created: str
    command: str
    complete: bool  # false: interrupted, the configs that are here were finished
    device: Device
    compute_capability: str | None
    cpu: BenchCpu | None = None  # null on a GPU
    target: BenchTarget
    recipe: dict[str, Any]
    settings: BenchSettings
    systems: list[BenchSystem]
    configs: list[BenchConfig]
    notes: list[str]  # what holds for every figure: support of this GPU, known hazards
    warnings: list[str]
    errors: list[str]
    environment: dict[str, Any]
    prepare_s: float | None = None  # wall time of builds and compilations before the first config

    @property
    def labels(self) -> dict[str, str]:
        """Return what systems are called, by name."""
        return {system.name: system.label for system in self.systems}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row a system and config."""
        shape = {"kind", "batch", "length", "sequences"}
        for config in self.configs:
            yield from (config.model_dump(include=shape) | row.model_dump() for row in config.rows)


def read_bench(path: Path) -> Bench:
    """Read and check a `bench.json`.

    Raises:
        UserError: missing, or not of this schema.
    """
    return read(path, Bench, "bench result", "run `qdqbench bench` again")


def write_bench(path: Path, bench: Bench) -> None:
    """Write `bench.json` atomically."""
    files.write_json(path, bench.model_dump(mode="json"))


def row_of(config: BenchConfig, system: str) -> BenchRow | None:
    """Return the measured row of a system; None where it was not measured."""
    return next((row for row in config.rows if row.system == system and row.status == "done"), None)


def rate_of(config: BenchConfig, system: str, streams: int) -> float | None:
    """Return sequences per second of a system at that many streams; None where it was not measured."""
    row = row_of(config, system)
    rates = {each.streams: each.sequences_per_s for each in row.throughput} if row else {}
    return rates.get(streams)


def compute_speedups(rows: Sequence[BenchRow], config: str, seed: int) -> list[Speedup]:
    """Return INT8 engines over each other system, and the others over the FP16 engine.

    By another recipe (`int8-RECIPE`, on a GPU) an engine is over each system without INT8, too.
    """
    done = {row.system: row for row in rows if row.status == "done"}
    pairs = [(own, name) for own in OURS for name in done if name not in OURS]
    more = [name for name in done if "fp16" in done and name.startswith("int8-") and name not in OURS]
    pairs += [(own, name) for own in more for name in done if not name.startswith("int8")]
    pairs += [(name, "fp16") for name in done if name not in (*OURS, *more, "fp16")] + [OURS[::-1]]
    return [
        compare_rounds(system, baseline, config, done[system].round_ms, done[baseline].round_ms, seed)
        for system, baseline in pairs
        if done.keys() >= {system, baseline}
    ]


def speedup_of(config: BenchConfig, system: str, baseline: str) -> Speedup | None:
    """Return the speed-up of one system over another; None where one was not measured."""
    return next((s for s in config.speedups if (s.system, s.baseline) == (system, baseline)), None)


def headline_of(systems: Sequence[BenchSystem], config: BenchConfig) -> Speedup | None:
    """Return the fastest INT8 engine over the fastest system without INT8; None without either.

    It is what `min_speedup` of a gate is checked against.
    """
    medians = {row.system: row.median_ms for row in config.rows if row.median_ms is not None}
    ours = min((name for name in OURS if name in medians), key=medians.__getitem__, default="")
    return over_fastest(systems, config, ours)


def over_fastest(systems: Sequence[BenchSystem], config: BenchConfig, name: str) -> Speedup | None:
    """Return one INT8 system over the fastest without INT8; None where not measured."""
    floats = {system.name for system in systems if system.precision != "int8"}
    ratios = [s for s in config.speedups if s.system == name and s.baseline in floats]
    return min(ratios, key=lambda ratio: ratio.value, default=None)


def config_label(config: BenchConfig, task: str | None) -> str:
    """Return `b32 s128`, or `b32 SST-2 lengths`."""
    if config.kind == "fixed":
        return f"b{config.batch} s{config.length}"
    return f"b{config.batch} {task} lengths"
