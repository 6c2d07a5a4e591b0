"""Which samples a stage answers otherwise than FP32."""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from qdqbench.eval.metrics.changes import (
    Answered,
    answered,
    differing,
    has_answers_that_flip,
    sample_labels,
    sample_texts,
)
from qdqbench.eval.metrics.logits import read_logits
from qdqbench.quantize.models.load import read_class_names
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.tasks.types.classification import class_text
from qdqbench.quantize.tasks.types.tokens import is_named
from qdqbench.quantize.utils.arrays import Float64, Floats, Int64
from qdqbench.quantize.utils.comparison import Change, ChangedAnswer, ChangedAnswers, Classes, ClassRow
from qdqbench.quantize.utils.files import atomic_path
from qdqbench.quantize.utils.names import without_formula

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Beside:
    """Both on the first evaluation split."""

    task: Task
    stage: str
    split: str
    fp32: Floats  # answers [answers, width]
    made: Floats  # the same of `stage`
    gold: metrics.Gold
    names: list[str]  # of the classes

    @classmethod
    def of(cls, session: Session, stage: str) -> "Beside":
        """What a run left; its stage was evaluated."""
        task, folder = session.config.task, session.folder / "logits"
        before, after = (read_logits(folder / f"{name}.npz") for name in ("fp32", stage))
        split = next(iter(before))
        gold = metrics.select_reference(task, session.gold[split], before[split])
        return cls(task, stage, split, before[split], after[split], gold, _names(session, split))

    @cached_property
    def of_fp32(self) -> Answered:
        """What FP32 said."""
        return answered(self.task, self.fp32, self.gold, self.names)

    @cached_property
    def of_stage(self) -> Answered:
        """What the stage said."""
        return answered(self.task, self.made, self.gold, self.names)

    @cached_property
    def distance(self) -> Float64:
        """The kind's divergence of both answers to each sample, [samples]."""
        both = self.fp32.astype(np.float64), self.made.astype(np.float64)
        return np.asarray(self.task.kind.divergence(*both, self.gold), dtype=np.float64)


def _names(session: Session, split: str) -> list[str]:
    """Names of the classes: the model's, or those of the labels where it only numbers them."""
    task, dataset = session.config.task, session.eval_splits[split][0].dataset
    names = list(task.classes) or read_class_names(session.model_name, session.config.revision, task.kind)
    feature = dataset.features.get(task.label_column)
    known = [*task.values] or list(getattr(feature, "names", None) or ())
    return known if len(known) == len(names) and not is_named(tuple(names)) else names


FILE = "changed.csv"  # in the run directory: all of them
KEPT = 200  # of them in results.json and on the page
ORDER: tuple[Change, ...] = get_args(Change)


def changed_answers(
    both: Beside, dataset: "datasets.Dataset", folder: Path, kept: int = KEPT
) -> ChangedAnswers:
    """The samples whose answers changed, of scores those that are not the same; all go to `changed.csv`.

    Raises:
        UserError: the file cannot be written.
    """
    found = _all(both, dataset)
    _write(found, folder / FILE)
    counts = Counter(row.change for row in found)
    return ChangedAnswers(
        stage=both.stage,
        split=both.split,
        answers_are=both.task.kind.answer,
        n=len(both.gold),
        found=len(found),
        counts={change: counts[change] for change in ORDER if counts[change]},
        rows=found[:kept],
        file=FILE,
    )


def _all(both: Beside, dataset: "datasets.Dataset") -> list[ChangedAnswer]:
    """Lost answers first, then won ones, the farthest first."""
    before, after = both.of_fp32, both.of_stage
    flips = has_answers_that_flip(before)
    samples: Int64 = differing(before, after) if flips else np.flatnonzero(both.distance > 0)
    changes = [_change(both, int(sample)) for sample in samples]
    rank = [ORDER.index(change) for change in changes]
    order = np.lexsort((-both.distance[samples], np.array(rank))).tolist()
    chosen = samples[order]
    texts: Sequence[str] = sample_texts(dataset, both.task, chosen) if len(chosen) else []
    labels = sample_labels(both.task, both.gold, both.names, chosen)
    margins = before.margin, after.margin
    return [
        ChangedAnswer(
            sample=int(sample),
            text=text,
            label=label,
            fp32=before.word(int(sample)),
            answer=after.word(int(sample)),
            fp32_margin=None if margins[0] is None else float(margins[0][sample]),
            margin=None if margins[1] is None else float(margins[1][sample]),
            change=changes[place],
            distance=float(both.distance[sample]),
        )
        for place, sample, text, label in zip(order, chosen, texts, labels, strict=True)
    ]


def _change(both: Beside, sample: int) -> Change:
    if both.of_fp32.right is None or both.of_stage.right is None:
        return "nearer or farther"
    before, after = bool(both.of_fp32.right[sample]), bool(both.of_stage.right[sample])
    if before != after:
        return "right to wrong" if before else "wrong to right"
    return "still right" if before else "still wrong"


def _write(rows: list[ChangedAnswer], path: Path) -> None:
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        table = csv.DictWriter(stream, [*ChangedAnswer.model_fields])
        table.writeheader()
        for row in rows:
            table.writerow({key: without_formula(value) for key, value in row.model_dump().items()})


MOST = 40  # classes whose confusion is kept as a matrix


def classes_of(both: Beside) -> Classes | None:
    """Class by class; None where answers are no classes."""
    kind = both.task.kind
    if kind.by_class is None:
        return None
    labels, before, samples = kind.by_class(both.of_fp32.predicted, both.gold)
    _, after, _ = kind.by_class(both.of_stage.predicted, both.gold)
    seen = (int(each.max()) for each in (labels, before, after) if len(each))
    count = max(both.task.num_labels - 1, *seen) + 1
    few = count <= MOST
    return Classes(
        stage=both.stage,
        unit="words" if kind.units else "samples",
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
    """Of a class, from what is labelled so and answered so by both, bool [units].

    The error is that of a ratio of sums over samples (Cochran 1977, "Sampling Techniques", section 2.9), as
    words of one sentence go together.
    """
    n = int(labelled.sum())
    if not n:
        return ClassRow(name=name, n=0, fp32=None, recall=None, delta=None, delta_stderr=None, lost=0, won=0)
    right = [(labelled & each).sum() for each in (before, after)]
    step = after[labelled].astype(np.int64) - before[labelled]
    delta = float(step.mean())
    of_sample = np.bincount(samples[labelled], weights=step - delta)
    return ClassRow(
        name=name,
        n=n,
        fp32=float(right[0] / n),
        recall=float(right[1] / n),
        delta=delta,
        delta_stderr=float(np.sqrt(np.square(of_sample).sum()) / n),
        lost=int((step < 0).sum()),
        won=int((step > 0).sum()),
    )
