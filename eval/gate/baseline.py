"""What a model scores that does not read its input: the bar for FP32 itself."""

from dataclasses import dataclass

import numpy as np

from qdqbench.eval.accuracy.gate import NOISE
from qdqbench.quantize.core.arrays import Floats
from qdqbench.quantize.kinds.scores import CORRELATIONS
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task


@dataclass(frozen=True)
class Baseline:
    """The best that one answer to everything scores."""

    answer: int | None  # the class; None: any constant, which correlates with nothing
    value: float  # of the primary metric


def baseline_of(task: Task, answers: Floats, gold: metrics.Gold) -> Baseline | None:
    """The best constant answer by the primary metric; None for kinds of tasks that have none.

    Args:
        answers: [answers, width] of any model, for their form.
        gold: as `metrics.predictions` takes it.
    """
    kind, primary = task.kind, task.metrics[0]
    if primary in CORRELATIONS:
        return Baseline(None, 0.0)
    predicted = metrics.predictions(task, answers, gold)
    if predicted.ndim != 1 or not np.issubdtype(predicted.dtype, np.integer):
        return None
    scores = [
        kind.metrics[primary].value(kind.table(np.full_like(predicted, answer), gold))
        for answer in range(task.num_labels)
    ]
    best = int(np.argmax(scores))
    return Baseline(best, float(scores[best]))


def reads_its_input(value: float, stderr: float, baseline: Baseline) -> bool | None:
    """Whether a metric is above the baseline beyond noise; None where the samples cannot tell."""
    if value > baseline.value + NOISE * stderr:
        return True
    return False if value < baseline.value - NOISE * stderr else None
