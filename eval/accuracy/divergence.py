"""How far a model's answers are from those of FP32."""

import numpy as np

from qdqbench.quantize.core.arrays import Float64, Floats
from qdqbench.quantize.tasks.metrics import Gold
from qdqbench.quantize.tasks.task import Task


def divergence(task: Task, reference: Floats, answers: Floats, gold: Gold) -> Float64:
    """How far answers are from FP32's, by sample, float64 [samples]; 0 where they say the same.

    Classes: KL(FP32 || candidate) of the probabilities, in nat, of a sample with several answers their mean.
    Regression: squared difference over the variance of FP32's outputs.

    Args:
        reference: float32 [answers, width] of FP32.
        answers: the same of the candidate.
        gold: as `metrics.predictions` takes it.

    Raises:
        CheckFailed: all FP32 outputs of a regression are equal.
    """
    return task.kind.divergence(reference.astype(np.float64), answers.astype(np.float64), gold)
