"""Which samples a stage answers otherwise than FP32."""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from qdqbench.eval.metrics.compare import measure_powers
from qdqbench.eval.metrics.logits import read_logits
from qdqbench.eval.metrics.results import Change, ChangedPrediction, ChangedPredictions, Classes, ClassRow
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.kinds.classification import class_text
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils.arrays import Array, Float64, Floats, Int64
from qdqbench.quantize.utils.files import atomic_path
from qdqbench.quantize.utils.names import without_formula

if TYPE_CHECKING:
    import datasets

LONGEST_TEXT = 600  # characters of a sample that are kept
FILE = "changed.csv"  # in the run directory: all of them
KEPT = 200  # of them in results.json and on the page
MOST = 40  # classes whose confusion is kept as a matrix
ORDER: tuple[Change, ...] = get_args(Change)


@dataclass(frozen=True)
class Predictions:
    """Predictions of one model for the samples of a split."""

    predicted: Array  # [samples] or [samples, ...], as the kind of the task has it
    margin: Float64 | None  # [samples]: see `predict_answers`; None where no classes compete
    right: Array | None  # bool [samples]; None where none is right or wrong
    names: Sequence[str]  # of the classes by number; empty where there are none

    @property
    def is_discrete(self) -> bool:
        """Return whether predictions are the same or not, rather than nearer or farther."""
        return not np.issubdtype(self.predicted.dtype, np.floating)

    def margin_of(self, sample: int) -> float | None:
        return None if self.margin is None else float(self.margin[sample])

    def is_right(self, sample: int) -> bool | None:
        return None if self.right is None else bool(self.right[sample])

    def word(self, sample: int) -> str:
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


def predict_answers(task: Task, answers: Floats, gold: metrics.Gold, names: Sequence[str]) -> Predictions:
    """Return the predictions of a split from answers [answers, width], and the margin of each.

    The margin of a classified sample is the probability of its class less that of the next; 0 is a tie.
    """
    from scipy.special import softmax

    kind, predicted = task.kind, metrics.predict(task, answers, gold)
    classified = np.issubdtype(predicted.dtype, np.integer) and predicted.ndim == 1
    right = kind.right(kind.table(predicted, gold))
    margin = None
    if classified:
        ordered = np.sort(softmax(answers.astype(np.float64), axis=1), axis=1)
        margin = np.asarray(ordered[:, -1] - ordered[:, -2])
    return Predictions(predicted, margin, right, names if classified or kind.names_classes else ())


def find_changed(reference: Predictions, other: Predictions) -> Array:
    """Return samples with another prediction, ascending; none for scores."""
    if not reference.is_discrete:
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(reference.predicted != other.predicted)


def sample_texts(dataset: "datasets.Dataset", task: Task, samples: Int64) -> list[str]:
    """Return the texts of samples in a line each; of one with several rows those of its first."""
    rows = np.flatnonzero(np.diff(task.kind.groups(dataset, task), prepend=-1))[samples]
    chosen = dataset.select(rows.tolist())
    columns = [chosen[column] for column in task.text_columns]
    return [_line(values) for values in zip(*columns, strict=True)]


def _line(values: tuple[Any, ...]) -> str:
    texts = (" ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values)
    line = " | ".join(" ".join(text.split()) for text in texts)
    return line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}…"


@dataclass(frozen=True)
class PairedAnswers:
    """Predictions of FP32 and of a stage on the first evaluation split."""

    task: Task
    stage: str
    split: str
    fp32: Floats  # answers [answers, width]
    answers: Floats  # the same of `stage`
    gold: metrics.Gold
    names: list[str]  # of the classes

    @classmethod
    def of(cls, session: Session, stage: str) -> "PairedAnswers":
        task, folder = session.config.task, session.folder / "logits"
        before, after = (read_logits(folder / f"{name}.npz") for name in ("fp32", stage))
        split = next(iter(before))
        gold = metrics.select_reference(task, session.gold[split], before[split])
        names = [*session.class_names]
        return cls(task, stage, split, before[split], after[split], gold, names)

    @cached_property
    def of_fp32(self) -> Predictions:
        return predict_answers(self.task, self.fp32, self.gold, self.names)

    @cached_property
    def of_stage(self) -> Predictions:
        return predict_answers(self.task, self.answers, self.gold, self.names)

    @cached_property
    def distance(self) -> Float64:
        return measure_powers(self.task.kind, self.fp32, self.answers, self.gold).noise


def list_changed_answers(
    both: PairedAnswers, dataset: "datasets.Dataset", folder: Path
) -> ChangedPredictions:
    """Return samples with changed predictions, of scores all that moved; write `changed.csv`.

    Regressed ones come first, then fixed ones, the farthest first.
    """
    before, after = both.of_fp32, both.of_stage
    samples: Int64 = find_changed(before, after) if before.is_discrete else np.flatnonzero(both.distance > 0)
    changes = np.array([ORDER.index(_change(before, after, sample)) for sample in samples], dtype=np.int64)
    order = np.lexsort((-both.distance[samples], changes))
    samples, changes = samples[order], changes[order]
    texts: Sequence[str] = sample_texts(dataset, both.task, samples) if len(samples) else []
    labels = both.task.kind.label_texts(both.gold[samples], both.names)
    rows = [
        ChangedPrediction(
            sample=int(sample),
            text=text,
            label=label,
            fp32=before.word(sample),
            prediction=after.word(sample),
            fp32_margin=before.margin_of(sample),
            margin=after.margin_of(sample),
            change=ORDER[change],
            distance=float(both.distance[sample]),
        )
        for sample, change, text, label in zip(samples, changes, texts, labels, strict=True)
    ]
    with atomic_path(folder / FILE) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        table = csv.DictWriter(stream, [*ChangedPrediction.model_fields])
        table.writeheader()
        for row in rows:
            table.writerow({key: without_formula(value) for key, value in row.model_dump().items()})
    counts = Counter(row.change for row in rows)
    return ChangedPredictions(
        stage=both.stage,
        split=both.split,
        prediction_type=both.task.kind.answer,
        n=len(both.gold),
        count=len(rows),
        counts={change: counts[change] for change in ORDER if counts[change]},
        rows=rows[:KEPT],
        file=FILE,
    )


def _change(reference: Predictions, other: Predictions, sample: int) -> Change:
    before, after = reference.is_right(sample), other.is_right(sample)
    if before is None or after is None:
        return "moved"
    if before != after:
        return "regressed" if before else "fixed"
    return "still_right" if before else "still_wrong"


def compare_classes(both: PairedAnswers) -> Classes | None:
    kind = both.task.kind
    of_fp32 = kind.by_class(both.of_fp32.predicted, both.gold)
    of_stage = kind.by_class(both.of_stage.predicted, both.gold)
    if of_fp32 is None or of_stage is None:
        return None
    (labels, before, samples), after = of_fp32, of_stage[1]
    seen = (int(numbers.max()) for numbers in (labels, before, after) if len(numbers))
    count = max(both.task.num_labels - 1, *seen) + 1
    few = count <= MOST
    return Classes(
        stage=both.stage,
        unit="words" if kind.over_tokens else "samples",
        rows=[
            _row(class_text(number, both.names), labels == number, before == number, after == number, samples)
            for number in range(count)
        ],
        fp32=_confusion(labels, before, count) if few else [],
        confusion=_confusion(labels, after, count) if few else [],
    )


def _confusion(labels: Int64, answers: Int64, count: int) -> list[list[int]]:
    counted = np.bincount(labels * count + answers, minlength=count * count)
    return [[int(number) for number in row] for row in counted.reshape(count, count)]


def _row(name: str, labelled: Int64, before: Int64, after: Int64, samples: Int64) -> ClassRow:
    """Return the row of a class, from bool [units] of its labels and of both predictions.

    The error is that of a ratio of sums over samples (Cochran 1977, "Sampling Techniques", section 2.9), as
    words of one sentence go together.
    """
    n, step = int(labelled.sum()), after[labelled].astype(np.int64) - before[labelled]
    recall: list[float | None] = [None, None]
    delta = error = None
    if n:
        recall = [float((labelled & answers).sum() / n) for answers in (before, after)]
        delta = float(step.mean())
        of_sample = np.bincount(samples[labelled], weights=step - delta)
        error = float(np.sqrt(np.square(of_sample).sum()) / n)
        if delta and error < 1e-12:  # one sample, or all alike, tells of no others
            error = metrics.RULE_OF_THREE**0.5 / len({*samples[labelled].tolist()})
    return ClassRow(
        name=name,
        n=n,
        fp32=recall[0],
        recall=recall[1],
        delta=delta,
        delta_stderr=error,
        regressed=int((step < 0).sum()),
        fixed=int((step > 0).sum()),
    )
