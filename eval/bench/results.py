"""Schema of `bench.json`, every number of one `qdqbench bench` (documented in docs/results.md)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from qdqbench.eval.bench.loop import speedup
from qdqbench.quantize.core import files
from qdqbench.quantize.core.frames import Tabular
from qdqbench.quantize.core.speedup import Speedup
from qdqbench.quantize.core.strict import Strict, read

BENCH_FILE = "bench.json"
PEERS = ("torch-", "compile-")  # how names of PyTorch contestants begin
OURS = ("int8", "int8-exact")  # INT8 engines that a bench is about


class BenchTarget(Strict):
    """The model that was measured."""

    kind: Literal["run", "model", "shape"]  # run directory, a model folder, or a built-in shape
    name: str
    random_weights: bool  # the weights mean nothing: latency is real, accuracy is not
    calibration: str  # data that set the INT8 scales
    shape: dict[str, int]  # layers, hidden, heads, intermediate, vocabulary, parameters
    files: dict[str, str]  # ONNX file -> sha256


class BenchSettings(Strict):
    """How it was measured."""

    batches: list[int]
    lengths: list[int]
    real_lengths: str | None  # task whose lengths were measured too
    streams: list[int]
    rounds: int
    seconds: float
    repeats: int | None
    input_sets: int  # different random inputs that each contestant rotates through
    profile: Literal["both", "static", "recipe"]
    seed: int
    threads: int | None = None  # of a contestant on a CPU; null on a GPU
    how: str | None = None  # in words, where something else than this program measured
    peers_masked: bool = False  # PyTorch had the attention mask at fixed shapes too; older files had it not


class BenchContestant(Strict):
    """Something that was measured."""

    name: str
    label: str
    precision: Literal["int8", "fp16", "bf16", "fp32"]
    backend: str  # library and version
    recipe: dict[str, Any] | None = None  # of `--also`; null: the bench's own, or older than this field


class BenchThroughput(Strict):
    """Sequences per second with several inferences at once."""

    streams: int
    sequences_per_s: float  # median over rounds
    low: float  # slowest round
    high: float


class BenchKernels(Strict):
    """Kernels that one inference of a peer ran, by torch.profiler."""

    names: dict[str, int]  # launches of each, most frequent first
    fused_attention: int  # launches of kernels that compute a whole attention
    fp32_gemms: int  # launches of matrix products that are not in half precision


class BenchRow(Strict):
    """One contestant in one cell."""

    contestant: str
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
    clock_mhz: float | None = None  # medians while this contestant ran; null where nothing reads them
    power_w: float | None = None
    temperature_c: float | None = None
    rel_error: float | None = None  # of its logits, against the cell's reference
    int8_gemms: int | None = None  # of the INT8 engine, from its layer table
    expected_int8_gemms: int | None = None
    not_int8: list[str] = Field(default_factory=list)
    engine_bytes: int | None = None
    activation_bytes: int | None = None
    kernels: BenchKernels | None = None  # of a peer on a GPU; null where they were not read


class BenchCell(Strict):
    """One shape, or one task's real lengths."""

    kind: Literal["fixed", "real"]
    batch: int
    length: int | None  # tokens; null for real lengths
    sequences: int  # of one launch: the batch, or the whole split
    shapes: int  # different (batch, length) in one launch
    padded_to: list[int] = []  # tokens of a batch; of real lengths
    real_tokens: int  # without padding
    padded_tokens: int
    reference: str | None  # contestant whose logits the others are held to
    rows: list[BenchRow]
    speedups: list[Speedup]
    headline: Speedup | None = None  # fastest INT8 engine over the fastest FP16 contestant
    slow_reasons: list[str] = []  # where INT8 is slower than its FP16 twin, read from the layers
    spent_s: float | None = None  # wall time of making and measuring it


class BenchCpu(Strict):
    """The CPU of a bench on one."""

    name: str
    cores: int  # that the process may use
    features: list[str]  # instruction sets for INT8 and BF16
    load_before: float | None  # load average of the last minute; null where the system has none
    load_after: float | None


class Bench(Tabular):
    """Every number of one bench."""

    schema_version: Literal[1] = 1
    created: str
    command: str
    complete: bool  # false: interrupted, the cells that are here were finished
    device: Literal["gpu", "cpu"]
    compute_capability: str | None
    cpu: BenchCpu | None = None  # null on a GPU
    target: BenchTarget
    recipe: dict[str, Any]
    settings: BenchSettings
    contestants: list[BenchContestant]
    cells: list[BenchCell]
    notes: list[str]  # what holds for every figure: support of this GPU, known hazards
    warnings: list[str]
    errors: list[str]
    environment: dict[str, Any]
    ahead_s: float | None = None  # wall time of builds and compilations before the first cell

    def rows(self) -> Iterator[dict[str, Any]]:
        """One a contestant and shape."""
        shape = {"kind", "batch", "length", "sequences"}
        for cell in self.cells:
            yield from (cell.model_dump(include=shape) | row.model_dump() for row in cell.rows)


def read_bench(path: Path) -> Bench:
    """Read and check a `bench.json`.

    Raises:
        UserError: missing, or not of this schema.
    """
    return read(path, Bench, "bench result", "run `qdqbench bench` again")


def write_bench(path: Path, bench: Bench) -> None:
    """Write `bench.json` atomically."""
    files.write_json(path, bench.model_dump(mode="json"))


def row_of(cell: BenchCell, contestant: str) -> BenchRow | None:
    """The measured row of a contestant; None where it was not measured."""
    found = [row for row in cell.rows if row.contestant == contestant and row.status == "done"]
    return found[0] if found else None


def rate_of(cell: BenchCell, contestant: str, streams: int) -> float | None:
    """Sequences per second of a contestant at that many streams; None where it was not measured."""
    row = row_of(cell, contestant)
    rates = {each.streams: each.sequences_per_s for each in row.throughput} if row else {}
    return rates.get(streams)


def speedups(rows: Sequence[BenchRow], config: str, seed: int) -> list[Speedup]:
    """INT8 engines over each other contestant, and the others over the FP16 twin.

    By another recipe (`int8-RECIPE`, on a GPU) an engine is over each contestant without INT8, too.
    """
    done = {row.contestant: row for row in rows if row.status == "done"}
    pairs = [(own, name) for own in OURS for name in done if name not in OURS]
    more = [name for name in done if "fp16" in done and name.startswith("int8-") and name not in OURS]
    pairs += [(own, name) for own in more for name in done if not name.startswith("int8")]
    pairs += [(name, "fp16") for name in done if name not in (*OURS, *more, "fp16")] + [OURS[::-1]]
    return [
        speedup(name, over, config, done[name].round_ms, done[over].round_ms, seed)
        for name, over in pairs
        if done.keys() >= {name, over}
    ]


def speedup_of(cell: BenchCell, contestant: str, over: str) -> Speedup | None:
    """The speed-up of one contestant over another; None where one was not measured."""
    return next((s for s in cell.speedups if (s.system, s.baseline) == (contestant, over)), None)


def headline_of(contestants: Sequence[BenchContestant], cell: BenchCell) -> Speedup | None:
    """The fastest INT8 engine over the fastest FP16 contestant, whatever runs it; None without either.

    On a CPU, where nothing runs in FP16, over the fastest in BF16 or FP32.
    """
    medians = {row.contestant: row.median_ms for row in cell.rows if row.median_ms is not None}
    ours = min((name for name in OURS if name in medians), key=medians.__getitem__, default="")
    return over_fastest(contestants, cell, ours)


def over_fastest(contestants: Sequence[BenchContestant], cell: BenchCell, name: str) -> Speedup | None:
    """One INT8 contestant over the fastest in FP16, on a CPU in BF16 or FP32; None where not measured."""
    precision = {about.name: about.precision for about in contestants}
    floats = {"fp16", "bf16"} if "fp16" in precision.values() else {"bf16", "fp32"}
    found = [s for s in cell.speedups if s.system == name and precision.get(s.baseline) in floats]
    return min(found, key=lambda ratio: ratio.value, default=None)


def peer_doubt(row: BenchRow, precision: str) -> str:
    """Why a peer is not what it could be, by its kernels; empty where they are fine or were not read."""
    if row.status != "done" or row.kernels is None:
        return ""
    surplus = row.kernels.fp32_gemms if precision != "fp32" else 0
    gemms = f"{surplus} GEMMs in FP32" if surplus else ""
    if not row.kernels.fused_attention:
        return f"no fused attention kernel ran{', ' if gemms else ''}{gemms}"
    return gemms


def cell_label(cell: BenchCell, task: str | None) -> str:
    """`b32 s128`, or `b32 SST-2 lengths`."""
    return f"b{cell.batch} s{cell.length}" if cell.kind == "fixed" else f"b{cell.batch} {task} lengths"
