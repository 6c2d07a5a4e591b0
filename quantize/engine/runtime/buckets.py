"""Length buckets: to which few lengths the rows of some data are padded, and the profiles for them.

Kernels of a GPU engine are made for the shapes of its profiles: a few fixed lengths run faster than any
length, and cost padding. A CPU's kernels take every shape: there each batch keeps its own length.
"""

from collections.abc import Sequence

import numpy as np

from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.utils.arrays import Int64

STEP = 8  # lengths are multiples of it, as tensor cores want
MOST = 6  # buckets; each is a profile with kernels of its own
LEAST_SAVING = 0.02  # of the tokens, that one more bucket must save
LARGEST_BATCH = 128  # that profiles take, as those of the shipped recipes


def choose_edges(lengths: Int64, longest: int, most: int = MOST) -> list[int]:
    """Lengths to pad to, rising, that make the fewest tokens: by dynamic programming over the histogram.

    Fewer than `most` where one more would save less than LEAST_SAVING.

    Args:
        lengths: tokens of each row, int64 [rows], at least one.
        longest: no edge is larger, multiple of STEP or not.
    """
    edges, counts = np.unique(np.minimum(-(-lengths // STEP) * STEP, longest), return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])  # rows up to each edge
    # cost[i, j]: tokens of the rows between the edges i and j where they are padded to the latter
    cost = (before[None, 1:] - before[:-1, None]) * edges[None, :]
    best, cuts = cost[0].astype(np.int64), [np.zeros(len(edges), dtype=np.int64)]
    totals = [best[-1]]
    possible, never = np.tri(len(edges), dtype=bool).T, np.iinfo(np.int64).max
    for _ in range(1, min(most, len(edges))):
        # the last bucket starts at edge i; up to edge i - 1 go the others, which are one fewer
        tried = np.where(possible, np.roll(best, 1)[:, None] + cost, never)
        tried[0] = cost[0]
        cuts.append(tried.argmin(axis=0))
        best = tried.min(axis=0)
        totals.append(best[-1])
    savings = 1 - np.array(totals[1:]) / np.array(totals[:-1])
    count = 1 + int(np.argmin(np.append(savings >= LEAST_SAVING, False)))
    found, last = [], len(edges) - 1
    for cut in reversed(cuts[:count]):
        found.append(int(edges[last]))
        if cut[last] == 0:
            break
        last = int(cut[last]) - 1
    return found[::-1]


def bucket_profiles(edges: Sequence[int], longest: int, batch: int) -> list[Profile]:
    """A profile of fixed length for each bucket, and one for what is longer than all of them.

    Args:
        edges: from `choose_edges`.
        longest: tokens that an input can have.
        batch: samples of a batch, which kernels are chosen for.
    """
    most = max(batch, LARGEST_BATCH)
    fixed = [Profile((1, edge), (batch, edge), (most, edge)) for edge in edges]
    if edges[-1] < longest:
        fixed.append(Profile((1, edges[-1] + 1), (batch, longest), (most, longest)))
    return fixed
