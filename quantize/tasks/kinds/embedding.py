"""Sentence embeddings: pairs with a score, and texts without labels, compared with FP32's embeddings."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from qdqbench.quantize.tasks.kinds.encoded import Targets, Units
from qdqbench.quantize.tasks.kinds.kind import CORRELATIONS, Metric, TaskFields, TaskKind, mean_of_column
from qdqbench.quantize.utils.arrays import Array, Float64, Floats, Int64
from qdqbench.quantize.utils.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

NEIGHBORS = 10
DECIMALS = 6  # of similarities that are compared: what float32 holds, whatever the order of its sums
BLOCK = 1 << 23  # similarities held at a time (32 MiB)


def unit(vectors: Floats) -> Floats:
    """Scale vectors [n, width] to length 1, in the same type; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1))


def cosines(a: Floats, b: Floats) -> Float64:
    """Return the cosine of each pair of rows, [n]; 0 with a vector of zeros, 1 of two."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    found = np.divide((a * b).sum(axis=1), lengths, out=np.zeros(len(a)), where=lengths > 0)
    return np.where(~a.any(axis=1) & ~b.any(axis=1), 1.0, np.clip(found, -1, 1))


def overlap(reference: Floats, answers: Floats, count: int = NEIGHBORS) -> Float64:
    """Return the share of the `count` nearest texts by one embedding that are nearest by the other too, [n].

    A text is no neighbor of itself. Nearest are those of the largest cosine; of equal ones the first. Exact,
    in blocks: memory grows with n, not with its square.
    """
    count = min(count, len(reference) - 1)
    if count < 1:
        return np.ones(len(reference))
    pairs = zip(_nearest(reference, count), _nearest(answers, count), strict=True)
    return np.concatenate([(mine & other).sum(axis=1) / count for mine, other in pairs])


def _nearest(vectors: Floats, count: int) -> Iterator[npt.NDArray[np.bool_]]:
    """Return the nearest texts of each, in blocks [block, n]."""
    vectors = unit(vectors.astype(np.float32))
    block = max(1, BLOCK // len(vectors))
    for start in range(0, len(vectors), block):
        similar = (vectors[start : start + block] @ vectors.T).round(DECIMALS)
        rows = np.arange(len(similar))
        similar[rows, start + rows] = -np.inf
        least = np.partition(similar, -count, axis=1)[:, -count, None]
        surely, tied = similar > least, similar == least
        missing = count - surely.sum(axis=1, keepdims=True)
        yield surely | (tied & (np.cumsum(tied, axis=1) <= missing))


def weighted_percentile(weights: Floats, values: Float64, share: float) -> Float64:
    """Return the smallest value that `share` of the samples do not exceed, of each resample.

    Weights say how often each sample counts, float64 [resamples, samples].
    """
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[:, order], axis=1)
    reached = below >= share * below[:, -1:] - 1e-9
    return np.asarray(values[order][reached.argmax(axis=1)])


OUTPUT = "sentence_embedding"
LOWEST = 0.01  # the share of texts whose cosine is at most `cosine_p1`
SAME = 1e-3  # length of what differs between embeddings, relative to theirs, up to which they are the same


AGREEMENT = {  # of each text's cosine to FP32's embedding, and the share of neighbors that stay, [n, 2]
    "cosine": mean_of_column(0),
    "cosine_p1": Metric(
        weighted=lambda weights, table: weighted_percentile(weights, table[:, 0], LOWEST),
        alone=lambda table: float(np.quantile(table[:, 0], LOWEST, method="inverted_cdf")),
    ),
    "neighbors": mean_of_column(1),
}


class Embedding(TaskKind):
    architecture = "SentenceEmbedding"
    embeds = True
    outputs = {OUTPUT: ("batch", "width")}
    head = "a sentence embedding"
    calibrates_unlabelled = True

    def constant(self, answers: Floats, labels: Array) -> bool:
        spread = np.linalg.norm(answers - answers.mean(axis=0), axis=1).max()
        return bool(spread <= SAME * np.linalg.norm(answers, axis=1).max())


class PairEmbedding(Embedding):
    name = "embedding"
    answer = "cosine of the two texts"
    text_columns = (2, 2)
    texts_apart = True
    gold_is_labels = False
    metrics = CORRELATIONS
    default_metrics = ("spearman", "pearson")

    def targets(self, dataset: "Dataset", task: TaskFields, samples: Int64, units: list[Units]) -> Targets:
        labels = super().targets(dataset, task, samples, units).labels
        return Targets(np.repeat(labels, 2), gold=labels)

    def answer_samples(self, gold: Array) -> Int64:
        return np.repeat(np.arange(len(gold)), 2)

    def predict(self, answers: Floats, gold: Array) -> Float64:
        return cosines(answers[::2], answers[1::2])


class TextEmbedding(Embedding):
    name = "embedding of texts"
    answer = "cosine to FP32, nearest texts that stay"
    text_columns = (1, 1)
    labelled = False
    metrics = AGREEMENT
    default_metrics = tuple(metrics)

    def targets(self, dataset: "Dataset", task: TaskFields, samples: Int64, units: list[Units]) -> Targets:
        count = len(samples)
        if count <= NEIGHBORS:
            raise UserError(
                f"{count} texts are too few to compare their {NEIGHBORS} nearest neighbors; give more"
            )
        return Targets(np.zeros(count, dtype=np.float32))

    def predict(self, answers: Floats, gold: Floats) -> Float64:
        return np.stack([cosines(gold, answers), overlap(gold, answers)], axis=1)

    def table(self, predicted: Array, gold: Floats) -> Array:
        return predicted

    def label_texts(self, gold: Floats, names: Sequence[str]) -> list[None]:
        return [None] * len(gold)


PAIRS, TEXTS_ALONE = PairEmbedding(), TextEmbedding()
