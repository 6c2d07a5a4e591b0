"""Schema of `bench.json`, every number of one `qdqbench bench` (documented in docs/reference/results.md)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qdqbench.eval.metrics.results import Conditions, Ratio, Speedup
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import TENSORRT
from qdqbench.quantize.utils.schema import Strict, Tabular, field, read

BENCH_FILE = "bench.json"
ROUND_RESAMPLES = 2000
LEAST_ROUNDS = 5  # a bootstrap of fewer holds much less often than 95% of the time
OURS = ("int8", "int8-exact")  # INT8 engines that a bench is about
# those of TensorRT where the bench is about kernels of backend cuda; else these are `int8-cuda`
TENSORRT_SYSTEMS = [f"int8-{name}{shapes}" for name in TENSORRT for shapes in ("", "-exact")]
OF_RECIPE = (*OURS, "int8-cuda", *TENSORRT_SYSTEMS)  # INT8 engines of the recipe, by any backend
Device = Literal["gpu", "cpu"]
Shape = tuple[int, int]  # batch, length
Precision = Literal["int8", "fp8", "fp16", "bf16", "fp32"]
EngineShapes = Literal["both", "exact", "recipe"]


class BenchTarget(Strict):
    """The model that was measured."""

    kind: Literal["run", "model", "shape"] = field("Run directory, model folder, or built-in shape.")
    name: str = field("Name of the model.")
    random_weights: bool = field("True for a built-in shape, whose accuracy means nothing.")
    calibration: str = field("Data that set the INT8 scales.")
    shape: dict[str, int] = field("Layers, hidden, heads, intermediate, vocabulary, positions, parameters.")
    files: dict[str, str] = field("SHA-256 of each ONNX file.")


class BenchSettings(Strict):
    """Settings of the measurement."""

    batches: list[int] = field("Batch sizes in sequences.")
    lengths: list[int] = field("Sequence lengths in tokens.")
    dataset: str | None = field("Task whose evaluation split was timed too; null without one.")
    streams: list[int] = field("Numbers of concurrent inferences; on a CPU they share the threads.")
    rounds: int = field("Number of interleaved rounds.")
    duration_s: float = field("Time of latency inferences per system and config in seconds, over all rounds.")
    iterations: int | None = field("Inferences per round; null: as many as `duration_s` takes.")
    input_sets: int = field("Number of inputs of a fixed shape that each system rotates through.")
    inputs: str | None = field(
        "What they are: texts of the split that a run calibrates on, or random token ids; null without one.",
        default=None,
    )
    engine_shapes: EngineShapes = field(
        "Shapes of the engines: those of the recipe, the exact one of each config, or both."
    )
    seed: int = field("Seed of random weights, inputs and bootstrap.")
    threads: int | None = field("Threads of each system on a CPU; null on a GPU.", default=None)
    cost_per_hour: float | None = field(
        "Price of the machine an hour, of which the report makes the cost of a million texts; null without.",
        default=None,
    )
    quick: bool = field("True for the bench that ends a run: its own engine and one twin.", default=False)
    shapes: list[Shape] = field(
        "Batch and length of each shape, in place of all batches at all lengths; empty without.", default=[]
    )


class BenchSystem(Strict):
    """Something that was measured: an engine, PyTorch, another quantizer."""

    name: str = field("Unique short name, such as `int8`, `fp16`, `torch`.")
    label: str = field("Name in reports.")
    precision: Precision = field("Compute precision.")
    backend: str = field("Library and version.")
    recipe: dict[str, Any] | None = field(
        "Recipe of `--extra-recipe`; null for the bench's own.", default=None
    )


class BenchThroughput(Strict):
    """Sequences per second with several inferences at once."""

    streams: int = field(
        "Concurrent inferences: on a GPU each with its own buffers and CUDA stream, on a CPU each called by "
        "a thread of its own."
    )
    sequences_per_s: float = field("Sequences per second of wall time, median over rounds.")
    low: float = field("Sequences per second of the slowest round.")
    high: float = field("Sequences per second of the fastest round.")


class BenchKernels(Strict):
    """Kernels that one inference of PyTorch or of backend cuda ran, by torch.profiler."""

    names: dict[str, int] = field(
        "Launches of each kernel, most frequent first, names cut at 160 characters."
    )
    fused_attention: int = field(
        "Launches of kernels that compute a whole attention, by their names (flash-attention, CUTLASS "
        "memory-efficient, cuDNN, Inductor's flex attention, those of backend cuda)."
    )
    fp32_gemms: int = field(
        "Launches of matrix products of cuBLAS and CUTLASS that name neither FP16, BF16 nor INT8."
    )


class BenchRow(Strict):
    """One system in one config."""

    system: str = field("Name of the system.")
    status: Literal["done", "error", "skipped"] = field("`done`; `error` or `skipped`, without numbers.")
    reason: str | None = field("Reason of an error or skip; null if done.", default=None)
    detail: str | None = field(
        "Execution mode: CUDA graph, compile mode, attention mask, profile; null if it did not run.",
        default=None,
    )
    launches: int = field("Timed inferences over all rounds.", default=0)
    median_ms: float | None = field(
        "Latency in ms: median over rounds of the rounds' medians; null unless done.", default=None
    )
    p50_ms: float | None = field("Median latency of all inferences in ms; null unless done.", default=None)
    p90_ms: float | None = field("90th percentile of the latency in ms; null unless done.", default=None)
    p99_ms: float | None = field(
        "99th percentile of the latency in ms; null below 100 inferences.", default=None
    )
    round_ms: list[float] = field("Median latency of each round in ms.", default=[])
    round_cpu_ms: list[float] = field(
        "CPU time of all threads per inference in ms by round; empty on a GPU.", default=[]
    )
    cpu_ms: float | None = field(
        "CPU time of all threads per inference in ms, median over rounds; null on a GPU.", default=None
    )
    sequences_per_s: float | None = field(
        "Sequences per second of consecutive inferences (sequences / `median_ms`); null unless done.",
        default=None,
    )
    throughput: list[BenchThroughput] = field(
        "Throughput by number of concurrent inferences; empty for dataset sequence lengths.", default=[]
    )
    clock_mhz: float | None = field(
        "Median SM clock in MHz while this system ran; null if not read.", default=None
    )
    power_w: float | None = field(
        "Median power draw in W while this system ran; null if not read.", default=None
    )
    temperature_c: float | None = field(
        "Median GPU temperature in degrees Celsius while this system ran; null if not read.", default=None
    )
    rel_error: float | None = field(
        "Relative error of its logits against the reference (norm of the difference / norm of the "
        "reference); null for the reference.",
        default=None,
    )
    int8_gemms: int | None = field(
        "MatMul and Gemm nodes in INT8 by the layer table of an INT8 engine; null for other systems.",
        default=None,
    )
    expected_int8_gemms: int | None = field(
        "MatMul and Gemm nodes that the recipe puts in INT8; null for other systems.", default=None
    )
    not_int8: list[str] = field(
        "Nodes that the recipe puts in INT8 and the engine runs in another precision.", default=[]
    )
    engine_bytes: int | None = field("Size of the engine in bytes; null without one.", default=None)
    activation_bytes: int | None = field(
        "Device memory of one execution context in bytes; null if not known.", default=None
    )
    kernels: BenchKernels | None = field(
        "Kernels of PyTorch or backend cuda on a GPU; null if not read.", default=None
    )

    @property
    def in_best_form(self) -> bool:
        return self.kernels is None or self.kernels.fused_attention > 0

    def fp32_gemms(self, precision: str) -> int:
        return self.kernels.fp32_gemms if self.kernels and precision != "fp32" else 0


class BenchConfig(Strict):
    """One shape, or one task's evaluation split at one batch size."""

    kind: Literal["fixed", "dataset"] = field("One shape, or the evaluation split of a task.")
    batch: int = field("Batch size in sequences.")
    length: int | None = field("Sequence length in tokens; null for a dataset.")
    sequences: int = field("Sequences per inference: the batch, or the whole split.")
    shapes: int = field("Number of different shapes (batch, length) per inference.")
    padded_to: list[int] = field("Padded length in tokens of each batch of a dataset.", default=[])
    real_tokens: int = field("Tokens without padding.")
    padded_tokens: int = field("Tokens with padding.")
    reference: str | None = field("System whose logits the others are checked against; null without one.")
    rows: list[BenchRow] = field("Measurements by system.")
    speedups: list[Speedup] = field("Speed-ups between systems.")
    headline: Speedup | None = field(
        "Fastest INT8 engine over the fastest system without INT8; null without either.", default=None
    )
    slow_reasons: list[str] = field(
        "Reasons from the layer tables why INT8 is slower than its FP16 engine; empty where it is not.",
        default=[],
    )
    elapsed_s: float | None = field(
        "Wall time of preparing and measuring this config in seconds; null if not known.", default=None
    )
    other_cores: float | None = field(
        "Cores that other processes took while it was timed, in the mean; null on a GPU or if not known.",
        default=None,
    )


class BenchCpu(Strict):
    """The CPU of a bench on one."""

    name: str = field("Name of the CPU.")
    cores: int = field("Cores that the process may use.")
    features: list[str] = field(
        "Instruction sets for INT8 and BF16, as Linux names them; empty if not known."
    )
    load_before: float | None = field(
        "Load average of the last minute before the first config; null if not known."
    )
    load_after: float | None = field(
        "Load average of the last minute after the last config, the bench itself included; null if not known."
    )


class Bench(Tabular):
    """Every number of one bench."""

    schema_version: Literal[2] = field("Version of this schema.", default=2)
    created: str = field("Time of the end, ISO 8601, UTC.")
    command: str = field("Command line.")
    complete: bool = field("False if it was interrupted; the configs in the file are finished.")
    device: Device = field("Device of the measurement.")
    compute_capability: str | None = field("Compute capability of the GPU; null on a CPU.")
    cpu: BenchCpu | None = field("CPU of the measurement; null on a GPU.", default=None)
    target: BenchTarget = field("Model that was measured.")
    recipe: dict[str, Any] = field("Recipe with every default filled in.")
    settings: BenchSettings = field("Settings of the measurement.")
    systems: list[BenchSystem] = field("Systems that were measured.")
    configs: list[BenchConfig] = field("Measurements by config.")
    notes: list[str] = field(
        "Notes on all figures: random weights, a GPU without official support, known hazards of the version."
    )
    warnings: list[str] = field("Missing figures: baselines that did not run, clocks that were not read.")
    errors: list[str] = field("Systems that failed or were wrong; they make the exit status 2.")
    environment: dict[str, Any] = field("Versions of the libraries, hardware, driver, git hash.")
    prepare_s: float | None = field(
        "Wall time of builds and compilations before the first config in seconds; null if not known.",
        default=None,
    )
    earlier: list["Bench"] = field("Benches of the same files before this one, the latest first.", default=[])

    def facts(self) -> dict[str, Any]:
        """Return what a notebook shows of it."""
        best = [each.headline for each in self.configs if each.headline]
        speed = {row.config: f"{row.leading.value:.2f}x over {row.baseline}" for row in best}
        return {"device": self.device, "systems": len(self.systems), **speed, "errors": len(self.errors)}

    @property
    def labels(self) -> dict[str, str]:
        return {system.name: system.label for system in self.systems}

    @property
    def all(self) -> list["Bench"]:
        """This bench and those before it."""
        return [self, *self.earlier]

    def rows(self) -> Iterator[dict[str, Any]]:
        shape = {"kind", "batch", "length", "sequences"}
        for config in self.configs:
            yield from (config.model_dump(include=shape) | row.model_dump() for row in config.rows)


def read_bench(path: Path) -> Bench:
    return read(path, Bench, "bench result", "run `qdqbench bench` again")


def write_bench(path: Path, bench: Bench) -> None:
    files.write_json(path, bench.model_dump(mode="json"))


def is_of(bench: Bench, recipe: Mapping[str, Any]) -> bool:
    """Return whether a bench has the backend and compute type of a recipe; its graph the hashes tell."""
    parts = (("engine", "backend"), ("precision", "compute"))
    return all(bench.recipe.get(part, {}).get(name) == recipe[part][name] for part, name in parts)


def read_earlier(path: Path, measured: Mapping[str, str], recipe: Mapping[str, Any]) -> list[Bench]:
    """Return the benches in a file that are of the same files as a new one, by their SHA-256, and recipe."""
    try:
        known = read_bench(path).all if path.is_file() else []
    except UserError:  # of another version
        return []
    same = [bench for bench in known if bench.target.files == measured and is_of(bench, recipe)]
    kept = [bench for bench in same if bench.configs]
    return [bench.model_copy(update={"earlier": []}) for bench in kept]


def row_of(config: BenchConfig, system: str) -> BenchRow | None:
    return next((row for row in config.rows if row.system == system and row.status == "done"), None)


def rate_of(config: BenchConfig, system: str, streams: int) -> float | None:
    row = row_of(config, system)
    rates = {each.streams: each.sequences_per_s for each in row.throughput} if row else {}
    return rates.get(streams)


def cost_of(config: BenchConfig, system: str, per_hour: float) -> float | None:
    """Return what a million texts cost at the highest rate that a system reached in a config."""
    if (row := row_of(config, system)) is None:
        return None
    rates = [row.sequences_per_s or 0.0, *(each.sequences_per_s for each in row.throughput)]
    return per_hour / 3600 / max(rates) * 1e6 if max(rates) else None


def compare_rounds(system: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Ratio:
    """Return the ratio of the medians of rounds (milliseconds), with 95% by paired bootstrap over rounds."""
    own, base = np.asarray(system), np.asarray(baseline)
    own_ms, base_ms = float(np.median(own)), float(np.median(base))
    value, low, high = base_ms / own_ms, None, None
    if len(base) >= LEAST_ROUNDS:
        rows = np.random.default_rng(seed).integers(0, len(base), (ROUND_RESAMPLES, len(base)))
        ratios = np.median(base[rows], axis=1) / np.median(own[rows], axis=1)
        # the value is the estimate: an interval of a few rounds must not exclude it by interpolation
        low, high = (float(edge) for edge in np.percentile(ratios, [2.5, 97.5]))
        low, high = min(low, value), max(high, value)
    return Ratio(value=value, ci95_low=low, ci95_high=high, system_ms=own_ms, baseline_ms=base_ms)


def compute_speedups(
    rows: Sequence[BenchRow], config: str, seed: int, other_cores: float | None = None
) -> list[Speedup]:
    """Return INT8 over all others, these over the FP16 engine, and other recipes over what is not INT8."""
    done = {row.system: row for row in rows if row.status == "done"}
    pairs = [(own, name) for own in OURS for name in done if name not in OURS]
    others = (name for name in done if name.startswith("int8-") and name not in OURS)
    more = [name for name in others if {"fp16", "unpadded-fp16"} & done.keys() or name in OF_RECIPE]
    pairs += [(own, name) for own in more for name in done if not name.startswith("int8")]
    pairs += [(name, "fp16") for name in done if name not in (*OURS, *more, "fp16")] + [OURS[::-1]]
    return [
        speedup_between(done[system], done[baseline], config, seed, other_cores)
        for system, baseline in pairs
        if done.keys() >= {system, baseline}
    ]


def speedup_between(
    own: BenchRow, base: BenchRow, config: str, seed: int, other_cores: float | None = None
) -> Speedup:
    wall = compare_rounds(own.round_ms, base.round_ms, seed)
    times = own.round_cpu_ms, base.round_cpu_ms
    return Speedup(
        **wall.model_dump(),
        system=own.system,
        baseline=base.system,
        config=config,
        cpu=compare_rounds(*times, seed) if all(map(all, times)) and all(times) else None,
        other_cores=other_cores,
    )


def speedup_of(config: BenchConfig, system: str, baseline: str) -> Speedup | None:
    return next((s for s in config.speedups if (s.system, s.baseline) == (system, baseline)), None)


def headline_of(
    systems: Sequence[BenchSystem], config: BenchConfig, engines: Sequence[str] = OF_RECIPE
) -> Speedup | None:
    """Return the fastest of the recipe's engines, of any backend, over the fastest system without INT8."""
    medians = {row.system: row.median_ms for row in config.rows if row.median_ms is not None}
    ours = min((name for name in engines if name in medians), key=medians.__getitem__, default="")
    return over_fastest(systems, config, ours)


def over_fastest(systems: Sequence[BenchSystem], config: BenchConfig, name: str) -> Speedup | None:
    floats = {system.name for system in systems if system.precision != "int8"}
    ratios = [s for s in config.speedups if s.system == name and s.baseline in floats]
    return min(ratios, key=lambda ratio: ratio.leading.value, default=None)


def config_label(config: BenchConfig, task: str | None) -> str:
    if config.kind == "fixed":
        return f"{config.batch} x {config.length}"
    return f"{config.batch} x {task} lengths"


def list_speed(bench: Bench, engines: Sequence[str] = OF_RECIPE) -> Iterator[Speedup]:
    """Yield the headline of each config with labels and conditions; also those of earlier benches.

    What is proven and deployed are `OURS`, so a run is judged by these alone.
    """
    for each in bench.all:
        machine = each.environment.get("cpu" if each.device == "cpu" else "gpu")
        conditions = Conditions(
            created=each.created,
            command=each.command,
            machine=str(machine or "unknown"),
            threads=each.settings.threads,
            rounds=each.settings.rounds,
            load_before=each.cpu.load_before if each.cpu else None,
        )
        more = {"quick": each.settings.quick, "conditions": conditions}
        for config in each.configs:
            if (best := headline_of(each.systems, config, engines)) is not None:
                names = {"system": each.labels[best.system], "baseline": each.labels[best.baseline]}
                yield best.model_copy(update=names | more)
