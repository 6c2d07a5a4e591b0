"""Regression: one score for a sentence, or a pair."""

from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.tasks.types.kind import SAME, TaskKind
from qdqbench.quantize.tasks.types.scores import CORRELATIONS
from qdqbench.quantize.utils.arrays import Array, Float64, Floats
from qdqbench.quantize.utils.errors import CheckFailed

if TYPE_CHECKING:
    from torch import Tensor


class Regression(TaskKind):
    name = "regression"
    answer = "score"
    problem_type = "regression"
    head = "one regression output"
    reads_first_token = True
    metrics = CORRELATIONS
    default_metrics: tuple[str, ...] = ("pearson", "spearman")
    divergence_name = "squared"

    def predict(self, answers: Floats, gold: Any) -> Float64:
        return np.asarray(answers[:, 0], dtype=np.float64)

    def divergence(self, reference: Float64, answers: Float64, gold: Any) -> Float64:
        """Return the squared difference over the variance of the reference."""
        spread = float(reference.var())
        if spread == 0:
            raise CheckFailed("FP32 gives the same output for every sample; the model or the data is broken")
        return np.asarray(((answers - reference) ** 2).mean(axis=1) / spread)

    def constant(self, answers: Floats, labels: Array) -> bool:
        return bool(np.std(answers[:, 0]) <= SAME * np.std(labels))

    def loss(self, answers: "Tensor", labels: "Tensor", counts: "Tensor") -> "Tensor":
        from torch.nn import functional

        return functional.mse_loss(answers.float()[:, 0], labels, reduction="sum")

    def distance(
        self, answers: "Tensor", teacher: "Tensor", temperature: float, counts: "Tensor"
    ) -> "Tensor":
        from torch.nn import functional

        return functional.mse_loss(answers.float(), teacher.float(), reduction="sum")

    def distance_unit(self, answers: Floats) -> float:
        return float(np.var(answers))

    def mean_loss(self, answers: Floats, labels: Array, counts: Array) -> float:
        return float(np.mean((answers[:, 0].astype(np.float64) - labels) ** 2))


REGRESSION = Regression()
