"""What quantization does to each class: confusion beside FP32's, and the change of each class's recall."""

import numpy as np

from qdqbench.eval.effects.beside import Beside
from qdqbench.quantize.core.arrays import Int64
from qdqbench.quantize.core.comparison import Classes, ClassRow
from qdqbench.quantize.kinds.classification import class_text

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
