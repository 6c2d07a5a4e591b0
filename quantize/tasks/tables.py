"""Files of rows as people have them: what stands between fields, and how texts are encoded."""

import codecs
import csv
import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.machine.quiet import quiet

if TYPE_CHECKING:
    import datasets

    from qdqbench.quantize.tasks.task import Task

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


def read_table(
    task: "Task", paths: list[Path], kind: str, cache: str
) -> "tuple[datasets.Dataset, list[str], list[str]]":
    """Rows of files of one kind, notes on their form, and what in it may be wrong.

    Args:
        kind: of `FORMATS`, but text.
        cache: folder for Arrow copies.

    Raises:
        UserError: they cannot be read in that form.
    """
    import datasets

    names = ", ".join(str(path) for path in paths)
    # A sentence may be "NA", "null" or "12": only the labels of a CSV have missing values.
    options: dict[str, Any] = {}
    notes, warnings = list[str](), list[str]()
    if kind == "csv":
        options["converters"] = dict.fromkeys(task.text_columns, str)
        options["keep_default_na"] = False
        options["na_values"] = {task.label_column: ["", "NA", "NaN", "nan", "null", "None"]}
        options["encoding"], options["sep"] = _form(task, paths[0])
        if options["encoding"] not in ("utf-8", "utf-8-sig"):
            warnings.append(f"{names} is not UTF-8 and was read as {options['encoding']}: look at its texts")
        if options["sep"] != ("\t" if paths[0].suffix == ".tsv" else ","):
            notes.append(f"{names} has {BETWEEN[options['sep']]} between its fields")
    try:
        with quiet("datasets"):
            dataset = datasets.load_dataset(
                kind,
                data_files={"data": [glob.escape(str(path.resolve())) for path in paths]},
                split="data",
                cache_dir=cache,
                **options,
            )
    except Exception as error:  # the readers raise ArrowInvalid, DatasetGenerationError, even StopIteration
        raise UserError(
            f"cannot read {names} as {kind} ({innermost(error)}); it has no rows, another form than its name "
            "says, or is damaged"
        ) from error
    if "__index_level_0__" in dataset.column_names:
        raise UserError(
            f"{names} has rows with more fields than its header; quote the texts that hold "
            f"{BETWEEN[options.get('sep', ',')]}"
        )
    return dataset, notes, warnings


def innermost(error: BaseException) -> str:
    """The innermost cause, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(": ")


def _form(task: "Task", path: Path) -> tuple[str, str]:
    """Encoding of a file, and the separator under which its header has the task's columns."""
    encoding = _encoding(path)
    with path.open("rb") as stream:
        head = stream.read(HEAD).decode(encoding, errors="ignore")
    line = next(iter(head.splitlines()), "")
    usual = "\t" if path.suffix == ".tsv" else ","
    wanted = {*task.text_columns, task.label_column}
    fields = {mark: next(csv.reader([line], delimiter=mark), []) for mark in (usual, *BETWEEN)}
    return encoding, max(fields, key=lambda mark: (len(wanted & {*fields[mark]}), mark == usual))


def _encoding(path: Path) -> str:
    """UTF-8 where all of it is, UTF-16 where its first bytes say so, else that of Windows."""
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


def part_of_one_file(samples: Any, *, judged: bool) -> Any:
    """Rows of a single file that train, or that are judged, ascending: a draw of samples, always the same.

    Args:
        samples: the sample of each row, int64 [rows].
    """
    count = int(samples.max()) + 1 if len(samples) else 0
    order = np.random.default_rng(0).permutation(count)
    chosen = np.zeros(count, dtype=bool)
    chosen[order[: max(1, round(JUDGED * count)) if count > 1 else 0]] = True
    return np.flatnonzero(chosen[samples] == judged)
