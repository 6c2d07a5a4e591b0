"""Splits as they come: from the hub, or from files in a folder."""

import atexit
import codecs
import csv
import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.tasks.task import GLUE, Task
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
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
    left_out = {"empty": blank, "there before": len(texts) - blank - len(first)}
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
            f"{source} is a single file, half of which is split {names[0]!r} and half {names[1]!r}, so it "
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
    try:
        with quiet("datasets"):
            where = {"data": [glob.escape(str(path.resolve())) for path in paths]}
            dataset = datasets.load_dataset(
                kind, data_files=where, split="data", cache_dir=_cache_folder(), **options
            )
    except Exception as error:  # the readers raise ArrowInvalid, DatasetGenerationError, even StopIteration
        raise UserError(
            f"cannot read {names} as {kind} ({find_root_cause(error)}); it has no rows, another form than "
            "its name says, or is damaged"
        ) from error
    if "__index_level_0__" in dataset.column_names:
        raise UserError(
            f"{names} has rows with more fields than its header; quote the texts that hold {BETWEEN[mark]}"
        )
    return dataset, notes, warnings


def find_root_cause(error: BaseException) -> str:
    """Return the innermost cause, in one line."""
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
    return encoding, max(fields, key=lambda mark: (len(wanted & {*fields[mark]}), mark == usual))


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
    """Read a whole split as it is; `tasks.rows.load_split` checks it and documents `source`."""
    if is_hub_source(source):
        loaded, single = _load_hub(task, source, split), False
    else:
        loaded, single = _load_files(task, Path(source), split), Path(source).is_file()
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


def _hub_set(task: Task, source: str) -> tuple[str, str, str | None]:
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
    """Return the commit of a hub source; None for a folder."""
    if not is_hub_source(source):
        return None
    repository, _, revision = _hub_set(task, source)
    try:
        return commit_of(repository, "dataset", revision)
    except HubError as error:
        raise UserError(f"cannot load --data {source}: {error}, or give --data FOLDER") from error


def _load_hub(task: Task, source: str, split: str) -> Split:
    import datasets

    repository, config, _ = _hub_set(task, source)
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


def _find_files(task: Task, folder: Path, split: str) -> tuple[list[Path], list[str]]:
    """Return the files of a split in FOLDER/TASK or FOLDER, or the only file, and what to know about them.

    `datasets` would take patterns too, but reads one shard of two, or one of two formats, without a word.
    """
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
    there = []
    for place in places:
        names = sorted(path.name + os.sep * path.is_dir() for path in place.iterdir())
        there.append(f"{place} holds {', '.join(names[:12] + ['...'] * (len(names) > 12)) or 'nothing'}")
    raise UserError(
        f"no file for split {split!r} of task {task.name!r}: looked for {looked} with {', '.join(FORMATS)} "
        f"and for their shards (-00000-of-00001); {'; '.join(there)}; give --data the folder that holds it"
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
