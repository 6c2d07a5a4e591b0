"""Rows in memory become files that tasks read, the same ones for the same rows."""

from pathlib import Path

import datasets
import pandas
import pytest

from qdqbench.quantize.tasks.data.files import save_rows
from qdqbench.quantize.tasks.data.load import load_split
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.utils.errors import UserError

ROWS = [{"sentence": f"a film {number}", "label": number % 2} for number in range(20)]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
TABLE = datasets.Dataset.from_list(ROWS)


def read(source, split="validation"):
    return load_split(get_task("sst2"), source, split).dataset.to_list()


@pytest.mark.parametrize("rows", [TABLE, pandas.DataFrame(ROWS), ROWS, COLUMNS, TABLE.with_format("torch")])
def test_a_table_in_any_form_is_one_file(rows, tmp_path):
    path = Path(save_rows(rows, tmp_path / "data"))
    both = [*read(str(path), "train"), *read(str(path))]
    assert sorted(row["sentence"] for row in both) == sorted(COLUMNS["sentence"])
    assert save_rows(rows, tmp_path / "data") == str(path)
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("name", ["validation", "test"])
@pytest.mark.parametrize(
    "form", [datasets.DatasetDict, lambda splits: {k: v.to_pandas() for k, v in splits.items()}]
)
def test_splits_are_a_folder(name, form, tmp_path):
    path = save_rows(form({"train": TABLE, name: TABLE.select(range(4))}), tmp_path)
    assert [read(path, "train"), read(path)] == [ROWS, ROWS[:4]]


def test_texts_are_rows_of_one_column(tmp_path):
    path = save_rows(["one text", "another"], tmp_path)
    assert datasets.Dataset.from_parquet(path)["text"] == ["one text", "another"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (7, "type int is no data"),
        (TABLE.to_iterable_dataset(), "type IterableDataset is no data"),
        ({"train": 7}, "is no table"),
        ([1, 2], "is no table"),
        (pandas.DataFrame({"text": ["x", 3]}), "is no table"),
        ({}, "holds no rows"),
        ([], "holds no rows"),
    ],
)
def test_what_is_no_table_is_one_sentence(rows, said, tmp_path):
    with pytest.raises(UserError, match=said):
        save_rows(rows, tmp_path)
    assert [*tmp_path.iterdir()] == []
