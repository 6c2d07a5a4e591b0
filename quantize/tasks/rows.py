"""Checked splits, and their samples as batches of tokens."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qdqbench.quantize.tasks.sources import Split, read_split
from qdqbench.quantize.tasks.task import GLUE, Task, find_nearest, with_classes
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION
from qdqbench.quantize.tasks.types.encoded import Encoded, IndexedBatch, RowLayout, Units, pad
from qdqbench.quantize.tasks.types.kind import NUMBERS
from qdqbench.quantize.tasks.types.tokens import class_names
from qdqbench.quantize.utils.arrays import Batch, Int64
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list

if TYPE_CHECKING:
    import datasets

MOST_VALUES = 1000  # different texts up to which a column may be one of classes


def add_label_values(task: Task, source: str, classes: Sequence[str] = ()) -> Task:
    """Return a classification of one's own, with the values of its label column by class number.

    Texts are matched with the names of the model's classes, whatever their case; where these are others, they
    are numbered in sorted order. Whole numbers from 1 to the number of classes are numbered from 0. They are
    read from the train split and every evaluation split, so that all are numbered alike.
    """
    if task.kind is not CLASSIFICATION or task.name in GLUE:
        return task
    labels: set[str] = set()
    texts = False
    for name in (task.train_split, *task.eval_splits):
        split = read_split(task, source, name)
        if task.label_column not in split.dataset.column_names:
            continue  # texts alone; where labels are needed, the caller says so
        column = split.dataset.data.column(task.label_column)
        texts |= "string" in str(column.type)
        if not texts and "int" not in str(column.type):
            return task
        labels |= {str(value) for value in column.unique().to_pylist() if value is not None}
    if not labels:
        return task
    if not texts:  # numbered from 1 instead of 0, or as they are
        whole, count = {int(value) for value in labels}, task.num_labels
        from_one = min(whole) >= 1 and max(whole) == count
        numbers = tuple(str(number) for number in range(1, count + 1)) if from_one else ()
        return task.model_copy(update={"values": numbers})
    spelled = {text.strip().lower(): text for text in labels}
    names = [name.strip().lower() for name in classes]
    values = tuple(sorted(labels))
    if len(spelled) == len(labels) and {*spelled} <= {*names}:
        values = tuple(spelled.get(name, shown) for name, shown in zip(names, classes, strict=True))
    found = f"the labels (column {task.label_column!r}) of {source} are {len(values)} different texts"
    if not 2 <= len(values) <= MOST_VALUES:
        raise UserError(f"{found}, not classes; name the right --label-column")
    if len(values) != task.num_labels:
        raise UserError(
            f"{found} ({name_list(values)}), but --num-labels is {task.num_labels}; correct one of them"
        )
    return task.model_copy(update={"values": values})


def _number_labels(dataset: "datasets.Dataset", task: Task, source: str) -> tuple["datasets.Dataset", str]:
    """Return rows with the class numbers of their labels, and a note of the numbers."""
    column = task.label_column
    values = [None if each is None else str(each) for each in dataset.data.column(column).to_pylist()]
    numbers = {value: number for number, value in enumerate(task.values)}
    if unknown := sorted({value for value in values if value is not None} - {*numbers}):
        raise UserError(
            f"the labels (column {column!r}) of {source} hold {name_list(unknown)}, which is none of "
            f"{name_list(task.values)}; start anew where the data changed"
        )
    given = [None if value is None else numbers[value] for value in values]
    labels = given if None in given else np.array(given, dtype=np.int64)
    note = f"labels are numbered {name_list(f'{value} = {number}' for value, number in numbers.items())}"
    others = [name for name in dataset.column_names if name != column]
    return dataset.select_columns(others).add_column(column, labels), note


OVERLAP = 3  # windows share a third of their length, as 128 of 384 tokens in Devlin et al. 2018
TOKENIZER_ROWS = 1000  # rows per tokenizer call


def load_split(  # noqa: PLR0913
    task: Task,
    source: str,
    split: str,
    *,
    limit: int | None = None,
    seed: int | None = None,
    labelled: bool = True,
) -> Split:
    """Load and check one split.

    Args:
        source: `hub` (nyu-mll/glue) or `hub:OWNER/NAME[:CONFIG]`, each with `@REVISION` where a certain
            commit, branch or tag is meant, or a folder with `TASK/SPLIT.EXT` or `SPLIT.EXT` (EXT: parquet,
            csv, json, jsonl; also shards `SPLIT-00000-of-00002.EXT`). For the train split a partial
            `SPLIT_subset.EXT` is taken when nothing else is there, and noted.
        limit: Keep this many rows: the first ones, or a draw without replacement when `seed` is given
            (a smaller draw is the start of a larger one). Of samples of several rows the last is kept whole.
        seed: Shuffle the samples.
        labelled: Whether labels are read and checked.
    """
    if limit is not None and limit < 1:
        raise UserError(f"{limit} samples of split {split!r} were asked for; ask for at least 1")
    labelled = labelled and task.kind.labelled
    loaded = read_split(task, source, split)
    columns = _check_columns(loaded, task, labelled)
    dataset, notes = loaded.dataset.select_columns(columns), [*loaded.notes]
    if labelled and task.values:
        dataset, note = _number_labels(dataset, task, loaded.source)
        notes.append(note)
    warnings = loaded.warnings + tuple(_check_texts(dataset, task, split, loaded.source))
    if labelled:
        _check_labels(dataset, task, loaded.source)
    if limit is not None and limit > loaded.rows:
        notes.append(f"{limit} samples asked for, split {split!r} has {loaded.rows}")
    dataset = _ordered(dataset, task, seed)
    kept = loaded.rows if limit is None else complete_samples(dataset, task, min(limit, loaded.rows))
    dataset = dataset.select(range(kept))
    if kept < loaded.rows and seed is None:  # a draw is asked for, a cut must be seen
        notes.append(f"the first {kept} of {loaded.rows} rows of split {split!r}")
    return Split(dataset, loaded.source, loaded.fingerprint, loaded.rows, tuple(notes), warnings)


def add_tag_classes(task: Task, source: str) -> Task:
    """Return a task with the classes that the tags of its train split name."""
    loaded = read_split(task, source, task.train_split)
    _check_columns(loaded, task, labelled=True)
    labels = f"the labels (column {task.label_column!r}) of {loaded.source}"
    kind = str(loaded.dataset.data.column(task.label_column).type)
    if not re.fullmatch(task.kind.label_type, kind):
        raise UserError(f"{labels} are {kind}, not {task.kind.label_values}; name the right --label-column")
    if not (names := class_names(loaded.dataset, task.label_column)):
        raise UserError(f"{labels} are numbers without names; write the tags as texts, such as B-PER")
    return with_classes(task, names)


def complete_samples(dataset: "datasets.Dataset", task: Task, rows: int) -> int:
    """Return the rows of all samples that the first rows belong to; rows of a sample stand together."""
    samples = task.kind.groups(dataset, task)
    return rows if rows >= len(samples) else int(np.searchsorted(samples, samples[rows - 1], side="right"))


def _ordered(dataset: "datasets.Dataset", task: Task, seed: int | None) -> "datasets.Dataset":
    """Return the samples as they come, or shuffled, with the rows of each together."""
    samples = task.kind.groups(dataset, task)
    if seed is None and (np.diff(samples) >= 0).all():
        return dataset
    count = int(samples.max()) + 1
    order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
    return dataset.select(np.argsort(np.argsort(order)[samples], kind="stable"))


def _check_columns(split: Split, task: Task, labelled: bool) -> list[str]:
    wanted = [*task.text_columns, *([task.label_column] if labelled else [])]
    there = split.dataset.column_names
    if missing := [name for name in wanted if name not in there]:
        hints = [f"{name} (nearest: {find_nearest(name, there)})" for name in missing if there]
        raise UserError(
            f"{split.source} has no column {', '.join(hints) or 'any'}; its columns are {', '.join(there)}; "
            "name yours with --text-column and --label-column, or give the data of this --task"
        )
    if not split.rows:
        raise UserError(f"{split.source} has no rows; give a split with samples")
    return wanted


def _check_texts(dataset: "datasets.Dataset", task: Task, split: str, source: str) -> list[str]:
    """Refuse other types and nulls; warn of texts without a word, as an empty cell of a CSV file is one."""
    warnings = []
    for name in task.text_columns:
        column = dataset.data.column(name)
        if not re.fullmatch(task.kind.text_type, str(column.type)):
            raise UserError(
                f"column {name!r} of {source} holds {column.type}, not {task.kind.text_values}; name the "
                "right --text-column"
            )
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise UserError(
                f"column {name!r} of {source} has {column.null_count} empty (null) texts, the first in row "
                f"{row}; fill or drop these rows"
            )
        texts = column.to_pylist()
        if count := sum(not (text.strip() if isinstance(text, str) else text) for text in texts):
            warnings.append(f"{count} of {len(texts)} texts in column {name!r} of split {split!r} are empty")
    return warnings


def _check_labels(dataset: "datasets.Dataset", task: Task, source: str) -> None:
    column = dataset.data.column(task.label_column)
    if column.null_count:
        problem = f"are missing in {column.null_count} of {len(column)} rows; give a labelled split"
    elif not re.fullmatch(task.kind.label_type, str(column.type)):
        wanted = task.kind.label_values.format(last=task.num_labels - 1)
        problem = f"are {column.type}; map them to {wanted}, or name the right --label-column"
    elif re.fullmatch(NUMBERS, str(column.type)) and (column.to_numpy() == -1).all():
        problem = "are all -1: test splits of GLUE have no labels; use the train or a validation split"
    else:
        problem = task.kind.label_problem(dataset, task)
    if problem:
        raise UserError(f"the labels (column {task.label_column!r}) of {source} {problem}")


def require_order(split: Split, task: Task, classes: Sequence[str]) -> None:
    """Refuse class names in another order than the model's: right answers would count as wrong."""
    there = getattr(split.dataset.features[task.label_column], "names", ())
    named, known = ([str(name).lower() for name in names] for names in (there, classes))
    if named != known and sorted(named) == sorted(known):
        raise UserError(
            f"the labels (column {task.label_column!r}) of {split.source} are {', '.join(named)} from 0 on, "
            f"those of the model {', '.join(known)}; number the data as it does"
        )


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

    Args:
        tokenizer: A fast tokenizer of transformers.
        max_length: Most tokens of a sample, special tokens included; the longer text of a pair is cut first.
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
        if task.kind.windows:
            _require_room(texts[0], task, tokenizer, max_length - special - max_length // OVERLAP - 1)
        if apart > 1:
            texts = [[text for sample in zip(*texts, strict=True) for text in sample]]
        coded = tokenizer(
            *texts, max_length=max_length, return_token_type_ids=True, return_attention_mask=False, **options
        )
        samples = coded.get("overflow_to_sample_mapping", range(len(coded.encodings)))
        for offset, (sample, encoding) in enumerate(zip(samples, coded.encodings, strict=True)):
            yield Sample(
                count,
                np.array(coded["input_ids"][offset], dtype=np.int64),
                np.array(coded["token_type_ids"][offset], dtype=np.int64),
                bool(encoding.overflowing) and not task.kind.windows,
                start + sample // apart,
                encoding,
            )
            count += 1


def _require_room(questions: list[str], task: Task, tokenizer: Any, room: int) -> None:
    """Refuse first texts that leave a window no more of the second than its overlap."""
    coded = tokenizer(questions, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    if long := [text for text, ids in zip(questions, coded, strict=True) if len(ids) > room]:
        raise UserError(
            f"{len(long)} texts in column {task.text_columns[0]!r} have more than {room} tokens, which "
            f"leaves a window no room for {task.text_columns[1]!r}, such as {long[0][:60]!r}; raise "
            "export.max_length (--max-length), or shorten them"
        )


def encode(split: Split, task: Task, tokenizer: Any, max_length: int) -> Encoded:
    """Tokenize a whole split, with its labels; arguments as in `iter_encoded`."""
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
