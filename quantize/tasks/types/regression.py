"""Regression: one score for a sentence, or a pair."""

from typing import TYPE_CHECKING

import numpy as np

from qdqbench.quantize.tasks.types.classification import NUMBERS, TEXTS, label_and_prediction, labels_as
from qdqbench.quantize.tasks.types.kind import LOGITS, SAME, Described, TaskKind
from qdqbench.quantize.tasks.types.scores import CORRELATIONS
from qdqbench.quantize.utils.arrays import Array, Float64, Floats
from qdqbench.quantize.utils.errors import CheckFailed

if TYPE_CHECKING:
    import datasets
    import torch


def _label_problem(dataset: "datasets.Dataset", task: Described) -> str:
    labels = dataset.data.column(task.label_column).to_numpy()
    bad = int((~np.isfinite(labels)).sum())
    return f"are not finite in {bad} of {len(labels)} rows; drop or correct them" if bad else ""


def _predict(logits: Floats, labels: Array) -> Float64:
    return np.asarray(logits[:, 0], dtype=np.float64)


def _divergence(reference: Float64, logits: Float64, labels: Array) -> Float64:
    """Return the squared difference over the variance of the reference.

    Raises:
        CheckFailed: the reference is constant.
    """
    spread = float(reference.var())
    if spread == 0:
        raise CheckFailed("FP32 gives the same output for every sample; the model or the data is broken")
    return np.asarray(((logits - reference) ** 2).mean(axis=1) / spread)


def _loss(logits: "torch.Tensor", labels: "torch.Tensor", answers: "torch.Tensor") -> "torch.Tensor":
    from torch.nn import functional

    return functional.mse_loss(logits.float()[:, 0], labels, reduction="sum")


def _distance(
    logits: "torch.Tensor", teacher: "torch.Tensor", temperature: float, answers: "torch.Tensor"
) -> "torch.Tensor":
    from torch.nn import functional

    return functional.mse_loss(logits.float(), teacher.float(), reduction="sum")


REGRESSION = TaskKind(
    name="regression",
    model_class="AutoModelForSequenceClassification",
    architecture="ForSequenceClassification",
    problem_type="regression",
    outputs=LOGITS,
    head="one regression output",
    text_type=TEXTS,
    text_values="texts",
    label_type=NUMBERS,
    label_values="numbers",
    label_problem=_label_problem,
    targets=labels_as(np.float32),
    metrics=CORRELATIONS,
    default_metrics=("pearson", "spearman"),
    predict=_predict,
    table=label_and_prediction,
    right=None,
    divergence_name="squared",
    divergence=_divergence,
    loss=_loss,
    distance=_distance,
    distance_unit=lambda answers: float(np.var(answers)),
    mean_loss=lambda logits, labels, _: float(np.mean((logits[:, 0].astype(np.float64) - labels) ** 2)),
    reads_first_token=True,
    constant=lambda logits, labels: bool(np.std(logits[:, 0]) <= SAME * np.std(labels)),
    answer="score",
    label_texts=lambda labels, names: [f"{label:.4g}" for label in labels],
)
