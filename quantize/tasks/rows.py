"""Checked splits, and their samples as batches of tokens."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qdqbench.quantize.core.arrays import Array, Batch, Int64
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.tasks.sources import Split, read_split
from qdqbench.quantize.tasks.task import Task, nearest

if TYPE_CHECKING:
    import datasets

IndexedBatch = tuple[Int64, Batch]

TOKENIZER_ROWS = 1000  # rows per tokenizer call
NO_LABEL = -1  # what nyu-mll/glue writes in its test splits


def load_split(
    task: Task, source: str, split: str, *, limit: int | None = None, seed: int | None = None
) -> Split:
    """Load and check one split.

    Args:
        task: Names the columns, and the config on the hub.
        source: `hub` (nyu-mll/glue) or `hub:OWNER/NAME[:CONFIG]`, each with `@REVISION` where a certain
            commit, branch or tag is meant, or a folder with `TASK/SPLIT.EXT` or `SPLIT.EXT` (EXT: parquet,
            csv, json, jsonl; also shards `SPLIT-00000-of-00002.EXT`). For the train split a partial
            `SPLIT_subset.EXT` is taken when nothing else is there, and noted.
        split: Name of the split.
        limit: Keep this many rows: the first ones, or a draw without replacement when `seed` is given
            (a smaller draw is the start of a larger one).
        seed: Shuffle the rows.

    Raises:
        UserError: nothing found, unreadable, wrong columns, or texts or labels that do not fit the task.
    """
    if limit is not None and limit < 1:
        raise UserError(f"{limit} samples of split {split!r} were asked for; ask for at least 1")
    loaded = read_split(task, source, split)
    columns = _check_columns(loaded, task)
    dataset = loaded.dataset.select_columns(columns)
    _check_rows(dataset, task, loaded.source)
    notes = [*loaded.notes, *_blank(dataset, task, split)]
    kept = loaded.rows if limit is None else min(limit, loaded.rows)
    if limit is not None and limit > loaded.rows:
        notes.append(f"{limit} samples asked for, split {split!r} has {loaded.rows}")
    order = range(kept) if seed is None else np.random.default_rng(seed).permutation(loaded.rows)[:kept]
    dataset = dataset.select(order)
    if kept < loaded.rows and seed is None:  # a draw is asked for, a cut must be seen
        notes.append(f"the first {kept} of {loaded.rows} rows of split {split!r}")
    return Split(dataset, loaded.source, loaded.fingerprint, loaded.rows, tuple(notes))


def _check_columns(split: Split, task: Task) -> list[str]:
    wanted = [*task.text_columns, task.label_column]
    there = split.dataset.column_names
    if missing := [name for name in wanted if name not in there]:
        hint = ", ".join(f"{name} (nearest: {nearest(name, there)})" for name in missing) if there else "any"
        raise UserError(
            f"{split.source} has no column {hint}; its columns are {', '.join(there)}; name yours with "
            "--text-column and --label-column, or give the data of this --task"
        )
    if not split.rows:
        raise UserError(f"{split.source} has no rows; give a split with samples")
    return wanted


def _check_rows(dataset: "datasets.Dataset", task: Task, source: str) -> None:
    """Check the type and the range of every text and label."""
    for name in task.text_columns:
        column = dataset.data.column(name)
        if str(column.type) not in ("string", "large_string"):
            raise UserError(
                f"column {name!r} of {source} holds {column.type}, not texts; name the right --text-column"
            )
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise UserError(
                f"column {name!r} of {source} has {column.null_count} empty (null) texts, the first in row "
                f"{row}; fill or drop these rows"
            )
    column = dataset.data.column(task.label_column)
    if column.null_count:
        problem = f"are missing in {column.null_count} of {len(column)} rows; give a labelled split"
    elif not re.fullmatch(r"bool|u?int\d+|halffloat|float|double", str(column.type)):
        wanted = task.kind.label_values.format(last=task.num_labels - 1)
        problem = f"are {column.type}; map them to {wanted}, or name the right --label-column"
    else:
        problem = _label_problem(column.to_numpy(), task)
    if problem:
        raise UserError(f"the labels (column {task.label_column!r}) of {source} {problem}")


def _blank(dataset: "datasets.Dataset", task: Task, split: str) -> list[str]:
    """Texts without a word: an empty cell of a CSV file is one, so this may be a fault of the data."""
    found = []
    for name in task.text_columns:
        texts = dataset.data.column(name).to_pylist()
        if count := sum(not text.strip() for text in texts):
            found.append(f"{count} of {len(texts)} texts in column {name!r} of split {split!r} are empty")
    return found


def _label_problem(labels: Array, task: Task) -> str:
    """What is wrong with numeric labels, [rows]; empty when nothing is."""
    if (labels == NO_LABEL).all():
        return f"are all {NO_LABEL}: test splits of GLUE have no labels; use the train or a validation split"
    return task.kind.label_problem(labels, task.num_labels)


class Sample(NamedTuple):
    """One encoded sample, without padding."""

    row: int  # of the split
    input_ids: Int64  # [length]
    token_type_ids: Int64  # [length]
    truncated: bool  # tokens were cut off


@dataclass(frozen=True)
class Encoded:
    """A whole split as tokens, without padding."""

    input_ids: list[Int64]
    token_type_ids: list[Int64]
    labels: Array  # int64 classes or float32 scores, [samples]
    truncated: int  # samples that lost tokens

    @property
    def lengths(self) -> Int64:
        """Tokens of each sample, [samples]."""
        return np.array([len(ids) for ids in self.input_ids], dtype=np.int64)

    def batch(self, rows: Iterable[int], pad_id: int) -> IndexedBatch:
        """Rows of the split, int64 [B], and their tokens, padded to the longest of them, int64 [B, L]."""
        return pad([(row, self.input_ids[row], self.token_type_ids[row]) for row in rows], pad_id)


def iter_encoded(split: Split, task: Task, tokenizer: Any, max_length: int) -> Iterator[Sample]:
    """Tokenize a split in chunks, so that memory does not grow with the samples.

    Args:
        split: From `load_split`, with the same task.
        tokenizer: A fast tokenizer of transformers.
        max_length: Most tokens of a sample, special tokens included; the longer text of a pair is cut first.

    Raises:
        UserError: the tokenizer is not a fast one, or `max_length` leaves no room for text.
    """
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} is not a fast tokenizer; save one with tokenizer.json")
    special = tokenizer.num_special_tokens_to_add(pair=len(task.text_columns) == 2)
    if max_length <= special:  # the tokenizer would then not truncate at all
        raise UserError(f"max_length {max_length} holds the {special} special tokens only; give more")
    for start in range(0, len(split.dataset), TOKENIZER_ROWS):
        rows = split.dataset[start : start + TOKENIZER_ROWS]
        texts = [rows[name] for name in task.text_columns]
        coded = tokenizer(
            *texts,
            truncation=True,
            max_length=max_length,
            return_token_type_ids=True,
            return_attention_mask=False,
        )
        for offset, encoding in enumerate(coded.encodings):
            yield Sample(
                start + offset,
                np.array(coded["input_ids"][offset], dtype=np.int64),
                np.array(coded["token_type_ids"][offset], dtype=np.int64),
                bool(encoding.overflowing),
            )


def encode(split: Split, task: Task, tokenizer: Any, max_length: int) -> Encoded:
    """Tokenize a whole split, with its labels; arguments and errors as in `iter_encoded`."""
    samples = list(iter_encoded(split, task, tokenizer, max_length))
    values = split.dataset.select_columns([task.label_column])[:][task.label_column]
    return Encoded(
        input_ids=[sample.input_ids for sample in samples],
        token_type_ids=[sample.token_type_ids for sample in samples],
        labels=np.array(values, dtype=task.kind.label_type),
        truncated=sum(sample.truncated for sample in samples),
    )


def pad(samples: list[tuple[int, Int64, Int64]], pad_id: int) -> IndexedBatch:
    """One batch of (row, input_ids, token_type_ids), padded to the longest sample."""
    shape = len(samples), max(len(ids) for _, ids, _ in samples)
    batch = {
        "input_ids": np.full(shape, pad_id, dtype=np.int64),
        "attention_mask": np.zeros(shape, dtype=np.int64),
        "token_type_ids": np.zeros(shape, dtype=np.int64),
    }
    for row, (_, ids, types) in enumerate(samples):
        batch["input_ids"][row, : len(ids)] = ids
        batch["attention_mask"][row, : len(ids)] = 1
        batch["token_type_ids"][row, : len(ids)] = types
    return np.array([index for index, _, _ in samples], dtype=np.int64), batch


def sorted_batches(encoded: Encoded, batch_size: int, *, pad_id: int) -> Iterator[IndexedBatch]:
    """Batches for evaluation: longest samples first, each batch padded to its own longest.

    Sorting by length keeps padding small; the longest first makes the largest allocation the first one.

    Yields:
        Rows of the split, int64 [B], and `input_ids`, `attention_mask`, `token_type_ids`, int64 [B, L].
    """
    order = np.argsort(-encoded.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size].tolist()
        yield encoded.batch(rows, pad_id)


def equal_length_batches(
    samples: Iterable[Sample], batch_size: int, *, pad_id: int
) -> Iterator[IndexedBatch]:
    """Batches for calibration: every sample of a batch has the same length, so no padding token is ever seen.

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
