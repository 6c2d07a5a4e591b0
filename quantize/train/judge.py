"""Judging a model in training on held-out rows, sharded over all processes."""

from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.core.arrays import Array, Float32
from qdqbench.quantize.encoders.inputs import inputs_of
from qdqbench.quantize.tasks.rows import Encoded, Ints
from qdqbench.quantize.tasks.task import Task

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

BATCH = 64


def predict_rows(
    accelerator: "Accelerator", model: "nn.Module", encoded: Encoded, rows: Ints, pad_id: int
) -> Float32:
    """Logits float32 [rows, num_labels] of some rows of a split, the same on every process.

    Args:
        accelerator: each process computes a share.
        model: in eval mode, on the accelerator's device.
        rows: int64.
    """
    import torch
    from accelerate.utils import gather_object

    order = np.argsort(-encoded.lengths[rows], kind="stable")  # positions in `rows`
    mine = order[accelerator.process_index :: accelerator.num_processes]
    found: list[tuple[Ints, Float32]] = []
    for start in range(0, len(mine), BATCH):
        positions = mine[start : start + BATCH]
        _, batch = encoded.batch(rows[positions].tolist(), pad_id)
        with torch.inference_mode():
            given = inputs_of(model, batch)
            inputs = {name: torch.from_numpy(array).to(accelerator.device) for name, array in given.items()}
            logits: Any = model(**inputs).logits
        found.append((positions, logits.float().cpu().numpy()))
    parts: list[tuple[Ints, Float32]] = gather_object(found)
    result = np.empty((len(rows), parts[0][1].shape[1]), dtype=np.float32)
    for positions, values in parts:
        result[positions] = values
    return result


def collapsed(task: Task, logits: Float32, labels: Array) -> bool:
    """Whether the answers are not finite, or do not depend on the input though the labels do."""
    return not np.isfinite(logits).all() or task.kind.constant(logits, labels)
