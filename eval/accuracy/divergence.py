"""The samples that a choice of INT8 tensors is measured on, and how far its answers are from FP32's."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from qdqbench.quantize.core.arrays import Float64, Floats
from qdqbench.quantize.core.errors import CheckFailed, UserError
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.tasks.rows import Encoded, encode, load_split
from qdqbench.quantize.tasks.sources import Split
from qdqbench.quantize.tasks.task import Task

if TYPE_CHECKING:
    from qdqbench.quantize.rundir.session import Session
    from qdqbench.quantize.tasks.rows import Encoded


def draw_samples(session: "Session", samples: int) -> tuple[Split, Encoded]:
    """Rows of the calibration split that calibration does not see: the next ones of its permutation.

    Notes of the split, and that it has fewer rows, go to the session.

    Raises:
        UserError: the calibration split is one that judges, or it has no rows left.
    """
    settings, task = session.recipe.calibration, session.config.task
    if settings.split in task.eval_splits:
        raise UserError(
            f"calibration.split is {settings.split!r}, the judge of task {task.name!r}; what is chosen is "
            f"measured beside the calibration data, so set calibration.split to {task.train_split}"
        )
    wanted = settings.samples + samples
    split = load_split(task, session.data_source, settings.split, limit=wanted, seed=settings.seed)
    session.notes += [note for note in split.notes if not note.startswith(f"{wanted} samples")]
    there = len(split.dataset)
    if there - settings.samples < 2:
        raise UserError(
            f"split {settings.split!r} of {split.source} has {split.rows} rows and calibration takes "
            f"{settings.samples}: none are left to measure on; lower calibration.samples in the recipe"
        )
    if there < wanted:
        session.notes.append(
            f"measured on {there - settings.samples} samples, not {samples}: split {settings.split!r} has "
            f"{split.rows} rows, and calibration takes {settings.samples}"
        )
    split = replace(split, dataset=split.dataset.select(range(settings.samples, there)))
    encoded = encode(split, task, session.tokenizer, session.recipe.export.max_length)
    if encoded.truncated:
        session.notes.append(f"{encoded.truncated} samples were cut to export.max_length")
    return split, encoded


def divergence(task: Task, reference: Floats, logits: Floats) -> Float64:
    """How far logits are from FP32's, by sample, float64 [n]; 0 where they say the same.

    Classes: KL(FP32 || logits) of the class probabilities, in nat. Regression: squared difference over the
    variance of FP32's outputs.

    Args:
        task: classes or regression.
        reference: float32 [n, num_labels] of FP32.
        logits: the same of the candidate.

    Raises:
        CheckFailed: all FP32 outputs of a regression are equal.
    """
    before, after = reference.astype(np.float64), logits.astype(np.float64)
    if task.is_regression:
        spread = float(before.var())
        if spread == 0:
            raise CheckFailed("FP32 gives the same output for every sample; the model or the data is broken")
        return np.asarray(((after - before) ** 2).mean(axis=1) / spread)
    logs = [x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (before, after)]
    each = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1)
    return np.asarray(np.maximum(each, 0))  # rounding
