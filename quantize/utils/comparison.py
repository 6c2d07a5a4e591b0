"""A stage against FP32, answer by answer and layer by layer, and the gate, as results files have them."""

import math
from typing import Literal

from pydantic import Field

from qdqbench.quantize.utils.schema import Strict

# 1 - cosine at which `Agreement.cosine_counts` begins a new count: four a decade
COSINE_EDGES = tuple(10 ** (quarter / 4) for quarter in range(-28, 1))


MAX_OUTPUT_ERROR = 0.005  # relative, of a linear's output: FP16 gives 0.0006, a wrong scale or bias far more


class Agreement(Strict):
    """Embeddings of a stage against those of FP32 of the same texts."""

    n: int  # texts
    # cosine to FP32's (mean), cosine_p1 (its 1st percentile), neighbors (of the 10 nearest, share that stays)
    values: dict[str, float]
    stderr: dict[str, float]  # bootstrap over texts
    cosine_counts: list[int]  # texts by 1 - cosine, from one of `COSINE_EDGES` to the next
    neighbor_counts: list[int]  # texts by how many of the nearest stay: none, 1, ..., all


class Comparison(Strict):
    """A model against FP32 on the same samples (paired)."""

    delta: dict[str, float]  # model minus FP32, by metric, primary first
    delta_stderr: dict[str, float]  # paired bootstrap
    n: int  # paired samples
    disagreements: int | None  # samples whose predicted class differs; None for regression
    mcnemar_p: float | None  # exact McNemar test on the discordant pairs; None for regression
    within_noise: bool  # |delta| of the primary metric is at most 2 paired standard errors
    mean_abs_logit_diff: float | None  # None: not kept
    sqnr_db: float | None  # 10 log10(power of FP32 logits / power of the difference); None when equal
    agreement: Agreement | None = None  # None but for embeddings
    # distance of the answers, mean over samples (see `Divergence`); None: of a stage of `run`
    divergence: float | None = None
    divergence_stderr: float | None = None  # over samples

    @property
    def drop(self) -> float:
        """Return FP32 minus the model in the primary metric; positive is a loss."""
        return -next(iter(self.delta.values())) + 0.0  # no negative zero

    @property
    def drop_stderr(self) -> float:
        """Return the paired standard error of the drop."""
        return next(iter(self.delta_stderr.values()))

    @property
    def distance(self) -> float:
        """Return the divergence of a comparison that has one."""
        assert self.divergence is not None
        return self.divergence


class ParityRow(Strict):
    """One quantized tensor with the reference's inputs fed to the ONNX graph (teacher forcing)."""

    name: str  # module path of the quantizer's layer
    codes: int  # INT8 codes compared
    differing: int
    at_border: int = 0  # of them, one step off for values that are as near as the graph's arithmetic rounds
    max_step: int
    output_rel_error: float | None  # of the layer's own output: ||onnx - reference|| / ||reference||
    limit: float = 0.005  # largest fraction of codes that may differ and are at no border
    step_limit: int = 1  # largest step that this tensor may have

    @property
    def share(self) -> float:
        """Fraction of codes that differ without lying at a rounding border."""
        return (self.differing - self.at_border) / max(self.int8_values, 1)

    @property
    def nearest(self) -> tuple[float, str]:
        """The part that it uses of its nearest limit (over 1: it does not hold): "codes", "step" or "output".

        Steps count once they are over: within their limit they are whole numbers that say nothing.
        """
        over = self.max_step / self.step_limit if self.max_step > self.step_limit else 0.0
        allowed = self.limit * self.int8_values
        faults = self.differing - self.at_border
        codes = faults / allowed if allowed else math.inf if faults else 0.0
        error = self.output_rel_error or 0.0
        output = math.inf if math.isnan(error) else error / MAX_OUTPUT_ERROR
        return max((codes, "codes"), (output, "output"), (over, "step"), key=lambda part: part[0])

    @property
    def holds(self) -> bool:
        """Within its limits: codes, steps, and the linear's own output."""
        return self.nearest[0] <= 1


class Parity(Strict):
    """ONNX Runtime against the fake-quant model, layer by layer."""

    n: int  # samples
    padded: bool  # the batches hold padding
    rows: list[ParityRow]
    logits_max_abs_diff: float  # with teacher forcing
    limit_fraction: float
    limit_step: int
    passed: bool
    end_to_end: Comparison | None = None  # ONNX Runtime against fake-quant (not FP32) on the whole split


Change = Literal["regressed", "fixed", "still_wrong", "still_right", "moved"]


class ChangedPrediction(Strict):
    """A sample that a stage answers otherwise than FP32, or whose score it moved."""

    sample: int  # row of the evaluation split, or number of the sample where it has several rows
    text: str | None  # in one line, cut where it is long; None: the data was not found
    label: str | None  # what is right; None: nothing is
    fp32: str
    prediction: str  # of the stage
    fp32_margin: float | None  # probability of the class less that of the next; None where none compete
    margin: float | None
    change: Change  # the last is of answers that are neither right nor wrong
    distance: float  # the kind of task's divergence of the two answers


class ChangedPredictions(Strict):
    """Answers of the stage nearest to deployment against FP32's, on the first evaluation split."""

    stage: str
    split: str
    prediction_type: str  # class, score, ...
    n: int  # samples
    found: int  # of them with another answer; of scores those that are not the same number
    counts: dict[Change, int]
    rows: list[ChangedPrediction]  # lost answers first, then won ones, the farthest first; at most 200
    file: str  # with all of them


class ClassRow(Strict):
    """One class; recall is the share of the samples (or words) with its label that are answered so."""

    name: str
    n: int  # samples with this label, or words
    fp32: float | None  # recall; None: none has the label
    recall: float | None  # of the stage
    delta: float | None  # from FP32
    delta_stderr: float | None  # paired, over samples
    lost: int  # right in FP32 alone
    won: int  # right in the stage alone


class Classes(Strict):
    """Labels against answers of FP32 and of the stage nearest to deployment, class by class."""

    stage: str
    unit: Literal["samples", "words"]
    rows: list[ClassRow]  # by class number
    fp32: list[list[int]]  # confusion, [label][answer]; empty with more than 40 classes
    confusion: list[list[int]]  # the same of the stage


class LayerError(Strict):
    """What INT8 costs the output of one linear, or of a block, against FP32; relative, by its norm."""

    name: str  # module path of a linear; "embeddings", "layer.0", ..., "head" of blocks
    what: Literal["linear", "block"]
    isolated: float  # both get the same input: what its own INT8 costs
    cumulative: float | None  # of a block: all before it is in INT8 too


class LayerErrors(Strict):
    """Fake-quant against FP32 layer by layer."""

    n: int  # samples
    rows: list[LayerError]  # in the order of the model


class ModelChange(Strict):
    """What the recipe changed in the model besides Q/DQ."""

    what: str
    count: int  # of what the sentence names
    description: str


class EngineSize(Strict):
    """An engine without INT8 that the run's bench built, of the backend of the run's own."""

    name: str  # its label
    precision: Literal["fp16", "bf16", "fp32"]
    bytes: int


GateState = Literal["passed", "failed", "not_evaluated", "inconclusive"]
# accuracy: a drop of the primary metric. baseline: FP32 against one answer for everything. check: an error of
# `check`. engine: it did not run. require_int8: what runs in INT8. min_speedup: a config of the bench.
# parity: ONNX Runtime against fake-quant. recipe: it could not be tried. verification: the engine's outputs.
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
    state: IssueState  # within noise: it holds, two paired standard errors included
    stage: str | None = None  # of the run: fp32, fake_quant, onnxruntime, engine
    split: str | None = None
    metric: str | None = None
    value: float | None = None  # accuracy: the drop; baseline: FP32's metric; min_speedup: the speed-up
    stderr: float | None = None  # of the value
    limit: float | None = None  # that the value is compared with
    n: int | None = None  # samples
    needed: int | None = None  # samples that can tell
    config: str | None = None  # of the bench: b32 s128
    baseline: str | None = None  # label of what INT8 is compared with there
    names: list[str] = Field(default_factory=list)  # modules, nodes, finding and node, or the constant answer
    detail: str = ""  # cause and advice as the part that measured it words them: shown, never read


class Gate(Strict):
    """The recipe's gate."""

    passed: bool  # nothing that was judged fails; `state` says whether all of it was
    max_drop: float
    min_speedup: float | None = None
    issues: list[GateIssue] = Field(default_factory=list)

    def having(self, *states: IssueState) -> list[GateIssue]:
        """Return the issues in any of these states."""
        return [issue for issue in self.issues if issue.state in states]

    @property
    def failures(self) -> list[GateIssue]:
        """Return why it does not hold."""
        return self.having("failed")

    @property
    def state(self) -> GateState:
        """Passed only where all that is asked was judged, on samples that can tell."""
        if not self.passed:
            return "failed"
        if self.having("inconclusive"):
            return "inconclusive"
        return "not_evaluated" if self.having("not_evaluated") else "passed"
