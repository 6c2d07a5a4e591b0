"""Re-ranking by a cross-encoder: one score for a query and a passage; a sample is a query with its passages.

Gold is the relevance of the passages of each query, [queries, most passages of a query], NaN where a query
has fewer; so are predictions with their scores.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qdqbench.quantize.tasks.kinds.classification import Regression
from qdqbench.quantize.tasks.kinds.encoded import Targets, Units
from qdqbench.quantize.tasks.kinds.kind import TaskFields, TaskKind, mean_of_column, ratio
from qdqbench.quantize.utils.arrays import Array, Float64, Floats, Int64

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor

BEST = 10  # passages that ndcg@10 and mrr@10 look at


class Reranking(Regression):
    name = "re-ranking"
    answer = "scores of the passages"
    head = "one score (num_labels 1)"
    count = 1
    text_columns = (2, 2)
    label_values = "relevance from 0 to 1"
    gold_is_labels = False
    # Gains are the relevance itself, as in Järvelin and Kekäläinen 2002, "Cumulated gain-based evaluation of
    # IR techniques", and trec_eval; for the others every relevance above 0 is relevant.
    default_metrics = (f"mrr@{BEST}", f"ndcg@{BEST}", "average_precision")
    metrics = {name: mean_of_column(column) for column, name in enumerate(default_metrics)}

    def groups(self, dataset: "Dataset", task: TaskFields) -> Int64:
        import pandas

        queries = np.array(self.column(dataset, task.text_columns[0]), dtype=object)
        return np.asarray(pandas.factorize(queries)[0], dtype=np.int64)

    def label_problem(self, dataset: "Dataset", task: TaskFields) -> str:
        labels = np.array(self.column(dataset, task.label_column), dtype=np.float64)
        groups = self.groups(dataset, task)
        if not ((labels >= 0) & (labels <= 1)).all():
            if not np.isfinite(labels).all():
                return "are not finite in some rows; drop or correct them"
            return (
                f"go from {labels.min():g} to {labels.max():g}, but relevance is from 0 to 1; divide grades "
                "by the highest one"
            )
        if not labels.any():
            return "are all 0, so there is nothing to find; give a split with relevant passages"
        counts = np.bincount(groups)
        if lonely := int((counts == 1).sum()):
            first = dataset[int(np.argmax(counts[groups] == 1))][task.text_columns[0]]
            return (
                f"rank nothing for {lonely} of {len(counts)} queries, which have one passage only (the first "
                f"is {first[:60]!r}); give each query two or more"
            )
        return ""

    def targets(self, dataset: "Dataset", task: TaskFields, samples: Int64, units: list[Units]) -> Targets:
        labels = np.array(self.column(dataset, task.label_column), dtype=np.float64)
        counts = np.bincount(samples)
        gold = np.full((len(counts), counts.max()), np.nan)
        gold[np.arange(counts.max()) < counts[:, None]] = labels
        lost = int((np.nan_to_num(gold).max(axis=1) == 0).sum())
        warning = f"{lost} of {len(counts)} queries have no relevant passage and count as 0 in every metric"
        return Targets(labels.astype(np.float32), gold, (warning,) if lost else ())

    def answer_samples(self, gold: Array) -> Int64:
        return np.asarray(np.nonzero(np.isfinite(gold))[0])

    def predict(self, answers: Floats, gold: Array) -> Float64:
        scores = np.full(gold.shape, np.nan)
        scores[np.isfinite(gold)] = answers[:, 0]
        return scores

    def table(self, predicted: Array, gold: Array) -> Float64:
        """Return reciprocal rank, gain and average precision by query; equal scores in the worst order."""
        there = np.isfinite(gold)
        order = np.lexsort((np.where(there, gold, np.inf), np.where(there, -predicted, np.inf)), axis=-1)
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

    def label_texts(self, gold: Array, names: Sequence[str]) -> list[str]:
        return [", ".join(f"{x:.3g}" for x in row[np.isfinite(row)]) for row in gold]

    constant = TaskKind.constant

    def loss(self, answers: "Tensor", labels: "Tensor", counts: "Tensor") -> "Tensor":
        """Compute cross-entropy of relevance by passage (Nogueira and Cho 2019, arXiv 1901.04085)."""
        from torch.nn import functional

        return functional.binary_cross_entropy_with_logits(answers.float()[:, 0], labels, reduction="sum")

    def mean_loss(self, answers: Floats, labels: Array, counts: Array) -> float:
        scores = answers[:, 0].astype(np.float64)
        return float(np.mean(np.logaddexp(0, scores) - scores * labels))


RERANKING = Reranking()
