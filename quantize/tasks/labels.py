"""Labels as people have them: texts, or numbers from 1 on, and the class number of each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qdqbench.quantize.tasks.sources import Split, read_split
from qdqbench.quantize.tasks.task import GLUE, Task
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list

if TYPE_CHECKING:
    import datasets

MOST_VALUES = 1000  # different texts up to which a column may be one of classes


def with_values_of(task: Task, source: str, classes: Sequence[str] = ()) -> Task:
    """A classification of one's own, with the values of its label column by class number.

    Texts are matched with the names of the model's classes, whatever their case; where these are others, they
    are numbered in sorted order. Whole numbers from 1 to the number of classes are numbered from 0. They are
    read from the train split and every evaluation split, so that all are numbered alike.

    Args:
        classes: names of the model's classes by their number; empty where it has none yet.

    Raises:
        UserError: as `read_split`, or more or fewer texts than classes.
    """
    if task.kind is not CLASSIFICATION or task.name in GLUE:
        return task
    found: set[str] = set()
    texts = False
    for name in (task.train_split, *task.eval_splits):
        split = read_split(task, source, name)
        if task.label_column not in split.dataset.column_names:
            continue  # texts alone; where labels are needed, the caller says so
        column = split.dataset.data.column(task.label_column)
        texts |= "string" in str(column.type)
        if not texts and "int" not in str(column.type):
            return task
        found |= {str(value) for value in column.unique().to_pylist() if value is not None}
    if not found:
        return task
    values = _by_name(found, classes) if texts else _from_one(found, task.num_labels)
    if texts and not 2 <= len(values) <= MOST_VALUES:
        raise UserError(
            f"the labels (column {task.label_column!r}) of {source} are {len(values)} different texts, not "
            "classes; name the right --label-column"
        )
    if texts and len(values) != task.num_labels:
        raise UserError(
            f"the labels (column {task.label_column!r}) of {source} are {len(values)} different texts "
            f"({name_list(values)}), but --num-labels is {task.num_labels}; correct one of them"
        )
    return task.model_copy(update={"values": values})


def _by_name(found: set[str], classes: Sequence[str]) -> tuple[str, ...]:
    """Texts by class number: the model's, where each is one of its names, else in sorted order."""
    spelled = {text.strip().lower(): text for text in found}
    names = [name.strip().lower() for name in classes]
    if len(spelled) == len(found) and {*spelled} <= {*names}:
        return tuple(spelled.get(name, shown) for name, shown in zip(names, classes, strict=True))
    return tuple(sorted(found))


def _from_one(found: set[str], count: int) -> tuple[str, ...]:
    """Numbers by class number where they go from 1 to the number of classes; empty where they do not."""
    whole = {int(value) for value in found}
    ours = whole and min(whole) >= 1 and max(whole) == count
    return tuple(str(number) for number in range(1, count + 1)) if ours else ()


def numbered(split: Split, task: Task) -> tuple["datasets.Dataset", str]:
    """A split with the class numbers of its labels, and the note of what is which.

    Raises:
        UserError: a label that `with_values_of` did not see.
    """
    dataset, column = split.dataset, task.label_column
    values = [None if each is None else str(each) for each in dataset.data.column(column).to_pylist()]
    numbers = {value: number for number, value in enumerate(task.values)}
    if unknown := sorted({value for value in values if value is not None} - {*numbers}):
        raise UserError(
            f"the labels (column {column!r}) of {split.source} hold {name_list(unknown)}, which is none of "
            f"{name_list(task.values)}; start anew where the data changed"
        )
    given = [None if value is None else numbers[value] for value in values]
    labels = given if None in given else np.array(given, dtype=np.int64)
    note = f"labels are numbered {name_list(f'{value} = {number}' for value, number in numbers.items())}"
    others = [name for name in dataset.column_names if name != column]
    return dataset.select_columns(others).add_column(column, labels), note
