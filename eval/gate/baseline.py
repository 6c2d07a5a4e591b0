"""What a model scores that does not read its input: the bar for FP32 itself."""

import json
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qdqbench.eval.accuracy.gate import NOISE
from qdqbench.eval.accuracy.logits import read_logits
from qdqbench.quantize.core.arrays import Array, Floats
from qdqbench.quantize.core.results import StageResult
from qdqbench.quantize.kinds.scores import CORRELATIONS
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task


@dataclass(frozen=True)
class Baseline:
    """The best that one answer to everything scores."""

    answer: int | None  # the class; None: any constant, which correlates with nothing
    value: float  # of the primary metric


class Standing(NamedTuple):
    """FP32 beside one answer for everything."""

    said: str
    above: bool | None  # as `reads_its_input`
    mend: str = ""  # what is wrong, and what to do


def standing_of(session: Session, row: StageResult) -> Standing | None:
    """Hold FP32 to one answer for everything: what it does not know, INT8 cannot lose.

    Args:
        row: of the FP32 model that this session evaluated.

    Returns:
        None where the kind of task has no such answer.
    """
    task, metric = session.config.task, session.config.task.metrics[0]
    if metric not in row.metrics:
        return None
    logits = read_logits(session.folder / "logits" / "fp32.npz")
    split = next(iter(logits))
    gold = metrics.against(task, session.gold[split], logits[split])
    if (baseline := baseline_of(task, logits[split], gold)) is None:
        return None
    value, stderr = row.metrics[metric], row.stderr.get(metric, 0.0)
    always = "any constant" if baseline.answer is None else f"always class {baseline.answer}"
    said = f"FP32 {metric} {value:.4f} against {baseline.value:.4f} of {always}"
    if (above := reads_its_input(value, stderr, baseline)) is not False:
        return Standing(said, above)
    untrained = "the model was not trained on this task, or its answers are to be read the other way round"
    return Standing(said, above, mend_of(task, logits[split], gold, baseline, stderr) or untrained)


def mend_of(task: Task, answers: Floats, gold: metrics.Gold, baseline: Baseline, stderr: float) -> str:
    """Which class of the model is which of the data, where that makes its answers right; else empty.

    Arguments as of `baseline_of`; the order is the assignment with the most right answers (Kuhn 1955).
    """
    from scipy.optimize import linear_sum_assignment

    predicted = metrics.predictions(task, answers, gold)
    if task.num_labels < 2 or not isinstance(gold, np.ndarray) or gold.shape != predicted.shape:
        return ""
    counts: Array = np.zeros((task.num_labels, task.num_labels), dtype=np.int64)
    np.add.at(counts, (predicted, gold), 1)
    _, order = linear_sum_assignment(counts, maximize=True)
    metric = task.metrics[0]
    mended = float(task.kind.metrics[metric].value(task.kind.table(order[predicted], gold)))
    if not reads_its_input(mended, stderr, baseline):
        return ""
    moved = [(ours, int(theirs)) for ours, theirs in enumerate(order) if ours != theirs]
    shown = ", ".join(f"{ours} is the data's {theirs}" for ours, theirs in moved)
    wrong = f"the labels are in another order: the model's {shown}, which makes {metric} {mended:.4f}"
    if task.values and not all(value.isdigit() for value in task.values):
        names = json.dumps({str(ours): task.values[theirs] for ours, theirs in enumerate(order)})
        return f"{wrong}; write `id2label`: {names} into the model's config.json"
    return f"{wrong}; number column {task.label_column!r} of the data as the model does"


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
