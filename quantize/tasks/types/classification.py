"""Classification: one class for a sentence, or a pair."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qdqbench.quantize.tasks.types.encoded import RowLayout, Targets
from qdqbench.quantize.tasks.types.kind import LOGITS, SAME, Described, TaskKind
from qdqbench.quantize.tasks.types.scores import CLASSES
from qdqbench.quantize.utils.arrays import Array, Float64, Floats, Int64

if TYPE_CHECKING:
    import datasets
    import torch

TEXTS = "(large_)?string"
NUMBERS = r"bool|u?int\d+|halffloat|float|double"


def _label_problem(dataset: "datasets.Dataset", task: Described) -> str:
    labels, count = dataset.data.column(task.label_column).to_numpy(), task.num_labels
    if labels.dtype.kind == "f":
        return f"are {labels.dtype}, not classes 0 to {count - 1}; regression needs --num-labels 1"
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= count:
        return (
            f"go from {least} to {most}, but the task has classes 0 to {count - 1} (-1 means unlabelled); "
            "correct them or give the right --num-labels"
        )
    return ""


def labels_as(dtype: type) -> "Callable[[datasets.Dataset, Described, RowLayout], Targets]":
    """Return `TaskKind.targets` of a label column that holds a number in each row."""

    def targets(dataset: "datasets.Dataset", task: Described, layout: RowLayout) -> Targets:
        values = dataset.select_columns([task.label_column])[:][task.label_column]
        return Targets(np.array(values, dtype=dtype))

    return targets


def _predict(logits: Floats, labels: Array) -> Int64:
    """Return the first of the largest."""
    return np.asarray(np.argmax(logits, axis=1), dtype=np.int64)


def label_and_prediction(predicted: Array, labels: Array) -> Array:
    """Return a table for the metrics of both."""
    return np.stack([labels, predicted], axis=1)


def kl(reference: Float64, logits: Float64) -> Float64:
    """Compute KL(reference || logits) of the class probabilities, in nat, by answer."""
    logs = [x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (reference, logits)]
    each = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1)
    return np.asarray(np.maximum(each, 0))  # rounding


def _loss(logits: "torch.Tensor", labels: "torch.Tensor", answers: "torch.Tensor") -> "torch.Tensor":
    from torch.nn import functional

    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def _distance(
    logits: "torch.Tensor", teacher: "torch.Tensor", temperature: float, answers: "torch.Tensor"
) -> "torch.Tensor":
    """Compute KL(teacher || student) T^2 (Hinton et al. 2015, arXiv 1503.02531)."""
    from torch.nn import functional

    student = functional.log_softmax(logits.float() / temperature, dim=-1)
    target = functional.log_softmax(teacher.float() / temperature, dim=-1)
    distance = functional.kl_div(student, target, reduction="sum", log_target=True)
    return distance * temperature**2


def _log_softmax(logits: Floats) -> Float64:
    from scipy.special import log_softmax

    return np.asarray(log_softmax(logits.astype(np.float64), axis=1))


def _mean_loss(logits: Floats, labels: Array, answers: Array) -> float:
    return float(-np.mean(_log_softmax(logits)[np.arange(len(labels)), labels]))


def _by_class(predicted: Array, labels: Array) -> tuple[Int64, Int64, Int64]:
    return labels.astype(np.int64), predicted.astype(np.int64), np.arange(len(labels))


def class_text(number: int, names: Sequence[str]) -> str:
    """Return a class by its name, by its number where it has none."""
    return names[number] if 0 <= number < len(names) else str(number)


def same_for_all(logits: Floats, labels: Array) -> bool:
    """Return whether the class probabilities do not depend on the input though labels do.

    Not whether one class gets them all: with few samples of the others, a sound model may do that.
    """
    return len(np.unique(labels)) > 1 and bool(np.ptp(_log_softmax(logits), axis=0).max() <= SAME)


CLASSIFICATION = TaskKind(
    name="classification",
    model_class="AutoModelForSequenceClassification",
    architecture="ForSequenceClassification",
    problem_type="single_label_classification",
    outputs=LOGITS,
    head="{count} classes",
    text_type=TEXTS,
    text_values="texts",
    label_type=NUMBERS,
    label_values="integers from 0 to {last}",
    label_problem=_label_problem,
    targets=labels_as(np.int64),
    metrics=CLASSES,
    default_metrics=("accuracy",),
    predict=_predict,
    table=label_and_prediction,
    right=lambda table: np.asarray(table[:, 0] == table[:, 1]),
    divergence_name="kl",
    divergence=lambda reference, logits, labels: kl(reference, logits),
    loss=_loss,
    distance=_distance,
    distance_unit=lambda answers: 1.0,  # nat
    mean_loss=_mean_loss,
    reads_first_token=True,
    constant=same_for_all,
    answer="class",
    label_texts=lambda labels, names: [class_text(int(label), names) for label in labels],
    by_class=_by_class,
)
