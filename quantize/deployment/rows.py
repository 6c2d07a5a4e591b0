"""Rows of data files in parts of equal size, read in bounded memory."""

import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from qdqbench.quantize.tasks.data.files import FORMATS, MOST_COLUMNS, find_form, require_closed_quotes
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list

ROWS = 4096  # of a part
BLOCK = 16 << 20  # bytes of JSON in which one row must end
TEXT = "text"  # column of a file of lines
KINDS = FORMATS | {".arrow": "arrow"}


@dataclass(frozen=True)
class Rows:
    """Rows of files of one kind of `KINDS`, in their order."""

    paths: tuple[Path, ...]
    kind: str
    total: float  # rows, or bytes where rows are not known
    wanted: frozenset[str]  # columns that tell the separator of a CSV

    def read_schema(self) -> pa.Schema:
        """Return the columns, by the first rows."""
        table, _ = next(self._tables(), (None, 0))
        if table is None:
            raise UserError(f"{name_list(map(str, self.paths))} has no rows; give a file with some")
        return table.schema

    def share(self, at: float, limit: int | None) -> tuple[float, float]:
        """Return how much is done of what: `limit` ends files whose rows are known."""
        counted = self.kind == "parquet" and limit is not None
        return at, min(self.total, limit or self.total) if counted else self.total

    def parts(self, size: int, limit: int | None = None) -> Iterator[tuple[pa.Table, float]]:
        """Yield parts of `size` rows, the last one shorter, each with how much of `total` was read."""
        waiting: list[pa.Table] = []
        count, left, at = 0, limit, 0.0
        for table, at in self._tables():
            taken = table.slice(0, left)
            left = None if left is None else left - len(taken)
            waiting, count = [*waiting, taken], count + len(taken)
            while count >= size:
                whole = pa.concat_tables(waiting)
                yield whole.slice(0, size), at
                waiting, count = [whole.slice(size)], count - size
            if left == 0:
                break
        if count:
            yield pa.concat_tables(waiting), at

    def _tables(self) -> Iterator[tuple[pa.Table, float]]:
        """Yield tables of the first one's schema, each with how much of `total` was read."""
        schema, before = None, 0.0
        for path in self.paths:
            at = 0.0
            try:
                for batch, at in READERS[self.kind](path, self.wanted):
                    table = pa.Table.from_batches([batch])
                    if schema is not None and not table.schema.equals(schema):
                        if missing := sorted({*schema.names} - {*table.column_names}):
                            told = f"{path} has no column {name_list(missing)}, which {self.paths[0]} has"
                            raise UserError(f"{told}; give files of the same columns")
                        table = table.select(schema.names).cast(schema)
                    schema = table.schema.remove_metadata()
                    yield table.replace_schema_metadata(), before + at
            except (pa.ArrowException, UnicodeDecodeError) as error:
                raise _explain(path, self.kind, error) from error
            before += at


def open_rows(data: Path, wanted: Collection[str]) -> Rows:
    """Find the files of rows: one, those of a folder of one format, or of a folder that `datasets` saved."""
    paths = _find(data)
    kind, total = KINDS[paths[0].suffix], 0
    for path in paths:
        if kind != "parquet":
            total += path.stat().st_size
            continue
        try:
            total += pa.parquet.read_metadata(path).num_rows
        except (pa.ArrowException, OSError) as error:
            raise _explain(path, kind, error) from error
    return Rows(tuple(paths), kind, total, frozenset(wanted))


def _explain(path: Path, kind: str, error: Exception) -> UserError:
    why = " ".join(str(error).split())[:300]
    return UserError(
        f"cannot read {path} as {kind} ({why}); it is damaged, or has another form than its name says"
    )


def _find(data: Path) -> list[Path]:
    known = ", ".join(KINDS)
    if data.is_file():
        if data.suffix not in KINDS:
            raise UserError(f"--data {data} is none of {known}; give the rows in one of them")
        return [data]
    if not data.is_dir():
        raise UserError(f"--data {data} does not exist; give a file ({known}) or a folder of them")
    if (data / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in data.glob("*/state.json"))
        raise UserError(f"{data} holds the splits {name_list(splits)}; give one, such as {data / splits[0]}")
    if (state := data / "state.json").is_file():  # as `datasets` saves it
        listed = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
        return [data / Path(each["filename"]).name for each in listed]
    found = sorted(path for path in data.iterdir() if path.suffix in KINDS and path.name[0] not in "._")
    kinds = {KINDS[path.suffix] for path in found}
    if len(kinds) != 1:
        what = f"files of {len(kinds)} formats ({name_list(sorted(kinds))})" if kinds else "no data file"
        raise UserError(f"{data} holds {what}; give a file, or a folder with files of one format ({known})")
    return found


def _read_parquet(path: Path, _: Collection[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
    with pa.parquet.ParquetFile(path) as file:
        done = 0
        for batch in file.iter_batches(batch_size=ROWS):
            done += len(batch)
            yield batch, done


def _read_arrow(path: Path, _: Collection[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
    with pa.memory_map(str(path)) as stream:
        for batch in pa.ipc.open_stream(stream):
            for start in range(0, len(batch), ROWS):
                yield batch.slice(start, ROWS), stream.tell()


def _read_csv(path: Path, wanted: Collection[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
    """Yield rows of texts: a type that is guessed from the first rows could fail at a later one."""
    encoding, mark, names = find_form(path, wanted)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path} has more than one column {name_list(twice)}; remove or rename the others")
    if len(names) > MOST_COLUMNS:
        raise UserError(f"{path} has {len(names):,} columns, and {MOST_COLUMNS:,} are the most; drop others")
    require_closed_quotes(path, encoding, mark)
    with path.open("rb") as stream:
        reader = pa.csv.open_csv(
            stream,
            pa.csv.ReadOptions(encoding="utf8" if encoding.startswith("utf-8") else encoding),
            # of one column an empty line is an empty text
            pa.csv.ParseOptions(delimiter=mark, newlines_in_values=True, ignore_empty_lines=len(names) != 1),
            pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False),
        )
        for batch in reader:
            yield batch, stream.tell()


def _read_json(path: Path, _: Collection[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
    with path.open("rb") as stream:
        if stream.read(1 << 12).lstrip()[:1] == b"[":
            raise UserError(f"{path} is one list of JSON; write a row in each line (JSON lines) instead")
        stream.seek(0)
        for batch in pa.json.open_json(stream, pa.json.ReadOptions(block_size=BLOCK)):
            yield batch, stream.tell()


def _read_text(path: Path, _: Collection[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
    with path.open(encoding="utf-8-sig") as stream:
        done = 0
        while lines := [line.removesuffix("\n") for line in itertools.islice(stream, ROWS)]:
            done += sum(len(line.encode()) + 1 for line in lines)
            yield pa.record_batch({TEXT: pa.array(lines, pa.string())}), done


READERS: dict[str, Any] = {
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "csv": _read_csv,
    "json": _read_json,
    "text": _read_text,
}


def choose_columns(
    schema: pa.Schema, wanted: Sequence[str], count: int, named: Sequence[str] | None, *, words: bool
) -> list[str]:
    """Return the columns of texts: those that are named, the task's, or the only one of texts.

    Args:
        wanted: the task's own columns.
        count: of texts of a row.
        words: a text may be a list of words; else the model would read two as a pair of texts.
    """
    texts = [field.name for field in schema if _is_text(field.type, words)]
    there = f"its columns are {name_list(schema.names)}"
    if named is not None and len(named) != count:
        raise UserError(f"--text-column names {len(named)} columns, and the run reads {count} texts a row")
    chosen = [*named] if named is not None else [*wanted[:count]]
    if named is None and count == 1 and chosen[0] not in schema.names and len(texts) == 1:
        chosen = texts
    if missing := [name for name in chosen if name not in schema.names]:
        raise UserError(
            f"the data has no column {name_list(missing)}; {there}; name those with texts (--text-column)"
        )
    if wrong := [name for name in chosen if name not in texts]:
        raise UserError(f"column {name_list(wrong)} holds {schema.field(wrong[0]).type}, not texts; {there}")
    return chosen


def _is_text(kind: Any, words: bool) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if words and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
