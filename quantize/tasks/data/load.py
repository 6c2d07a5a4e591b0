"""A checked split: its rows, in order or drawn, and its labels as numbers."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qdqbench.quantize.tasks.data.splits import Split, is_hub_source, read_split
from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION
from qdqbench.quantize.tasks.kinds.kind import NUMBERS
from qdqbench.quantize.tasks.kinds.multilabel import MULTI_LABEL, count_labels
from qdqbench.quantize.tasks.kinds.tokens import class_names
from qdqbench.quantize.tasks.task import GLUE, Task, with_classes
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    import datasets


def note_all(split: str, rows: int, most: int) -> str:
    return f"all {rows} rows of split {split!r} are used, of {most} at most"


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
    """
    if limit is not None and limit < 1:
        raise UserError(f"{limit} samples of split {split!r} were asked for; ask for at least 1")
    labelled = labelled and task.kind.labelled
    loaded = join_columns(read_split(task, source, split), task)
    columns = _check_columns(loaded, task, labelled)
    dataset, notes = loaded.dataset.select_columns(columns), [*loaded.notes]
    if labelled and task.values:
        dataset, note = _number_labels(dataset, task, loaded.source)
        notes.append(note)
    warnings = loaded.warnings + tuple(_check_texts(dataset, task, split, loaded.source))
    if labelled:
        _check_labels(dataset, task, loaded.source)
        column = dataset.data.column(task.label_column)
        if seed is None and task.kind is CLASSIFICATION and len(column.unique()) < 2:
            warnings += (
                f"all {len(column)} labels of split {split!r} are of one class: its score cannot tell a good "
                "model from one that answers the same to all",
            )
    if limit is not None and limit > loaded.rows and seed is not None:  # a limit that cuts nothing is none
        notes.append(note_all(split, loaded.rows, limit))
    dataset = _ordered(dataset, task, seed)
    kept = loaded.rows if limit is None else complete_samples(dataset, task, min(limit, loaded.rows))
    dataset = dataset.select(range(kept))
    if kept < loaded.rows and seed is None:  # a draw is asked for, a cut must be seen
        notes.append(f"the first {kept} of {loaded.rows} rows of split {split!r}")
    return Split(dataset, loaded.source, loaded.fingerprint, loaded.rows, tuple(notes), warnings)


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


def has_label_lists(task: Task, source: str) -> bool:
    """Return whether labels of the train split are lists of classes, or columns with commas between them."""
    if "," in task.label_column:
        return True
    try:
        dataset = read_split(task, source, task.train_split).dataset
    except UserError:
        return False  # whoever needs the split says so
    there = task.label_column in dataset.column_names
    kind = str(dataset.data.column(task.label_column).type) if there else ""
    return re.fullmatch(MULTI_LABEL.label_type, kind) is not None


def join_columns(split: Split, task: Task) -> Split:
    """Return a split whose label column lists those of several label columns that are 1 in each row."""
    dataset, column = split.dataset, task.label_column
    names = [name.strip() for name in column.split(",")]
    if len(names) == 1 or column in dataset.column_names or not {*names} <= {*dataset.column_names}:
        return split
    columns = dataset.select_columns(names)[:]
    for name, values in columns.items():
        if strange := sorted({repr(value) for value in values if value not in (0, 1)}):
            raise UserError(
                f"the labels (column {name!r}) of {split.source} are 0 or 1 in columns with commas between "
                f"them, not {name_list(strange)}; correct them or --label-column"
            )
    import datasets

    there = [[number for number, name in enumerate(names) if columns[name][row]] for row in range(split.rows)]
    feature = datasets.Sequence(datasets.ClassLabel(names=names))
    with quiet("datasets"):
        return replace(
            split, dataset=dataset.remove_columns(names).add_column(column, there, feature=feature)
        )


NUMERIC = ("int", "uint", "float", "halffloat", "double", "decimal", "null")
PLAIN = (*NUMERIC, "string", "large_string", "bool", "dictionary")  # starts of Arrow's names of types
MOST_VALUES = 1000  # different texts up to which a column may be one of classes


def add_label_values(task: Task, source: str, classes: Sequence[str] = ()) -> Task:
    """Return a classification of one's own, with the values of its label column by class number.

    Texts are matched with the names of the model's classes, whatever their case; where these are others, they
    are numbered in sorted order. Whole numbers from 1 to the number of classes are numbered from 0. They are
    read from the train split and every evaluation split, so that all are numbered alike.
    """
    if task.kind is not CLASSIFICATION or (task.name in GLUE and is_hub_source(source)):
        return task
    labels, kind = _read_labels(task, source)
    texts = kind == "texts"
    if not labels or kind == "fractions" or (task.name in GLUE and not texts):
        return task
    if not texts:  # numbered from 1 instead of 0, or as they are
        whole, count = {int(value) for value in labels}, task.num_labels
        from_one = min(whole) >= 1 and max(whole) == count
        numbers = tuple(str(number) for number in range(1, count + 1)) if from_one else ()
        return task.model_copy(update={"values": numbers})
    spelled = {text.strip().lower(): text for text in labels}
    names = [name.strip().lower() for name in classes]
    values = tuple(sorted(labels, key=int if all(map(str.isdecimal, labels)) else None))
    if len(spelled) == len(labels) and {*spelled} <= {*names}:
        values = tuple(spelled.get(name, shown) for name, shown in zip(names, classes, strict=True))
    found = f"the labels (column {task.label_column!r}) of {source} are {len(values)} different texts"
    if not 2 <= len(values) <= MOST_VALUES:
        raise UserError(f"{found}, not classes; name the right --label-column")
    if len(values) != task.num_labels:
        raise UserError(
            f"{found} ({name_list(values)}), but task {task.name!r} has {task.num_labels} classes; correct "
            "the labels, --label-column or --num-labels"
        )
    return task.model_copy(update={"values": values})


def count_classes(task: Task, source: str, outputs: int | None = None) -> int:
    """Return the number of classes that the labels of all splits say, 1 for scores.

    Args:
        outputs: of the head of a trained model: one takes whole numbers as scores, and the data may lack a
            class of several.
    """
    labels, kind = _read_labels(task, source, required=True)
    if kind == "texts":
        return max(2, outputs or 0, len(labels))
    if kind == "fractions" or outputs == 1:
        return outputs or 1
    whole = {int(label) for label in labels} or {0}
    return max(2, outputs or 0, max(whole) + (min(whole) < 1))


def _read_labels(
    task: Task, source: str, *, required: bool = False
) -> tuple[set[str], Literal["texts", "whole", "fractions"]]:
    """Return the different labels of all splits, and what they are."""
    labels, types = set[str](), list[str]()
    for name in (task.train_split, *task.eval_splits):
        try:
            split = read_split(task, source, name)
        except UserError:
            if task.name in GLUE:
                continue  # whoever needs this split says so
            raise
        if required:
            _check_columns(split, task, labelled=True)
        elif task.label_column not in split.dataset.column_names:
            continue  # texts alone; where labels are needed, the caller says so
        column = split.dataset.data.column(task.label_column)
        types.append(kind := str(column.type))
        if not kind.startswith(PLAIN):
            raise UserError(
                f"the labels (column {task.label_column!r}) of {source} are {kind}, neither numbers nor "
                "texts; name the right --label-column"
            )
        labels |= {str(value) for value in column.unique().to_pylist() if value is not None}
    if any("string" in each or each == "bool" for each in types):
        return labels, "texts"
    return labels, "whole" if all("int" in each for each in types) else "fractions"


def _number_labels(dataset: "datasets.Dataset", task: Task, source: str) -> tuple["datasets.Dataset", str]:
    column = task.label_column
    values = [None if each is None else str(each) for each in dataset.data.column(column).to_pylist()]
    numbers = {value: number for number, value in enumerate(task.values)}
    if unknown := sorted({value for value in values if value is not None} - {*numbers}):
        raise UserError(
            f"the labels (column {column!r}) of {source} hold {name_list(unknown)}, which is none of "
            f"{name_list(task.values)}; start over where the data changed"
        )
    given = [None if value is None else numbers[value] for value in values]
    labels = given if None in given else np.array(given, dtype=np.int64)
    note = f"labels are numbered {name_list(f'{value} = {number}' for value, number in numbers.items())}"
    others = [name for name in dataset.column_names if name != column]
    return dataset.select_columns(others).add_column(column, labels), note


def add_data_classes(task: Task, source: str) -> Task:
    """Return a task with the classes of its train split, by name where labels have names."""
    loaded = join_columns(read_split(task, source, task.train_split), task)
    _check_columns(loaded, task, labelled=True)
    labels = f"the labels (column {task.label_column!r}) of {loaded.source}"
    kind = str(loaded.dataset.data.column(task.label_column).type)
    if not re.fullmatch(task.kind.label_type, kind):
        raise UserError(f"{labels} are {kind}, not {task.kind.label_values}; name the right --label-column")
    names = class_names(loaded.dataset, task.label_column)
    if not names and task.kind is MULTI_LABEL:
        count = count_labels(loaded.dataset, task.label_column)
        names = tuple(f"LABEL_{number}" for number in range(count))
    if not names:
        raise UserError(f"{labels} are numbers without names; write the tags as texts, such as B-PER")
    return with_classes(task, names)


def _check_columns(split: Split, task: Task, labelled: bool) -> list[str]:
    wanted = [*task.text_columns, *([task.label_column] if labelled else [])]
    there = split.dataset.column_names
    if missing := [name for name in wanted if name not in there]:
        folded = {name.lower(): name for name in there}
        near = {name: difflib.get_close_matches(name.lower(), folded, n=1) for name in missing}
        hints = [f"{name} (nearest: {folded[fit[0]]})" if fit else name for name, fit in near.items()]
        raise UserError(
            f"{split.source} has no column {', '.join(hints)}; its columns are "
            f"{', '.join(there) or 'none'}; name yours with --text-column and --label-column, or "
            "give the data of this --task"
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
                f"column {name!r} of {source} holds {_name_type(column)}, not {task.kind.text_values}; "
                "name the right --text-column"
            )
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise UserError(
                f"column {name!r} of {source} has {column.null_count} empty (null) texts, the first in row "
                f"{row}; fill or drop these rows"
            )
        texts = column.to_pylist()
        if lost := sum(task.kind.split_words and None in text for text in texts):
            raise UserError(f"column {name!r} of {source} has null words in {lost} texts; drop them")
        if count := sum(not (text.strip() if isinstance(text, str) else text) for text in texts):
            warnings.append(f"{count} of {len(texts)} texts in column {name!r} of split {split!r} are empty")
    return warnings


def _name_type(column: Any) -> str:
    return "texts" if "string" in (name := str(column.type)) and "<" not in name else name


def _check_labels(dataset: "datasets.Dataset", task: Task, source: str) -> None:
    column = dataset.data.column(task.label_column)
    if column.null_count:
        problem = f"are missing in {column.null_count} of {len(column)} rows; give a labeled split"
    elif not re.fullmatch(task.kind.label_type, str(column.type)):
        wanted = task.kind.label_values.format(last=task.num_labels - 1)
        problem = f"are {_name_type(column)}; map them to {wanted}, or name the right --label-column"
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
