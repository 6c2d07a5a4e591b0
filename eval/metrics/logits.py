"""Answers of a stage: computed in batches, kept as files, scored."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qdqbench.eval.metrics.compare import compare
from qdqbench.eval.metrics.results import StageResult
from qdqbench.eval.metrics.runners import predict
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task, merge_splits
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Array, Floats, read_arrays
from qdqbench.quantize.utils.errors import UserError

Logits = dict[str, Floats]  # answers [answers, width] by evaluation split


def evaluate_stage(
    session: Session,
    stage: str,
    runner: Any,
    batch_size: int | None = None,
    edges: Sequence[int] | None = None,
) -> Path:
    """Write answers and their labels of every evaluation split as arrays; `edges` as of `predict`."""
    arrays: dict[str, Any] = {}
    for name, (_, encoded) in session.eval_splits.items():
        arrays[f"{name}.logits"] = predict(
            runner,
            encoded,
            pad_id=session.pad_id,
            batch_size=batch_size or session.config.batch_size,
            stage=stage,
            edges=edges,
        )
        arrays[f"{name}.labels"] = encoded.labels
    path = session.folder / "logits" / f"{stage}.npz"
    with files.atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)
    return path


def read_logits(path: Path) -> Logits:
    """Read the logits that `evaluate_stage` wrote, float [answers, width] by split."""
    return read_answers(path)[0]


def read_answers(path: Path) -> tuple[Logits, dict[str, Array]]:
    """Read the logits and labels that `evaluate_stage` wrote, by split.

    Raises:
        UserError: the file is missing, damaged or too large, or lacks logits and labels that are numbers.
    """
    again = f"run `qdqbench evaluate {path.parent.parent}` again"
    arrays = read_arrays(path, again)
    splits = [name.removesuffix(".logits") for name in arrays if name.endswith(".logits")]
    for split in splits:
        logits, labels = arrays[f"{split}.logits"], arrays.get(f"{split}.labels")
        if labels is None or logits.dtype.kind != "f" or not logits.ndim or labels.dtype.kind not in "biuf":
            raise UserError(f"{path} holds no logits and labels of {split}; {again}")
    if not splits:
        raise UserError(f"{path} holds no answers; {again}")
    return {n: arrays[f"{n}.logits"] for n in splits}, {n: arrays[f"{n}.labels"] for n in splits}


def score(  # noqa: PLR0913, PLR0917
    task: Task, path: Path, reference: Path | None, gold: dict[str, metrics.Gold], seed: int, detail: str
) -> StageResult:
    """Score one stage, paired with a reference stage.

    A task with two evaluation splits (MNLI) has metrics and differences of the second under a suffix:
    accuracy_mm. Everything else, the number of samples too, is of the first.
    """
    logits = read_logits(path)
    before = logits if reference is None else read_logits(reference)
    gold = {name: metrics.select_reference(task, gold[name], before[name]) for name in logits}
    versus = None
    if reference is not None:
        found = [compare(task, before[name], logits[name], gold[name], seed=seed) for name in logits]
        deltas = merge_splits(each.delta for each in found)
        errors = merge_splits(each.delta_stderr for each in found)
        versus = found[0].model_copy(update={"delta": deltas, "delta_stderr": errors})
    return StageResult(
        status="done",
        metrics=merge_splits(metrics.compute(task, logits[name], gold[name]) for name in logits),
        stderr=merge_splits(metrics.stderr(task, logits[name], gold[name], seed=seed) for name in logits),
        n=len(next(iter(gold.values()))),
        vs_fp32=versus,
        detail=detail,
    )
