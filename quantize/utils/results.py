"""Schema of `results.json`, the one file that holds every number of a run (documented in docs/results.md)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.calibration_results import Lengths, QuantizerRow, SoftmaxRow
from qdqbench.quantize.utils.comparison import (
    ChangedPredictions,
    Classes,
    Comparison,
    EngineSize,
    Gate,
    LayerErrors,
    ModelChange,
    Parity,
)
from qdqbench.quantize.utils.frames import Tabular, stage_rows
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.schema import Strict, read
from qdqbench.quantize.utils.speedup import Speedup
from qdqbench.quantize.utils.training_results import TrainingRun

SCHEMA_VERSION = 2  # since `n` is of the first split and a drop within noise holds
RESULTS_FILE = "results.json"
STAGES = ("fp32", "fake_quant", "onnxruntime", "engine")
Severity = Literal["error", "warning"]
# What a finding does to an engine of TensorRT, in the order in which it matters. "not portable": ONNX Runtime
# refuses the file, TensorRT does not.
Effect = Literal["refused", "wrong", "not INT8", "not portable", "slow", "note"]
QAT_STAGES = ("fp32", "ptq", "fake_quant", "onnxruntime", "engine")  # fake_quant is the trained model


class StageResult(Strict):
    """One stage of evaluation."""

    status: Literal["done", "skipped"]
    reason: str | None = None  # why it was skipped
    metrics: dict[str, float] = Field(default_factory=dict)  # the primary metric comes first
    stderr: dict[str, float] = Field(default_factory=dict)
    n: int = 0  # of the first evaluation split, whose metrics have no suffix
    vs_fp32: Comparison | None = None
    detail: str | None = None  # what ran: versions, provider, precision


class LayerRow(Strict):
    """One kernel of the engine."""

    name: str
    kind: str  # LayerType of the builder: gemm, kgen, runtime_fusion, ...
    onnx: list[str]  # ONNX nodes it covers
    inputs: list[str]  # datatypes of the non-constant inputs
    constants: list[str]  # datatypes of the constants
    outputs: list[str]
    kernel: str | None = None  # its implementation, where the runtime tells it: brgemm_avx512_i8


class EngineResult(Tabular):
    """What was built and what it runs in INT8 (counts are ONNX MatMul/Gemm nodes, not kernels)."""

    backend: str  # tensorrt, tensorrt_rtx, openvino or onnxruntime
    version: str
    compute_capability: list[str]  # of GPUs; none for a CPU
    ahead_of_time: bool  # built without running on a GPU
    file: str
    bytes: int
    int8_gemms: int
    expected_int8_gemms: int
    not_int8: list[str]  # ONNX nodes that the recipe asks for and the engine runs in something else
    attention_fused: int  # attentions that one fused kernel computes
    attention_int8: int  # of these, with INT8 q, k and v
    expected_attention_int8: int
    int8_residuals: int = 0  # LayerNorms whose kernel reads the residual as INT8
    expected_int8_residuals: int = 0
    not_int8_residuals: list[str] = []  # LayerNorms whose kernel should and does not, by ONNX name
    profiles: int | None = None  # each has kernels of its own in `layers`; None: of a run that did not count
    kernels: int | None = None  # of one profile (the one with the most), without signals and waits
    layers: list[LayerRow]

    @property
    def on_cpu(self) -> bool:
        """Whether a CPU runs it."""
        return self.backend in CPU_BACKENDS

    def rows(self) -> list[LayerRow]:
        """One a kernel."""
        return self.layers


class BlockCheck(Strict):
    """One block of the engine that got the reference's own input (teacher forcing); errors are relative.

    None stands for an error that is not a number: the block made NaN or infinity.
    """

    name: str  # "embeddings", "layer.0", ..., "head"
    n: int  # positions compared, padding left out
    error: float | None  # ||engine - reference|| / ||reference||
    quantization_error: float  # what quantization itself costs in this block: fake-quant against FP32
    limit: float  # of `error`
    position_error: float | None  # the same at the worst single position
    position_limit: float
    systematic_error: float | None  # part of `error` that one offset and factor per channel explain
    systematic_limit: float
    nonfinite: int  # NaN or infinite numbers
    nonfinite_shapes: list[list[int]]  # [batch, length] of the batches that had them

    @property
    def holds(self) -> bool:
        """Finite, and within each limit."""
        pairs = (
            (self.error, self.limit),
            (self.position_error, self.position_limit),
            (self.systematic_error, self.systematic_limit),
        )
        return not self.nonfinite and all(error is not None and error <= limit for error, limit in pairs)


class ShapeCheck(Strict):
    """The deployed engine on one batch of real samples, against the reference."""

    batch: int
    length: int
    what: str  # "padded", "equal lengths", "shortest", "longest"
    nonfinite: int  # samples with a NaN or infinite logit
    max_abs_logit_diff: float | None  # over the finite samples


class PaddingCheck(Strict):
    """The same samples alone, padded to the longest length, and inside of the largest batch."""

    n: int  # samples
    nonfinite: int
    mean_abs_logit_diff: float | None  # of a sample's answers among themselves
    mean_limit: float
    max_abs_logit_diff: float | None
    max_limit: float

    @property
    def holds(self) -> bool:
        """Finite, and within both limits."""
        pairs = ((self.mean_abs_logit_diff, self.mean_limit), (self.max_abs_logit_diff, self.max_limit))
        return not self.nonfinite and all(value is not None and value <= limit for value, limit in pairs)


class PredictionsCheck(Strict):
    """The deployed engine's answers to a draw of real samples, against the reference."""

    n: int
    nonfinite: int  # samples; where there are any, nothing else is known
    metric: str
    drop: float | None  # reference minus engine
    drop_limit: float | None  # the gate's max_drop and two paired standard errors
    disagreements: int | None  # None for regression
    disagreement_limit: float | None  # samples
    mean_abs_logit_diff: float | None
    quantization_mean_abs_logit_diff: float  # fake-quant against FP32: what quantization itself costs
    mean_limit: float
    ks_statistic: float | None  # two-sample Kolmogorov-Smirnov of one answer a sample, worst label
    ks_p: float | None
    ks_p_limit: float

    @property
    def holds(self) -> bool:
        """Finite, and within each limit."""
        pairs = [(self.drop, self.drop_limit), (self.mean_abs_logit_diff, self.mean_limit)]
        if self.disagreements is not None:
            pairs.append((self.disagreements, self.disagreement_limit))
        within = all(a is not None and b is not None and a <= b for a, b in pairs)
        return not self.nonfinite and within and self.ks_p is not None and self.ks_p >= self.ks_p_limit


class Verification(Strict):
    """What the engine computes on the GPU, against the model that it was made from."""

    reference: Literal["fake_quant", "fp32"]  # FP32 where nothing is quantized
    seed: int
    blocks: list[BlockCheck]
    blocks_not_checked: str | None = None  # why the graph could not be cut into blocks
    stitched_int8_gemms: int  # of the engine whose blocks were judged; the deployed one has engine.int8_gemms
    shapes: list[ShapeCheck]
    padding: PaddingCheck
    predictions: PredictionsCheck
    warnings: list[str]  # known hazards of this version, and limits of this verification
    failures: list[str]
    passed: bool


class FileRow(Strict):
    """One exported file."""

    name: str
    bytes: int
    fp32_ratio: float | None  # size divided by the size of the FP32 twin; None: no ONNX file


class FindingRow(Strict):
    """One finding of `check`."""

    severity: Severity
    effect: Effect | None = None  # on an engine; None: of a run that did not tell it
    code: str
    node: str
    why: str
    fix: str


class Timing(Strict):
    """Cost of one stage of the run."""

    wall_s: float
    cpu_s: float | None = None  # of all threads; None: of a run that did not measure it
    peak_rss_bytes: int  # of the whole process while the stage ran
    reused: bool  # nothing had changed, the files of an earlier run were kept


class Results(Tabular):
    """Every number of one run, or of its stages up to one; what those do not write has its default."""

    schema_version: int = SCHEMA_VERSION
    until: str | None = None  # stage that was asked for, or evaluate; None: the run has its report
    created: str  # ISO 8601, UTC
    command: str
    recipe: dict[str, Any]  # resolved
    model: dict[str, Any]  # name, sha256; with a report parameters, architecture
    task: dict[str, Any]  # name, metrics, label names
    data: dict[str, Any]  # source, calibration and evaluation splits with n
    seed: int
    quantized_layers: list[str] = []
    quantized_attention: list[str] = []  # attention modules in INT8
    quantized_residual: list[str] = []  # modules whose residual is in INT8
    high_precision_layers: list[str] = []  # linears that stay in FP16 or FP32
    quantizers: list[QuantizerRow] = []
    softmax: list[SoftmaxRow] = []
    files: list[FileRow] = []  # ONNX files; without a report all files of the stages
    findings: list[FindingRow] = []
    parity: Parity | None = None
    stages: dict[str, StageResult] = {}  # keys: `expected_stages`
    skipped: dict[str, str] = {}  # stage -> why it has no result, such as no device to run on
    changed_predictions: ChangedPredictions | None = None  # None: nothing but FP32 was scored
    classes: Classes | None = None  # None: answers are no classes
    layer_errors: LayerErrors | None = None  # None: nothing is quantized
    model_changes: list[ModelChange] = []  # besides Q/DQ
    fp16: StageResult | None = None  # the FP16 twin; None: not asked for
    vs_fp16: Comparison | None = None  # the stage nearest to deployment against the FP16 twin
    training: TrainingRun | None = None  # None: the recipe has no QAT
    qat_vs_ptq: Comparison | None = None  # fake-quant after QAT against before, where Comparison says FP32
    engine: EngineResult | None = None
    gpu_engine: EngineResult | None = None  # built ahead of time beside an engine for this CPU, as a proof
    lengths: Lengths | None = None  # what the engine's profiles follow; None: the recipe's own shapes
    verification: Verification | None = None  # None: the engine was not run, or not verified
    speed: list[Speedup] = []  # of the run's bench; none: it has none, or one of other files
    unquantized_engines: list[EngineSize] = []  # engines of the same backend without INT8, by the run's bench
    gate: Gate
    timings: dict[str, Timing]
    warnings: list[str]  # --limit, skipped stages, partial splits, anything a reader must know
    notes: list[str] = []  # how data were read and calibrated: nothing to do
    environment: dict[str, Any]  # versions, hardware, git hash

    def rows(self) -> Iterator[dict[str, Any]]:
        """As `stage_rows`."""
        return stage_rows(self.stages)

    @property
    def trained(self) -> bool:
        """Whether QAT came between PTQ and the export."""
        return self.training is not None

    @property
    def expected_stages(self) -> tuple[str, ...]:
        """The stages of such a run, in their order."""
        return QAT_STAGES if self.trained else STAGES


def read_results(folder: Path) -> Results:
    """Read `results.json` of a finished run.

    Raises:
        UserError: missing, or not of this version.
    """
    return read(folder / RESULTS_FILE, Results, "report", f"run `qdqbench report {folder}`")


def write_results(folder: Path, results: Results) -> None:
    """Write `results.json` of a run."""
    files.write_text(folder / RESULTS_FILE, results.model_dump_json(indent=2) + "\n")
