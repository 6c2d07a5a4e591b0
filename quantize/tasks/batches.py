"""Rows of a split as batches: for evaluation, and for calibration."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qdqbench.quantize.tasks.rows import Sample, iter_encoded
from qdqbench.quantize.tasks.sources import Split
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.tasks.types.encoded import Encoded, IndexedBatch, pad
from qdqbench.quantize.utils.arrays import Batch, Int64


def sorted_batches(
    encoded: Encoded, batch_size: int, *, pad_id: int, edges: Sequence[int] | None = None
) -> Iterator[IndexedBatch]:
    """Yield batches for evaluation: longest samples first, each batch padded to its own longest.

    Sorting by length keeps padding small; the longest first makes the largest allocation the first one.

    Args:
        edges: of length buckets; no batch has rows of two, and all of a bucket are of one size, some with a
            copy of their last row, since an engine may compile kernels for each new shape.

    Yields:
        Rows of the split, int64 [B], and `input_ids`, `attention_mask`, `token_type_ids`, int64 [B, L], with
        edges perhaps [B + 1, L].
    """
    listed = sorted_rows(encoded.lengths, batch_size, edges)
    sizes: dict[int, int] = {}
    for length, rows in listed if edges else ():
        sizes[length] = max(sizes.get(length, 0), len(rows))
    for length, rows in listed:
        copies = max(0, sizes.get(length, 0) - len(rows))
        _, batch = encoded.batch(np.pad(rows, (0, copies), mode="edge").tolist(), pad_id)
        yield rows, batch


def sorted_rows(
    lengths: Int64, batch_size: int, edges: Sequence[int] | None = None
) -> list[tuple[int, Int64]]:
    """Return the length that each batch is to be padded to, and its rows; the longest first.

    Args:
        lengths: tokens of each row, int64 [rows].
        edges: of length buckets, rising, the last no shorter than any row: the rows of a bucket are shared
            out evenly, so that its batches differ by one row at most. None: each batch to its longest row.
    """
    order = np.argsort(-lengths, kind="stable")
    if edges is None:
        parts = np.split(order, range(batch_size, len(order), batch_size))
        return [(int(lengths[rows[0]]), rows) for rows in parts if len(rows)]
    made, bucket = [], np.searchsorted(edges, lengths[order])
    for index in reversed(range(len(edges))):
        if len(rows := order[bucket == index]):
            made += [(edges[index], part) for part in np.array_split(rows, -(-len(rows) // batch_size))]
    return made


def equal_length_batches(
    samples: Iterable[Sample], batch_size: int, *, pad_id: int
) -> Iterator[IndexedBatch]:
    """Yield batches for calibration: all samples of one length, so no padding token is ever seen.

    A quantizer sees all positions whatever the attention mask says. Samples wait in one bucket per length; a
    full bucket is a batch, the rest follows at the end, shortest first. So at most `batch_size - 1` samples
    per length are held, however many there are.

    Yields:
        As `sorted_batches`.
    """
    buckets: dict[int, list[tuple[int, Int64, Int64]]] = {}
    for sample in samples:
        bucket = buckets.setdefault(len(sample.input_ids), [])
        bucket.append(sample[:3])
        if len(bucket) == batch_size:
            yield pad(bucket, pad_id)
            bucket.clear()
    for _, bucket in sorted(buckets.items()):
        if bucket:
            yield pad(bucket, pad_id)


@dataclass(frozen=True)
class CalibrationBatches:
    """Batches of equal length over a split, made anew on each pass, so that memory holds few samples."""

    split: Split
    task: Task
    tokenizer: Any
    max_length: int
    batch_size: int
    pad_id: int

    def __iter__(self) -> Iterator[Batch]:
        samples = iter_encoded(self.split, self.task, self.tokenizer, self.max_length)
        for _, batch in equal_length_batches(samples, self.batch_size, pad_id=self.pad_id):
            yield batch
