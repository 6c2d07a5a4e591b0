"""Checked splits, and their samples as batches of tokens."""

import atexit
import codecs
import csv
import difflib
import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from qdqbench.quantize.tasks.task import GLUE, Task, with_classes
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION
from qdqbench.quantize.tasks.types.encoded import Encoded, IndexedBatch, RowLayout, Units, pad
from qdqbench.quantize.tasks.types.kind import NUMBERS
from qdqbench.quantize.tasks.types.tokens import class_names
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Batch, Int64
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.system.hub import HubError, commit_of
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    import datasets


def read_lines(paths: Sequence[Path]) -> list[str]:
    """Read UTF-8 text files, one text a line; empty lines are texts too."""
    lines = []
    for path in paths:
        try:
            with path.open(encoding="utf-8-sig") as stream:
                lines += [line.removesuffix("\n") for line in stream]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it"
            ) from error
    return lines


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


def draw_half(texts: Sequence[str], names: tuple[str, str], name: str, source: str) -> list[str]:
    """Draw the half `name` (to calibrate with, or to judge on) of a single file's texts; always the same."""
    if name not in names:
        raise UserError(
            f"{source} is a single file: one half is split {names[0]!r} and the other {names[1]!r}, so it "
            f"has no split {name!r}; name one of them, or give --data a folder"
        )
    order = np.random.default_rng(0).permutation(len(texts))
    first = len(texts) // 2
    return [texts[row] for row in np.sort(order[:first] if name == names[0] else order[first:])]


def make_dataset(texts: list[str], column: str) -> "datasets.Dataset":
    import datasets

    features = datasets.Features({column: datasets.Value("string")})
    return datasets.Dataset.from_dict({column: texts}, features=features)


FORMATS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".txt": "text",
}
BETWEEN = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
WINDOWS = "cp1252"  # what spreadsheets of Western languages write where they do not write UTF-8
HEAD = 1 << 16  # bytes of a file in which its header must end
CHUNK = 1 << 20
JUDGED = 0.2  # share of a single file that is evaluated on


def read_table(task: Task, paths: list[Path], kind: str) -> "tuple[datasets.Dataset, list[str], list[str]]":
    """Read rows of files of one kind of `FORMATS` but text, notes on their form, and warnings."""
    import datasets

    names = ", ".join(str(path) for path in paths)
    # A sentence may be "NA", "null" or "12": only the labels of a CSV have missing values.
    options: dict[str, Any] = {}
    notes, warnings, mark = list[str](), list[str](), ","
    if kind == "csv":
        encoding, mark = _form(task, paths[0])
        missing = {task.label_column: ["", "NA", "NaN", "nan", "null", "None"]}
        options = {"converters": dict.fromkeys(task.text_columns, str), "keep_default_na": False}
        options |= {"na_values": missing, "encoding": encoding, "sep": mark}
        if encoding not in ("utf-8", "utf-8-sig"):
            warnings.append(f"{names} is not UTF-8 and was read as {encoding}: look at its texts")
        if mark != ("\t" if paths[0].suffix == ".tsv" else ","):
            notes.append(f"{names} has {BETWEEN[mark]} between its fields")
    # else a load of local files asks a server, which takes seconds if there is no network
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        with quiet("datasets"):
            where = {"data": [glob.escape(str(path.resolve())) for path in paths]}
            dataset = datasets.load_dataset(
                kind, data_files=where, split="data", cache_dir=_cache_folder(), **options
            )
            if kind != "csv":  # readers of JSON and Parquet take texts that are not UTF-8
                dataset.data.validate(full=True)
    except Exception as error:  # the readers raise ArrowInvalid, DatasetGenerationError, even StopIteration
        why = find_root_cause(error)
        if files.SAID.search(why):  # on the disk of temporary files: the data may be whole
            raise files.cannot_write(Path(_cache_folder()), files.NO_SPACE) from error
        raise UserError(
            f"cannot read {names} as {kind} ({why}); it has no rows, another form than "
            "its name says, or is damaged"
        ) from error
    if "__index_level_0__" in dataset.column_names:
        raise UserError(
            f"{names} has rows with more fields than its header; quote the texts that hold {BETWEEN[mark]}"
        )
    return dataset, notes, warnings


def find_root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(": ")


def _form(task: Task, path: Path) -> tuple[str, str]:
    """Return the encoding of a file, and the separator under which its header has the task's columns."""
    encoding = _encoding(path)
    with path.open("rb") as stream:
        head = stream.read(HEAD).decode(encoding, errors="ignore")
    line = next(iter(head.splitlines()), "")
    usual = "\t" if path.suffix == ".tsv" else ","
    wanted = {*task.text_columns, task.label_column}
    fields = {mark: next(csv.reader([line], delimiter=mark), []) for mark in (usual, *BETWEEN)}
    parted = {mark: (len(wanted & {*names}), len(names) > 1, mark == usual) for mark, names in fields.items()}
    return encoding, max(parted, key=lambda mark: parted[mark])


def _encoding(path: Path) -> str:
    """Return UTF-16 by its first bytes, UTF-8 where all of the file is, else the encoding of Windows."""
    with path.open("rb") as stream:
        start = stream.read(4)
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            decoder.decode(start)
            while block := stream.read(CHUNK):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return WINDOWS
    return "utf-8-sig" if start.startswith(codecs.BOM_UTF8) else "utf-8"


GLUE_REPOSITORY = "nyu-mll/glue"
HUB = {name: (GLUE_REPOSITORY, name) for name in GLUE} | {
    name: (f"rajpurkar/{name}", "") for name in ("squad", "squad_v2")
}


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
        loaded, single = _load_files(task, Path(source), split), _only_file(task, Path(source)).is_file()
    if task.kind.labelled:
        return _part(loaded, task, split) if single else loaded
    column, dataset = task.text_columns[0], loaded.dataset
    if column not in dataset.column_names or "string" not in str(dataset.data.column(column).type):
        return loaded  # the caller says what is wrong
    texts, left_out = drop_duplicates(dataset.data.column(column).to_pylist(), loaded.source)
    if single:
        texts = draw_half(texts, (task.train_split, task.eval_splits[0]), split, source)
    return replace(
        loaded, dataset=make_dataset(texts, column), rows=len(texts), warnings=(*loaded.warnings, *left_out)
    )


def _part(whole: Split, task: Task, split: str) -> Split:
    """Draw the rows of a split from a single file that holds all samples; always the same."""
    complete = {*task.text_columns, task.label_column} <= {*whole.dataset.column_names}
    samples = task.kind.groups(whole.dataset, task) if complete else np.arange(whole.rows)
    count = int(samples.max(initial=-1)) + 1
    judged = np.zeros(count, dtype=bool)
    drawn = max(1, round(JUDGED * count)) if count > 1 else 0
    judged[np.random.default_rng(0).permutation(count)[:drawn]] = True
    rows = np.flatnonzero(judged[samples] == (split != task.train_split))
    if not len(rows):
        raise UserError(
            f"{whole.source} is one file of {whole.rows} rows, too few to evaluate on and to calibrate with"
        )
    note = f"{whole.source} is one file: a fifth of it, a draw that is always the same, is evaluated on"
    with quiet("datasets"):
        kept = whole.dataset.select(rows).flatten_indices()  # columns are read from its table, which has all
    return replace(whole, dataset=kept, rows=len(rows), notes=(*whole.notes, note))


@lru_cache
def _cache_folder() -> str:
    """Return a folder of this process for Arrow copies of the user's files; nothing is left behind."""
    folder = tempfile.mkdtemp(prefix="qdqbench-data-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def has_only_texts(task: Task, source: str, split: str) -> bool:
    """Return whether a split is a text file, in which there are no labels."""
    return not is_hub_source(source) and _find_files(task, Path(source), split)[0][0].suffix == ".txt"


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
            dataset = datasets.load_dataset(repository, config or None, split=split, revision=commit)
    except Exception as error:  # the hub's clients raise OSError, ValueError, RuntimeError, httpx errors, ...
        raise UserError(
            f"cannot load split {split!r} of {name} from the hub ({find_root_cause(error)}); check the name "
            "and the connection, or give --data FOLDER"
        ) from error
    return Split(dataset, f"hub {name}, split {split}", f"{dataset._fingerprint} {commit}", len(dataset))


def _load_files(task: Task, folder: Path, split: str) -> Split:
    paths, warnings = _find_files(task, folder, split)
    kind, notes, doubts = FORMATS[paths[0].suffix], list[str](), list[str]()
    if kind == "text":
        dataset = make_dataset(read_lines(paths), task.text_columns[0])
    else:
        dataset, notes, doubts = read_table(task, paths, kind)
    digests = [files.sha256(path) for path in paths]
    whole = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    names = ", ".join(map(str, paths))
    return Split(dataset, names, whole, len(dataset), tuple(notes), (*warnings, *doubts))


def _only_file(task: Task, source: Path) -> Path:
    """Return the only data file of a folder, unless it is named as a split; else the source."""
    places = [place for place in (source / task.name, source) if place.is_dir()]
    suffixes = {*FORMATS} - ({".txt"} if task.kind.labelled else set())
    found = [path for place in places[:1] for path in place.iterdir() if path.suffix in suffixes]
    named = task.train_split, *task.eval_splits, "test"
    alone = len(found) == 1 and not found[0].stem.startswith(named)
    return found[0] if alone and len(task.eval_splits) == 1 else source


def _find_files(task: Task, folder: Path, split: str) -> tuple[list[Path], list[str]]:
    """Return the files of a split in FOLDER/TASK or FOLDER, or the only file, and what to know about them.

    `datasets` would take patterns too, but reads one shard of two, or one of two formats, without a word.
    """
    folder = _only_file(task, folder)
    if folder.is_file():
        if task.kind.labelled and len(task.eval_splits) > 1:
            raise UserError(f"task {task.name!r} has two evaluation splits; give a folder, not a file")
        if folder.suffix not in FORMATS:
            raise UserError(f"--data {folder} is none of {', '.join(FORMATS)}; give the rows in one of them")
        return [folder], []
    if not folder.is_dir():
        what = "file" if folder.suffix in FORMATS else "folder"
        raise UserError(f"data {what} {folder} does not exist; give --data a file, a folder of them, or hub")
    places = [place for place in (folder / task.name, folder) if place.is_dir()]
    stems = [split] + [f"{split}_subset"] * (split == task.train_split)
    for place in places:
        for stem in stems:
            found = [(place / f"{stem}{suffix}", suffix) for suffix in FORMATS]
            choices = [[path] for path, _ in found if path.is_file()]
            choices += [shards for _, suffix in found if (shards := _shards(place, stem, suffix))]
            if choices:
                warnings = []
                if stem != split:
                    warnings.append(f"{choices[0][0]} holds only a part of the {split} split")
                if len(choices) > 1:
                    others = ", ".join(str(paths[0]) for paths in choices[1:])
                    warnings.append(f"{choices[0][0]} was read, {others} not")
                return choices[0], warnings
    looked = ", ".join(f"{place}{os.sep}{stem}" for place in (folder / task.name, folder) for stem in stems)
    there, table = [], None
    for place in places:
        names = sorted(path.name + os.sep * path.is_dir() for path in place.iterdir())
        there.append(f"{place} holds {', '.join(names[:12] + ['...'] * (len(names) > 12)) or 'nothing'}")
        table = table or next((place / name for name in names if Path(name).suffix in FORMATS), None)
    fix = f"--data a file with all samples, such as {table}, or " if table else "--data "
    raise UserError(
        f"no file for split {split!r} of task {task.name!r}: looked for {looked} with {', '.join(FORMATS)} "
        f"and for their shards (-00000-of-00001); {'; '.join(there)}; give {fix}the folder that holds it"
    )


def _shards(place: Path, stem: str, suffix: str) -> list[Path]:
    pattern = re.compile(re.escape(stem) + r"-(\d{5})-of-(\d{5})" + re.escape(suffix))
    matches = {path: match for path in sorted(place.iterdir()) if (match := pattern.fullmatch(path.name))}
    if not matches:
        return []
    totals = {int(match[2]) for match in matches.values()}
    if len(totals) > 1 or len(matches) != max(totals):
        raise UserError(
            f"{place} holds {len(matches)} shards {stem}-*{suffix} where their names say "
            f"{' or '.join(map(str, sorted(totals)))}; complete the download"
        )
    return list(matches)


def source_fingerprint(task: Task, source: str, split: str) -> str:
    """Return SHA-256 of the files of a split; name and commit for the hub."""
    if is_hub_source(source):
        return f"{source} {split} {source_commit(task, source)}"
    paths, _ = _find_files(task, Path(source), split)
    return " ".join(files.sha256(path) for path in paths)


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
    values = tuple(sorted(labels))
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
        return max(2, len(labels))
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
        types.append(str(column.type))
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
        if task.kind.windows:
            _require_room(texts[0], task, tokenizer, max_length - special - max_length // OVERLAP - 1)
        elif len(texts) == 2 and apart == 1:
            texts = _shorten_pairs(texts[0], texts[1], tokenizer, max_length)
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
