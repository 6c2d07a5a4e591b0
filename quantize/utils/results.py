"""Schemas of `results.json` and `finetune.json`, every number of a run and of a training."""

import statistics
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from qdqbench.quantize.utils import comparison, files
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.schema import Strict, Tabular, read, stage_rows
from qdqbench.quantize.utils.shown import Shown
from qdqbench.quantize.utils.speedup import Speedup


class QuantizerRow(Strict):
    """One calibrated quantizer."""

    name: str
    """Path of the quantizer."""
    module: str
    """Path of the layer that it belongs to."""
    kind: Literal["weight", "input", "query", "key", "value", "softmax", "residual"]
    """Kind of tensor; `query`, `key`, `value` and `softmax` of an INT8 attention, `residual` of an INT8
    residual stream."""
    axis: int | None
    """Channel axis; null when one scale serves the whole tensor."""
    amax: float
    """Largest magnitude that is representable (the scale is amax / 127); the largest of all channels."""
    amax_min: float
    """Smallest amax of all channels; equal to `amax` per tensor."""
    amax_over_rms: float | None
    """Outlier measure of an activation: amax / root mean square; null when not measured."""
    calibrated_amax: float | None = None
    """Amax from calibration if the recipe overrides it (`calibration.amax`); else null."""
    amax_spread: float | None = None
    """Largest magnitudes of four parts of the calibration rows: standard deviation / mean. Null for weights
    and the softmax, and for an amax that the recipe gives or training changed."""


def describe_spread(quantizers: Sequence[QuantizerRow]) -> str:
    """Return the median and the largest `amax_spread` in words; empty if there is none."""
    spread = summarize_spread(quantizers)
    return f"median {spread[0]:.1%}, largest {spread[1].amax_spread:.1%}" if spread else ""


def summarize_spread(quantizers: Sequence[QuantizerRow]) -> tuple[float, QuantizerRow] | None:
    """Return the median of all `amax_spread`, and the quantizer with the largest; None if there is none."""
    spreads = [(row.amax_spread, row) for row in quantizers if row.amax_spread is not None]
    widest = max(spreads, key=itemgetter(0), default=None)
    return (statistics.median(map(itemgetter(0), spreads)), widest[1]) if widest else None


class SoftmaxRow(Strict):
    """Cost of INT8 in the softmax of one attention, alone in INT8, on calibration samples of some lengths."""

    module: str
    """Path of the attention."""
    length: int
    """Longest sample of this row in tokens; shorter ones have rows of their own."""
    amax: float
    """Amax of the softmax output; the scale is amax / 127."""
    centered: bool
    """Whether values are mean-centered: a row of the attention that loses mass gets their mean instead."""
    zeroed: float
    """Share of the attention that rounds to zero."""
    clipped: float
    """Share of the attention above the amax."""
    error: float
    """Relative error of the attention's output: norm of the difference over the norm in FP32."""


class LengthBucket(Strict):
    """Rows that are padded to the same length."""

    length: int
    """Length in tokens that its rows are padded to."""
    rows: int
    """Number of rows."""
    tokens: int
    """Tokens of its rows without padding."""


class Lengths(Strict):
    """Lengths of the evaluation data, and what an engine with `shapes: auto` makes of them."""

    splits: list[str]
    """Evaluation splits whose rows were counted."""
    rows: int
    """Rows of all splits; of questions the windows."""
    tokens: int
    """Tokens of all rows, without padding."""
    shortest: int
    """Tokens of the shortest row."""
    longest: int
    """Tokens of the longest row."""
    median: float
    """Median tokens of a row."""
    p90: int
    """90th percentile of the tokens of a row."""
    histogram: list[tuple[int, int]]
    """Pairs of tokens and the number of rows that have so many."""
    buckets: list[LengthBucket]
    """Lengths that rows are padded to; empty for a CPU, whose kernels take every length."""
    padding: float
    """Share of the tokens of the engine's batches that is padding."""
    longest_padding: float
    """Share of padding if all rows were padded to the longest."""
    profiles: list[str]
    """Optimization profiles of the engine, each [min, opt, max]."""


class LogRow(Strict):
    """One look at the loss, or one evaluation on the held-out rows."""

    step: int
    """Optimizer steps done; 0 is before training."""
    epoch: float
    """Passes over the training rows done."""
    loss: float | None = None
    """Training loss, mean over the samples since the previous row; null in an evaluation."""
    learning_rate: float | None = None
    """Learning rate of the next step; null in an evaluation."""
    gradient_norm: float | None = None
    """Norm of the gradient of this step before clipping; null in an evaluation."""
    score: float | None = None
    """Score of an evaluation on the held-out rows, higher is better; it chooses the weights. Else null."""
    values: dict[str, float] = Field(default_factory=dict)
    """Figures of an evaluation on the held-out rows: `loss` against the labels, the metrics, and for QAT
    `distance` from the predictions of the FP32 model (KL divergence in nat, squared error for regression)."""


class TrainingRun(Strict):
    """One training run, of one seed."""

    seed: int
    """Seed of the batches, the dropout, the held-out rows, and of a new classifier."""
    status: Literal["done", "failed"]
    """Status; failed: it diverged or its loss was not a number."""
    reason: str | None = None
    """Reason of the failure; null where it is done."""
    folder: str | None = None
    """Folder of the model, relative to the file; null of a QAT."""
    settings: dict[str, Any]
    """The `qat` section of the recipe, or the settings of `finetune`, with every default filled in."""
    precision: str
    """Precision: `bf16` (autocast), `tf32` or `fp32`."""
    device: str
    """Name of the GPU, or `CPU`."""
    processes: int
    """Processes that trained together, one per GPU."""
    rows: int
    """Training rows, without those held out."""
    held_out: int
    """Rows of the train split that evaluate the training and are never learned from."""
    steps: int = 0
    """Optimizer steps done."""
    planned_steps: int = 0
    """Optimizer steps that the settings ask for."""
    best_step: int = 0
    """Step whose weights are kept, chosen on the held-out rows; 0: the weights before training."""
    stopped: str | None = None
    """Reason for the end before the last step; null where there was none."""
    seconds: float = 0.0
    """Time spent in steps in seconds, without evaluations and checkpoints."""
    samples_per_s: float | None = None
    """Samples per second over `seconds`, of all processes together; null without a step."""
    parameters: int = 0
    """Parameters of the model; 0 where they were not counted."""
    log: list[LogRow] = []
    """Losses and evaluations, by step."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Metrics on the validation split in FP32, the primary one first; of `finetune` only."""
    stderr: dict[str, float] = {}
    """Standard error of each metric over the samples."""
    n: int = 0
    """Samples of the first evaluation split."""
    notes: list[str] = []
    """Events of the training: resumed, a checkpoint that was not whole."""


class Spread(Strict):
    """A metric over seeds."""

    mean: float
    """Mean over the seeds."""
    sd: float | None
    """Sample standard deviation (n - 1); null for one seed."""
    n: int
    """Number of seeds."""


class Finetuning(Shown, Strict):
    """`finetune.json`."""

    schema_version: Literal[1] = 1
    """Version of this schema."""
    created: str
    """Time of the end, ISO 8601, UTC."""
    command: str
    """Command line."""
    base: dict[str, Any]
    """Name, sha256 and `revision` (commit, null for a folder) of the encoder at the start."""
    task: dict[str, Any]
    """Name, metrics (the primary one first), label names."""
    data: str
    """Fingerprint of the train split."""
    runs: list[TrainingRun]
    """One training per seed, failed ones too."""
    spread: dict[str, Spread]
    """Metrics of the validation split over the seeds that are done, by metric; empty where none is."""
    best_seed: int | None
    """Seed with the best score on its held-out rows, never on the validation split; null where all failed."""
    warnings: list[str]
    """Caveats of the figures: `--limit`, failed seeds."""
    notes: list[str] = []
    """Notes on how the data were read."""
    environment: dict[str, Any]
    """Versions of the libraries, hardware, git hash."""

    def facts(self) -> dict[str, Any]:
        """Return what a notebook shows of it."""
        means = {name: f"{each.mean:.4f}" for name, each in self.spread.items()}
        return {"seeds": len(self.runs), **means, "best seed": self.best_seed}


def training_line(row: "LogRow", steps: int) -> str:
    loss = "" if row.loss is None else f", loss {row.loss:.4g}"
    return f"step {row.step} of {steps}{loss}"


SCHEMA_VERSION = 3
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
    """`done`, or `skipped` with a reason."""
    reason: str | None = None
    """Reason why it was skipped; null when it ran."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Metrics by name, primary first, from 0 to 1 (correlations from -1): `accuracy`, `f1`, `matthews`,
    `pearson`, `spearman`; entities: `f1`, `precision`, `recall` (seqeval, micro) and `accuracy` by word;
    questions: `f1` and `exact_match` (SQuAD); the suffix `_mm` is MNLI's mismatched split."""
    stderr: dict[str, float] = Field(default_factory=dict)
    """Standard error of each metric over the samples, regardless of tokens or windows per sample."""
    n: int = 0
    """Number of samples of the first evaluation split, whose metrics have no suffix."""
    vs_fp32: comparison.Comparison | None = None
    """Paired comparison; null for `fp32` itself and for skipped stages."""
    detail: str | None = None
    """Library, version, provider and precision that ran; null for skipped stages."""


class LayerRow(Strict):
    """One kernel of the engine."""

    name: str
    """Name of the kernel."""
    kind: str
    """LayerType of the builder: `gemm`, `kgen`, `runtime_fusion`, ..."""
    onnx: list[str]
    """ONNX nodes that it covers; a node whose work is split is listed by several kernels."""
    inputs: list[str]
    """Datatypes of the non-constant inputs."""
    constants: list[str]
    """Datatypes of the constants."""
    outputs: list[str]
    """Datatypes of the outputs."""
    kernel: str | None = None
    """Implementation, as CPU runtimes report it, such as `brgemm_avx512_i8`; else null."""
    residual: str | None = None
    """Datatype of the residual that a kernel of backend `cuda` adds, or that is in the sum it normalizes."""


class EngineResult(Tabular):
    """The built engine and its INT8 layers (counts are ONNX MatMul/Gemm nodes, not kernels)."""

    backend: str
    """Runtime: `tensorrt`, `tensorrt_rtx`, `cuda`, `openvino` or `onnxruntime`."""
    version: str
    """Version of the builder."""
    compute_capability: list[str]
    """GPUs that the engine is for, such as `8.9`; empty for a CPU."""
    ahead_of_time: bool
    """True if it was built without running on a GPU."""
    file: str
    """Path of the engine in the run directory."""
    bytes: int
    """Size of the engine in bytes."""
    int8_gemms: int
    """MatMul and Gemm nodes that run in INT8, by the engine's own layer table."""
    expected_int8_gemms: int
    """MatMul and Gemm nodes that the recipe puts in INT8."""
    not_int8: list[str]
    """ONNX nodes that the recipe puts in INT8 and the engine runs in another precision."""
    attention_fused: int
    """Attention layers that one fused kernel computes."""
    attention_int8: int
    """Fused attention layers with INT8 q, k and v."""
    expected_attention_int8: int
    """Attention layers that the recipe puts in INT8, one fused kernel each."""
    int8_residuals: int
    """LayerNorms whose kernel reads the residual as INT8."""
    expected_int8_residuals: int
    """LayerNorms whose residual the recipe puts in INT8."""
    not_int8_residuals: list[str]
    """LayerNorms, by ONNX name, whose residual should be INT8 and is not."""
    profiles: int
    """Optimization profiles, each with its own kernels in `layers`."""
    kernels: int
    """Kernels of the profile with the most, without signals and waits."""
    layers: list[LayerRow]
    """Layer table, in the order of execution."""

    @property
    def on_cpu(self) -> bool:
        return self.backend in CPU_BACKENDS

    def rows(self) -> list[LayerRow]:
        return self.layers


def _within(*pairs: tuple[float | None, float | None]) -> bool:
    """Return whether each value is a number within its limit."""
    return all(value is not None and limit is not None and value <= limit for value, limit in pairs)


class BlockCheck(Strict):
    """One block of the engine that got the reference's own input (teacher forcing); errors are relative.

    None stands for an error that is not a number: the block made NaN or infinity.
    """

    name: str
    """Block: `embeddings`, `layer.0`, ..., `head`."""
    n: int
    """Positions compared, without padding."""
    error: float | None
    """Relative error of the block's output; null if the block produced NaN or infinity."""
    quantization_error: float
    """Relative error of the fake-quant block against the FP32 block: the cost of quantization itself."""
    limit: float
    """Limit of `error`: 0.01 or `quantization_error`, the larger."""
    position_error: float | None
    """Relative error at the worst single position; null if it is not a number."""
    position_limit: float
    """Limit of `position_error`: 0.05 or four times that of quantization itself, the larger."""
    systematic_error: float | None
    """Part of `error` that an offset and a factor per channel explain; null if it is not a number."""
    systematic_limit: float
    """Limit of `systematic_error`: 0.01 or three standard errors of what such noise explains, the larger."""
    nonfinite: int
    """Number of NaN or infinite values."""
    nonfinite_shapes: list[list[int]]
    """Batch and length of each batch with NaN or infinite values."""

    @property
    def holds(self) -> bool:
        position = self.position_error, self.position_limit
        systematic = self.systematic_error, self.systematic_limit
        return not self.nonfinite and _within((self.error, self.limit), position, systematic)


class ShapeCheck(Strict):
    """The deployed engine on one batch of real samples, against the reference."""

    batch: int
    """Samples of the batch."""
    length: int
    """Length in tokens, with padding."""
    what: str
    """Selection of the samples: `padded`, `equal lengths` (no padding), `shortest`, `longest`."""
    nonfinite: int
    """Samples with a NaN or infinite logit."""
    max_abs_logit_diff: float | None
    """Largest absolute logit difference from the reference, over the finite samples; null without one."""


class PaddingCheck(Strict):
    """The same samples alone, padded to the longest length, and inside of the largest batch."""

    n: int
    """Samples."""
    nonfinite: int
    """Samples with a NaN or infinite logit in any setting."""
    mean_abs_logit_diff: float | None
    """Mean spread of a logit over the settings; null without a finite sample."""
    mean_limit: float
    """Limit of the mean: three times a sum. It adds the mean logit difference of fake-quant and FP32, at
    least 1% of the logits' root mean square, and three standard errors of such a mean over `n` samples."""
    max_abs_logit_diff: float | None
    """Largest spread of a logit over the settings; null without a finite sample."""
    max_limit: float
    """Limit of the largest: twice the largest logit difference of fake-quant and FP32, at least 10% of the
    logits' root mean square."""

    @property
    def holds(self) -> bool:
        mean, most = (self.mean_abs_logit_diff, self.mean_limit), (self.max_abs_logit_diff, self.max_limit)
        return not self.nonfinite and _within(mean, most)


class PredictionsCheck(Strict):
    """The deployed engine's answers to a draw of real samples, against the reference."""

    n: int
    """Samples drawn."""
    nonfinite: int
    """Samples with a NaN or infinite logit; where there are any, the rest is null."""
    metric: str
    """Primary metric of the task."""
    drop: float | None
    """Metric of the reference minus that of the engine; null with `nonfinite` samples."""
    drop_limit: float | None
    """Limit of `drop`: the gate's `max_drop` plus two paired standard errors; null with `drop`."""
    disagreements: int | None
    """Samples whose predicted class differs; null for regression."""
    disagreement_limit: float | None
    """Limit of `disagreements` in samples: those that quantization itself changes plus `max_drop` of all,
    plus two standard errors; null with them."""
    mean_abs_logit_diff: float | None
    """Mean absolute logit difference from the reference; null with `nonfinite` samples."""
    quantization_mean_abs_logit_diff: float
    """Mean absolute logit difference of the reference from FP32, over all samples drawn."""
    mean_limit: float
    """Limit of `mean_abs_logit_diff`: twice the mean logit difference of fake-quant and FP32, at least 2% of
    the logits' root mean square."""
    ks_statistic: float | None
    """Two-sample Kolmogorov-Smirnov statistic of the logits of the label with the smallest p; else null."""
    ks_p: float | None
    """p-value of `ks_statistic`; null with it."""
    ks_p_limit: float
    """Smallest p-value that passes: 0.001 divided by the number of labels."""

    @property
    def holds(self) -> bool:
        pairs = [(self.drop, self.drop_limit), (self.mean_abs_logit_diff, self.mean_limit)]
        if self.disagreements is not None:
            pairs.append((self.disagreements, self.disagreement_limit))
        return not self.nonfinite and _within(*pairs, (self.ks_p_limit, self.ks_p))


class Verification(Strict):
    """Outputs of the engine against those of the model that it was made from."""

    reference: Literal["fake_quant", "fp32"]
    """Model that the engine is compared with: fake-quant, or FP32 where nothing is quantized."""
    seed: int
    """Seed of the sample draw."""
    blocks: list[BlockCheck]
    """Embeddings, encoder layers, and head, each given the reference's own input (teacher forcing)."""
    blocks_not_checked: str | None = None
    """Reason why the graph could not be cut into blocks; null if it was."""
    stitched_int8_gemms: int
    """INT8 GEMMs of the checked blocks; equal to `engine.int8_gemms` if cutting changed nothing."""
    shapes: list[ShapeCheck]
    """Deployed engine on batches of real samples."""
    padding: PaddingCheck
    """The same samples alone, padded, and inside the largest batch."""
    predictions: PredictionsCheck
    """Predictions of the deployed engine on a sample of the evaluation split."""
    warnings: list[str]
    """Known hazards of the backend's version, and limits of this verification."""
    failures: list[str]
    """Reasons why the engine is wrong; each is an issue of the gate too."""
    passed: bool
    """True without failures."""


class FileRow(Strict):
    """One exported file."""

    name: str
    """Path in the run directory."""
    bytes: int
    """Size in bytes."""
    fp32_ratio: float | None
    """Size divided by that of the FP32 graph; null for other files than ONNX."""


class FindingRow(Strict):
    """One finding of `check`."""

    severity: Severity
    """Severity; an `error` makes the exit status 2."""
    effect: Effect
    """Effect on a TensorRT engine: it is not built, predictions can be wrong, INT8 does not happen, ONNX
    Runtime alone refuses the file, time, a note."""
    code: str
    """Stable short name of the rule."""
    node: str
    """ONNX node or tensor."""
    why: str
    """Cause."""
    fix: str
    """Advice."""


class Timing(Strict):
    """Cost of one stage of the run."""

    wall_s: float
    """Wall time in seconds."""
    cpu_s: float | None = None
    """CPU time of all threads in seconds; null if not measured."""
    peak_rss_bytes: int
    """Peak memory of the whole process during the stage, in bytes."""
    reused: bool
    """True if nothing had changed and the files of an earlier run were kept."""


class Results(Tabular):
    """Every number of one run, or of its stages up to one; what those do not write has its default."""

    schema_version: int = SCHEMA_VERSION
    """Version of this schema."""
    until: str | None = None
    """Last stage that was requested, or `evaluate`; null once the run has its report."""
    created: str
    """Time of the end, ISO 8601, UTC."""
    command: str
    """Command line."""
    recipe: dict[str, Any]
    """Recipe with every default filled in, as in `recipe.yaml`."""
    model: dict[str, Any]
    """Name, sha256 of the files (for a hub model: of id and commit), `revision` (commit of a hub model,
    null for a folder), number of parameters, architecture."""
    task: dict[str, Any]
    """Name, metrics (the primary one first), label names."""
    data: dict[str, Any]
    """Source of the data, `revision` (commit of a hub data set, null for a folder), calibration and
    evaluation splits with their number of samples."""
    seed: int
    """Seed of all random numbers."""
    quantized_layers: list[str] = []
    """Linear layers in INT8."""
    quantized_attention: list[str] = []
    """Attention layers in INT8."""
    quantized_residual: list[str] = []
    """Modules whose residual is in INT8."""
    high_precision_layers: list[str] = []
    """Linear layers that stay in FP16 or FP32."""
    quantizers: list[QuantizerRow] = []
    """Calibrated quantizers; empty for a recipe without INT8."""
    softmax: list[SoftmaxRow] = []
    """Cost of INT8 by softmax; empty without INT8 attention."""
    files: list[FileRow] = []
    """Exported ONNX files; before the report all files of the stages."""
    findings: list[FindingRow] = []
    """Findings of `check` on the quantized ONNX file."""
    parity: comparison.Parity | None = None
    """ONNX Runtime against the fake-quant model, layer by layer; null when not measured."""
    stages: dict[str, StageResult] = {}
    """Evaluation by stage, in this order: `fp32` (PyTorch), `ptq` (only with QAT: quantized PyTorch model
    before training), `fake_quant` (quantized PyTorch model; with QAT after training), `onnxruntime`
    (quantized ONNX file), `engine`."""
    skipped: dict[str, str] = {}
    """Reason by stage that has no result, such as no device to run on."""
    changed_predictions: comparison.ChangedPredictions | None = None
    """Samples with another prediction than FP32 nearest to deployment; null if only FP32 was scored."""
    classes: comparison.Classes | None = None
    """Confusion and recall by class; null if predictions are not classes."""
    layer_errors: comparison.LayerErrors | None = None
    """Cost of INT8 by layer; null if nothing is quantized."""
    model_changes: list[comparison.ModelChange] = []
    """Changes of the model besides Q/DQ, from the records of calibration and export."""
    fp16: StageResult | None = None
    """FP16 graph in ONNX Runtime; null until `qdqbench report RUN --fp16`."""
    vs_fp16: comparison.Comparison | None = None
    """Stage nearest to deployment minus the FP16 graph, on the same samples; null with `fp16`."""
    training: TrainingRun | None = None
    """QAT; null for a recipe without `qat`, or before training."""
    qat_vs_ptq: comparison.Comparison | None = None
    """Fake-quant model after QAT minus before it, on the same samples; null without QAT."""
    engine: EngineResult | None = None
    """Engine; null if none was built (`stages.engine.reason` says why)."""
    gpu_engine: EngineResult | None = None
    """Engine for GPUs, built ahead of time in addition to one for this CPU; null if the run has none."""
    lengths: Lengths | None = None
    """Lengths of the evaluation data and the profiles derived from them; null without `shapes: auto`."""
    verification: Verification | None = None
    """Outputs of the engine against the reference; null if it was not run or not verified."""
    speed: list[Speedup] = []
    """Speed-ups from the run's bench; empty before it."""
    unquantized_engines: list[comparison.EngineSize] = []
    """Engines without INT8 of the same backend from the run's bench; empty before it."""
    gate: comparison.Gate
    """Verdict of the recipe's gate."""
    timings: dict[str, Timing]
    """Cost by stage, in the order of the run."""
    warnings: list[str]
    """Caveats of the numbers: `--limit`, skipped stages, partial splits."""
    notes: list[str] = []
    """Notes on how the data were read and calibrated: delimiter, split, rows requested and available."""
    environment: dict[str, Any]
    """Versions of the libraries, hardware, `git`: commit of the checkout, with the suffix `-dirty` if
    files were changed; null for an installed package."""

    def facts(self) -> dict[str, Any]:
        """Return what a notebook shows of it."""
        scores = {
            name: ", ".join(f"{metric} {value:.4f}" for metric, value in stage.metrics.items())
            for name, stage in self.stages.items()
            if stage.status == "done"
        }
        done = self.until or ("passed" if self.gate.passed else "failed")
        return {"recipe": self.recipe["name"], **scores, "until" if self.until else "gate": done}

    def rows(self) -> Iterator[dict[str, Any]]:
        return stage_rows(self.stages)

    @property
    def trained(self) -> bool:
        return self.training is not None

    @property
    def expected_stages(self) -> tuple[str, ...]:
        return QAT_STAGES if self.trained else STAGES


def read_results(folder: Path) -> Results:
    return read(folder / RESULTS_FILE, Results, "report", f"run `qdqbench report {folder}`")


def write_results(folder: Path, results: Results) -> None:
    files.write_text(folder / RESULTS_FILE, results.model_dump_json(indent=2) + "\n")
