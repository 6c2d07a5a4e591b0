"""Samples as tokens, and batches: sorted by length for evaluation, of equal length for calibration."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qdqbench.quantize.tasks.data.splits import Split
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.tasks.types.encoded import Encoded, IndexedBatch, RowLayout, Units, pad
from qdqbench.quantize.utils.arrays import Batch, Int64
from qdqbench.quantize.utils.errors import UserError

OVERLAP = 3  # windows share a third of their length, as 128 of 384 tokens in Devlin et al. 2018
TOKENIZER_ROWS = 1000  # rows per tokenizer call
MOST_WINDOWS = 256  # of a context, as scripts of a deployed folder have it, and of a tokenizer call


class Sample(NamedTuple):
    """One encoded row, without padding."""

    row: int  # of all rows of the split
    input_ids: Int64  # [length]
    token_type_ids: Int64  # [length]
    truncated: bool  # tokens were cut off
    sample: int = 0  # of the split
    coded: Any = None  # as tokenizers gives it


def iter_encoded(split: Split, task: Task, tokenizer: Any, max_length: int) -> Iterator[Sample]:
    """Tokenize a split in chunks, so that memory does not grow with the samples.

    `max_length` counts special tokens; the longer text of a pair is cut first.
    """
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} is not a fast tokenizer; save one with tokenizer.json")
    apart = len(task.text_columns) if task.kind.texts_apart else 1  # rows of each sample
    special = tokenizer.num_special_tokens_to_add(pair=len(task.text_columns) == 2 and apart == 1)
    if max_length <= special:  # the tokenizer would then not truncate at all
        raise UserError(f"max_length {max_length} holds the {special} special tokens only; give more")
    options: dict[str, Any] = {"truncation": True, "is_split_into_words": task.kind.split_words}
    if task.kind.windows:
        stride = max_length // OVERLAP
        options |= {"truncation": "only_second", "return_overflowing_tokens": True, "stride": stride}
    count = 0
    for start in range(0, len(split.dataset), TOKENIZER_ROWS):
        rows = split.dataset[start : start + TOKENIZER_ROWS]
        texts = [rows[name] for name in task.text_columns]
        if task.prompts:
            both = zip(task.prompts, texts, strict=True)
            texts = [[f"{prompt}{text}" for text in column] for prompt, column in both]
        parts = [slice(None)]
        if task.kind.windows:
            _require_room(texts[0], task, tokenizer, max_length - special - max_length // OVERLAP - 1)
            counts = count_windows(texts[0], texts[1], tokenizer, max_length)
            if max(counts) > MOST_WINDOWS:
                long = counts.index(max(counts))
                raise UserError(
                    f"row {start + long} of {split.source} would be read in {counts[long]} windows, and "
                    f"{MOST_WINDOWS} are the most; shorten its {task.text_columns[1]!r} or "
                    f"{task.text_columns[0]!r}, or raise export.max_length (--max-length)"
                )
            parts = _few_windows(counts)
        elif len(texts) == 2 and apart == 1:
            texts = _shorten_pairs(texts[0], texts[1], tokenizer, max_length)
        if apart > 1:
            texts = [[text for sample in zip(*texts, strict=True) for text in sample]]
        for part in parts:
            coded = tokenizer(
                *(column[part] for column in texts),
                max_length=max_length,
                return_token_type_ids=True,
                return_attention_mask=False,
                **options,
            )
            samples = coded.get("overflow_to_sample_mapping", range(len(coded.encodings)))
            for offset, (sample, encoding) in enumerate(zip(samples, coded.encodings, strict=True)):
                yield Sample(
                    count,
                    np.array(coded["input_ids"][offset], dtype=np.int64),
                    np.array(coded["token_type_ids"][offset], dtype=np.int64),
                    bool(encoding.overflowing) and not task.kind.windows,
                    start + (part.start or 0) + sample // apart,
                    encoding,
                )
                count += 1


def count_windows(
    questions: Sequence[str], contexts: Sequence[str], tokenizer: Any, max_length: int
) -> list[int]:
    """Return in how many windows each context is read, without making them."""
    counts, special = [], tokenizer.num_special_tokens_to_add(pair=True)
    options = {"add_special_tokens": False, "verbose": False}
    both = (tokenizer([*texts], **options)["input_ids"] for texts in (questions, contexts))
    for question, context in zip(*both, strict=True):
        room = max_length - special - len(question)
        step = room - max_length // OVERLAP
        counts.append(1 + (max(0, math.ceil((len(context) - room) / step)) if step > 0 else 0))
    return counts


def _few_windows(counts: Sequence[int]) -> list[slice]:
    """Return runs of rows of at most `MOST_WINDOWS` windows together, since each takes memory."""
    ends, total = list[int](), 0
    for row, count in enumerate(counts):
        if total + count > MOST_WINDOWS:
            ends, total = [*ends, row], 0
        total += count
    return [slice(*each) for each in itertools.pairwise([0, *ends, len(counts)])]


def _shorten_pairs(
    first: Sequence[str], second: Sequence[str], tokenizer: Any, max_length: int
) -> list[list[str]]:
    """Cut the texts of pairs behind what truncation can keep, where they are long.

    `tokenizers` combines all parts that truncation cuts off one text with all of the other: two texts of 16
    kB take seconds and gigabytes. The longer text keeps a token more, since it gets an odd one.
    """
    shortened = [[*first], [*second]]
    for place, pair in enumerate(zip(first, second, strict=True)):
        if max(map(len, pair)) <= 8 * max_length:
            continue
        coded = tokenizer([*pair], add_special_tokens=False, verbose=False).encodings
        longest = max(len(each.ids) for each in coded)
        for texts, each in zip(shortened, coded, strict=True):
            keep = 2 * max_length + (len(each.ids) == longest)
            if len(each.ids) > keep:
                texts[place] = texts[place][: each.offsets[keep - 1][1]]
    return shortened


def _require_room(questions: list[str], task: Task, tokenizer: Any, room: int) -> None:
    coded = tokenizer(questions, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    if long := [text for text, ids in zip(questions, coded, strict=True) if len(ids) > room]:
        raise UserError(
            f"{len(long)} texts in column {task.text_columns[0]!r} exceed {room} tokens, which "
            f"leaves a window no room for {task.text_columns[1]!r}, such as {long[0][:60]!r}; raise "
            "export.max_length (--max-length), or shorten them"
        )


def encode(split: Split, task: Task, tokenizer: Any, max_length: int) -> Encoded:
    kind, rows, units = task.kind, [], list[Units]()
    for row in iter_encoded(split, task, tokenizer, max_length):
        rows.append(row._replace(coded=None))  # large
        if kind.over_tokens:
            units.append(kind.units(row.coded))
    samples = kind.groups(split.dataset, task)[[row.sample for row in rows]]
    targets = kind.targets(split.dataset, task, RowLayout(samples, units))
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

    @property
    def rows(self) -> int:
        return len(self.split.dataset)

    def __iter__(self) -> Iterator[Batch]:
        samples = iter_encoded(self.split, self.task, self.tokenizer, self.max_length)
        for _, batch in equal_length_batches(samples, self.batch_size, pad_id=self.pad_id):
            yield batch
