"""Samples as tokens, and batches: sorted by length for evaluation, of equal length for calibration."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qdqbench.quantize.standalone.texts import MOST_WINDOWS, Encoder
from qdqbench.quantize.tasks.data.splits import Split
from qdqbench.quantize.tasks.kinds.encoded import Encoded, IndexedBatch, Units, pad
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils.arrays import Batch, Int64
from qdqbench.quantize.utils.errors import UserError

OVERLAP = 3  # windows share a third of their length, as 128 of 384 tokens in Devlin et al. 2018
TOKENIZER_ROWS = 1000  # rows per tokenizer call


class Sample(NamedTuple):
    """One encoded row, without padding."""

    row: int  # of all rows of the split
    input_ids: Int64  # [length]
    token_type_ids: Int64  # [length]
    truncated: bool  # tokens were cut off
    sample: int = 0  # of the split
    coded: Any = None  # as tokenizers gives it


def make_encoder(task: Task, tokenizer: Any, max_length: int) -> Encoder:
    """Return the encoder of a task's samples; a `UserError` where a row has no room for a token."""
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} is not a fast tokenizer; save one with tokenizer.json")
    pair = len(task.text_columns) == 2 and not task.kind.texts_apart
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_length <= special:  # the tokenizer would then not truncate at all
        raise UserError(f"max_length {max_length} holds the {special} special tokens only; give more")
    return Encoder(
        tokenizer.backend_tokenizer,
        max_length,
        words=task.kind.split_words,
        stride=max_length // OVERLAP if task.kind.windows else 0,
        truncation=task.kind.truncation,
        side=tokenizer.truncation_side,
    )


def iter_encoded(split: Split, task: Task, tokenizer: Any, max_length: int) -> Iterator[Sample]:
    """Tokenize a split in chunks, so that memory does not grow with the samples.

    `max_length` counts special tokens; the longer text of a pair is cut first.
    """
    encoder, count = make_encoder(task, tokenizer, max_length), 0
    for start in range(0, len(split.dataset), TOKENIZER_ROWS):
        rows = split.dataset[start : start + TOKENIZER_ROWS]
        for sample in encode_columns(rows, task, encoder, split.source, start):
            yield sample._replace(row=count)
            count += 1


def encode_columns(
    rows: Mapping[str, Sequence[Any]], task: Task, encoder: Encoder, source: str, start: int = 0
) -> Iterator[Sample]:
    """Tokenize some rows of a source, by column, of which the first has the number `start`."""
    apart = len(task.text_columns) if task.kind.texts_apart else 1  # rows of each sample
    columns: list[Sequence[Any]] = [rows[name] for name in task.text_columns]
    if task.prompts:
        both = zip(task.prompts, columns, strict=True)
        columns = [[f"{prompt}{text}" for text in column] for prompt, column in both]
    samples: list[Any] = [*zip(*columns, strict=True)] if len(columns) > 1 else [*columns[0]]
    if apart > 1:
        samples = [text for sample in samples for text in sample]
    if task.kind.windows:
        _require_windows(encoder, samples, task, source, start)
    for row, (number, coded) in enumerate(encoder.encode(samples)):
        ids, types = (np.array(each, dtype=np.int64) for each in (coded.ids, coded.type_ids))
        truncated = bool(coded.overflowing) and not task.kind.windows
        yield Sample(row, ids, types, truncated, start + number // apart, coded)


def _require_windows(
    encoder: Encoder, samples: Sequence[tuple[str, str]], task: Task, source: str, start: int
) -> None:
    question, context = task.text_columns
    counts = encoder.count_windows(samples)
    if long := [text for (text, _), windows in zip(samples, counts, strict=True) if not windows]:
        room = encoder.max_length - encoder.tokenizer.num_special_tokens_to_add(True) - encoder.stride - 1
        raise UserError(
            f"{len(long)} texts in column {question!r} exceed {room} tokens, which leaves a window no room "
            f"for {context!r}, such as {long[0][:60]!r}; raise export.max_length (--max-length), or shorten "
            "them"
        )
    if max(counts) > MOST_WINDOWS:
        row = counts.index(max(counts))
        raise UserError(
            f"row {start + row} of {source} would be read in {counts[row]} windows, and {MOST_WINDOWS} are "
            f"the most; shorten its {context!r} or {question!r}, or raise export.max_length (--max-length)"
        )


def encode(split: Split, task: Task, tokenizer: Any, max_length: int) -> Encoded:
    kind, rows, units = task.kind, [], list[Units]()
    for row in iter_encoded(split, task, tokenizer, max_length):
        rows.append(row._replace(coded=None))  # large
        if kind.over_tokens:
            units.append(kind.units(row.coded))
    samples = kind.groups(split.dataset, task)[[row.sample for row in rows]]
    targets = kind.targets(split.dataset, task, samples, units)
    return Encoded(
        input_ids=[row.input_ids for row in rows],
        token_type_ids=[row.token_type_ids for row in rows],
        labels=targets.labels,
        truncated=sum(row.truncated for row in rows),
        positions=[each.positions for each in units] if kind.over_tokens else None,
        samples=samples,
        scored=targets.gold,
        warnings=targets.warnings,
    )


def sorted_batches(
    encoded: Encoded, batch_size: int, *, pad_id: int, edges: Sequence[int] | None = None
) -> Iterator[IndexedBatch]:
    """Yield batches for evaluation, longest samples first: rows [B] of the split, and inputs int64 [B, L].

    Sorting by length keeps padding small; the longest first makes the largest allocation the first one. With
    edges of length buckets no batch has rows of two, and all of a bucket are of one size, since an engine may
    compile kernels for each new shape: some have a copy of their last row, and inputs [B + 1, L].
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

    Of rising edges the last is no shorter than any row; batches of a bucket differ by one row at most.
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
    """Batches of equal length over a split, tokenized on each pass, so that memory holds few samples."""

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
