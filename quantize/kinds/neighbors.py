"""How well embeddings agree with others of the same texts: cosine, and nearest neighbours among the texts."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from qdqbench.quantize.core.arrays import Float64, Floats

NEIGHBORS = 10
DECIMALS = 6  # of similarities that are compared: what float32 holds, whatever the order of its sums
BLOCK = 1 << 23  # similarities held at a time (32 MiB)


def unit(vectors: Floats) -> Floats:
    """Vectors [n, width] of length 1, of the same type; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1))


def cosines(a: Floats, b: Floats) -> Float64:
    """Cosine of each pair of rows, [n]; 0 with a vector of zeros, 1 of two."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    found = np.divide((a * b).sum(axis=1), lengths, out=np.zeros(len(a)), where=lengths > 0)
    return np.where(~a.any(axis=1) & ~b.any(axis=1), 1.0, np.clip(found, -1, 1))


def overlap(reference: Floats, made: Floats, count: int = NEIGHBORS) -> Float64:
    """Share of the nearest texts by one embedding that are nearest by the other too, [n].

    A text is no neighbour of itself. Nearest are those of the largest cosine; of equal ones the first. Exact,
    in blocks: memory grows with n, not with its square.

    Args:
        reference: [n, width].
        made: the same texts, [n, width].
        count: neighbours; of fewer texts all others.
    """
    count = min(count, len(reference) - 1)
    if count < 1:
        return np.ones(len(reference))
    pairs = zip(_nearest(reference, count), _nearest(made, count), strict=True)
    return np.concatenate([(mine & other).sum(axis=1) / count for mine, other in pairs])


def _nearest(vectors: Floats, count: int) -> Iterator[npt.NDArray[np.bool_]]:
    """Which texts are the nearest of each, in blocks [block, n]."""
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
    """The smallest value that at least `share` of the samples do not exceed, of each resample.

    Args:
        weights: how often each sample counts, float64 [resamples, samples].
        values: [samples].
        share: from 0 to 1.
    """
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[:, order], axis=1)
    reached = below >= share * below[:, -1:] - 1e-9
    return np.asarray(values[order][reached.argmax(axis=1)])
