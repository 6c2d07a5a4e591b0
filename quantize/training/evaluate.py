"""Judging a model in training on held-out rows, sharded over all processes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.tasks.types.encoded import Encoded
from qdqbench.quantize.tasks.types.kind import TaskKind, join_outputs
from qdqbench.quantize.utils.arrays import Array, Float32, Int64
from qdqbench.quantize.utils.progress import track

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn

BATCH = 64


def share_batches(
    accelerator: "Accelerator", model: "nn.Module", encoded: Encoded, pad_id: int
) -> "Iterator[tuple[Int64, dict[str, torch.Tensor]]]":
    """Yield this process's share of the rows, and the model's inputs of them; the longest first."""
    import torch

    order = np.argsort(-encoded.lengths, kind="stable")
    mine = order[accelerator.process_index :: accelerator.num_processes]
    for start in track("answering", range(0, len(mine), BATCH)):
        rows = mine[start : start + BATCH]
        _, batch = encoded.batch(rows.tolist(), pad_id)
        given = select_inputs(model, batch)
        yield rows, {n: torch.from_numpy(array).to(accelerator.device) for n, array in given.items()}


def predict_rows(
    accelerator: "Accelerator", model: "nn.Module", kind: TaskKind, encoded: Encoded, pad_id: int
) -> Float32:
    """Compute the answers float32 [answers, width] to a split, the same on every process.

    Each process computes a share; the model is in eval mode, on the accelerator's device.
    """
    import torch
    from accelerate.utils import gather_object

    found: list[tuple[Int64, Float32]] = []
    for rows, inputs in share_batches(accelerator, model, encoded, pad_id):
        with torch.inference_mode():
            made: Any = encoded.kept(rows, join_outputs(model(**inputs), kind.outputs))
        found.append((rows, made.float().cpu().numpy()))
    parts: list[tuple[Int64, Float32]] = gather_object(found)
    result = np.empty((encoded.answers.sum(), parts[0][1].shape[1]), dtype=np.float32)
    for rows, values in parts:
        result[encoded.answers_of(rows)] = values
    return result


def is_collapsed(task: Task, logits: Float32, labels: Array) -> bool:
    """Return whether the answers are not finite, or do not depend on the input though the labels do."""
    return not np.isfinite(logits).all() or task.kind.constant(logits, labels)
