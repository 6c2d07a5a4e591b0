"""Lengths of a run's evaluation data, and the profiles that `shapes: auto` makes of them."""

import numpy as np

from qdqbench.quantize.core.arrays import Int64
from qdqbench.quantize.core.calibration_results import LengthBucket, Lengths
from qdqbench.quantize.core.limits import CPU_BACKENDS
from qdqbench.quantize.engine.backend import preferred_backend
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.runtime.buckets import (
    LARGEST_BATCH,
    bucket_profiles,
    choose_edges,
)
from qdqbench.quantize.tasks.batches import sorted_rows


def row_lengths(session: Session) -> Int64:
    """Tokens of each row of the evaluation splits, int64 [rows]; labels are not looked at."""
    return np.concatenate([encoded.lengths for _, encoded in session.eval_splits.values()])


def length_edges(session: Session) -> list[int] | None:
    """Lengths that the engine's batches are padded to; None: each to its own longest row.

    Those are the profiles of `shapes: auto`; a CPU's kernels take every length, so that padding buys nothing.
    """
    if not session.recipe.auto_shapes or preferred_backend(session.recipe.engine.backend) in CPU_BACKENDS:
        return None
    return choose_edges(row_lengths(session), session.recipe.export.max_length)


def auto_profiles(session: Session) -> list[Profile]:
    """Optimization profiles for the lengths of the evaluation data; for a CPU one for every shape."""
    batch, longest = session.config.batch_size, session.recipe.export.max_length
    if edges := length_edges(session):
        return bucket_profiles(edges, longest, batch)
    typical = int(np.median(row_lengths(session)))
    return [Profile((1, 1), (batch, typical), (max(batch, LARGEST_BATCH), longest))]


def found_lengths(session: Session) -> Lengths | None:
    """Lengths, buckets and profiles of a run with `shapes: auto` for its results; None without."""
    if not session.recipe.auto_shapes:
        return None
    lengths, edges = row_lengths(session), length_edges(session)
    values, counts = np.unique(lengths, return_counts=True)
    tokens, longest = int(lengths.sum()), int(lengths.max())
    ends = np.searchsorted(lengths, edges or (), sorter=np.argsort(lengths), side="right")
    parts = np.split(np.sort(lengths), ends[:-1])
    batches = [
        each
        for _, encoded in session.eval_splits.values()
        for each in sorted_rows(encoded.lengths, session.config.batch_size, edges)
    ]
    return Lengths(
        splits=list(session.eval_splits),
        rows=len(lengths),
        tokens=tokens,
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        p90=int(np.percentile(lengths, 90, method="higher")),
        longest=longest,
        histogram=[(int(value), int(count)) for value, count in zip(values, counts, strict=True)],
        buckets=[
            LengthBucket(length=edge, rows=len(part), tokens=int(part.sum()))
            for edge, part in zip(edges or (), parts, strict=False)
        ],
        padding=1 - tokens / sum(length * len(rows) for length, rows in batches),
        longest_padding=1 - tokens / (longest * len(lengths)),
        profiles=list(map(str, auto_profiles(session))),
    )
