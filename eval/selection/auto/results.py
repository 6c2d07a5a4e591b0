"""Schema of `auto.json`: what was tried, what each step bought, and what to deploy (docs/how-to/auto.md)."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from qdqbench.eval.metrics.results import Comparison, GateCode, GateIssue
from qdqbench.eval.selection.search.results import Source
from qdqbench.eval.selection.trials.results import ChoiceRecord, Failure, Trial
from qdqbench.quantize.tasks.metrics import NOISE
from qdqbench.quantize.utils.schema import Strict, Tabular, field

AUTO_FILE = "auto.json"
BEST_RECIPE = "best.yaml"
StepKind = Literal["shipped", "methods", "islands", "search", "qat", "unquantized"]
SkipReason = Literal["holds", "no_base", "no_remedy", "only_speed", "faster", "budget", "misfit"]


class Criteria(Strict):
    """The gate: what was asked for."""

    max_drop: float = field("Largest drop of the primary metric that passes, absolute.")
    min_speedup: float | None = field("Lowest speed-up over no INT8 that passes, or null.", default=None)


class NestedFolds(Strict):
    """A recipe that holds, each sample scored with the step that is chosen without it."""

    folds: int = field("Number of folds of the samples.")
    scores: dict[str, Comparison] = field("Comparisons with FP32 by evaluation split.")
    others: float = field("Share of the samples whose fold chooses another step.")
    unmet: list[GateIssue] = field("Issues of accuracy; empty if it passes.")


class Proposal(Strict):
    """Source of a step's recipe."""

    base: str = field("Name of the recipe that it changes.")
    samples: int | None = field("Train rows that it was chosen on; null without.", default=None)
    share: float | None = field("Share of the base's noise power that is left.", default=None)
    method: str = field("Calibration section in words.", default="")
    linears: list[str] = field("Linear layers that are kept out of INT8.", default=[])
    trial: int | None = field("Number of the trial of the search; null without.", default=None)
    trials: int | None = field("Number of trials of the search; null without one.", default=None)
    speedup: float | None = field("Speed-up of the trial; null if not measured.", default=None)


class StepRun(Strict):
    """A recipe through a whole run."""

    folder: str = field("Run directory, relative to the folder of `auto`.")
    engine: str | None = field("Engine, relative to the folder of `auto`; null if none was built.")
    int8_linears: int = field("Linear layers in INT8.")
    int8_attention: int = field("Attention layers in INT8.")
    stage: str = field("Last stage that was measured, whose scores these are.")
    previous: str | None = field("Name of the last measured step before it; null for the first.")
    vs_previous: dict[str, Comparison] = field("Comparisons with that step by evaluation split.")
    source: Source | None = field("Device and baseline of the speed-up; null without one.")
    not_timed: Failure | None = field("Reason why a required speed-up is missing; else null.")
    issues: list[GateIssue] = field("Issues that keep it from passing.")
    open: list[GateIssue] = field("Issues of its gate that stay open.", default=[])
    nested: NestedFolds | None = field("Nested evaluation, if evaluation data chose.", default=None)


class AutoStep(Trial):
    """One step: a recipe that was proposed, run and checked against the gate, or why it was not."""

    name: str = field("Name of the shipped recipe, else the kind.")
    kind: StepKind = field("Kind of step.")
    status: Literal["done", "skipped", "failed"] = field("`done`, `skipped` or `failed`.")
    skipped: SkipReason | None = field(
        "Reason of the skip: an earlier step `holds`; `no_base`: no shipped recipe finished; `no_remedy`: "
        "it changes nothing about what is unmet; `only_speed`: only speed is unmet; `faster`: INT8 is, so "
        "nothing speaks for going without; `budget`: its estimate exceeds what is left; `misfit`: its recipe "
        "does not fit the model. Else null.",
        default=None,
    )
    proposal: Proposal | None = field("Origin of the recipe; null if there is none.", default=None)
    estimate_s: float | None = field("Estimated time in seconds; null if not known.", default=None)
    run: StepRun | None = field("Run of the recipe; null unless done.", default=None)

    @property
    def unmet(self) -> list[GateIssue]:
        if self.run is None:
            return []
        return [*self.run.issues, *(self.run.nested.unmet if self.run.nested else [])]

    @property
    def holds(self) -> bool:
        return self.run is not None and not self.unmet

    @property
    def no_faster(self) -> bool:
        """Tell whether its twin without INT8 was timed, and is as fast or faster."""
        return self.speedup is not None and self.speedup.leading.verdict in ("slower", "as fast")

    @property
    def undecided(self) -> list[GateIssue]:
        """Issues of accuracy that its samples are too few for."""
        return [issue for issue in self.run.open if issue.state == "inconclusive"] if self.run else []

    @property
    def drop(self) -> float:
        return max(comparison.drop for comparison in self.scores.values())

    @property
    def most_drop(self) -> float:
        """Upper bound of the drop: with two standard errors."""
        return max(each.drop + NOISE * each.drop_stderr for each in self.scores.values())

    def lacks(self, code: GateCode) -> bool:
        return any(issue.code == code for issue in self.unmet)


class AutoChoice(Strict):
    """Recommendation to deploy, and its verdict."""

    passed: bool = field("True if a recipe passes.")
    step: str | None = field("Name of the chosen step; null if none finished.")
    recipe: str | None = field("Path of the chosen recipe; null with `step`.", default=None)
    engine: str | None = field("Path of its engine; null if none was built.", default=None)
    run: str | None = field("Path of its run directory; null with `step`.", default=None)
    command: str | None = field("Command that repeats its run; null with `step`.", default=None)


class Auto(ChoiceRecord, Tabular):
    """Everything that `qdqbench auto` tried."""

    folder: str = field("Folder that the paths of the steps are relative to.")
    model: dict[str, Any] = field("Name and SHA-256 of its files.")
    task: dict[str, Any] = field("Name, columns, metrics, label names.")
    data: dict[str, Any] = field("Source, `evaluation`: samples by split, `proposals`: train rows, `limit`.")
    seed: int = field("Seed of bootstrap, search and folds.")
    gate: Criteria = field("Criteria.")
    fp32: dict[str, float] = field("Metrics of FP32.")
    budget_s: float = field("Time budget in seconds.")
    elapsed_s: float = field("Time of finished steps in seconds, interrupted calls included.")
    steps: list[AutoStep] = field("Steps, in their order.")
    choice: AutoChoice = field("Recipe to deploy.")

    def facts(self) -> dict[str, Any]:
        """Return what a notebook shows of it."""
        return {"recipe": self.choice.step, "steps": len(self.steps)}

    @property
    def chosen(self) -> AutoStep | None:
        return next((step for step in self.steps if step.name == self.choice.step), None)

    @property
    def source(self) -> Source | None:
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
    """Return the first step that holds, else the one nearest to FP32; None where none was measured.

    Where samples are too few for those that hold, it is the one with the smallest upper bound of its drop.
    The step without INT8 ran because that is as fast, so it is taken if it holds.
    """
    done = [step for step in steps if step.run]
    holding = [step for step in done if step.holds]
    if done and done[-1].kind == "unquantized" and done[-1].holds:
        return done[-1]
    if decided := [step for step in holding if not step.undecided]:
        return decided[0]
    if holding:
        return min(holding, key=lambda step: step.most_drop)
    return min(done, key=lambda step: step.drop, default=None)
