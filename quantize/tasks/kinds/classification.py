"""Classification and regression: one class, or one score, for a sentence or a pair."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.tasks.kinds.kind import CLASSES, CORRELATIONS, SAME, TaskFields, TaskKind
from qdqbench.quantize.utils.arrays import Array, Float64, Floats, Int64

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor


def _log_softmax(logits: Floats) -> Float64:
    from scipy.special import log_softmax

    return np.asarray(log_softmax(logits.astype(np.float64), axis=1))


def class_text(number: int, names: Sequence[str]) -> str:
    return names[number] if 0 <= number < len(names) else str(number)


def same_for_all(logits: Floats, labels: Array) -> bool:
    """Return whether probabilities do not depend on the input; a sound model, too, may give all one class."""
    return len(np.unique(labels)) > 1 and bool(np.ptp(_log_softmax(logits), axis=0).max() <= SAME)


class Classification(TaskKind):
    name = "classification"
    answer = "class"
    problem_type = "single_label_classification"
    head = "{count} classes"
    reads_first_token = True
    label_values = "integers from 0 to {last}"
    label_dtype = np.int64
    metrics = CLASSES
    default_metrics = ("accuracy",)

    def label_problem(self, dataset: "Dataset", task: TaskFields) -> str:
        labels, count = dataset.data.column(task.label_column).to_numpy(), task.num_labels
        if labels.dtype.kind == "f" and not all(map(float.is_integer, labels.tolist())):  # 1.0 is a class
            return f"are {labels.dtype}, not classes 0 to {count - 1}; regression needs --num-labels 1"
        least, most = int(labels.min()), int(labels.max())
        if least < 0 or most >= count:
            return (
                f"go from {least} to {most}, but the task has classes 0 to {count - 1} (-1 means unlabeled)"
                "; correct them or give the right --num-labels"
            )
        return ""

    def predict(self, answers: Floats, gold: Any) -> Int64:
        return np.asarray(np.argmax(answers, axis=1), dtype=np.int64)

    def right(self, table: Array) -> Array:
        return np.asarray(table[:, 0] == table[:, 1])

    def by_class(self, predicted: Array, gold: Array) -> tuple[Int64, Int64, Int64]:
        return gold.astype(np.int64), predicted.astype(np.int64), np.arange(len(gold))

    def label_texts(self, gold: Array, names: Sequence[str]) -> list[str]:
        return [class_text(int(label), names) for label in gold]

    def constant(self, answers: Floats, labels: Array) -> bool:
        return same_for_all(answers, labels)

    def loss(self, answers: "Tensor", labels: "Tensor", counts: "Tensor") -> "Tensor":
        from torch.nn import functional

        return functional.cross_entropy(answers.float(), labels, reduction="sum")

    def mean_loss(self, answers: Floats, labels: Array, counts: Array) -> float:
        return float(-np.mean(_log_softmax(answers)[np.arange(len(labels)), labels]))


CLASSIFICATION = Classification()


class Regression(TaskKind):
    name = "regression"
    answer = "score"
    problem_type = "regression"
    head = "one regression output"
    reads_first_token = True
    metrics = CORRELATIONS
    default_metrics: tuple[str, ...] = ("pearson", "spearman")

    def predict(self, answers: Floats, gold: Any) -> Float64:
        return np.asarray(answers[:, 0], dtype=np.float64)

    def constant(self, answers: Floats, labels: Array) -> bool:
        return bool(np.std(answers[:, 0]) <= SAME * np.std(labels))

    def loss(self, answers: "Tensor", labels: "Tensor", counts: "Tensor") -> "Tensor":
        from torch.nn import functional

        return functional.mse_loss(answers.float()[:, 0], labels, reduction="sum")

    def mean_loss(self, answers: Floats, labels: Array, counts: Array) -> float:
        return float(np.mean((answers[:, 0].astype(np.float64) - labels) ** 2))


REGRESSION = Regression()
