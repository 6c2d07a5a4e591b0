"""Schemas of `results.json` and `finetune.json`, every number of a run and of a training."""

import statistics
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from qdqbench.quantize.utils import comparison, files
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.schema import Strict, Tabular, field, read, stage_rows
from qdqbench.quantize.utils.shown import Shown
from qdqbench.quantize.utils.speedup import Speedup


class QuantizerRow(Strict):
    """One calibrated quantizer."""

    name: str = field("Path of the quantizer.")
    module: str = field("Path of the layer that it belongs to.")
    kind: Literal["weight", "input", "query", "key", "value", "softmax", "residual"] = field(
        "Kind of tensor; `query`, `key`, `value` and `softmax` of an INT8 attention, `residual` of an INT8 "
        "residual stream."
    )
    axis: int | None = field("Channel axis; null when one scale serves the whole tensor.")
    amax: float = field(
        "Largest magnitude that is representable (the scale is amax / 127); the largest of all channels."
    )
    amax_min: float = field("Smallest amax of all channels; equal to `amax` per tensor.")
    amax_over_rms: float | None = field(
        "Outlier measure of an activation: amax / root mean square; null when not measured."
    )
    calibrated_amax: float | None = field(
        "Amax from calibration if the recipe overrides it (`calibration.amax`); else null.", default=None
    )
    amax_spread: float | None = field(
        "Largest magnitudes of four parts of the calibration rows: standard deviation / mean. Null for "
        "weights and the softmax, and for an amax that the recipe gives or training changed.",
        default=None,
    )


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

    module: str = field("Path of the attention.")
    length: int = field("Longest sample of this row in tokens; shorter ones have rows of their own.")
    amax: float = field("Amax of the softmax output; the scale is amax / 127.")
    centered: bool = field(
        "Whether values are mean-centered: a row of the attention that loses mass gets their mean instead."
    )
    zeroed: float = field("Share of the attention that rounds to zero.")
    clipped: float = field("Share of the attention above the amax.")
    error: float = field(
        "Relative error of the attention's output: norm of the difference over the norm in FP32."
    )


class LengthBucket(Strict):
    """Rows that are padded to the same length."""

    length: int = field("Length in tokens that its rows are padded to.")
    rows: int = field("Number of rows.")
    tokens: int = field("Tokens of its rows without padding.")


class Lengths(Strict):
    """Lengths of the evaluation data, and what an engine with `shapes: auto` makes of them."""

    splits: list[str] = field("Evaluation splits whose rows were counted.")
    rows: int = field("Rows of all splits; of questions the windows.")
    tokens: int = field("Tokens of all rows, without padding.")
    shortest: int = field("Tokens of the shortest row.")
    longest: int = field("Tokens of the longest row.")
    median: float = field("Median tokens of a row.")
    p90: int = field("90th percentile of the tokens of a row.")
    histogram: list[tuple[int, int]] = field("Pairs of tokens and the number of rows that have so many.")
    buckets: list[LengthBucket] = field(
        "Lengths that rows are padded to; empty for a CPU, whose kernels take every length."
    )
    padding: float = field("Share of the tokens of the engine's batches that is padding.")
    longest_padding: float = field("Share of padding if all rows were padded to the longest.")
    profiles: list[str] = field("Optimization profiles of the engine, each [min, opt, max].")


class LogRow(Strict):
    """One look at the loss, or one evaluation on the held-out rows."""

    step: int = field("Optimizer steps done; 0 is before training.")
    epoch: float = field("Passes over the training rows done.")
    loss: float | None = field(
        "Training loss, mean over the samples since the previous row; null in an evaluation.", default=None
    )
    learning_rate: float | None = field(
        "Learning rate of the next step; null in an evaluation.", default=None
    )
    gradient_norm: float | None = field(
        "Norm of the gradient of this step before clipping; null in an evaluation.", default=None
    )
    score: float | None = field(
        "Score of an evaluation on the held-out rows, higher is better; it chooses the weights. Else null.",
        default=None,
    )
    values: dict[str, float] = field(
        "Figures of an evaluation on the held-out rows: `loss` against the labels, the metrics, and for QAT "
        "`distance` from the predictions of the FP32 model (KL divergence in nat, squared error for "
        "regression).",
        default={},
    )


class TrainingRun(Strict):
    """One training run, of one seed."""

    seed: int = field("Seed of the batches, the dropout, the held-out rows, and of a new classifier.")
    status: Literal["done", "failed"] = field("Status; failed: it diverged or its loss was not a number.")
    reason: str | None = field("Reason of the failure; null where it is done.", default=None)
    folder: str | None = field("Folder of the model, relative to the file; null of a QAT.", default=None)
    settings: dict[str, Any] = field(
        "The `qat` section of the recipe, or the settings of `finetune`, with every default filled in."
    )
    precision: str = field("Precision: `bf16` (autocast), `tf32` or `fp32`.")
    device: str = field("Name of the GPU, or `CPU`.")
    processes: int = field("Processes that trained together, one per GPU.")
    rows: int = field("Training rows, without those held out.")
    held_out: int = field("Rows of the train split that evaluate the training and are never learned from.")
    steps: int = field("Optimizer steps done.", default=0)
    planned_steps: int = field("Optimizer steps that the settings ask for.", default=0)
    best_step: int = field(
        "Step whose weights are kept, chosen on the held-out rows; 0: the weights before training.", default=0
    )
    stopped: str | None = field(
        "Reason for the end before the last step; null where there was none.", default=None
    )
    seconds: float = field(
        "Time spent in steps in seconds, without evaluations and checkpoints.", default=0.0
    )
    samples_per_s: float | None = field(
        "Samples per second over `seconds`, of all processes together; null without a step.", default=None
    )
    parameters: int = field("Parameters of the model; 0 where they were not counted.", default=0)
    log: list[LogRow] = field("Losses and evaluations, by step.", default=[])
    metrics: dict[str, float] = field(
        "Metrics on the validation split in FP32, the primary one first; of `finetune` only.", default={}
    )
    stderr: dict[str, float] = field("Standard error of each metric over the samples.", default={})
    n: int = field("Samples of the first evaluation split.", default=0)
    notes: list[str] = field("Events of the training: resumed, a checkpoint that was not whole.", default=[])


class Spread(Strict):
    """A metric over seeds."""

    mean: float = field("Mean over the seeds.")
    sd: float | None = field("Sample standard deviation (n - 1); null for one seed.")
    n: int = field("Number of seeds.")


class Finetuning(Shown, Strict):
    """`finetune.json`."""

    schema_version: Literal[1] = field("Version of this schema.", default=1)
    created: str = field("Time of the end, ISO 8601, UTC.")
    command: str = field("Command line.")
    base: dict[str, Any] = field(
        "Name, sha256 and `revision` (commit, null for a folder) of the encoder at the start."
    )
    task: dict[str, Any] = field("Name, metrics (the primary one first), label names.")
    data: str = field("Fingerprint of the train split.")
    runs: list[TrainingRun] = field("One training per seed, failed ones too.")
    spread: dict[str, Spread] = field(
        "Metrics of the validation split over the seeds that are done, by metric; empty where none is."
    )
    best_seed: int | None = field(
        "Seed with the best score on its held-out rows, never on the validation split; null where all failed."
    )
    warnings: list[str] = field("Caveats of the figures: `--limit`, failed seeds.")
    notes: list[str] = field("Notes on how the data were read.", default=[])
    environment: dict[str, Any] = field("Versions of the libraries, hardware, git hash.")

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

    status: Literal["done", "skipped"] = field("`done`, or `skipped` with a reason.")
    reason: str | None = field("Reason why it was skipped; null when it ran.", default=None)
    metrics: dict[str, float] = field(
        "Metrics by name, primary first, from 0 to 1 (correlations from -1): `accuracy`, `f1`, `matthews`, "
        "`pearson`, `spearman`; entities: `f1`, `precision`, `recall` (seqeval, micro) and `accuracy` by "
        "word; questions: `f1` and `exact_match` (SQuAD); the suffix `_mm` is MNLI's mismatched split.",
        default={},
    )
    stderr: dict[str, float] = field(
        "Standard error of each metric over the samples, regardless of tokens or windows per sample.",
        default={},
    )
    n: int = field(
        "Number of samples of the first evaluation split, whose metrics have no suffix.", default=0
    )
    vs_fp32: comparison.Comparison | None = field(
        "Paired comparison; null for `fp32` itself and for skipped stages.", default=None
    )
    detail: str | None = field(
        "Library, version, provider and precision that ran; null for skipped stages.", default=None
    )


class LayerRow(Strict):
    """One kernel of the engine."""

    name: str = field("Name of the kernel.")
    kind: str = field("LayerType of the builder: `gemm`, `kgen`, `runtime_fusion`, ...")
    onnx: list[str] = field(
        "ONNX nodes that it covers; a node whose work is split is listed by several kernels."
    )
    inputs: list[str] = field("Datatypes of the non-constant inputs.")
    constants: list[str] = field("Datatypes of the constants.")
    outputs: list[str] = field("Datatypes of the outputs.")
    kernel: str | None = field(
        "Implementation, as CPU runtimes report it, such as `brgemm_avx512_i8`; else null.", default=None
    )
    residual: str | None = field(
        "Datatype of the residual that a kernel of backend `cuda` adds, or that is in the sum it normalizes.",
        default=None,
    )


class EngineResult(Tabular):
    """The built engine and its INT8 layers (counts are ONNX MatMul/Gemm nodes, not kernels)."""

    backend: str = field("Runtime: `tensorrt`, `tensorrt_rtx`, `cuda`, `openvino` or `onnxruntime`.")
    version: str = field("Version of the builder.")
    compute_capability: list[str] = field("GPUs that the engine is for, such as `8.9`; empty for a CPU.")
    ahead_of_time: bool = field("True if it was built without running on a GPU.")
    file: str = field("Path of the engine in the run directory.")
    bytes: int = field("Size of the engine in bytes.")
    int8_gemms: int = field("MatMul and Gemm nodes that run in INT8, by the engine's own layer table.")
    expected_int8_gemms: int = field("MatMul and Gemm nodes that the recipe puts in INT8.")
    not_int8: list[str] = field(
        "ONNX nodes that the recipe puts in INT8 and the engine runs in another precision."
    )
    attention_fused: int = field("Attention layers that one fused kernel computes.")
    attention_int8: int = field("Fused attention layers with INT8 q, k and v.")
    expected_attention_int8: int = field(
        "Attention layers that the recipe puts in INT8, one fused kernel each."
    )
    int8_residuals: int = field("LayerNorms whose kernel reads the residual as INT8.")
    expected_int8_residuals: int = field("LayerNorms whose residual the recipe puts in INT8.")
    not_int8_residuals: list[str] = field(
        "LayerNorms, by ONNX name, whose residual should be INT8 and is not."
    )
    profiles: int = field("Optimization profiles, each with its own kernels in `layers`.")
    kernels: int = field("Kernels of the profile with the most, without signals and waits.")
    layers: list[LayerRow] = field("Layer table, in the order of execution.")

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

    name: str = field("Block: `embeddings`, `layer.0`, ..., `head`.")
    n: int = field("Positions compared, without padding.")
    error: float | None = field(
        "Relative error of the block's output; null if the block produced NaN or infinity."
    )
    quantization_error: float = field(
        "Relative error of the fake-quant block against the FP32 block: the cost of quantization itself."
    )
    limit: float = field("Limit of `error`: 0.01 or `quantization_error`, the larger.")
    position_error: float | None = field(
        "Relative error at the worst single position; null if it is not a number."
    )
    position_limit: float = field(
        "Limit of `position_error`: 0.05 or four times that of quantization itself, the larger."
    )
    systematic_error: float | None = field(
        "Part of `error` that an offset and a factor per channel explain; null if it is not a number."
    )
    systematic_limit: float = field(
        "Limit of `systematic_error`: 0.01 or three standard errors of what such noise explains, the larger."
    )
    nonfinite: int = field("Number of NaN or infinite values.")
    nonfinite_shapes: list[list[int]] = field("Batch and length of each batch with NaN or infinite values.")

    @property
    def holds(self) -> bool:
        position = self.position_error, self.position_limit
        systematic = self.systematic_error, self.systematic_limit
        return not self.nonfinite and _within((self.error, self.limit), position, systematic)


class ShapeCheck(Strict):
    """The deployed engine on one batch of real samples, against the reference."""

    batch: int = field("Samples of the batch.")
    length: int = field("Length in tokens, with padding.")
    what: str = field(
        "Selection of the samples: `padded`, `equal lengths` (no padding), `shortest`, `longest`."
    )
    nonfinite: int = field("Samples with a NaN or infinite logit.")
    max_abs_logit_diff: float | None = field(
        "Largest absolute logit difference from the reference, over the finite samples; null without one."
    )


class PaddingCheck(Strict):
    """The same samples alone, padded to the longest length, and inside of the largest batch."""

    n: int = field("Samples.")
    nonfinite: int = field("Samples with a NaN or infinite logit in any setting.")
    mean_abs_logit_diff: float | None = field(
        "Mean spread of a logit over the settings; null without a finite sample."
    )
    mean_limit: float = field(
        "Limit of the mean: three times a sum. Its first part is the mean logit difference of fake-quant and "
        "FP32, at least 1% of the logits' root mean square. Its second part is three standard errors of such "
        "a mean over `n` samples."
    )
    max_abs_logit_diff: float | None = field(
        "Largest spread of a logit over the settings; null without a finite sample."
    )
    max_limit: float = field(
        "Limit of the largest: twice the largest logit difference of fake-quant and FP32, at least 10% of "
        "the logits' root mean square."
    )

    @property
    def holds(self) -> bool:
        mean, most = (self.mean_abs_logit_diff, self.mean_limit), (self.max_abs_logit_diff, self.max_limit)
        return not self.nonfinite and _within(mean, most)


class PredictionsCheck(Strict):
    """The deployed engine's answers to a draw of real samples, against the reference."""

    n: int = field("Samples drawn.")
    nonfinite: int = field("Samples with a NaN or infinite logit; where there are any, the rest is null.")
    metric: str = field("Primary metric of the task.")
    drop: float | None = field(
        "Metric of the reference minus that of the engine; null with `nonfinite` samples."
    )
    drop_limit: float | None = field(
        "Limit of `drop`: the gate's `max_drop` plus two paired standard errors; null with `drop`."
    )
    disagreements: int | None = field("Samples whose predicted class differs; null for regression.")
    disagreement_limit: float | None = field(
        "Limit of `disagreements` in samples: those that quantization itself changes plus `max_drop` of "
        "all, plus two standard errors; null with them."
    )
    mean_abs_logit_diff: float | None = field(
        "Mean absolute logit difference from the reference; null with `nonfinite` samples."
    )
    quantization_mean_abs_logit_diff: float = field(
        "Mean absolute logit difference of the reference from FP32, over all samples drawn."
    )
    mean_limit: float = field(
        "Limit of `mean_abs_logit_diff`: twice the mean logit difference of fake-quant and FP32, at least "
        "2% of the logits' root mean square."
    )
    ks_statistic: float | None = field(
        "Two-sample Kolmogorov-Smirnov statistic of the logits of the label with the smallest p; else null."
    )
    ks_p: float | None = field("p-value of `ks_statistic`; null with it.")
    ks_p_limit: float = field("Smallest p-value that passes: 0.001 divided by the number of labels.")

    @property
    def holds(self) -> bool:
        pairs = [(self.drop, self.drop_limit), (self.mean_abs_logit_diff, self.mean_limit)]
        if self.disagreements is not None:
            pairs.append((self.disagreements, self.disagreement_limit))
        return not self.nonfinite and _within(*pairs, (self.ks_p_limit, self.ks_p))


class Verification(Strict):
    """Outputs of the engine against those of the model that it was made from."""

    reference: Literal["fake_quant", "fp32"] = field(
        "Model that the engine is compared with: fake-quant, or FP32 where nothing is quantized."
    )
    seed: int = field("Seed of the sample draw.")
    blocks: list[BlockCheck] = field(
        "Embeddings, encoder layers, and head, each given the reference's own input (teacher forcing)."
    )
    blocks_not_checked: str | None = field(
        "Reason why the graph could not be cut into blocks; null if it was.", default=None
    )
    stitched_int8_gemms: int = field(
        "INT8 GEMMs of the checked blocks; equal to `engine.int8_gemms` if cutting changed nothing."
    )
    shapes: list[ShapeCheck] = field("Deployed engine on batches of real samples.")
    padding: PaddingCheck = field("The same samples alone, padded, and inside the largest batch.")
    predictions: PredictionsCheck = field(
        "Predictions of the deployed engine on a sample of the evaluation split."
    )
    warnings: list[str] = field("Known hazards of the backend's version, and limits of this verification.")
    failures: list[str] = field("Reasons why the engine is wrong; each is an issue of the gate too.")
    passed: bool = field("True without failures.")


class FileRow(Strict):
    """One exported file."""

    name: str = field("Path in the run directory.")
    bytes: int = field("Size in bytes.")
    fp32_ratio: float | None = field(
        "Size divided by that of the FP32 graph; null for other files than ONNX."
    )


class FindingRow(Strict):
    """One finding of `check`."""

    severity: Severity = field("Severity; an `error` makes the exit status 2.")
    effect: Effect = field(
        "Effect on a TensorRT engine: it is not built, predictions can be wrong, INT8 does not happen, ONNX "
        "Runtime alone refuses the file, time, a note."
    )
    code: str = field("Stable short name of the rule.")
    node: str = field("ONNX node or tensor.")
    why: str = field("Cause.")
    fix: str = field("Advice.")


class Timing(Strict):
    """Cost of one stage of the run."""

    wall_s: float = field("Wall time in seconds.")
    cpu_s: float | None = field("CPU time of all threads in seconds; null if not measured.", default=None)
    peak_rss_bytes: int = field("Peak memory of the whole process during the stage, in bytes.")
    reused: bool = field("True if nothing had changed and the files of an earlier run were kept.")


class Results(Tabular):
    """Every number of one run, or of its stages up to one; what those do not write has its default."""

    schema_version: int = field("Version of this schema.", default=SCHEMA_VERSION)
    until: str | None = field(
        "Last stage that was requested, or `evaluate`; null once the run has its report.", default=None
    )
    created: str = field("Time of the end, ISO 8601, UTC.")
    command: str = field("Command line.")
    recipe: dict[str, Any] = field("Recipe with every default filled in, as in `recipe.yaml`.")
    model: dict[str, Any] = field(
        "Name, sha256 of the files (for a hub model: of id and commit), `revision` (commit of a hub model, "
        "null for a folder), number of parameters, architecture."
    )
    task: dict[str, Any] = field("Name, metrics (the primary one first), label names.")
    data: dict[str, Any] = field(
        "Source of the data, `revision` (commit of a hub data set, null for a folder), calibration and "
        "evaluation splits with their number of samples."
    )
    seed: int = field("Seed of all random numbers.")
    quantized_layers: list[str] = field("Linear layers in INT8.", default=[])
    quantized_attention: list[str] = field("Attention layers in INT8.", default=[])
    quantized_residual: list[str] = field("Modules whose residual is in INT8.", default=[])
    high_precision_layers: list[str] = field("Linear layers that stay in FP16 or FP32.", default=[])
    quantizers: list[QuantizerRow] = field(
        "Calibrated quantizers; empty for a recipe without INT8.", default=[]
    )
    softmax: list[SoftmaxRow] = field("Cost of INT8 by softmax; empty without INT8 attention.", default=[])
    files: list[FileRow] = field(
        "Exported ONNX files; before the report all files of the stages.", default=[]
    )
    findings: list[FindingRow] = field("Findings of `check` on the quantized ONNX file.", default=[])
    parity: comparison.Parity | None = field(
        "ONNX Runtime against the fake-quant model, layer by layer; null when not measured.", default=None
    )
    stages: dict[str, StageResult] = field(
        "Evaluation by stage, in this order: `fp32` (PyTorch), `ptq` (only with QAT: quantized PyTorch "
        "model before training), `fake_quant` (quantized PyTorch model; with QAT after training), "
        "`onnxruntime` (quantized ONNX file), `engine`.",
        default={},
    )
    skipped: dict[str, str] = field(
        "Reason by stage that has no result, such as no device to run on.", default={}
    )
    changed_predictions: comparison.ChangedPredictions | None = field(
        "Samples with another prediction than FP32 nearest to deployment; null if only FP32 was scored.",
        default=None,
    )
    classes: comparison.Classes | None = field(
        "Confusion and recall by class; null if predictions are not classes.", default=None
    )
    layer_errors: comparison.LayerErrors | None = field(
        "Cost of INT8 by layer; null if nothing is quantized.", default=None
    )
    model_changes: list[comparison.ModelChange] = field(
        "Changes of the model besides Q/DQ, from the records of calibration and export.", default=[]
    )
    fp16: StageResult | None = field(
        "FP16 graph in ONNX Runtime; null until `qdqbench report RUN --fp16`.", default=None
    )
    vs_fp16: comparison.Comparison | None = field(
        "Stage nearest to deployment minus the FP16 graph, on the same samples; null with `fp16`.",
        default=None,
    )
    training: TrainingRun | None = field(
        "QAT; null for a recipe without `qat`, or before training.", default=None
    )
    qat_vs_ptq: comparison.Comparison | None = field(
        "Fake-quant model after QAT minus before it, on the same samples; null without QAT.", default=None
    )
    engine: EngineResult | None = field(
        "Engine; null if none was built (`stages.engine.reason` says why).", default=None
    )
    gpu_engine: EngineResult | None = field(
        "Engine for GPUs, built ahead of time in addition to one for this CPU; null if the run has none.",
        default=None,
    )
    lengths: Lengths | None = field(
        "Lengths of the evaluation data and the profiles derived from them; null without `shapes: auto`.",
        default=None,
    )
    verification: Verification | None = field(
        "Outputs of the engine against the reference; null if it was not run or not verified.", default=None
    )
    speed: list[Speedup] = field("Speed-ups from the run's bench; empty before it.", default=[])
    unquantized_engines: list[comparison.EngineSize] = field(
        "Engines without INT8 of the same backend from the run's bench; empty before it.", default=[]
    )
    gate: comparison.Gate = field("Verdict of the recipe's gate.")
    timings: dict[str, Timing] = field("Cost by stage, in the order of the run.")
    warnings: list[str] = field("Caveats of the numbers: `--limit`, skipped stages, partial splits.")
    notes: list[str] = field(
        "Notes on how the data were read and calibrated: delimiter, split, rows requested and available.",
        default=[],
    )
    environment: dict[str, Any] = field(
        "Versions of the libraries, hardware, `git`: commit of the checkout, with the suffix `-dirty` if "
        "files were changed; null for an installed package."
    )

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
