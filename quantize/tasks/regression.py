"""Regression: one score for a sentence, or a pair."""

from typing import TYPE_CHECKING

import numpy as np

from qdqbench.quantize.core.arrays import Array, Float64, Floats
from qdqbench.quantize.core.errors import CheckFailed
from qdqbench.quantize.tasks.kind import LOGITS, SAME, TaskKind

if TYPE_CHECKING:
    import torch


def _label_problem(labels: Array, count: int) -> str:
    bad = int((~np.isfinite(labels)).sum())
    return f"are not finite in {bad} of {len(labels)} rows; drop or correct them" if bad else ""


def _predict(logits: Floats) -> Float64:
    return np.asarray(logits[:, 0], dtype=np.float64)


def _divergence(reference: Float64, logits: Float64) -> Float64:
    """Squared difference over the variance of the reference.

    Raises:
        CheckFailed: the reference is constant.
    """
    spread = float(reference.var())
    if spread == 0:
        raise CheckFailed("FP32 gives the same output for every sample; the model or the data is broken")
    return np.asarray(((logits - reference) ** 2).mean(axis=1) / spread)


def _loss(logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
    from torch.nn import functional

    return functional.mse_loss(logits.float()[:, 0], labels, reduction="sum")


def _distance(logits: "torch.Tensor", teacher: "torch.Tensor", temperature: float) -> "torch.Tensor":
    from torch.nn import functional

    return functional.mse_loss(logits.float(), teacher.float(), reduction="sum")


REGRESSION = TaskKind(
    name="regression",
    model_class="AutoModelForSequenceClassification",
    problem_type="regression",
    outputs=LOGITS,
    head="one regression output",
    label_type=np.float32,
    label_values="numbers",
    label_problem=_label_problem,
    metrics=("pearson", "spearman"),
    default_metrics=("pearson", "spearman"),
    predict=_predict,
    right_or_wrong=False,
    divergence_name="squared",
    divergence=_divergence,
    loss=_loss,
    distance=_distance,
    distance_unit=lambda answers: float(np.var(answers)),
    mean_loss=lambda logits, labels: float(np.mean((logits[:, 0].astype(np.float64) - labels) ** 2)),
    constant=lambda logits, labels: bool(np.std(logits[:, 0]) <= SAME * np.std(labels)),
)
