"""A split as it is in files or on the hub, before it is checked."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qdqbench.quantize.tasks.data.files import (
    FORMATS,
    find_files,
    find_root_cause,
    make_dataset,
    only_file,
    other_names,
    read_lines,
    read_table,
)
from qdqbench.quantize.tasks.task import GLUE, Task
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.hub import HubError, commit_of
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    import datasets


GLUE_REPOSITORY = "nyu-mll/glue"
HUB = {name: (GLUE_REPOSITORY, name) for name in GLUE} | {
    name: (f"rajpurkar/{name}", "") for name in ("squad", "squad_v2")
}
JUDGED = 0.2  # share of a single file that is evaluated on, where the rest is trained on
# samples of a single file that calibrate; more do not pay (docs/how-to/compare-calibration.md)
LEAST_CALIBRATING, MOST_CALIBRATING = 64, 512


@dataclass(frozen=True)
class Split:
    """A checked split; its dataset holds the task's text and label columns only, memory-mapped."""

    dataset: "datasets.Dataset"
    source: str  # the files, or the hub set with its config
    # SHA-256 of the files (of their digests, when several), or the hub set's fingerprint and commit
    fingerprint: str
    rows: int  # before the limit
    notes: tuple[str, ...] = ()  # how it was read: what stands between fields, which part of a file
    warnings: tuple[str, ...] = ()  # what a reader of the report must know: a part of a split, empty texts


def read_split(task: Task, source: str, split: str) -> Split:
    """Read a whole split as it is; `load_split` checks it and documents `source`."""
    if is_hub_source(source):
        loaded, single = _load_hub(task, source, split), False
    else:
        loaded, single = _load_files(task, Path(source), split), only_file(task, Path(source)).is_file()
    if task.kind.labelled:
        return _part(loaded, task, split) if single else loaded
    column, dataset = task.text_columns[0], loaded.dataset
    if column not in dataset.column_names or "string" not in str(dataset.data.column(column).type):
        return loaded  # the caller says what is wrong
    texts, left_out = drop_duplicates(dataset.data.column(column).to_pylist(), loaded.source)
    if single:
        texts = draw_part(texts, (task.train_split, task.eval_splits[0]), split, source)
    return replace(
        loaded, dataset=make_dataset(texts, column), rows=len(texts), warnings=(*loaded.warnings, *left_out)
    )


def count_judged(samples: int, *, trained: bool) -> int:
    """Return how many samples of a single file are evaluated on: all but those that calibrate or train."""
    if trained:
        return max(1, round(JUDGED * samples)) if samples > 1 else 0
    return samples - max(1, min(MOST_CALIBRATING, max(LEAST_CALIBRATING, samples // 4), samples // 2))


def _part(whole: Split, task: Task, split: str) -> Split:
    """Draw the rows of a split from a single file that holds all samples; always the same."""
    complete = {*task.text_columns, task.label_column} <= {*whole.dataset.column_names}
    samples = task.kind.groups(whole.dataset, task) if complete else np.arange(whole.rows)
    count = int(samples.max(initial=-1)) + 1
    judged = np.zeros(count, dtype=bool)
    drawn = max(0, count_judged(count, trained=task.trained))
    judged[np.random.default_rng(0).permutation(count)[:drawn]] = True
    rows = np.flatnonzero(judged[samples] == (split != task.train_split))
    if not len(rows):
        raise UserError(
            f"{whole.source} is one file of {whole.rows} rows, too few to evaluate on and to calibrate with"
        )
    others = "train" if task.trained else "calibrate"
    note = (
        f"{whole.source} is one file: {drawn:,} of {count:,} samples, a draw that is always the same, are "
        f"evaluated, the others {others}"
    )
    with quiet("datasets"):
        kept = whole.dataset.select(rows).flatten_indices()  # columns are read from its table, which has all
    return replace(whole, dataset=kept, rows=len(rows), notes=(*whole.notes, note))


def drop_duplicates(texts: Sequence[str | None], source: str) -> tuple[list[str], list[str]]:
    """Return each text with a word once, and notes: one that is there twice would be its own neighbor."""
    first: dict[str, str] = {}
    blank = 0
    for text in texts:
        if text is not None and (key := " ".join(text.split())):
            first.setdefault(key, text)
        else:
            blank += 1
    left_out = {"empty": blank, "duplicates": len(texts) - blank - len(first)}
    notes = [
        f"{count} of {len(texts)} texts of {source} are {what} and were left out"
        for what, count in left_out.items()
        if count
    ]
    return [*first.values()], notes


def draw_part(texts: Sequence[str], names: tuple[str, str], name: str, source: str) -> list[str]:
    """Draw the part `name` (to calibrate with, or to judge on) of a single file's texts; always the same."""
    if name not in names:
        raise UserError(
            f"{source} is a single file: one part is split {names[0]!r} and the other {names[1]!r}, so it "
            f"has no split {name!r}; name one of them, or give --data a folder"
        )
    order = np.random.default_rng(0).permutation(len(texts))
    first = len(texts) - count_judged(len(texts), trained=False)
    return [texts[row] for row in np.sort(order[:first] if name == names[0] else order[first:])]


def has_only_texts(task: Task, source: str, split: str) -> bool:
    """Return whether a split is a text file, in which there are no labels."""
    return not is_hub_source(source) and find_files(task, Path(source), split)[0][0].suffix == ".txt"


def _load_files(task: Task, folder: Path, split: str) -> Split:
    paths, warnings = find_files(task, folder, split)
    kind, notes, doubts = FORMATS[paths[0].suffix], list[str](), list[str]()
    if kind == "text":
        dataset = make_dataset(read_lines(paths), task.text_columns[0])
    else:
        dataset, notes, doubts = read_table(task, paths, kind)
    digests = [files.sha256(path) for path in paths]
    whole = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    names = ", ".join(map(str, paths))
    return Split(dataset, names, whole, len(dataset), tuple(notes), (*warnings, *doubts))


def source_fingerprint(task: Task, source: str, split: str) -> str:
    """Return SHA-256 of the files of a split; name and commit for the hub."""
    if is_hub_source(source):
        return f"{source} {split} {source_commit(task, source)}"
    paths, _ = find_files(task, Path(source), split)
    return " ".join(files.sha256(path) for path in paths)


def is_hub_source(source: str) -> bool:
    """Return whether a source is `hub[:OWNER/NAME[:CONFIG]][@REVISION]` rather than a folder."""
    return source == "hub" or source.startswith(("hub:", "hub@"))


def hub_set(task: Task, source: str) -> tuple[str, str, str | None]:
    """Return the repository, config or "", and revision of a hub source."""
    named, _, revision = source.partition("@")
    repository, _, config = named.removeprefix("hub").removeprefix(":").partition(":")
    if named == "hub":
        if task.name not in HUB:
            raise UserError(
                f"task {task.name!r} is not in {GLUE_REPOSITORY}; give a folder or hub:OWNER/NAME[:CONFIG]"
            )
        repository, config = HUB[task.name]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UserError(
            f"--data {source!r} names no hub set; write hub:OWNER/NAME[:CONFIG][@REVISION], hub[@REVISION], "
            "or a folder"
        )
    return repository, config, revision or None


def source_commit(task: Task, source: str) -> str | None:
    if not is_hub_source(source):
        return None
    repository, _, revision = hub_set(task, source)
    try:
        return commit_of(repository, "dataset", revision)
    except HubError as error:
        raise UserError(f"cannot load --data {source}: {error}, or give --data FOLDER") from error


def _load_hub(task: Task, source: str, split: str) -> Split:
    import datasets

    repository, config, _ = hub_set(task, source)
    commit = source_commit(task, source)
    name = f"{repository} ({config})" if config else repository
    try:
        with quiet("datasets"):
            if task.name not in HUB:
                there = datasets.get_dataset_split_names(repository, config or None, revision=commit)
                split = next((each for each in [split, *other_names(task, split)] if each in there), split)
            dataset = datasets.load_dataset(repository, config or None, split=split, revision=commit)
    except Exception as error:  # the hub's clients raise OSError, ValueError, RuntimeError, httpx errors, ...
        raise UserError(
            f"cannot load split {split!r} of {name} from the hub ({find_root_cause(error)}); check the name "
            "and the connection, or give --data FOLDER"
        ) from error
    return Split(dataset, f"hub {name}, split {split}", f"{dataset._fingerprint} {commit}", len(dataset))
