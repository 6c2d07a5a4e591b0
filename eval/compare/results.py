"""Schema of `compare.json`: every number of a comparison (documented in docs/compare.md)."""

from collections.abc import Iterator
from typing import Any, Literal

from qdqbench.quantize.core.comparison import GateCode, GateState
from qdqbench.quantize.core.frames import Tabular
from qdqbench.quantize.core.strict import Strict


class Latency(Strict):
    """The INT8 of a run in one cell of its bench."""

    cell: str  # b32 s128
    contestant: str
    median_ms: float
    over: str | None  # the fastest contestant that is not INT8; None where none was measured
    speedup: float | None  # over it
    low: float | None  # 95 % interval
    high: float | None


class ComparedRun(Strict):
    """One run, as its own results have it."""

    name: str  # unique among those that are compared
    folder: str
    model: str
    recipe: str
    task: str
    stage: str  # the measured stage nearest to deployment, whose answers are compared
    n: int
    metrics: dict[str, float]  # of that stage; the primary metric comes first
    stderr: dict[str, float]
    fp32: dict[str, float]
    delta: dict[str, float]  # from its own FP32
    delta_stderr: dict[str, float]
    backend: str | None  # of the engine; None: none was built
    int8: int | None  # matrix products in INT8 in the engine
    expected_int8: int | None
    planned_int8: int  # linears
    onnx_bytes: int | None  # of the quantized file, or of the FP16 twin where nothing is quantized
    engine_bytes: int | None
    gate: GateState
    failures: list[GateCode]
    warnings: list[str]
    device: str | None  # of the bench
    latency: list[Latency]


class Pair(Strict):
    """Two runs on the same samples: the second against the first."""

    first: str
    second: str
    not_paired: str | None  # why they cannot be: other task, other samples
    delta: dict[str, float] = {}  # second minus first, by metric
    delta_stderr: dict[str, float] = {}  # paired bootstrap
    n: int = 0
    disagreements: int | None = None  # None for scores
    mcnemar_p: float | None = None
    within_noise: bool | None = None


class SampleAnswer(Strict):
    """What one model answered to a sample."""

    answer: str
    margin: float | None  # probability of its class less that of the next; None where no classes compete
    right: bool | None


class ComparedSample(Strict):
    """A sample with different answers, or scores that differ most."""

    task: str
    sample: int  # row of the evaluation split, or number of the sample where it has several rows
    text: str | None  # None: the data was not found any more
    label: str | None
    answers: dict[str, SampleAnswer]  # by run, and of FP32 under "FP32" or "FP32 of MODEL"
    distance: float  # the kind's divergence between the two answers that differ most


class ComparedLayer(Strict):
    """A quantizer, linear or block beside itself in other runs."""

    what: Literal["amax", "output error", "block error"]
    name: str
    values: dict[str, float | None]  # by run; None: it has none there, or it is not a number


class Compared(Tabular):
    """A whole comparison."""

    schema_version: Literal[1] = 1
    created: str
    command: str
    runs: list[ComparedRun]
    pairs: list[Pair]
    samples: list[ComparedSample]
    samples_found: int  # before the longest list that is kept
    layers: list[ComparedLayer]
    notes: list[str]  # what could not be compared, and why

    def rows(self) -> Iterator[dict[str, Any]]:
        """One a run."""
        for run in self.runs:
            flat = run.model_dump(exclude={"metrics", "stderr", "fp32", "delta", "delta_stderr", "latency"})
            metric = next(iter(run.metrics))
            yield (
                flat
                | {
                    "metric": metric,
                    "value": run.metrics[metric],
                    "stderr": run.stderr.get(metric),
                    "fp32": run.fp32.get(metric),
                    "delta": run.delta.get(metric),
                    "delta_stderr": run.delta_stderr.get(metric),
                }
                | {f"ms at {each.cell}": each.median_ms for each in run.latency}
            )
