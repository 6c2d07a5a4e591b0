"""Schema of `compare.json`: every number of a comparison (documented in docs/compare.md)."""

from collections.abc import Iterator
from typing import Any, Literal

from qdqbench.quantize.utils.comparison import Comparison, GateCode, GateState
from qdqbench.quantize.utils.frames import Tabular
from qdqbench.quantize.utils.schema import Strict
from qdqbench.quantize.utils.speedup import Speedup


class RunLatency(Strict):
    """The INT8 of a run in one config of its bench."""

    config: str  # b32 s128
    system: str
    median_ms: float
    speedup: Speedup | None  # over the fastest system that is not INT8; None where none was measured


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
    vs_fp32: Comparison | None  # its own FP32; None where they were not compared
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
    latency: list[RunLatency]


class Pair(Strict):
    """Two runs on the same samples: the second against the first."""

    first: str
    second: str
    not_paired: str | None = None  # why they cannot be: other task, other samples
    comparison: Comparison | None = None  # None where they are not paired


class SamplePrediction(Strict):
    """What one model answered to a sample."""

    prediction: str
    margin: float | None  # probability of its class less that of the next; None where no classes compete
    right: bool | None


class ComparedSample(Strict):
    """A sample with different answers, or scores that differ most."""

    task: str
    sample: int  # row of the evaluation split, or number of the sample where it has several rows
    text: str | None  # None: the data was not found any more
    label: str | None
    predictions: dict[str, SamplePrediction]  # by run, and of FP32 under "FP32" or "FP32 of MODEL"
    distance: float  # the kind's divergence between the two answers that differ most


class ComparedLayer(Strict):
    """A quantizer, linear or block beside itself in other runs."""

    what: Literal["amax", "output error", "block error"]
    name: str
    values: dict[str, float | None]  # by run; None: it has none there, or it is not a number


class RunComparison(Tabular):
    """A whole comparison."""

    schema_version: Literal[1] = 1
    created: str
    command: str
    runs: list[ComparedRun]
    pairs: list[Pair]
    samples: list[ComparedSample]
    sample_count: int  # before the longest list that is kept
    layers: list[ComparedLayer]
    notes: list[str]  # what could not be compared, and why

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row for each run."""
        for run in self.runs:
            flat = run.model_dump(exclude={"metrics", "stderr", "fp32", "vs_fp32", "latency"})
            metric, versus = next(iter(run.metrics)), run.vs_fp32
            yield (
                flat
                | {
                    "metric": metric,
                    "value": run.metrics[metric],
                    "stderr": run.stderr.get(metric),
                    "fp32": run.fp32.get(metric),
                    "delta": versus.delta.get(metric) if versus else None,
                    "delta_stderr": versus.delta_stderr.get(metric) if versus else None,
                }
                | {f"ms at {each.config}": each.median_ms for each in run.latency}
            )
