"""Schema of `results.json`, the one file that holds every number of a run (documented in docs/results.md)."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
MAX_OUTPUT_ERROR = 0.005  # relative, of a linear's output: FP16 gives 0.0006, a wrong scale or bias far more
STAGES = ("fp32", "fake_quant", "onnxruntime", "engine")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Comparison(_Model):
    """A stage against FP32 on the same samples (paired)."""

    delta: dict[str, float]  # stage minus FP32, by metric
    delta_stderr: dict[str, float]  # paired bootstrap
    n: int  # paired samples
    disagreements: int | None  # samples whose predicted class differs; None for regression
    mcnemar_p: float | None  # exact McNemar test on the discordant pairs; None for regression
    within_noise: bool  # |delta| of the primary metric is at most 2 paired standard errors
    mean_abs_logit_diff: float
    sqnr_db: float | None  # 10 log10(power of FP32 logits / power of the difference); None when equal


class StageResult(_Model):
    """One stage of evaluation."""

    status: Literal["done", "skipped"]
    reason: str | None = None  # why it was skipped
    metrics: dict[str, float] = Field(default_factory=dict)  # the primary metric comes first
    stderr: dict[str, float] = Field(default_factory=dict)
    n: int = 0
    vs_fp32: Comparison | None = None
    detail: str | None = None  # what ran: versions, provider, precision


class LayerRow(_Model):
    """One kernel of the engine."""

    name: str
    kind: str  # LayerType of the builder: gemm, kgen, runtime_fusion, ...
    onnx: list[str]  # ONNX nodes it covers
    inputs: list[str]  # datatypes of the non-constant inputs
    constants: list[str]  # datatypes of the constants
    outputs: list[str]


class EngineResult(_Model):
    """What was built and what it runs in INT8 (counts are ONNX MatMul/Gemm nodes, not kernels)."""

    backend: str  # tensorrt or tensorrt_rtx
    version: str
    compute_capability: list[str]
    ahead_of_time: bool  # built without running on a GPU
    file: str
    bytes: int
    int8_gemms: int
    expected_int8_gemms: int
    not_int8: list[str]  # ONNX nodes that the recipe asks for and the engine runs in something else
    attention_fused: int  # fused attention kernels
    attention_int8: int  # ... whose q, k and v are INT8
    expected_attention_int8: int
    layers: list[LayerRow]


class QuantizerRow(_Model):
    """One calibrated quantizer."""

    name: str
    module: str
    kind: Literal["weight", "input", "query", "key", "value", "softmax"]
    axis: int | None
    amax: float  # the largest, when per-channel
    amax_min: float
    amax_over_rms: float | None  # outlier measure of an activation: amax / root mean square


class ParityRow(_Model):
    """One quantized tensor with the reference's inputs fed to the ONNX graph (teacher forcing)."""

    name: str  # module path of the quantizer's layer
    codes: int  # INT8 codes compared
    differing: int
    max_step: int
    output_rel_error: float | None  # of the layer's own output: ||onnx - reference|| / ||reference||
    limit: float = 0.005  # largest fraction of differing codes that this tensor may have
    step_limit: int = 1  # largest step that this tensor may have

    @property
    def holds(self) -> bool:
        """Within its limits: codes, steps, and the linear's own output."""
        codes = self.max_step <= self.step_limit and self.differing <= self.limit * self.codes
        return codes and (self.output_rel_error is None or self.output_rel_error <= MAX_OUTPUT_ERROR)


class Parity(_Model):
    """ONNX Runtime against the fake-quant model, layer by layer."""

    n: int  # samples
    padded: bool  # the batches hold padding
    rows: list[ParityRow]
    logits_max_abs_diff: float  # with teacher forcing
    limit_fraction: float
    limit_step: int
    passed: bool
    end_to_end: Comparison | None = None  # ONNX Runtime against fake-quant (not FP32) on the whole split


class FileRow(_Model):
    """One exported file."""

    name: str
    bytes: int
    fp32_ratio: float | None  # size divided by the size of the FP32 twin


class FindingRow(_Model):
    """One finding of `check`."""

    severity: Literal["error", "warning"]
    code: str
    node: str
    why: str
    fix: str


class Timing(_Model):
    """Cost of one stage of the run."""

    wall_s: float
    peak_rss_bytes: int  # of the whole process while the stage ran
    reused: bool  # nothing had changed, the files of an earlier run were kept


class Gate(_Model):
    """The recipe's gate."""

    passed: bool
    max_drop: float
    failures: list[str]


class Results(_Model):
    """Every number of one run."""

    schema_version: int = SCHEMA_VERSION
    created: str  # ISO 8601, UTC
    command: str
    recipe: dict[str, Any]  # resolved
    model: dict[str, Any]  # name, sha256, parameters, architecture
    task: dict[str, Any]  # name, metrics, label names
    data: dict[str, Any]  # source, calibration and evaluation splits with n
    seed: int
    quantized_layers: list[str]
    high_precision_layers: list[str]  # linears that stay in FP16 or FP32
    quantizers: list[QuantizerRow]
    files: list[FileRow]
    findings: list[FindingRow]
    parity: Parity | None
    stages: dict[str, StageResult]  # keys: STAGES
    engine: EngineResult | None
    gate: Gate
    timings: dict[str, Timing]
    warnings: list[str]  # --limit, skipped stages, partial splits, anything a reader must know
    environment: dict[str, Any]  # versions, hardware, git hash
