"""Files of samples: finding those of a split, reading each format, and writing rows in memory."""

import atexit
import codecs
import csv
import glob
import hashlib
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.tasks.task import GLUE, Task
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    import datasets


FORMATS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".txt": "text",
}
TRAINING, TESTS = ("training",), ("test", "testing")  # usual names of splits, besides the task's own
JUDGING = ("validation", "valid", "val", "dev", "eval", *TESTS)
BETWEEN = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
MARKED = ("utf-16", "utf-32")  # by a mark that stands for nothing else
WINDOWS = "cp1252"  # what spreadsheets of Western languages write where they do not write UTF-8
HEAD = 1 << 16  # bytes of a file in which its header must end
CHUNK = 1 << 20
BEGINNING, MOST_COLUMNS = 10 << 20, 2000  # bytes that are read for their columns; each column takes time
LONGEST_TEXT = 1 << 24  # characters between quotes
MOST_DEPTH = 100  # brackets of JSON inside each other; readers in C++ recurse
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"')
CACHE, JUST_MADE = "qdqbench-data-", 60  # seconds in which a folder may not be locked yet
_HELD = ExitStack()  # never closed: the lock of `cache_folder`
TRAIN, EVALUATED = "train", "validation"  # splits of tasks of one's own
DIGITS = 16  # of the hash in the name of rows that were in memory
LEAST_REFUSED, MOST_GROWTH = 256 << 20, 100  # bytes of unpacked rows, and times the bytes of their files


def find_files(task: Task, folder: Path, split: str) -> tuple[list[Path], list[str]]:
    """Return the files of a split in FOLDER/TASK or FOLDER, or the only file, and what to know about them.

    `datasets` would take patterns too, but reads one shard of two, or one of two formats, without a word.
    """
    folder = only_file(task, folder)
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
    stems = [split, *other_names(task, split)]
    for place in places:
        names = _by_stem(place)
        for stem in stems:
            choices = [[path] for path in names.get(stem, [])]
            choices += [shards for suffix in FORMATS if (shards := _shards(place, stem, suffix))]
            if choices:
                warnings = []
                if stem == f"{task.train_split}_subset":
                    warnings.append(f"{choices[0][0]} holds only a part of the {split} split")
                elif stem != split:
                    warnings.append(f"there is no split {split!r}: {choices[0][0]} is in its place")
                if len(choices) > 1:
                    others = ", ".join(str(paths[0]) for paths in choices[1:])
                    warnings.append(f"{choices[0][0]} was read, {others} not")
                return choices[0], warnings
    looked = ", ".join(f"{place}{os.sep}{stem}" for place in (folder / task.name, folder) for stem in stems)
    there, table = [], None
    for place in places:
        listed = sorted(path.name + os.sep * path.is_dir() for path in place.iterdir())
        there.append(f"{place} holds {', '.join(listed[:12] + ['...'] * (len(listed) > 12)) or 'nothing'}")
        # a test set must not calibrate: it is the train split that is split in two
        train = [path for stem in (task.train_split, *TRAINING) for path in _by_stem(place).get(stem, [])]
        table = table or next(iter(train), None)
    fix = f"--data {table}, which is split in two, or " if table and split != task.train_split else "--data "
    raise UserError(
        f"no file for split {split!r} of task {task.name!r}: looked for {looked} with {', '.join(FORMATS)} "
        f"and for their shards (-00000-of-00001); {'; '.join(there)}; give {fix}a folder that holds it"
    )


def other_names(task: Task, split: str) -> list[str]:
    """Return other usual names of a split; a test split of GLUE has no labels."""
    if split == task.train_split:
        return [*TRAINING, f"{split}_subset"]
    alone = split in task.eval_splits and len(task.eval_splits) == 1
    return [
        name for name in JUDGING if name != split and (name not in TESTS or task.name not in GLUE)
    ] * alone


def _by_stem(place: Path) -> dict[str, list[Path]]:
    """Return files of samples by their names in lower case, and by what follows the last _ or - in them."""
    found: dict[str, list[Path]] = {}
    ranks = {suffix: rank for rank, suffix in enumerate(FORMATS)}
    paths = [path for path in sorted(place.iterdir()) if path.is_file() and path.suffix in FORMATS]
    for path in sorted(paths, key=lambda path: ranks[path.suffix]):
        stem = path.stem.lower()
        for name in dict.fromkeys((path.stem, stem, re.split("[_-]", stem)[-1])):
            found.setdefault(name, []).append(path)
    for name, same in found.items():  # train.csv before my-train.csv
        exact = [path for path in same if path.stem.lower() == name.lower()]
        found[name] = exact or same
    return found


def only_file(task: Task, source: Path) -> Path:
    """Return the only data file of a folder, unless it is named as a split; else the source."""
    places = [place for place in (source / task.name, source) if place.is_dir()]
    suffixes = {*FORMATS} - ({".txt"} if task.kind.labelled else set())
    found = [path for place in places[:1] for path in place.iterdir() if path.suffix in suffixes]
    named = {task.train_split, *task.eval_splits, *TRAINING, *JUDGING}
    alone = len(found) == 1 and named.isdisjoint(re.split("[_-]", found[0].stem.lower()))
    return found[0] if alone and len(task.eval_splits) == 1 else source


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


def make_dataset(texts: list[str], column: str) -> "datasets.Dataset":
    import datasets

    features = datasets.Features({column: datasets.Value("string")})
    return datasets.Dataset.from_dict({column: texts}, features=features)


def read_table(task: Task, paths: list[Path], kind: str) -> "tuple[datasets.Dataset, list[str], list[str]]":
    """Read rows of files of one kind of `FORMATS` but text, notes on their form, and warnings."""
    import datasets

    names = ", ".join(str(path) for path in paths)
    options, notes, warnings = _csv_options(task, paths) if kind == "csv" else ({}, [], [])
    mark = options.get("sep", ",")
    # else a load of local files asks a server, which takes seconds if there is no network
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        if kind == "json" and (deep := next((path for path in paths if _is_deep(path)), None)):
            raise UserError(f"{deep} has over {MOST_DEPTH} brackets inside each other; flatten its rows")
        if (count := max(_count_columns(path, kind, mark) for path in paths)) > MOST_COLUMNS:
            raise UserError(f"{names} has {count:,} columns, and {MOST_COLUMNS:,} are the most; drop others")
        if kind == "parquet":
            _require_size(paths)
        with quiet("datasets"):
            where = {"data": [glob.escape(str(path.resolve())) for path in paths]}
            dataset = datasets.load_dataset(
                kind, data_files=where, split="data", cache_dir=cache_folder(), **options
            )
            if kind != "csv":  # readers of JSON and Parquet take texts that are not UTF-8
                dataset.data.validate(full=True)
    except UserError:
        raise
    except Exception as error:  # the readers raise ArrowInvalid, DatasetGenerationError, even StopIteration
        why = find_root_cause(error)
        if files.SAID.search(why):  # on the disk of temporary files: the data may be whole
            raise files.cannot_write(Path(cache_folder()), files.NO_SPACE) from error
        if kind == "csv" and "UnicodeDecodeError" in why:
            read_as = options["encoding"]
            raise UserError(f"{names} is neither UTF-8 nor {read_as} ({why}); save it as UTF-8") from error
        raise UserError(
            f"cannot read {names} as {kind} ({why}); it has no rows, another form than "
            "its name says, or is damaged"
        ) from error
    if "__index_level_0__" in dataset.column_names:
        raise UserError(
            f"{names} has rows with more fields than its header; quote the texts that hold {BETWEEN[mark]}"
        )
    return dataset, notes, warnings


def _csv_options(task: Task, paths: list[Path]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return options of the reader, notes on the form, and warnings."""
    encoding, mark, _ = find_form(paths[0], {*task.text_columns, task.label_column})
    # a sentence may be "NA", "null" or "12": only labels can be missing
    missing = {task.label_column: ["", "NA", "NaN", "nan", "null", "None"]}
    options = {"converters": dict.fromkeys(task.text_columns, str), "keep_default_na": False}
    options |= {"na_values": missing, "encoding": encoding, "sep": mark}
    names, notes, warnings = ", ".join(map(str, paths)), list[str](), list[str]()
    if not encoding.startswith("utf-8"):
        said, doubt = (notes, "") if encoding in MARKED else (warnings, ": look at its texts")
        said.append(f"{names} is not UTF-8 and was read as {encoding}{doubt}")
    if mark != ("\t" if paths[0].suffix == ".tsv" else ","):
        notes.append(f"{names} has {BETWEEN[mark]} between its fields")
    for path in paths:
        require_closed_quotes(path, encoding, mark)
    return options, notes, warnings


def _count_columns(path: Path, kind: str, mark: str) -> int:
    """Return how many columns a file has where it begins; 0 where its reader is to say what is wrong."""
    import pyarrow.json
    import pyarrow.parquet

    try:
        if kind == "parquet":
            return len(pyarrow.parquet.read_schema(path).names)
        if kind == "csv":
            with path.open("rb") as stream:
                return 1 + stream.readline(BEGINNING).count(mark.encode())
        options = pyarrow.json.ReadOptions(block_size=BEGINNING)
        return len(pyarrow.json.open_json(path, read_options=options).schema.names)
    except pyarrow.ArrowException:  # such as of JSON that is one list
        return 0


def _is_deep(path: Path) -> bool:
    """Return whether JSON has more than `MOST_DEPTH` brackets inside each other; its reader would crash."""
    for strip in (False, True):  # without texts, which takes time, only where brackets could be too deep
        depth, deepest = 0, 0
        with path.open("rb") as stream:
            for line in stream:
                bare = _TEXT.sub(b"", line) if strip else line
                opened, closed = (sum(map(bare.count, each)) for each in ((b"[", b"{"), (b"]", b"}")))
                if strip and depth + opened > MOST_DEPTH:
                    steps = np.frombuffer(bare, np.uint8)
                    both = np.isin(steps, [*b"[{"]).astype(np.int32) - np.isin(steps, [*b"]}"])
                    deepest = max(deepest, depth + int(np.cumsum(both, dtype=np.int32).max()))
                else:
                    deepest = max(deepest, depth + opened)
                depth = max(0, depth + opened - closed)
        if deepest <= MOST_DEPTH:
            return False
    return True


def _require_size(paths: Sequence[Path]) -> None:
    """Refuse files that become much larger than they are; a UserError too where no disk has room for them.

    A Parquet file has a text that is there a million times once, and the copy of it has each.
    """
    import pyarrow.parquet

    names, total = ", ".join(map(str, paths)), 0
    most = max(LEAST_REFUSED, MOST_GROWTH * sum(path.stat().st_size for path in paths))
    for path in paths:
        with pyarrow.parquet.ParquetFile(path) as table:
            groups = map(table.metadata.row_group, range(table.num_row_groups))
            sizes = itertools.chain(
                [sum(group.total_byte_size for group in groups) - total],  # before anything is unpacked
                (batch.nbytes for batch in table.iter_batches(batch_size=256)),
            )
            unpacked = 0
            for number, size in enumerate(sizes):
                unpacked += size if number else 0
                if total + max(size, unpacked) > most:
                    raise UserError(
                        f"{names} would take more than {most >> 20} MiB when unpacked, which is more than "
                        f"{MOST_GROWTH} times its size; write it without repeated texts"
                    )
            total += unpacked
    files.require_room(Path(cache_folder()), total, names)


def find_root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(": ")


@lru_cache
def cache_folder() -> str:
    """Return a folder of this process for Arrow copies of the user's files; nothing is left behind.

    It is locked until the process ends, so that a later one removes those of killed processes.
    """
    for abandoned in Path(tempfile.gettempdir()).glob(f"{CACHE}*"):
        with suppress(OSError):  # of another user, or held by its process
            if not abandoned.is_symlink() and time.time() - abandoned.stat().st_mtime > JUST_MADE:
                with files.locked(abandoned):
                    shutil.rmtree(abandoned)
    folder = tempfile.mkdtemp(prefix=CACHE)
    with suppress(OSError):  # a file system without locks
        _HELD.enter_context(files.locked(Path(folder)))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def find_form(path: Path, wanted: Collection[str]) -> tuple[str, str, list[str]]:
    """Return a CSV's encoding, the separator under which it has the wanted columns, and all columns."""
    encoding = _encoding(path)
    with path.open("rb") as stream:
        head = stream.read(HEAD).decode(encoding, errors="ignore")
    line = next(iter(head.splitlines()), "")
    usual = "\t" if path.suffix == ".tsv" else ","
    fields = {mark: next(csv.reader([line], delimiter=mark), []) for mark in (usual, *BETWEEN)}
    parted = {
        mark: (len({*wanted} & {*names}), len(names) > 1, mark == usual) for mark, names in fields.items()
    }
    chosen = max(parted, key=lambda mark: parted[mark])
    if twice := [name for name in wanted if fields[chosen].count(name) > 1]:
        raise UserError(f"{path} has more than one column {min(twice)!r}; remove or rename the others")
    return encoding, chosen, fields[chosen]


def require_closed_quotes(path: Path, encoding: str, mark: str) -> None:
    """Refuse a CSV with a quote that is not closed: readers join its row with others."""
    most = csv.field_size_limit(LONGEST_TEXT)  # an open quote takes no more memory than this
    try:
        with path.open(encoding=encoding, errors="replace", newline="") as stream:
            rows = csv.reader(stream, delimiter=mark, strict=True)
            while _skip_row(path, rows):
                pass
    finally:
        csv.field_size_limit(most)


def _skip_row(path: Path, rows: Any) -> bool:
    first = rows.line_num + 1
    try:
        return next(rows, None) is not None
    except csv.Error as error:
        if rows.line_num > first:
            raise UserError(
                f"{path}: line {first} opens a quote that is not closed up to line {rows.line_num}; "
                "close it, or double quotes that belong to a text"
            ) from error
        return True  # a text that begins with a quoted word


def _encoding(path: Path) -> str:
    """Return UTF-16 and UTF-32 by their first bytes, UTF-8 where all is, else the encoding of Windows."""
    with path.open("rb") as stream:
        start = stream.read(4)
        if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):  # the first begins as UTF-16 does
            return "utf-32"
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        if b"\0" in start:  # without a mark; a header has no such character
            return "utf-16-be" if start[0] == 0 else "utf-16-le"
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            decoder.decode(start)
            while block := stream.read(CHUNK):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            if start.startswith(codecs.BOM_UTF8):
                raise UserError(f"{path} begins as UTF-8, but not all of it is; save it as UTF-8") from error
            return WINDOWS
    return "utf-8-sig" if start.startswith(codecs.BOM_UTF8) else "utf-8"


def save_rows(data: Any, place: Path) -> str:
    """Write a dataset, a data frame, a list of rows or texts, or a dict of splits as Parquet.

    Return the path. The name has the hash of the contents, so equal rows are one file. Of two splits `train`
    and another, that is `validation`, whatever its name.
    """
    if isinstance(data, Mapping) and any(isinstance(each, str | Path) for each in data.values()):
        raise UserError("a dict of splits holds rows, no paths; give a folder with train.csv and so on")
    given = isinstance(data, Mapping) and data and all(map(_is_table, data.values()))
    splits = dict(data) if given else {}
    if {*splits} - {EVALUATED} and TRAIN in splits and len(splits) == 2:
        splits = {TRAIN if name == TRAIN else EVALUATED: rows for name, rows in splits.items()}
    tables = {str(name): _table(rows) for name, rows in (splits or {"": data}).items()}
    if empty := [name for name, table in tables.items() if not len(table)]:
        raise UserError(f"the data in memory{f' ({empty[0]})' * bool(empty[0])} holds no rows; give some")
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".") as made:
        paths = {name: Path(made) / f"{name}.parquet" for name in tables}
        for name, table in tables.items():
            with quiet("datasets"):
                table.to_parquet(paths[name])
        told = "".join(f"{name} {files.sha256(path)}\n" for name, path in sorted(paths.items()))
        digest = hashlib.sha256(told.encode()).hexdigest()[:DIGITS]
        target = place / digest if splits else place / f"{digest}.parquet"
        for path in paths.values():
            aim = target / path.name if splits else target
            aim.parent.mkdir(exist_ok=True)
            path.replace(aim)
    return str(target)


def _is_table(rows: Any) -> bool:
    listed = isinstance(rows, Sequence) and isinstance(next(iter(rows), None), Mapping)
    return listed or isinstance(rows, Mapping) or hasattr(rows, "columns") or hasattr(rows, "column_names")


def _table(rows: Any) -> Any:
    """Return rows as a dataset; a `UserError` says which type is none."""
    import datasets
    import pyarrow

    try:
        if isinstance(rows, datasets.Dataset):
            return rows
        if hasattr(rows, "iloc"):
            return datasets.Dataset.from_pandas(rows, preserve_index=False)
        if isinstance(rows, Mapping):
            return datasets.Dataset.from_dict({**rows})
        if isinstance(rows, Sequence) and not isinstance(rows, str | bytes):
            texts = all(isinstance(row, str) for row in rows)
            return datasets.Dataset.from_list([{"text": row} for row in rows] if texts else [*rows])
    except (pyarrow.ArrowException, AttributeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"data in memory is no table ({why}); give rows with the same columns") from error
    raise UserError(
        f"an object of type {type(rows).__name__} is no data; give a Dataset, a DataFrame, a list of "
        "rows, a dict of splits, or a path"
    )
