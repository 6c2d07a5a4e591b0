"""A stage against FP32 on the same samples, and the gate that holds it, as results files have them."""

from typing import Literal

from pydantic import Field

from qdqbench.quantize.core.strict import Strict

# 1 - cosine at which `Agreement.cosine_counts` begins a new count: four a decade
COSINE_EDGES = tuple(10 ** (quarter / 4) for quarter in range(-28, 1))


class Agreement(Strict):
    """Embeddings of a stage against those of FP32 of the same texts."""

    n: int  # texts
    # cosine to FP32's (mean), cosine_p1 (its 1st percentile), neighbors (of the 10 nearest, share that stays)
    values: dict[str, float]
    stderr: dict[str, float]  # bootstrap over texts
    cosine_counts: list[int]  # texts by 1 - cosine, from one of `COSINE_EDGES` to the next
    neighbor_counts: list[int]  # texts by how many of the nearest stay: none, 1, ..., all


class Comparison(Strict):
    """A stage against FP32 on the same samples (paired)."""

    delta: dict[str, float]  # stage minus FP32, by metric
    delta_stderr: dict[str, float]  # paired bootstrap
    n: int  # paired samples
    disagreements: int | None  # samples whose predicted class differs; None for regression
    mcnemar_p: float | None  # exact McNemar test on the discordant pairs; None for regression
    within_noise: bool  # |delta| of the primary metric is at most 2 paired standard errors
    mean_abs_logit_diff: float
    sqnr_db: float | None  # 10 log10(power of FP32 logits / power of the difference); None when equal
    agreement: Agreement | None = None  # None but for embeddings


class Speed(Strict):
    """INT8 over the fastest contestant without INT8 in one cell of the run's bench."""

    cell: str  # b32 s128
    over: str  # its label
    value: float  # below 1: slower
    low: float | None  # 95 %
    high: float | None


GateState = Literal["passed", "failed", "not judged", "cannot tell"]


class OpenQuestion(Strict):
    """What the gate asks and nothing answers."""

    state: Literal["not judged", "cannot tell"]  # nothing measured it, or the samples are too few
    what: str
    needs: str  # the command that judges it, or how many samples it takes


class Gate(Strict):
    """The recipe's gate."""

    passed: bool  # nothing that was judged fails; `state` says whether all of it was
    max_drop: float
    failures: list[str]
    notes: list[str] = Field(default_factory=list)  # drops over max_drop that hold within noise
    min_speedup: float | None = None
    open: list[OpenQuestion] = Field(default_factory=list)

    @property
    def state(self) -> GateState:
        """Passed only where all that is asked was judged, on samples that can tell."""
        if not self.passed:
            return "failed"
        states = {question.state for question in self.open}
        return "cannot tell" if "cannot tell" in states else "not judged" if states else "passed"
