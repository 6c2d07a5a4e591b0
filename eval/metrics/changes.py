"""What each sample was answered, in words, and where the answers of two models differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils.arrays import Array, Float64, Floats, Int64

if TYPE_CHECKING:
    import datasets

LONGEST_TEXT = 600  # characters of a sample that are kept


@dataclass(frozen=True)
class Answered:
    """The answers of one model to the samples of a split."""

    predicted: Array  # [samples] or [samples, ...], as the kind of the task has it
    margin: Float64 | None  # [samples]: see `answered`; None where no classes compete
    right: Array | None  # bool [samples]; None where none is right or wrong
    names: Sequence[str]  # of the classes by number; empty where there are none

    def word(self, sample: int) -> str:
        """The answer to a sample: a class, a score, a span, or the classes of its words."""
        value = self.predicted[sample]
        if isinstance(value, str):
            if not value:
                return "no answer"
            numbers = value.split()
            tagged = numbers and self.names and all(number.isdecimal() for number in numbers)
            return " ".join(self.names[int(number)] for number in numbers) if tagged else value
        if np.ndim(value):
            return ", ".join(f"{score:.5g}" for score in value[np.isfinite(value)])
        if np.issubdtype(self.predicted.dtype, np.integer):
            return self.names[int(value)] if int(value) < len(self.names) else str(value)
        return f"{value:.4g}"


def answered(task: Task, answers: Floats, gold: metrics.Gold, names: Sequence[str]) -> Answered:
    """The answers of a split, and how near each is to being another one.

    The margin of a sample that is classified is the probability of its class less that of the next: 0 is a
    tie, 1 is certain.

    Args:
        answers: float32 [answers, width].
        gold: as `metrics.predict` takes it.
        names: of the classes.

    Raises:
        CheckFailed: wrong shape, NaN or infinite answers.
    """
    kind, predicted = task.kind, metrics.predict(task, answers, gold)
    classified = np.issubdtype(predicted.dtype, np.integer) and predicted.ndim == 1
    right = kind.right(kind.table(predicted, gold)) if kind.right else None
    known = tuple(names) if classified or kind.names_classes else ()
    return Answered(predicted, _margin(answers) if classified else None, right, known)


def _margin(logits: Floats) -> Float64:
    from scipy.special import softmax

    ordered = np.sort(softmax(logits.astype(np.float64), axis=1), axis=1)
    return np.asarray(ordered[:, -1] - ordered[:, -2])


def has_answers_that_flip(found: Answered) -> bool:
    """Whether answers are the same or not, rather than nearer or farther."""
    return not np.issubdtype(found.predicted.dtype, np.floating)


def differing(reference: Answered, other: Answered) -> Array:
    """Samples with another answer, ascending; scores are never counted as another answer."""
    if not has_answers_that_flip(reference):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(reference.predicted != other.predicted)


def sample_texts(dataset: "datasets.Dataset", task: Task, samples: Int64) -> list[str]:
    """The texts of some samples of a split, in one line each; of one with several rows those of its first."""
    rows = samples
    if task.kind.groups is not None:
        rows = np.flatnonzero(np.diff(task.kind.groups(dataset, task), prepend=-1))[samples]
    chosen = dataset.select(rows.tolist())
    columns = [chosen[column] for column in task.text_columns]
    return [_line(values) for values in zip(*columns, strict=True)]


def _line(values: tuple[Any, ...]) -> str:
    texts = (" ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values)
    line = " | ".join(" ".join(text.split()) for text in texts)
    return line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}…"


def sample_labels(task: Task, gold: metrics.Gold, names: Sequence[str], samples: Int64) -> list[str | None]:
    """What would be right for some samples, in words; None where nothing is."""
    if task.kind.label_texts is None or not len(samples):
        return [None] * len(samples)
    return [*task.kind.label_texts(gold[samples], names)]
