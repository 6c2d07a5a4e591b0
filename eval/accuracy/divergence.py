"""How far a model's answers are from those of FP32."""

import numpy as np

from qdqbench.quantize.core.arrays import Float64, Floats
from qdqbench.quantize.tasks.task import Task


def divergence(task: Task, reference: Floats, logits: Floats) -> Float64:
    """How far logits are from FP32's, by sample, float64 [n]; 0 where they say the same.

    Classes: KL(FP32 || logits) of the class probabilities, in nat. Regression: squared difference over the
    variance of FP32's outputs.

    Args:
        reference: float32 [n, num_labels] of FP32.
        logits: the same of the candidate.

    Raises:
        CheckFailed: all FP32 outputs of a regression are equal.
    """
    return task.kind.divergence(reference.astype(np.float64), logits.astype(np.float64))
