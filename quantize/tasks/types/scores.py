"""Metrics of a table with the numbers of each sample, as they are and resampled."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from qdqbench.quantize.utils.arrays import Array, Floats
from qdqbench.quantize.utils.errors import UserError


@dataclass(frozen=True)
class Metric:
    """One metric; a table is [samples, columns]."""

    value: Callable[[Array], float]  # of a table
    # of tables whose rows count as often as weights say, float64 [resamples, rows]: one a resample
    weighted: Callable[[Floats, Array], Floats]
    stderr: Callable[[Array], float] | None = None  # of a table; None: bootstrap


def of_sums(value: Callable[[Floats], Floats]) -> Metric:
    """Make a metric of the sums of a table's columns: [resamples, columns] to [resamples]."""
    return Metric(
        value=lambda table: float(value(table.sum(axis=0, dtype=np.float64)[None])[0]),
        weighted=lambda weights, table: value(weights @ table),
    )


def mean_of_column(column: int) -> Metric:
    return Metric(
        value=lambda table: float(table[:, column].mean()),
        weighted=lambda weights, table: np.asarray(weights @ table[:, column] / weights.sum(axis=1)),
    )


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Return the quotient, 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


# The tables of these have two columns: label and prediction.


def _accuracy(table: Array) -> float:
    return float(np.mean(table[:, 0] == table[:, 1]))


def _weighted_accuracy(weights: Floats, table: Array) -> Floats:
    return np.asarray(weights @ (table[:, 0] == table[:, 1]) / weights.sum(axis=1))


def _binomial(table: Array) -> float:
    right = float(np.mean(table[:, 1] == table[:, 0]))
    return float(np.sqrt(right * (1 - right) / len(table)))


def _f1(table: Array) -> float:
    from sklearn import metrics

    return float(metrics.f1_score(table[:, 0], table[:, 1], zero_division=0.0))


def _weighted_f1(weights: Floats, table: Array) -> Floats:
    labels, predicted = table.T
    true_positive = weights @ ((labels == 1) & (predicted == 1))
    return ratio(2 * true_positive, weights @ (labels == 1) + weights @ (predicted == 1))


def _matthews(table: Array) -> float:
    from sklearn import metrics

    if np.ptp(table[:, 1]) == 0:
        return 0.0
    return float(metrics.matthews_corrcoef(table[:, 0], table[:, 1]))


def _weighted_matthews(weights: Floats, table: Array) -> Floats:
    """Compute the correlation of Gorodkin 2004, "Comparing two K-category assignments"."""
    labels, predicted = table.T
    classes = np.unique(table)
    total = weights.sum(axis=1)
    true = weights @ (labels[:, None] == classes)
    made = weights @ (predicted[:, None] == classes)
    covariance = total * (weights @ (labels == predicted)) - (true * made).sum(axis=1)
    spread = (total**2 - (true**2).sum(axis=1)) * (total**2 - (made**2).sum(axis=1))
    return ratio(covariance, np.sqrt(np.maximum(spread, 0)))


def _correlation(table: Array, *, ranks: bool) -> float:
    """Return Pearson's correlation, or Spearman's; 0 for constant predictions."""
    from scipy import stats

    if np.ptp(table[:, 0]) == 0:
        raise UserError(f"all {len(table)} labels are equal, so correlation is undefined; use more samples")
    if np.ptp(table[:, 1]) == 0:
        return 0.0
    correlate = stats.spearmanr if ranks else stats.pearsonr
    return float(correlate(table[:, 0], table[:, 1]).statistic)


def _weighted_pearson(weights: Floats, table: Array) -> Floats:
    return _pearson_rows(weights, table[:, 0], table[:, 1])


def _weighted_spearman(weights: Floats, table: Array) -> Floats:
    labels, predicted = (_weighted_ranks(weights, column) for column in table.T)
    return _pearson_rows(weights, labels, predicted)


def _pearson_rows(weights: Floats, x: Floats, y: Floats) -> Floats:
    """Compute Pearson correlation by row ([cells] or [resamples, cells]), 0 where `x` or `y` is constant."""
    total = weights.sum(axis=1, keepdims=True)
    floor_x, floor_y = (total.max() * (1e-12 * np.abs(values).max()) ** 2 for values in (x, y))
    x = x - (weights * x).sum(axis=1, keepdims=True) / total
    y = y - (weights * y).sum(axis=1, keepdims=True) / total
    spread_x, spread_y = (weights * x * x).sum(axis=1), (weights * y * y).sum(axis=1)
    # Rounding leaves about 1e-16 of a constant; float32 values that differ do so by at least 6e-8.
    varies = (spread_x > floor_x) & (spread_y > floor_y)
    return ratio((weights * x * y).sum(axis=1), np.where(varies, np.sqrt(spread_x * spread_y), 0))


def _weighted_ranks(weights: Floats, values: Array) -> Floats:
    """Return the mid-ranks of values that occur `weights` times, [resamples, cells]."""
    distinct, inverse = np.unique(values, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(len(distinct)))
    counts = np.add.reduceat(weights[:, order], starts, axis=1)
    return (np.cumsum(counts, axis=1) - (counts - 1) / 2)[:, inverse]


# The standard error of accuracy is sqrt(p (1 - p) / n), the binomial. F1 is that of class 1, and 0 when it is
# neither predicted nor there. Matthews is 0 for constant predictions. So are Pearson and Spearman, which are
# undefined there: a stage that answers the same to everything has no association with the labels, and its
# report and gate must say so rather than stop. Constant labels are another matter: nothing can be scored.
CLASSES = {
    "accuracy": Metric(_accuracy, _weighted_accuracy, _binomial),
    "f1": Metric(_f1, _weighted_f1),
    "matthews": Metric(_matthews, _weighted_matthews),
}
CORRELATIONS = {
    "pearson": Metric(partial(_correlation, ranks=False), _weighted_pearson),
    "spearman": Metric(partial(_correlation, ranks=True), _weighted_spearman),
}
