"""Rows in memory as files: a run reads them again when it resumes."""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.quiet import quiet

TRAIN, EVALUATED = "train", "validation"  # splits of tasks of one's own
DIGITS = 16  # of the hash in a name


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
