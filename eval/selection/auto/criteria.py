"""Whether a recipe holds, and how far its answers are from FP32's where nothing was chosen by them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qdqbench.eval.metrics.compare import compare
from qdqbench.eval.metrics.gate import NOISE
from qdqbench.eval.metrics.logits import Logits
from qdqbench.eval.selection.auto.results import Criteria, NestedFolds
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.tasks.types.encoded import Encoded
from qdqbench.quantize.utils.arrays import Int64
from qdqbench.quantize.utils.comparison import Comparison, GateIssue
from qdqbench.quantize.utils.results import Results
from qdqbench.quantize.utils.speedup import Speedup

FOLDS = 5


def list_drops(
    scores: Mapping[str, Comparison], metric: str, max_drop: float, stage: str = ""
) -> list[GateIssue]:
    """Return the drops of the primary metric that are above `max_drop`, and no noise either.

    That is stricter than `gate.judge`, which lets a drop pass that is above `max_drop` within noise: `auto`
    can try another recipe, where a run cannot.

    Args:
        scores: against FP32, by evaluation split.
        metric: names the primary metric.
        max_drop: a fraction.
        stage: of the run that the scores are of.
    """
    return [
        GateIssue(
            code="accuracy",
            state="failed",
            stage=stage or None,
            split=split,
            metric=metric,
            value=row.drop,
            stderr=row.drop_stderr,
            limit=max_drop,
            n=row.n,
        )
        for split, row in scores.items()
        if row.drop > max_drop and row.drop > NOISE * row.drop_stderr
    ]


def list_unmet(
    results: Results,
    stage: str,
    scores: Mapping[str, Comparison],
    speedup: Speedup | None,
    criteria: Criteria,
) -> list[GateIssue]:
    """Return what keeps the recipe of a run from holding.

    Args:
        results: of the whole run; its gate has the `max_drop` of the criteria.
        stage: the last measured one.
        scores: of that stage against FP32, by evaluation split.
        speedup: of its engine; None where there is none.
        criteria: what was asked for.
    """
    drops = list_drops(scores, str(results.task["metrics"][0]), criteria.max_drop, stage)
    # a drop of a stage before the last one counts where the last one has none
    issues = drops + [each for each in results.gate.failures if each.code != "accuracy" or not drops]
    least = criteria.min_speedup
    if least is not None and (speedup is None or speedup.value < least):
        issue = GateIssue(code="min_speedup", state="failed", limit=least)
        if speedup is not None:
            issue.value, issue.baseline, issue.config = speedup.value, speedup.baseline, speedup.config
        issues.append(issue)
    return issues


@dataclass(frozen=True)
class StepAnswers:
    """What one step answered in its last measured stage."""

    logits: Logits
    fails_anyway: bool  # it lacks something that other samples would not change


@dataclass(frozen=True)
class Evaluation:
    """Compares answers on the evaluation splits of a task."""

    task: Task
    encoded: Mapping[str, Encoded]  # by split
    max_drop: float
    seed: int

    def compare(self, reference: Logits, answers: Logits) -> dict[str, Comparison]:
        """Return answers against others, by split."""
        return {
            name: compare(self.task, reference[name], each, self.encoded[name].gold, seed=self.seed)
            for name, each in answers.items()
        }

    def nest_folds(self, fp32: Logits, tried: Sequence[StepAnswers], chosen: int) -> NestedFolds:
        """Return what a step is worth on samples that had no say in its choice.

        Which step is the first that holds is decided by evaluation data, so its own figure on them is a
        little too good. Here the samples of each of five folds get the answers of the step that the other
        four would have chosen; together they are one paired comparison of all samples (nested
        cross-validation: Varma and Simon 2006, "Bias in error estimation when using cross-validation for
        model selection").

        Args:
            fp32: answers of FP32 by split.
            tried: in the order of the steps.
            chosen: number of the step among them.
        """
        mixed = {name: np.array(tried[chosen].logits[name]) for name in self.encoded}
        folds = {
            name: np.random.default_rng(self.seed).permutation(len(each.gold)) % FOLDS
            for name, each in self.encoded.items()
        }
        other = 0
        for fold in range(FOLDS):
            outside = {name: np.flatnonzero(parts != fold) for name, parts in folds.items()}
            at = self._choose(fp32, tried, outside)
            if at == chosen:
                continue
            for name, each in self.encoded.items():
                inside = np.flatnonzero(folds[name] == fold)
                places = each.answers_of(each.rows_of(inside))
                mixed[name][places] = tried[at].logits[name][places]
                other += len(inside)
        scores = self.compare(fp32, mixed)
        return NestedFolds(
            folds=FOLDS,
            scores=scores,
            others=other / sum(len(each.gold) for each in self.encoded.values()),
            unmet=list_drops(scores, self.task.metrics[0], self.max_drop),
        )

    def _choose(self, fp32: Logits, tried: Sequence[StepAnswers], samples: Mapping[str, Int64]) -> int:
        """Return the number of the step that these samples choose, as `choose_step` does."""
        drops = []
        for at, each in enumerate(tried):
            scores = {
                name: self._compare_part(name, fp32, each.logits, kept) for name, kept in samples.items()
            }
            if not each.fails_anyway and not list_drops(scores, self.task.metrics[0], self.max_drop):
                return at
            drops.append(max(row.drop for row in scores.values()))
        return int(np.argmin(drops))

    def _compare_part(self, name: str, reference: Logits, answers: Logits, samples: Int64) -> Comparison:
        encoded = self.encoded[name]
        places = encoded.answers_of(encoded.rows_of(samples))
        gold = encoded.part(samples).gold
        return compare(self.task, reference[name][places], answers[name][places], gold, seed=self.seed)
