"""A stage against FP32, answer by answer and layer by layer, and the gate, as results files have them."""

import math
from typing import Literal

from qdqbench.quantize.utils.schema import Strict

# 1 - cosine at which `Agreement.cosine_counts` begins a new count: four a decade
COSINE_EDGES = tuple(10 ** (quarter / 4) for quarter in range(-28, 1))


MAX_OUTPUT_ERROR = 0.005  # relative, of a linear's output: FP16 gives 0.0006, a wrong scale or bias far more


class Agreement(Strict):
    """Embeddings of a stage against those of FP32 of the same texts."""

    n: int
    """Number of texts; of pairs, both."""
    values: dict[str, float]
    """`cosine`: mean cosine to the FP32 embedding of the same text; `cosine_p1`: its 1st percentile;
    `neighbors`: mean share of the 10 nearest texts by FP32 that stay among the 10 nearest."""
    stderr: dict[str, float]
    """Standard error of each value, by bootstrap over the texts with fixed neighbors."""
    cosine_counts: list[int]
    """Texts by 1 - cosine: under 1e-7, then four bins a decade; the last is 1 and more."""
    neighbor_counts: list[int]
    """Texts by how many of the 10 nearest neighbors stay: 0, 1, ..., 10."""


class Comparison(Strict):
    """A model against FP32 on the same samples (paired)."""

    delta: dict[str, float]
    """Model minus FP32 by metric; negative is a loss."""
    delta_stderr: dict[str, float]
    """Paired bootstrap standard error of `delta`, much smaller than that of the metric."""
    n: int
    """Number of paired samples of the first evaluation split."""
    disagreements: int | None
    """Samples with another prediction (class, tags of a sentence, text); null for regression."""
    mcnemar_p: float | None
    """p-value of the exact McNemar test on samples that one of the two gets right; null for regression."""
    within_noise: bool
    """True if `delta` of the primary metric is at most two of its standard errors."""
    mean_abs_logit_diff: float
    """Mean absolute difference of the logits."""
    sqnr_db: float | None
    """10 log10(power of the FP32 logits / power of the difference), in dB; null when the logits are equal."""
    agreement: Agreement | None = None
    """Embeddings against those of FP32; null for other models."""
    divergence: float | None = None
    """Mean divergence of the predictions per sample; null for a stage of `run`."""
    divergence_stderr: float | None = None
    """Standard error of `divergence` over samples; null with it."""

    @property
    def drop(self) -> float:
        """Return FP32 minus the model in the primary metric; positive is a loss."""
        return -next(iter(self.delta.values())) + 0.0  # no negative zero

    @property
    def drop_stderr(self) -> float:
        return next(iter(self.delta_stderr.values()))

    @property
    def distance(self) -> float:
        assert self.divergence is not None
        return self.divergence


class ParityRow(Strict):
    """One quantized tensor with the reference's inputs fed to the ONNX graph (teacher forcing)."""

    name: str
    """Module path of the layer whose input is compared; `@N` for call N of weights used several times."""
    int8_values: int
    """INT8 values compared."""
    differing: int
    """INT8 values that differ."""
    at_border: int = 0
    """Differing values that are one step off at a rounding border of the graph's arithmetic."""
    max_step: int
    """Largest difference between two INT8 values."""
    output_rel_error: float | None
    """Relative error of the layer's own output (norm of the difference / norm of the reference), at most
    0.005 passes; null if not measured."""
    limit: float = 0.005
    """Largest share of differing INT8 values that passes: 0.005, or with FP16 compute 2^-10 times their
    mean magnitude, the larger."""
    step_limit: int = 1
    """Largest difference of one INT8 value that passes: 1, or 2 for the softmax output with FP16 compute."""

    @property
    def share(self) -> float:
        return (self.differing - self.at_border) / max(self.int8_values, 1)

    @property
    def nearest(self) -> tuple[float, str]:
        """Return the share used of the nearest limit, and its name; steps count only over their limit."""
        over = self.max_step / self.step_limit if self.max_step > self.step_limit else 0.0
        allowed = self.limit * self.int8_values
        faults = self.differing - self.at_border
        codes = faults / allowed if allowed else math.inf if faults else 0.0
        error = self.output_rel_error or 0.0
        output = math.inf if math.isnan(error) else error / MAX_OUTPUT_ERROR
        return max((codes, "codes"), (output, "output"), (over, "step"), key=lambda part: part[0])

    @property
    def holds(self) -> bool:
        return self.nearest[0] <= 1


class Parity(Strict):
    """ONNX Runtime against the fake-quant model, layer by layer."""

    n: int
    """Number of samples."""
    padded: bool
    """True if the batches hold padding."""
    rows: list[ParityRow]
    """One row per compared tensor."""
    logits_max_abs_diff: float
    """Largest logit difference, with teacher forcing."""
    limit_fraction: float
    """Largest share of differing INT8 values that passes; the `limit` of a row may be larger."""
    limit_step: int
    """Largest difference of one INT8 value that passes."""
    passed: bool
    """True if every row is within its limits."""
    end_to_end: Comparison | None = None
    """ONNX Runtime minus fake-quant on the first evaluation split; not checked, as rounding differences
    add up over the layers; null if not measured."""


Change = Literal["regressed", "fixed", "still_wrong", "still_right", "moved"]


class ChangedPrediction(Strict):
    """A sample that a stage answers otherwise than FP32, or whose score it moved."""

    sample: int
    """Row of the split from 0, or number of the sample if it has several rows."""
    text: str | None
    """Text in one line of at most 600 characters, the first passage of several; null if not found."""
    label: str | None
    """Label in words; null without labels."""
    fp32: str
    """Prediction of FP32 in words."""
    prediction: str
    """Prediction of the stage in words."""
    fp32_margin: float | None
    """Probability of FP32's class minus that of the next one; null without competing classes."""
    margin: float | None
    """Margin of the stage, likewise."""
    change: Change
    """`regressed` (right to wrong), `fixed` (wrong to right), `still_wrong` and `still_right` (another
    prediction of the same kind), or `moved` (a score)."""
    distance: float
    """Divergence of the two predictions: KL divergence in nat; for scores the squared difference over
    FP32's variance; for embeddings 1 - cosine."""


class ChangedPredictions(Strict):
    """Answers of the stage nearest to deployment against FP32's, on the first evaluation split."""

    stage: str
    """Stage nearest to deployment that was scored: `engine`, `onnxruntime` or `fake_quant`."""
    split: str
    """First evaluation split."""
    prediction_type: str
    """Type of a prediction: `class`, `score`, `tags`, ..."""
    n: int
    """Number of samples."""
    count: int
    """Samples with another prediction; for scores another number."""
    counts: dict[Change, int]
    """Samples by `change`."""
    rows: list[ChangedPrediction]
    """Regressed samples first, then fixed ones, by falling distance; at most 200."""
    file: str
    """CSV in the run directory with all of them, in the same columns."""


class ClassRow(Strict):
    """One class; recall is the share of the samples (or words) with its label that are answered so."""

    name: str
    """Name of the class in the model."""
    n: int
    """Samples, or words, with this label."""
    fp32: float | None
    """Recall of FP32; null without such labels."""
    recall: float | None
    """Recall of the stage; null without such labels."""
    delta: float | None
    """Recall of the stage minus that of FP32; null without such labels."""
    delta_stderr: float | None
    """Paired standard error of `delta` over samples; null without such labels."""
    regressed: int
    """Samples, or words, that only FP32 gets right."""
    fixed: int
    """Samples, or words, that only the stage gets right."""


class Classes(Strict):
    """Labels against answers of FP32 and of the stage nearest to deployment, class by class."""

    stage: str
    """Stage nearest to deployment that was scored."""
    unit: Literal["samples", "words"]
    """Unit of the counts."""
    rows: list[ClassRow]
    """Classes, by number."""
    fp32: list[list[int]]
    """Confusion matrix of FP32, `[label][prediction]`; empty with more than 40 classes."""
    confusion: list[list[int]]
    """Confusion matrix of the stage, likewise."""


class LayerError(Strict):
    """Relative error of a linear's or block's output against FP32, by its norm."""

    name: str
    """Module path of a linear layer; `embeddings`, `layer.0`, ..., `head` of a block."""
    what: Literal["linear", "block"]
    """Linear layer, or block."""
    isolated: float
    """Relative error if both models get the fake-quant model's input there: the cost of its own INT8."""
    cumulative: float | None
    """Relative error from the tokens on, of all INT8 so far; null for linear layers and embeddings."""


class LayerErrors(Strict):
    """Fake-quant against FP32 layer by layer."""

    n: int
    """Number of samples."""
    rows: list[LayerError]
    """Linear layers, then blocks, in the order of the model."""


class ModelChange(Strict):
    """Change of the model by the recipe, besides Q/DQ."""

    what: str
    """Name of the change, such as `training`, `bias correction`, `tanh GELU`, `smoothing`, `INT8
    attention`, `FP16`."""
    count: int
    """Number of changed parts, as the description names them."""
    description: str
    """Change in a sentence."""


class EngineSize(Strict):
    """An engine without INT8 that the run's bench built, of the backend of the run's own."""

    name: str
    """Label in the bench."""
    precision: Literal["fp16", "bf16", "fp32"]
    """Compute precision."""
    bytes: int
    """Size of the engine in bytes."""


GateState = Literal["passed", "failed", "not_evaluated", "inconclusive"]
GateCode = Literal[
    "accuracy",
    "baseline",
    "check",
    "engine",
    "require_int8",
    "min_speedup",
    "parity",
    "recipe",
    "verification",
]
IssueState = Literal["failed", "within_noise", "not_evaluated", "inconclusive"]


class GateIssue(Strict):
    """One thing that the gate asks and that does not simply hold: `issue_sentence` makes a sentence of it."""

    code: GateCode
    """Check. `accuracy`: drop of the primary metric; `baseline`: FP32 against a constant prediction;
    `check`: an error of `check`; `engine`: it did not run; `require_int8`: precision of the engine;
    `min_speedup`: a config of the bench; `parity`: ONNX Runtime against fake-quant; `recipe`: it could
    not be tried; `verification`: outputs of the engine."""
    state: IssueState
    """State; `within_noise`: it passes with two paired standard errors included."""
    stage: str | None = None
    """Stage: `fp32`, `fake_quant`, `onnxruntime`, `engine`; null where none is concerned."""
    split: str | None = None
    """Evaluation split; null where the task has one."""
    metric: str | None = None
    """Metric; null where none is concerned."""
    value: float | None = None
    """Drop (`accuracy`), metric of FP32 (`baseline`) or speed-up (`min_speedup`); null if not measured."""
    stderr: float | None = None
    """Standard error of `value`; null without one."""
    limit: float | None = None
    """Limit of `value`; null without one."""
    n: int | None = None
    """Number of samples; null where none are concerned."""
    needed: int | None = None
    """Number of samples that would be conclusive; null where more do not help."""
    config: str | None = None
    """Config of the bench, such as `b32 s128`; null for other codes than `min_speedup`."""
    baseline: str | None = None
    """Label of the system that INT8 is compared with; null for other codes than `min_speedup`."""
    names: list[str] = []
    """Modules, nodes, finding and node, or the constant prediction."""
    detail: str = ""
    """Cause and advice in words, for display only."""


class Gate(Strict):
    """The recipe's gate."""

    passed: bool
    """True if nothing that was evaluated fails; else the exit status is 2."""
    max_drop: float
    """Largest loss of the primary metric against FP32 that passes, absolute, without noise."""
    min_speedup: float | None = None
    """Lowest speed-up over the fastest system without INT8 that passes in each config; null if none."""
    issues: list[GateIssue] = []
    """Checks that do not simply pass."""

    def having(self, *states: IssueState) -> list[GateIssue]:
        return [issue for issue in self.issues if issue.state in states]

    @property
    def failures(self) -> list[GateIssue]:
        return self.having("failed")

    @property
    def state(self) -> GateState:
        if not self.passed:
            return "failed"
        if self.having("inconclusive"):
            return "inconclusive"
        return "not_evaluated" if self.having("not_evaluated") else "passed"
