"""Which samples a stage answers otherwise than FP32."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from qdqbench.eval.accuracy.changes import differing, has_answers_that_flip, sample_labels, sample_texts
from qdqbench.eval.effects.beside import Beside
from qdqbench.quantize.core.arrays import Int64
from qdqbench.quantize.core.comparison import Change, ChangedAnswer, ChangedAnswers
from qdqbench.quantize.core.files import atomic_path
from qdqbench.quantize.core.names import without_formula

if TYPE_CHECKING:
    import datasets

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
