"""Schema of `auto.json`: what was tried, what each step bought, and what to deploy (docs/auto.md)."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from qdqbench.eval.selection.search.results import Source
from qdqbench.eval.selection.trials.results import Failure, Trial
from qdqbench.quantize.utils.comparison import Comparison, GateCode, GateIssue
from qdqbench.quantize.utils.frames import Tabular
from qdqbench.quantize.utils.schema import Strict

AUTO_FILE = "auto.json"
BEST_RECIPE = "best.yaml"
StepKind = Literal["shipped", "methods", "islands", "search", "qat"]
SkipReason = Literal[
    "holds",  # an earlier step holds the gate
    "no_base",  # no shipped recipe finished that it could start from
    "no_remedy",  # it changes nothing about what is unmet
    "only_speed",  # speed alone is unmet, and it cannot give that
    "budget",  # its estimate exceeds what is left
    "misfit",  # its recipe does not fit the model; `failure` says why
]


class Criteria(Strict):
    """The gate: what was asked for."""

    max_drop: float  # of the primary metric, a fraction
    min_speedup: float | None = None  # over the engine without INT8; None: not asked


class NestedFolds(Strict):
    """A recipe that holds, each sample scored with the step that is chosen without it."""

    folds: int  # parts of the samples
    scores: dict[str, Comparison]  # against FP32, by evaluation split
    others: float  # share of the samples whose answers are of another step than the chosen one
    unmet: list[GateIssue]  # of accuracy; empty where it holds


class Proposal(Strict):
    """How a step found its recipe."""

    base: str  # recipe that it changes
    samples: int | None = None  # train rows that it was chosen on
    share: float | None = None  # of the divergence of the base that is left
    method: str = ""  # calibration section, in words
    linears: list[str] = []  # kept out of INT8 by islands
    trial: int | None = None  # number in the search, of
    trials: int | None = None  # this many
    speedup: float | None = None  # of that trial


class StepRun(Strict):
    """A recipe through a whole run."""

    folder: str  # run directory, in the folder
    recipe_file: str  # in the folder
    engine: str | None  # in the folder; None where none was built
    int8_linears: int  # linears in INT8
    int8_attention: int  # attentions in INT8
    stage: str  # the last one that was measured, which the scores are of
    previous: str | None  # the last step before it that was measured
    vs_previous: dict[str, Comparison]  # by evaluation split; empty for the first
    source: Source | None  # of the speed-up; None: there is none
    not_timed: Failure | None  # why there is no speed-up
    issues: list[GateIssue]  # what keeps it from holding
    # where nothing does and others were tried before it; None: nothing was chosen by evaluation data
    nested: NestedFolds | None = None


class AutoStep(Trial):
    """One step: a recipe that was proposed, run and checked against the gate, or why it was not."""

    name: str  # of a shipped recipe its own; else the kind
    kind: StepKind
    status: Literal["done", "skipped", "failed"]
    skipped: SkipReason | None = None  # why
    proposal: Proposal | None = None  # None: no recipe was proposed
    estimate_s: float | None = None  # before: the seconds of the last step
    run: StepRun | None = None  # None unless done

    @property
    def unmet(self) -> list[GateIssue]:
        """Return everything that keeps it from holding."""
        if self.run is None:
            return []
        return [*self.run.issues, *(self.run.nested.unmet if self.run.nested else [])]

    @property
    def holds(self) -> bool:
        """Return whether its recipe holds the gate."""
        return self.run is not None and not self.unmet

    @property
    def drop(self) -> float:
        """Return the largest drop of the primary metric over evaluation splits."""
        return max(comparison.drop for comparison in self.scores.values())

    def lacks(self, code: GateCode) -> bool:
        """Return whether an issue of this code keeps it from holding."""
        return any(issue.code == code for issue in self.unmet)


class AutoChoice(Strict):
    """What to deploy, and whether it holds."""

    passed: bool  # a recipe holds
    step: str | None  # None: no step finished
    recipe: str | None = None  # files to deploy, with the folder
    engine: str | None = None
    run: str | None = None
    command: str | None = None  # that repeats it


class Auto(Tabular):
    """Everything that `qdqbench auto` tried."""

    schema_version: Literal[2] = 2
    created: str  # ISO 8601, UTC
    command: str
    folder: str  # that the paths of the steps are in
    model: dict[str, Any]  # name, sha256
    task: dict[str, Any]
    data: dict[str, Any]  # source, evaluated samples by split, rows that proposals are chosen on
    seed: int
    gate: Criteria
    metric: str  # primary metric of the task
    fp32: dict[str, float]  # metrics of FP32
    budget_s: float  # seconds that were allowed
    elapsed_s: float  # of finished steps, those of interrupted calls included
    steps: list[AutoStep]
    choice: AutoChoice
    warnings: list[str]  # what needs a look
    notes: list[str]  # how data were read, what was calibrated
    environment: dict[str, Any]  # versions, hardware, git hash

    @property
    def chosen(self) -> AutoStep | None:
        """Return the step that is deployed."""
        return next((step for step in self.steps if step.name == self.choice.step), None)

    @property
    def source(self) -> Source | None:
        """Return what speed-ups were measured with."""
        return next((step.run.source for step in self.steps if step.run and step.run.source), None)

    def value(self, step: AutoStep) -> float:
        """Return the primary metric of a step on the first evaluation split."""
        return self.fp32[self.metric] - next(iter(step.scores.values())).drop

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row a step; `delta` is the paired difference from FP32 on the first evaluation split."""
        for step in self.steps:
            reason = step.skipped or (step.failure.code if step.failure else None)
            row = {"step": step.name, "status": step.status, "holds": step.holds, "reason": reason}
            if step.run and step.recipe:
                first = next(iter(step.scores.values()))
                row |= {
                    "recipe": step.recipe.name,
                    "value": self.value(step),
                    "delta": -first.drop,
                    "delta_stderr": first.drop_stderr,
                    "speedup": step.speedup.value if step.speedup else None,
                }
            yield row


def choose_step(steps: Sequence[AutoStep]) -> AutoStep | None:
    """Return the first step that holds, else the one nearest to FP32; None where none was measured."""
    done = [step for step in steps if step.run]
    return next((step for step in done if step.holds), None) or min(
        done, key=lambda step: step.drop, default=None
    )
