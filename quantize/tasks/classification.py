"""Classification: one class for a sentence, or a pair."""

from typing import TYPE_CHECKING

import numpy as np

from qdqbench.quantize.core.arrays import Array, Float64, Floats, Int64
from qdqbench.quantize.tasks.kind import LOGITS, SAME, TaskKind

if TYPE_CHECKING:
    import torch


def _label_problem(labels: Array, count: int) -> str:
    if labels.dtype.kind == "f":
        return f"are {labels.dtype}, not classes 0 to {count - 1}; regression needs --num-labels 1"
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= count:
        return (
            f"go from {least} to {most}, but the task has classes 0 to {count - 1} (-1 means unlabelled); "
            "correct them or give the right --num-labels"
        )
    return ""


def _predict(logits: Floats) -> Int64:
    """The first of the largest."""
    return np.asarray(np.argmax(logits, axis=1), dtype=np.int64)


def _divergence(reference: Float64, logits: Float64) -> Float64:
    """KL(reference || logits) of the class probabilities, in nat."""
    logs = [x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (reference, logits)]
    each = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1)
    return np.asarray(np.maximum(each, 0))  # rounding


def _loss(logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
    from torch.nn import functional

    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def _distance(logits: "torch.Tensor", teacher: "torch.Tensor", temperature: float) -> "torch.Tensor":
    """KL(teacher || student) T^2 (Hinton et al. 2015, arXiv 1503.02531)."""
    from torch.nn import functional

    student = functional.log_softmax(logits.float() / temperature, dim=-1)
    target = functional.log_softmax(teacher.float() / temperature, dim=-1)
    distance = functional.kl_div(student, target, reduction="sum", log_target=True)
    return distance * temperature**2


def _log_softmax(logits: Floats) -> Float64:
    from scipy.special import log_softmax

    return np.asarray(log_softmax(logits.astype(np.float64), axis=1))


def _mean_loss(logits: Floats, labels: Array) -> float:
    return float(-np.mean(_log_softmax(logits)[np.arange(len(labels)), labels]))


def _constant(logits: Floats, labels: Array) -> bool:
    """Not whether one class gets them all: with few samples of the others, a sound model may do that."""
    return len(np.unique(labels)) > 1 and bool(np.ptp(_log_softmax(logits), axis=0).max() <= SAME)


CLASSIFICATION = TaskKind(
    name="classification",
    model_class="AutoModelForSequenceClassification",
    problem_type="single_label_classification",
    outputs=LOGITS,
    head="{count} classes",
    label_type=np.int64,
    label_values="integers from 0 to {last}",
    label_problem=_label_problem,
    metrics=("accuracy", "f1", "matthews"),
    default_metrics=("accuracy",),
    predict=_predict,
    right_or_wrong=True,
    divergence_name="kl",
    divergence=_divergence,
    loss=_loss,
    distance=_distance,
    distance_unit=lambda answers: 1.0,  # nat
    mean_loss=_mean_loss,
    constant=_constant,
)
