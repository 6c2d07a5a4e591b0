"""Schema of `compare.json`: every number of a comparison (documented in docs/compare.md)."""

from collections.abc import Iterator
from typing import Any, Literal

from qdqbench.quantize.utils.comparison import Comparison, GateCode, GateState
from qdqbench.quantize.utils.schema import Strict, Tabular
from qdqbench.quantize.utils.speedup import Speedup


class RunLatency(Strict):
    """The INT8 of a run in one config of its bench."""

    config: str
    """Config of the bench, such as `b32 s128`."""
    system: str
    """Name of the fastest INT8 engine."""
    median_ms: float
    """Latency in ms: median over rounds of the rounds' medians."""
    speedup: Speedup | None
    """Speed-up over the fastest system without INT8; null if none was measured."""


class ComparedRun(Strict):
    """One run, as its own results have it."""

    name: str
    """Last parts of its path that make the name unique."""
    folder: str
    """Path of the run directory as given."""
    model: str
    """Name of the model."""
    recipe: str
    """Name of the recipe."""
    task: str
    """Name of the task."""
    stage: str
    """Stage nearest to deployment that was scored, whose predictions are compared."""
    n: int
    """Number of samples that it scored."""
    metrics: dict[str, float]
    """Metrics of that stage, the primary one first."""
    stderr: dict[str, float]
    """Standard errors of the metrics, where known."""
    fp32: dict[str, float]
    """Metrics of the run's own FP32."""
    vs_fp32: Comparison | None
    """Comparison with the run's own FP32; null if they were not compared."""
    backend: str | None
    """Backend of the engine; null if none was built."""
    int8: int | None
    """Matrix products that the engine runs in INT8; null without one."""
    expected_int8: int | None
    """Matrix products that the recipe puts in INT8; null without an engine."""
    planned_int8: int
    """Linear layers that the recipe puts in INT8."""
    onnx_bytes: int | None
    """Size in bytes of the quantized ONNX file, or of the FP16 graph if nothing is quantized; null without
    a file."""
    engine_bytes: int | None
    """Size of the engine in bytes; null without one."""
    gate: GateState
    """State of the gate."""
    failures: list[GateCode]
    """Codes of the gate's failed checks."""
    warnings: list[str]
    """Warnings of its `results.json`."""
    device: str | None
    """Device of its bench; null without one, or if its files changed since."""
    latency: list[RunLatency]
    """Latency by config of its bench."""


class Pair(Strict):
    """Two runs on the same samples: the second against the first."""

    first: str
    """Name of the run that is the baseline."""
    second: str
    """Name of the run that is compared with it."""
    not_paired: str | None = None
    """Reason why they cannot be paired: another task, other samples; null if they are."""
    comparison: Comparison | None = None
    """Second run minus the first on the same samples; null if they are not paired."""


class SamplePrediction(Strict):
    """What one model answered to a sample."""

    prediction: str
    """Class, score or text."""
    margin: float | None
    """Probability of the class minus that of the next; null without competing classes."""
    right: bool | None
    """True if it agrees with the label; null if predictions are neither right nor wrong."""


class ComparedSample(Strict):
    """A sample with different answers, or scores that differ most."""

    task: str
    """Name of the task."""
    sample: int
    """Row of the evaluation split, or number of the sample if it has several rows."""
    text: str | None
    """Text of the sample; null if the data were not found."""
    label: str | None
    """Label in words; null for a task without labels."""
    predictions: dict[str, SamplePrediction]
    """Predictions by run; those of FP32 as `FP32`, or `FP32 of NAME` if the runs have different models."""
    distance: float
    """Divergence of the two predictions that differ most."""


class ComparedLayer(Strict):
    """A quantizer, linear or block beside itself in other runs."""

    what: Literal["amax", "output error", "block error"]
    """Quantity: amax of a quantizer, output error of a linear layer, output error of a block."""
    name: str
    """Name of the quantizer, linear layer or block."""
    values: dict[str, float | None]
    """Values by run; null if the run has none, or if it is not a number."""


class RunComparison(Tabular):
    """A whole comparison."""

    schema_version: Literal[2] = 2
    """Version of this schema."""
    created: str
    """Time of the end, ISO 8601, UTC."""
    command: str
    """Command line."""
    runs: list[ComparedRun]
    """Runs, in the order given."""
    pairs: list[Pair]
    """Each pair of runs."""
    samples: list[ComparedSample]
    """Samples with different predictions, or whose scores differ most."""
    sample_count: int
    """Number of such samples before the list was cut."""
    layers: list[ComparedLayer]
    """Quantizers, linear layers and blocks of several runs."""
    notes: list[str]
    """Parts that could not be compared, with the reason."""

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
