"""Multi-label classification: each class is in an answer or not, for a sentence or a pair."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.tasks.kinds.classification import class_text
from qdqbench.quantize.tasks.kinds.encoded import Targets, Units
from qdqbench.quantize.tasks.kinds.kind import SAME, TaskFields, TaskKind, of_sums, ratio, share_of_rows
from qdqbench.quantize.tasks.kinds.tokens import class_names, explain_names, read_classes
from qdqbench.quantize.utils.arrays import Array, Floats, Int64

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor

NONE = "none"  # a prediction without a class
LISTS = r"(large_|fixed_size_)?list<\w+: ({})( not null)?>(\[\d+\])?"  # pattern of Arrow's lists of a type


def _parts(table: Array) -> tuple[Array, Array, Array]:
    """Return the columns of each class: predicted and right, predicted, and of the label."""
    hits, predicted, gold = np.split(table, 3, axis=1)
    return hits, predicted, gold


def _micro(sums: Floats) -> Floats:
    hits, predicted, gold = (part.sum(axis=1) for part in _parts(sums))
    return ratio(2 * hits, predicted + gold)


def _macro(sums: Floats) -> Floats:
    hits, predicted, gold = _parts(sums)
    return np.asarray(ratio(2 * hits, predicted + gold).mean(axis=1))


def _exact(table: Array) -> Array:
    _, predicted, gold = _parts(table)
    return np.asarray((predicted == gold).all(axis=1))


def _is_marked(rows: Sequence[Any], count: int) -> bool:
    """Return whether rows of numbers have a 0 or 1 for each class, rather than the numbers of classes."""
    return all(len(row) == count and {*row} <= {0, 1} for row in rows)


class MultiLabel(TaskKind):
    name = "multi-label classification"
    answer = "classes"
    problem_type = "multi_label_classification"
    head = "{count} classes that are each there or not"
    reads_first_token = True
    names_classes = True
    label_type = LISTS.format(r"bool|u?int\d+|halffloat|float|double|(large_)?string")
    label_values = "lists of classes"
    gold_is_labels = False
    calibrates_unlabelled = True
    # of classes whose probability, the sigmoid of the logit, is above 0.5
    metrics = {"f1_micro": of_sums(_micro), "f1_macro": of_sums(_macro), "exact_match": share_of_rows(_exact)}
    default_metrics = tuple(metrics)

    def label_problem(self, dataset: "Dataset", task: TaskFields) -> str:
        rows = self.column(dataset, task.label_column)
        if missing := sum(None in row for row in rows):
            return f"are missing in part in {missing} of {len(rows)} rows; correct or drop them"
        names = class_names(dataset, task.label_column)
        texts = any(isinstance(label, str) for row in rows for label in row)
        if not texts and not _is_marked(rows, task.num_labels):
            count = len(names) or task.num_labels
            found = {label for row in rows for label in row}
            if strange := sorted(each for each in found if each not in range(count)):
                return (
                    f"have {strange[0]:g}, but are numbers of classes from 0 to {count - 1}, or a 0 or 1 for "
                    f"each of {count}; correct them"
                )
        if not any(map(len, rows)):
            return "are all empty, so there is nothing to find; give a split with labels"
        return explain_names(names, task, texts=texts)

    def targets(self, dataset: "Dataset", task: TaskFields, samples: Int64, units: list[Units]) -> Targets:
        known, rows = read_classes(dataset, task, "labels"), self.column(dataset, task.label_column)
        marks = np.zeros((len(rows), task.num_labels), dtype=np.float32)
        if not known.names and _is_marked(rows, task.num_labels):
            marks[:] = rows
        else:
            for mark, row in zip(marks, rows, strict=True):
                mark[[*map(known.number, row)]] = 1
        return Targets(marks, marks.astype(np.int8), known.warnings)

    def predict(self, answers: Floats, gold: Any) -> Array:
        """Return the numbers of the classes of a sample as one text."""
        return np.array([" ".join(map(str, np.flatnonzero(row > 0))) or NONE for row in answers])

    def table(self, predicted: Array, gold: Array) -> Array:
        marks = np.zeros(gold.shape, dtype=np.int8)
        for mark, text in zip(marks, predicted, strict=True):
            mark[[] if text == NONE else [*map(int, text.split())]] = 1
        return np.concatenate([marks & gold, marks, gold], axis=1)

    def right(self, table: Array) -> Array:
        return _exact(table)

    def label_texts(self, gold: Array, names: Sequence[str]) -> list[str]:
        rows = (map(int, np.flatnonzero(row)) for row in gold)
        return [" ".join(class_text(number, names) for number in row) or NONE for row in rows]

    def constant(self, answers: Floats, labels: Array) -> bool:
        shares = 1 / (1 + np.exp(-answers.astype(np.float64)))
        return len(np.unique(labels, axis=0)) > 1 and bool(np.ptp(shares, axis=0).max() <= SAME)

    def loss(self, answers: "Tensor", labels: "Tensor", counts: "Tensor") -> "Tensor":
        """Compute cross entropy of there or not, the mean over classes, as transformers does."""
        from torch.nn import functional

        each = functional.binary_cross_entropy_with_logits(answers.float(), labels, reduction="none")
        return each.mean(dim=1).sum()


def count_labels(dataset: "Dataset", column: str) -> int:
    """Return how many classes labels without names say that there are."""
    rows = MULTI_LABEL.column(dataset, column)
    marked = rows and len(rows[0]) > 1 and _is_marked(rows, len(rows[0]))  # one is the number of a class
    return len(rows[0]) if marked else 1 + max((int(label) for row in rows for label in row), default=0)


MULTI_LABEL = MultiLabel()
