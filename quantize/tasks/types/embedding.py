"""Sentence embeddings: pairs with a score, and texts without labels, which FP32's own embeddings judge."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qdqbench.quantize.tasks.types.classification import NUMBERS, TEXTS, label_and_prediction
from qdqbench.quantize.tasks.types.encoded import RowLayout, Targets
from qdqbench.quantize.tasks.types.kind import Described, TaskKind
from qdqbench.quantize.tasks.types.regression import REGRESSION
from qdqbench.quantize.tasks.types.scores import CORRELATIONS, Metric
from qdqbench.quantize.utils.arrays import Array, Float64, Floats
from qdqbench.quantize.utils.errors import UserError

if TYPE_CHECKING:
    import datasets
    import torch

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
    """Return the share of the nearest texts by one embedding that are nearest by the other too, [n].

    A text is no neighbor of itself. Nearest are those of the largest cosine; of equal ones the first. Exact,
    in blocks: memory grows with n, not with its square.

    Args:
        reference: [n, width].
        answers: the same texts, [n, width].
        count: neighbors; of fewer texts all others.
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
    """Return the smallest value that at least `share` of the samples do not exceed, of each resample.

    Args:
        weights: how often each sample counts, float64 [resamples, samples].
        values: [samples].
        share: from 0 to 1.
    """
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[:, order], axis=1)
    reached = below >= share * below[:, -1:] - 1e-9
    return np.asarray(values[order][reached.argmax(axis=1)])


OUTPUT = "sentence_embedding"
LOWEST = 0.01  # the share of texts whose cosine is at most `cosine_p1`
SAME = 1e-3  # length of what differs between embeddings, relative to theirs, up to which they are the same


def agreement(reference: Floats, made: Floats) -> Float64:
    """Return each text's cosine to FP32's embedding, and the share of neighbors that stay, [n, 2]."""
    return np.stack([cosines(reference, made), overlap(reference, made)], axis=1)


def _mean(column: int) -> Metric:
    return Metric(
        value=lambda table: float(table[:, column].mean()),
        weighted=lambda weights, table: np.asarray(weights @ table[:, column] / weights.sum(axis=1)),
    )


AGREEMENT = {  # of the table of `agreement`
    "cosine": _mean(0),
    "cosine_p1": Metric(
        value=lambda table: float(np.quantile(table[:, 0], LOWEST, method="inverted_cdf")),
        weighted=lambda weights, table: weighted_percentile(weights, table[:, 0], LOWEST),
    ),
    "neighbors": _mean(1),
}


def _scores(answers: Floats, labels: Array) -> Float64:
    """Return the cosine of the two texts of each pair."""
    return cosines(answers[::2], answers[1::2])


def _pair_divergence(reference: Float64, answers: Float64, labels: Array) -> Float64:
    """Return 1 - cosine to FP32's embedding, mean of both texts."""
    return np.asarray(1 - cosines(reference, answers).reshape(-1, 2).mean(axis=1))


def _pair_targets(dataset: "datasets.Dataset", task: Described, layout: RowLayout) -> Targets:
    made = REGRESSION.targets(dataset, task, layout).labels
    return Targets(np.repeat(made, 2), gold=made)


def _text_targets(dataset: "datasets.Dataset", task: Described, layout: RowLayout) -> Targets:
    count = len(layout.samples)
    if count <= NEIGHBORS:
        raise UserError(
            f"{count} texts are too few to compare their {NEIGHBORS} nearest neighbours; give at least "
            f"{NEIGHBORS + 1} different ones to judge on, and as many to calibrate with"
        )
    return Targets(np.zeros(count, dtype=np.float32))


def _distance(
    made: "torch.Tensor", teacher: "torch.Tensor", temperature: float, answers: "torch.Tensor"
) -> "torch.Tensor":
    """Return the squared error relative to the teacher's power: 2 - 2 cosine at length 1."""
    teacher = teacher.float()
    return ((made.float() - teacher).square().sum(dim=1) / teacher.square().sum(dim=1)).sum()


def _constant(answers: Floats, labels: Array) -> bool:
    """Return whether all texts have the same embedding."""
    spread = np.linalg.norm(answers - answers.mean(axis=0), axis=1).max()
    return bool(spread <= SAME * np.linalg.norm(answers, axis=1).max())


def _embedding(**fields: Any) -> TaskKind:
    """Return the common part of both kinds."""
    return TaskKind(
        model_class="AutoModel",
        architecture="SentenceEmbedding",
        problem_type=None,
        outputs={OUTPUT: ("batch", "width")},
        head="a sentence embedding",
        text_type=TEXTS,
        text_values="texts",
        right=None,
        divergence_name="cosine",
        loss=None,
        distance=_distance,
        distance_unit=lambda answers: 1.0,  # orthogonal embeddings are twice as far
        mean_loss=None,
        constant=_constant,
        calibrates_unlabelled=True,
        **fields,
    )


PAIRS = _embedding(
    name="embedding",
    text_columns=(2, 2),
    texts_apart=True,
    label_type=NUMBERS,
    label_values="numbers",
    label_problem=REGRESSION.label_problem,
    targets=_pair_targets,
    metrics=CORRELATIONS,
    default_metrics=("spearman", "pearson"),
    predict=_scores,
    table=label_and_prediction,
    divergence=_pair_divergence,
    answer="cosine of the two texts",
    label_texts=REGRESSION.label_texts,
    expected=lambda gold: 2 * len(gold),
)
TEXTS_ALONE = _embedding(
    name="embedding of texts",
    text_columns=(1, 1),
    labelled=False,
    label_type="",
    label_values="",
    label_problem=lambda dataset, task: "",
    targets=_text_targets,
    metrics=AGREEMENT,
    default_metrics=("cosine", "cosine_p1", "neighbors"),
    predict=lambda answers, gold: agreement(gold, answers),
    table=lambda predicted, gold: predicted,
    divergence=lambda reference, answers, gold: 1 - cosines(reference, answers),
    answer="cosine to FP32, nearest texts that stay",
)
