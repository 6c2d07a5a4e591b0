"""What a model scores that does not read its input: the bar for FP32 itself."""

import json
from dataclasses import dataclass

import numpy as np

from qdqbench.eval.metrics.gate import NOISE
from qdqbench.eval.metrics.logits import read_logits
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.tasks.types.scores import CORRELATIONS
from qdqbench.quantize.utils.arrays import Array, Floats
from qdqbench.quantize.utils.comparison import GateIssue
from qdqbench.quantize.utils.results import StageResult


@dataclass(frozen=True)
class Baseline:
    """The best that one answer to everything scores."""

    answer: int | None  # the class; None: any constant, which correlates with nothing
    value: float  # of the primary metric


def judge_baseline(session: Session, row: StageResult) -> GateIssue | None:
    """Compare FP32 with one answer for everything: what it does not know, INT8 cannot lose.

    Args:
        row: of the FP32 model that this session evaluated.

    Returns:
        None where FP32 is above it, or the kind of task has no such answer.
    """
    task, metric = session.config.task, session.config.task.metrics[0]
    if metric not in row.metrics:
        return None
    logits = read_logits(session.folder / "logits" / "fp32.npz")
    split = next(iter(logits))
    gold = metrics.select_reference(task, session.gold[split], logits[split])
    if (baseline := find_baseline(task, logits[split], gold)) is None:
        return None
    value, stderr = row.metrics[metric], row.stderr.get(metric, 0.0)
    if (above := reads_its_input(value, stderr, baseline)) is True:
        return None
    untrained = "the model was not trained on this task, or its answers are to be read the other way round"
    order = "" if above is None else find_label_order(task, logits[split], gold, baseline, stderr)
    return GateIssue(
        code="baseline",
        state="cannot tell" if above is None else "failed",
        stage="fp32",
        metric=metric,
        value=value,
        stderr=stderr,
        limit=baseline.value,
        n=row.n,
        names=[] if baseline.answer is None else [str(baseline.answer)],
        detail="" if above is None else order or untrained,
    )


def find_label_order(
    task: Task, answers: Floats, gold: metrics.Gold, baseline: Baseline, stderr: float
) -> str:
    """Return which class of the model is which of the data, where that makes its answers right; else empty.

    Arguments as of `find_baseline`; the order is the assignment with the most right answers (Kuhn 1955).
    """
    from scipy.optimize import linear_sum_assignment

    predicted = metrics.predict(task, answers, gold)
    if task.num_labels < 2 or not isinstance(gold, np.ndarray) or gold.shape != predicted.shape:
        return ""
    counts: Array = np.zeros((task.num_labels, task.num_labels), dtype=np.int64)
    np.add.at(counts, (predicted, gold), 1)
    _, order = linear_sum_assignment(counts, maximize=True)
    metric = task.metrics[0]
    reordered = float(task.kind.metrics[metric].value(task.kind.table(order[predicted], gold)))
    if not reads_its_input(reordered, stderr, baseline):
        return ""
    moved = [(ours, int(theirs)) for ours, theirs in enumerate(order) if ours != theirs]
    shown = ", ".join(f"{ours} is the data's {theirs}" for ours, theirs in moved)
    wrong = f"the labels are in another order: the model's {shown}, which makes {metric} {reordered:.4f}"
    if task.values and not all(value.isdigit() for value in task.values):
        names = json.dumps({str(ours): task.values[theirs] for ours, theirs in enumerate(order)})
        return f"{wrong}; write `id2label`: {names} into the model's config.json"
    return f"{wrong}; number column {task.label_column!r} of the data as the model does"


def find_baseline(task: Task, answers: Floats, gold: metrics.Gold) -> Baseline | None:
    """Return the best constant answer by the primary metric; None for kinds of tasks that have none.

    Args:
        answers: [answers, width] of any model, for their form.
        gold: as `metrics.predict` takes it.
    """
    kind, primary = task.kind, task.metrics[0]
    if primary in CORRELATIONS:
        return Baseline(None, 0.0)
    predicted = metrics.predict(task, answers, gold)
    if predicted.ndim != 1 or not np.issubdtype(predicted.dtype, np.integer):
        return None
    scores = [
        kind.metrics[primary].value(kind.table(np.full_like(predicted, answer), gold))
        for answer in range(task.num_labels)
    ]
    best = int(np.argmax(scores))
    return Baseline(best, float(scores[best]))


def reads_its_input(value: float, stderr: float, baseline: Baseline) -> bool | None:
    """Return whether a metric is above the baseline beyond noise; None where the samples cannot tell."""
    if value > baseline.value + NOISE * stderr:
        return True
    return False if value < baseline.value - NOISE * stderr else None
