"""Records of an evaluation: a stage, its comparison with FP32, parity with fake quantization, the gate."""

import math
import re
from typing import Any, Literal

from pydantic import field_validator, model_validator

from qdqbench.quantize.utils.schema import Strict, field

# 1 - cosine at which `Agreement.cosine_counts` begins a new count: four a decade
COSINE_EDGES = tuple(10 ** (quarter / 4) for quarter in range(-28, 1))


MAX_OUTPUT_ERROR = 0.005  # relative, of a linear's output: FP16 gives 0.0006, a wrong scale or bias far more


class Agreement(Strict):
    """Embeddings of a stage against those of FP32 of the same texts."""

    n: int = field("Number of texts; of pairs, both.")
    values: dict[str, float] = field(
        "`cosine`: mean cosine to the FP32 embedding of the same text; `cosine_p1`: its 1st percentile; "
        "`neighbors`: mean share of the 10 nearest texts by FP32 that stay among the 10 nearest."
    )
    stderr: dict[str, float] = field("Standard error by bootstrap over the texts with fixed neighbors.")
    cosine_counts: list[int] = field("Texts by 1 - cosine: under 1e-7, four bins a decade, 1 and more.")
    neighbor_counts: list[int] = field("Texts by how many of the 10 nearest neighbors stay: 0, 1, ..., 10.")


class Comparison(Strict):
    """A model against FP32 on the same samples (paired)."""

    delta: dict[str, float] = field("Model minus FP32 by metric; negative is a loss.")
    delta_stderr: dict[str, float] = field("Paired bootstrap standard error of `delta`.")
    n: int = field("Number of paired samples of the first evaluation split.")
    disagreements: int | None = field("Samples with another prediction; null for regression.")
    mcnemar_p: float | None = field("p-value of the exact McNemar test; null for regression.")
    within_noise: bool = field("True if `delta` of the primary metric is at most two of its standard errors.")
    mean_abs_logit_diff: float = field("Mean absolute difference of the logits.")
    sqnr_db: float | None = field("SQNR of the logits in dB; null if they equal those of FP32.")
    sqnr_db_stderr: float | None = field("Standard error of `sqnr_db` over samples.", default=None)
    sqnr_output: str | None = field("Output with the lowest SQNR; null if there is only one.", default=None)
    agreement: Agreement | None = field("Embeddings against FP32's; null for other models.", default=None)

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, values: Any) -> Any:
        """Leave out what runs had as null until 0.1.0."""
        if not isinstance(values, dict):
            return values
        gone = {"divergence", "divergence_stderr"}
        return {key: value for key, value in values.items() if value is not None or key not in gone}

    @property
    def drop(self) -> float:
        """Return FP32 minus the model in the primary metric; positive is a loss."""
        return -next(iter(self.delta.values())) + 0.0  # no negative zero

    @property
    def drop_stderr(self) -> float:
        return next(iter(self.delta_stderr.values()))

    @property
    def noise_power(self) -> float:
        """Return the power of the difference over that of FP32's logits; 0 where these are equal."""
        return 0.0 if self.sqnr_db is None else float(10 ** (-self.sqnr_db / 10))


class ParityRow(Strict):
    """A quantized tensor or an output, with the reference's inputs fed to the graph (teacher forcing)."""

    name: str = field("Module path of the layer whose input is compared (`@N`: call N), or output.")
    int8_values: int = field("INT8 values compared; 0 for an output.")
    differing: int = field("INT8 values that differ.")
    at_border: int = field("Differing values one step off at a rounding border of the graph.", default=0)
    max_step: int = field("Largest difference between two INT8 values.")
    output_rel_error: float | None = field("Relative error of the layer's own output, or null.")
    output_limit: float = field("Largest passing error: 0.005, or 0.02 in FP16.", default=MAX_OUTPUT_ERROR)
    limit: float = field("Largest passing share of differing INT8 values.", default=0.005)
    step_limit: int = field("Largest passing difference of one INT8 value.", default=1)

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
        output = math.inf if math.isnan(error) else error / self.output_limit
        return max((codes, "codes"), (output, "output"), (over, "step"), key=lambda part: part[0])

    @property
    def holds(self) -> bool:
        return self.nearest[0] <= 1


class Parity(Strict):
    """ONNX Runtime against the fake-quant model, layer by layer."""

    n: int = field("Number of samples.")
    padded: bool = field("True if the batches hold padding.")
    rows: list[ParityRow] = field("One row per quantized tensor.")
    outputs: list[ParityRow] = field("One row per output of the graph; empty in older files.", default=[])
    logits_max_abs_diff: float = field("Largest logit difference, with teacher forcing.")
    limit_fraction: float = field("Largest share of differing INT8 values that passes.")
    limit_step: int = field("Largest difference of one INT8 value that passes.")
    passed: bool = field("True if every row and output is within its limits.")
    end_to_end: Comparison | None = field("ONNX Runtime minus fake-quant; not judged.", default=None)

    @property
    def compared(self) -> list[ParityRow]:
        return [*self.rows, *self.outputs]


Change = Literal["regressed", "fixed", "still_wrong", "still_right", "moved"]


class ChangedPrediction(Strict):
    """A sample that a stage answers otherwise than FP32, or whose score it moved."""

    sample: int = field("Row of the split from 0, or number of the sample if it has several rows.")
    text: str | None = field("Text in one line of at most 600 characters; null if not found.")
    label: str | None = field("Label in words; null without labels.")
    fp32: str = field("Prediction of FP32 in words.")
    prediction: str = field("Prediction of the stage in words.")
    fp32_margin: float | None = field("Probability of FP32's class minus the next one's; or null.")
    margin: float | None = field("Margin of the stage, likewise.")
    change: Change = field(
        "`regressed` (right to wrong), `fixed` (wrong to right), `still_wrong` and `still_right` (another "
        "prediction of the same kind), or `moved` (a score)."
    )
    distance: float = field("Squared difference of the logits from FP32's, over FP32's mean power.")


class ChangedPredictions(Strict):
    """Answers of the stage nearest to deployment against FP32's, on the first evaluation split."""

    stage: str = field("Last stage that was scored: `engine`, `onnxruntime` or `fake_quant`.")
    split: str = field("First evaluation split.")
    prediction_type: str = field("Type of a prediction: `class`, `score`, `tags`, ...")
    n: int = field("Number of samples.")
    count: int = field("Samples with another prediction; for scores another number.")
    counts: dict[Change, int] = field("Samples by `change`.")
    rows: list[ChangedPrediction] = field("Regressed samples, then fixed ones, the farthest first.")
    file: str = field("CSV in the run directory with all of them, in the same columns.")


class ClassRow(Strict):
    """One class; recall is the share of the samples (or words) with its label that are answered so."""

    name: str = field("Name of the class in the model.")
    n: int = field("Samples, or words, with this label.")
    fp32: float | None = field("Recall of FP32; null without such labels.")
    recall: float | None = field("Recall of the stage; null without such labels.")
    delta: float | None = field("Recall of the stage minus that of FP32; null without such labels.")
    delta_stderr: float | None = field("Paired standard error of `delta`; null if `delta` is null.")
    regressed: int = field("Samples, or words, that only FP32 gets right.")
    fixed: int = field("Samples, or words, that only the stage gets right.")


class Classes(Strict):
    """Labels against answers of FP32 and of the stage nearest to deployment, class by class."""

    stage: str = field("Stage nearest to deployment that was scored.")
    unit: Literal["samples", "words"] = field("Unit of the counts.")
    rows: list[ClassRow] = field("Classes, by number.")
    fp32: list[list[int]] = field("Confusion matrix of FP32, `[label][prediction]`; empty above 40 classes.")
    confusion: list[list[int]] = field("Confusion matrix of the stage, likewise.")


class LayerError(Strict):
    """Relative error of a linear's or block's output against FP32, by its norm."""

    name: str = field("Module path of a linear layer; `embeddings`, `layer.0`, ..., `head` of a block.")
    what: Literal["linear", "block"] = field("Linear layer, or block.")
    isolated: float = field("Relative error with the fake-quant model's input: the cost of its own INT8.")
    cumulative: float | None = field("Relative error of all INT8 so far; null for linears and embeddings.")


class LayerErrors(Strict):
    """Fake-quant against FP32 layer by layer."""

    n: int = field("Number of samples.")
    rows: list[LayerError] = field("Linear layers, then blocks, in the order of the model.")


SpeedVerdict = Literal["faster", "as fast", "slower", "inconclusive"]
OTHER_CORES = 0.2  # taken by other processes, above which CPU time leads
AS_FAST = 0.05  # distance from 1 within which a 95% interval that contains 1 says that both are as fast


class Ratio(Strict):
    """Ratio of the times of a baseline and a system."""

    value: float = field("Time of the baseline / time of the system; below 1: slower.")
    ci95_low: float | None = field("Lower end of the 95% interval, by bootstrap over rounds, or null.")
    ci95_high: float | None = field("Upper end of the 95% interval; null under five rounds.")
    system_ms: float = field("Time of the system in ms: median over rounds of the rounds' medians.")
    baseline_ms: float = field("Time of the baseline in ms, likewise.")

    @property
    def interval(self) -> str:
        """The 95% interval in brackets; empty with fewer than five rounds."""
        if self.ci95_low is None or self.ci95_high is None:
            return ""
        return f"[{self.ci95_low:.2f}, {self.ci95_high:.2f}]"

    @property
    def verdict(self) -> SpeedVerdict:
        low, high = self.ci95_low, self.ci95_high
        if low is None or high is None:  # so few rounds tell nothing of others
            return "inconclusive"
        if low <= 1 <= high:
            return "as fast" if low >= 1 - AS_FAST and high <= 1 + AS_FAST else "inconclusive"
        return "slower" if self.value < 1 else "faster"


class Conditions(Strict):
    """Conditions of a measured speed."""

    created: str = field("End of its bench, ISO 8601, UTC.")
    command: str = field("Command line of its bench.")
    machine: str = field("Name of the CPU or GPU.")
    threads: int | None = field("Threads of each system on a CPU; null on a GPU.")
    rounds: int = field("Interleaved rounds.")
    load_before: float | None = field("Load average before the bench on a CPU; null if not known.")


class Speedup(Ratio):
    """Speed-up of a system over its baseline, timed interleaved in the same rounds."""

    system: str = field("Name of the system.")
    baseline: str = field("Name of the baseline.")
    config: str = field("Config that both ran, such as `32 x 128`.")
    cpu: Ratio | None = field("Ratio of the CPU times of all threads; null on a GPU.", default=None)
    other_cores: float | None = field("Mean cores used by other processes; null on a GPU.", default=None)
    quick: bool = field("True in results of a run for the bench that ends it.", default=False)
    conditions: Conditions | None = field("Conditions, in results of a run.", default=None)

    @field_validator("config")
    @classmethod
    def _spell(cls, config: str) -> str:
        """Return `32 x 128` of what benches called b32 s128 until 0.1.0."""
        return re.sub(r"^b(\d+) (s(?=\d+$))?", r"\1 x ", config)

    @property
    def leading(self) -> Ratio:
        """The ratio to go by: of CPU times where other processes took the cores, else of wall times."""
        return self.cpu if self.cpu and (self.other_cores or 0.0) > OTHER_CORES else self

    @property
    def by_cpu_time(self) -> bool:
        return self.leading is self.cpu


class StageResult(Strict):
    """One stage of evaluation."""

    status: Literal["done", "skipped"] = field("`done`, or `skipped` with a reason.")
    reason: str | None = field("Reason why it was skipped; null when it ran.", default=None)
    metrics: dict[str, float] = field(
        "Metrics by name, primary first, from 0 to 1 (correlations from -1): `accuracy`, `f1`, `matthews`, "
        "`pearson`, `spearman`; entities: `f1`, `precision`, `recall` (seqeval, micro) and `accuracy` by "
        "word; questions: `f1` and `exact_match` (SQuAD); several labels: `f1_micro`, `f1_macro`, "
        "`exact_match`; the suffix `_mm` is MNLI's mismatched split.",
        default={},
    )
    stderr: dict[str, float] = field("Standard error of each metric over the samples.", default={})
    n: int = field("Samples of the first evaluation split, whose metrics have no suffix.", default=0)
    vs_fp32: Comparison | None = field("Paired comparison; null for `fp32` and if skipped.", default=None)
    detail: str | None = field("Library, version, provider and precision; null if skipped.", default=None)


GateState = Literal["passed", "failed", "not_evaluated", "inconclusive"]


GateCode = Literal[
    "accuracy",
    "baseline",
    "check",
    "engine",
    "require_int8",
    "min_speedup",
    "min_sqnr_db",
    "parity",
    "recipe",
    "verification",
]


IssueState = Literal["failed", "within_noise", "not_evaluated", "inconclusive"]


class GateIssue(Strict):
    """One thing that the gate asks and that does not simply hold: `issue_sentence` makes a sentence of it."""

    code: GateCode = field(
        "Check. `accuracy`: drop of the primary metric; `baseline`: FP32 against a constant prediction; "
        "`check`: an error of `check`; `engine`: it did not run; `require_int8`: precision of the engine; "
        "`min_speedup`: a config of the bench; `min_sqnr_db`: SQNR of the answers; `parity`: ONNX Runtime "
        "against fake-quant; `recipe`: it could not be tried; `verification`: outputs of the engine."
    )
    state: IssueState = field("State; `within_noise`: it passes with two paired standard errors included.")
    stage: str | None = field("`fp32`, `fake_quant`, `onnxruntime`, `engine`, or null.", default=None)
    split: str | None = field("Evaluation split; null where the task has one.", default=None)
    metric: str | None = field("Metric; null where none is concerned.", default=None)
    value: float | None = field("Drop, metric, speed-up or dB; null if not measured.", default=None)
    stderr: float | None = field("Standard error of `value`; null without one.", default=None)
    limit: float | None = field("Limit of `value`; null without one.", default=None)
    n: int | None = field("Number of samples; null where none are concerned.", default=None)
    needed: int | None = field("Samples that would be conclusive; null if none help.", default=None)
    config: str | None = field("Config of the bench, such as `32 x 128` (`min_speedup`).", default=None)
    baseline: str | None = field("System that INT8 is compared with (`min_speedup`).", default=None)
    names: list[str] = field("Modules, nodes, finding and node, or the constant prediction.", default=[])
    reorder: bool = field("True if labels in another order make FP32 right (`detail`).", default=False)
    detail: str = field("Cause and advice in words, for display only.", default="")


class Gate(Strict):
    """The recipe's gate."""

    passed: bool = field("True if nothing that was evaluated fails; else the exit status is 2.")
    max_drop: float = field("Largest loss of the primary metric that passes, absolute, without noise.")
    min_speedup: float | None = field("Lowest passing speed-up in each config, or null.", default=None)
    issues: list[GateIssue] = field("Checks that do not simply pass.", default=[])

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
