"""Re-ranking by a cross-encoder: one score for a query and a passage; a sample is a query with its passages.

Gold is the relevance of the passages of each query, [queries, most passages of a query], NaN where a query
has fewer; so are predictions with their scores.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.tasks.types.encoded import RowLayout, Targets
from qdqbench.quantize.tasks.types.kind import SAME, Described
from qdqbench.quantize.tasks.types.regression import REGRESSION
from qdqbench.quantize.tasks.types.scores import Metric, ratio
from qdqbench.quantize.utils.arrays import Array, Float64, Floats, Int64

if TYPE_CHECKING:
    import datasets
    import torch

BEST = 10  # passages that ndcg@10 and mrr@10 look at


def _groups(dataset: "datasets.Dataset", task: Described) -> Int64:
    """Group rows by query: equal texts are one."""
    import pandas

    queries = np.array(_column(dataset, task.text_columns[0]), dtype=object)
    return np.asarray(pandas.factorize(queries)[0], dtype=np.int64)


def _labels(dataset: "datasets.Dataset", task: Described) -> Float64:
    return np.array(_column(dataset, task.label_column), dtype=np.float64)


def _column(dataset: "datasets.Dataset", name: str) -> list[Any]:
    values: list[Any] = dataset.select_columns([name])[:][name]
    return values


def _label_problem(dataset: "datasets.Dataset", task: Described) -> str:
    labels, groups = _labels(dataset, task), _groups(dataset, task)
    if not ((labels >= 0) & (labels <= 1)).all():
        if not np.isfinite(labels).all():
            return "are not finite in some rows; drop or correct them"
        return (
            f"go from {labels.min():g} to {labels.max():g}, but relevance is from 0 to 1; divide grades by "
            "the highest one"
        )
    if not labels.any():
        return "are all 0, so there is nothing to find; give a split with relevant passages"
    counts = np.bincount(groups)
    if lonely := int((counts == 1).sum()):
        first = dataset[int(np.argmax(counts[groups] == 1))][task.text_columns[0]]
        return (
            f"rank nothing for {lonely} of {len(counts)} queries, which have one passage only (the first is "
            f"{first[:60]!r}); give each query two or more"
        )
    return ""


def _targets(dataset: "datasets.Dataset", task: Described, layout: RowLayout) -> Targets:
    labels, counts = _labels(dataset, task), np.bincount(layout.samples)
    gold = np.full((len(counts), counts.max()), np.nan)
    gold[np.arange(counts.max()) < counts[:, None]] = labels
    lost = int((np.nan_to_num(gold).max(axis=1) == 0).sum())
    warning = f"{lost} of {len(counts)} queries have no relevant passage and count as 0 in every metric"
    return Targets(labels.astype(np.float32), gold, (warning,) if lost else ())


def _predict(answers: Floats, gold: Array) -> Float64:
    scores = np.full(gold.shape, np.nan)
    scores[np.isfinite(gold)] = answers[:, 0]
    return scores


def _table(scores: Array, gold: Array) -> Float64:
    """Return reciprocal rank, gain and average precision of each query; equal scores in the worst order."""
    there = np.isfinite(gold)
    order = np.lexsort((np.where(there, gold, np.inf), np.where(there, -scores, np.inf)), axis=-1)
    relevance = np.where(there, gold, 0)
    ranked = np.take_along_axis(relevance, order, axis=1)
    ideal = -np.sort(-relevance, axis=1)
    discounts = 1 / np.log2(2 + np.arange(min(BEST, gold.shape[1])))
    gain, most = (values[:, :BEST] @ discounts for values in (ranked, ideal))
    found = ranked > 0
    first = np.where(found[:, :BEST].any(axis=1), 1 / (1 + found.argmax(axis=1)), 0)
    precision = np.cumsum(found, axis=1) / (1 + np.arange(gold.shape[1]))
    average = ratio((precision * found).sum(axis=1), found.sum(axis=1).astype(np.float64))
    return np.stack([first, ratio(gain, most), average], axis=1)


def _mean(column: int) -> Metric:
    return Metric(
        value=lambda table: float(table[:, column].mean()),
        weighted=lambda weights, table: weights @ table[:, column] / weights.sum(axis=1),
    )


def _divergence(reference: Float64, scores: Float64, gold: Array) -> Float64:
    """Compute the divergence of a regression, of a query the mean over its passages."""
    each = REGRESSION.divergence(reference, scores, None)
    queries = np.nonzero(np.isfinite(gold))[0]
    return np.bincount(queries, weights=each) / np.bincount(queries)


def _loss(logits: "torch.Tensor", labels: "torch.Tensor", answers: "torch.Tensor") -> "torch.Tensor":
    """Compute cross-entropy of relevance, passage by passage (Nogueira and Cho 2019, arXiv 1901.04085)."""
    from torch.nn import functional

    return functional.binary_cross_entropy_with_logits(logits.float()[:, 0], labels, reduction="sum")


def _mean_loss(logits: Floats, labels: Array, answers: Any) -> float:
    scores = logits[:, 0].astype(np.float64)
    return float(np.mean(np.logaddexp(0, scores) - scores * labels))


# Gains are the relevance itself, as in Järvelin and Kekäläinen 2002, "Cumulated gain-based evaluation of IR
# techniques", and trec_eval; for the others every relevance above 0 is relevant.
RERANKING = dataclasses.replace(
    REGRESSION,
    name="re-ranking",
    head="one score (num_labels 1)",
    text_columns=(2, 2),
    count=1,
    groups=_groups,
    label_values="relevance from 0 to 1",
    label_problem=_label_problem,
    targets=_targets,
    metrics={f"mrr@{BEST}": _mean(0), f"ndcg@{BEST}": _mean(1), "average_precision": _mean(2)},
    default_metrics=(f"mrr@{BEST}", f"ndcg@{BEST}", "average_precision"),
    predict=_predict,
    table=_table,
    divergence=_divergence,
    loss=_loss,
    mean_loss=_mean_loss,
    expected=lambda gold: int(np.isfinite(gold).sum()),
    constant=lambda logits, labels: bool(np.ptp(logits[:, 0]) <= SAME),
    answer="scores of the passages",
    label_texts=lambda gold, names: [", ".join(f"{x:.3g}" for x in row[np.isfinite(row)]) for row in gold],
)
