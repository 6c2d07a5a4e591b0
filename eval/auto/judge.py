"""Whether a recipe holds, and how far its answers are from those of FP32 where nothing was chosen by them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qdqbench.eval.accuracy.compare import compare
from qdqbench.eval.accuracy.gate import NOISE
from qdqbench.eval.accuracy.logits import Logits
from qdqbench.eval.auto.results import Final, Lacks, Wanted
from qdqbench.eval.bench.engines import Latency
from qdqbench.eval.gate.gate import issue_sentence
from qdqbench.quantize.core.arrays import Int64
from qdqbench.quantize.core.comparison import Comparison
from qdqbench.quantize.core.results import Results
from qdqbench.quantize.kinds.encoded import Encoded
from qdqbench.quantize.tasks.metrics import against
from qdqbench.quantize.tasks.task import Task

FOLDS = 5


def drop_lacks(versus: Mapping[str, Comparison], metric: str, max_drop: float) -> list[str]:
    """What is wrong with drops of the primary metric: those that are above `max_drop`, and no noise either.

    That is stricter than `gate.judge`, which lets a drop pass that is above `max_drop` within noise: a
    ladder can climb on, where a run cannot.

    Args:
        versus: against FP32, by evaluation split.
        max_drop: a fraction.
    """
    found = []
    for split, row in versus.items():
        drop, error = -row.delta[metric], row.delta_stderr[metric]
        if drop > max_drop and drop > NOISE * error:
            found.append(
                f"{100 * drop:.2f} points of {metric} are lost on {split} (paired standard error "
                f"{100 * error:.2f}), which is neither within {100 * max_drop:g} nor within noise"
            )
    return found


def lacks_of(
    results: Results, versus: Mapping[str, Comparison], latency: Latency | None, wanted: Wanted
) -> Lacks:
    """What keeps the recipe of a run from holding: the one place where the ladder asks.

    Args:
        results: of the whole run; its gate has the ladder's `max_drop`.
        versus: its last measured stage against FP32, by evaluation split.
        latency: of its engine; None where there is none.
    """
    metric = str(results.task["metrics"][0])
    dropped = drop_lacks(versus, metric, wanted.max_drop)
    found = Lacks(accuracy=list(dropped))
    for failure in results.gate.failures:
        if failure.code != "accuracy":
            found.other.append(issue_sentence(failure))
        elif not dropped:  # of a stage before the last one
            found.accuracy.append(issue_sentence(failure))
    if wanted.min_speedup is not None:
        if latency is None:
            found.speed.append(f"a speed-up of {wanted.min_speedup:g}x is asked for, and none is known")
        elif latency.speedup < wanted.min_speedup:
            found.speed.append(f"it is {latency.speedup:.2f}x as fast, asked for is {wanted.min_speedup:g}x")
    return found


@dataclass(frozen=True)
class Answers:
    """What one step answered in its last measured stage."""

    logits: Logits
    fixed: bool  # it lacks something that other samples would not change


@dataclass(frozen=True)
class Judge:
    """Compares answers on the evaluation splits of a task."""

    task: Task
    encoded: Mapping[str, Encoded]  # by split
    max_drop: float
    seed: int

    def versus(self, reference: Logits, answers: Logits) -> dict[str, Comparison]:
        """Answers against others, by split."""
        return {
            name: compare(
                self.task,
                reference[name],
                answers[name],
                against(self.task, self.encoded[name].gold, reference[name]),
                seed=self.seed,
            )
            for name in answers
        }

    def final(self, fp32: Logits, tried: Sequence[Answers], chosen: int) -> Final:
        """What a step is worth on samples that had no say in its choice.

        Which step is the first that holds is decided by evaluation data, so its own figure on them is a
        little too good. Here the samples of each of five folds get the answers of the step that the other
        four would have chosen; together they are one paired comparison of all samples (nested
        cross-validation: Varma and Simon 2006, "Bias in error estimation when using cross-validation for
        model selection").

        Args:
            fp32: answers of FP32 by split.
            tried: in the order of the ladder.
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
            at = self._first_that_holds(fp32, tried, outside)
            if at == chosen:
                continue
            for name, each in self.encoded.items():
                inside = np.flatnonzero(folds[name] == fold)
                places = each.answers_of(each.rows_of(inside))
                mixed[name][places] = tried[at].logits[name][places]
                other += len(inside)
        versus = self.versus(fp32, mixed)
        return Final(
            folds=FOLDS,
            vs_fp32=versus,
            others=other / sum(len(each.gold) for each in self.encoded.values()),
            lacks=drop_lacks(versus, self.task.metrics[0], self.max_drop),
        )

    def _first_that_holds(self, fp32: Logits, tried: Sequence[Answers], samples: Mapping[str, Int64]) -> int:
        """Number of the step that these samples choose, as `climb.chosen` does."""
        metric, drops = self.task.metrics[0], []
        for at, each in enumerate(tried):
            versus = {name: self._part(name, fp32, each.logits, kept) for name, kept in samples.items()}
            if not each.fixed and not drop_lacks(versus, metric, self.max_drop):
                return at
            drops.append(max(-row.delta[metric] for row in versus.values()))
        return int(np.argmin(drops))

    def _part(self, name: str, fp32: Logits, answers: Logits, samples: Int64) -> Comparison:
        encoded = self.encoded[name]
        places = encoded.answers_of(encoded.rows_of(samples))
        before, gold = fp32[name][places], encoded.part(samples).gold
        return compare(
            self.task, before, answers[name][places], against(self.task, gold, before), seed=self.seed
        )
