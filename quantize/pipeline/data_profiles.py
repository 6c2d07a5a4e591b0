"""Optimization profiles of a run, and the lengths of its data that they follow."""

from typing import Any

import numpy as np

from qdqbench.quantize.engine import profiles as shapes
from qdqbench.quantize.engine.profiles import LengthBucket, Lengths
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.tasks.data.encode import sorted_rows
from qdqbench.quantize.utils.arrays import Int64
from qdqbench.quantize.utils.limits import BackendName, has_profiles


def engine_profiles(session: Session, backend: BackendName | None = None) -> list[Any]:
    """Return the profiles of an engine of the recipe's backend, or of another one."""
    if session.recipe.auto_shapes:
        batch, longest = session.config.batch_size, session.recipe.export.max_length
        if edges := length_edges(session, backend):
            return shapes.bucket_profiles(edges, longest, batch)
        typical = int(np.median(row_lengths(session)))
        return [shapes.Profile((1, 1), (batch, typical), (max(batch, shapes.LARGEST_BATCH), longest))]
    profiles = recipe_profiles(session.recipe)
    tuned = has_profiles(backend or session.target.backend)
    return profiles if tuned else [shapes.span_profiles(profiles)]


def recipe_profiles(recipe: Recipe) -> list[shapes.Profile]:
    bounds = (zip(each.batch, each.length, strict=True) for each in recipe.engine.profiles)
    return [shapes.Profile(*sizes) for sizes in bounds]


def row_lengths(session: Session) -> Int64:
    return np.concatenate([encoded.lengths for _, encoded in session.eval_splits.values()])


def length_edges(session: Session, backend: BackendName | None = None) -> list[int] | None:
    """Return the lengths that the engine's batches are padded to; None: each to its own longest row.

    Kernels without profiles take every length, so that padding buys nothing there.
    """
    if not session.recipe.auto_shapes or not has_profiles(backend or session.target.backend):
        return None
    return shapes.choose_edges(row_lengths(session), session.recipe.export.max_length)


def describe_lengths(session: Session) -> Lengths | None:
    if not session.recipe.auto_shapes:
        return None
    lengths, edges = row_lengths(session), length_edges(session)
    values, counts = np.unique(lengths, return_counts=True)
    tokens, longest = int(lengths.sum()), int(lengths.max())
    ends = np.searchsorted(lengths, edges or (), sorter=np.argsort(lengths), side="right")
    parts = np.split(np.sort(lengths), ends[:-1])
    splits, batch = session.eval_splits.values(), session.config.batch_size
    batches = [each for _, encoded in splits for each in sorted_rows(encoded.lengths, batch, edges)]
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
        profiles=list(map(str, engine_profiles(session))),
    )
