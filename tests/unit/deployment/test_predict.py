"""Files of numbers: the answer to a row is its number, so that each shows which row it belongs to."""

import itertools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from qdqbench.quantize.deployment.opened import Answering, ModelFile
from qdqbench.quantize.deployment.options import PredictOptions
from qdqbench.quantize.deployment.predict import Predictor, answer_files
from qdqbench.quantize.deployment.rows import open_rows
from qdqbench.quantize.deployment.write import describe_texts
from qdqbench.quantize.standalone.model import Model
from qdqbench.quantize.tasks.task import TASK_KINDS
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import locked

from ...support.fake_served import PAD, Engine, digits

NO_FILE = ModelFile(Path(), "")
TOLD = describe_texts(TASK_KINDS["regression"], 1, 32)
TOLD |= {"inputs": ["input_ids", "attention_mask"], "side": "right", "labels": [], "prompt": ""}
TOLD |= {"pad_id": PAD, "batch": 4}


class Killed(BaseException):
    """What a signal would be."""


@dataclass(frozen=True)
class Numbers(Answering):
    """Answers with the number in a text; killed at a batch."""

    killed_at: int = 10**9

    def open_model(self, threads=None, batch=None) -> Model:
        engine, batches = Engine(), itertools.count()

        def infer(tokens):
            if next(batches) == self.killed_at:
                raise Killed
            return engine(tokens)

        return Model(self.told, Tokenizer.from_str(digits()), infer, batch)


def numbers(**fields) -> Numbers:
    known = dict.fromkeys(("made_with", "task", "recipe", "tokenizer"), "fake")
    known |= {"backend": "onnxruntime", "int8": True, "max_drop": 0.0, "told": TOLD}
    known |= {"columns": ("text",), "outputs": (), "engine": NO_FILE, "graph": NO_FILE}
    return Numbers(**known | fields)


def write(path: Path, texts) -> Path:
    table = pa.table({"id": [*range(len(texts))], "text": pa.array(texts, pa.string())})
    pa.parquet.write_table(table, path, row_group_size=7)
    return path


def options(data, out, **fields) -> PredictOptions:
    return PredictOptions(run=Path("run"), data=data, out=out, **fields)


def answered(out: Path) -> list:
    table = pa.parquet.read_table(out).to_pylist()
    assert [row["id"] for row in table] == [*range(len(table))]
    return [row["predicted_score"] for row in table]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.one_of(st.none(), st.integers(0, 10**6)), min_size=1, max_size=60),
    st.integers(1, 13),
    st.lists(st.integers(0, 6), max_size=3),
    st.one_of(st.none(), st.integers(1, 70)),
    st.booleans(),
)
def test_no_row_is_lost_doubled_or_moved_however_often_it_is_killed(  # noqa: PLR0917
    tmp_path_factory, given, size, kills, limit, damaged
):
    folder = tmp_path_factory.mktemp("kills")
    data = write(folder / "data.parquet", [None if each is None else str(each) for each in given])
    wanted = options(data, folder / "out.parquet", limit=limit)
    for kill in kills:
        try:
            answer_files(numbers(killed_at=kill), wanted, size)
        except Killed:
            assert not wanted.out.exists()
            parts = sorted((folder / "out.parquet.parts").glob("*.parquet"))
            if damaged and parts:  # by a machine that lost its power
                parts[0].write_bytes(parts[0].read_bytes()[:-9])
        else:
            break
    else:
        made = answer_files(numbers(), wanted, size)
        assert made.rows == len(given[:limit])
        assert made.unanswered == sum(each is None for each in given[:limit])
    assert answered(wanted.out) == given[:limit]
    assert sorted(path.name for path in folder.iterdir()) == ["data.parquet", "out.parquet"]


def test_finished_parts_are_not_answered_again(tmp_path):
    wanted = options(write(tmp_path / "data.parquet", [*map(str, range(40))]), tmp_path / "out.parquet")
    with pytest.raises(Killed):
        answer_files(numbers(killed_at=7), wanted, 8)  # two batches a part
    made = answer_files(numbers(killed_at=4), wanted, 8)  # the other two parts
    assert made.rows == 40
    assert made.resumed >= 24
    assert answered(wanted.out) == [*range(40)]


def test_parts_of_something_else_are_refused_and_kept(tmp_path):
    data, out = write(tmp_path / "data.parquet", ["1", "2", "3"]), tmp_path / "out.parquet"
    with pytest.raises(Killed):
        answer_files(numbers(killed_at=1), options(data, out), 1)
    told = r"out.parquet.parts holds parts of other answers \(limit differ\); give another --out"
    with pytest.raises(UserError, match=told):
        answer_files(numbers(), options(data, out, limit=2), 1)
    write(data, ["4", "5", "6", "7"])
    with pytest.raises(UserError, match=r"parts of other answers \(files differ\)"):
        answer_files(numbers(), options(data, out), 1)
    with locked(tmp_path / "out.parquet.parts"), pytest.raises(UserError, match="in use by another call"):
        answer_files(numbers(), options(data, out), 1)
    answer_files(numbers(), options(data, out, overwrite=True), 1)
    assert answered(out) == [4, 5, 6, 7]
    (tmp_path / "out.parquet.parts").mkdir()
    (tmp_path / "out.parquet.parts" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds other files than parts of answers"):
        answer_files(numbers(), options(data, out), 1)


def texts_of(rows, size=3):
    return [row["text"] for part, _ in rows.parts(size) for row in part.to_pylist()]


def test_every_form_of_data_gives_its_rows_in_order(tmp_path):
    import datasets

    texts = ["a", 'with, "commas"', "two\nlines", "", "ünï", "NA", "12"]
    table = pa.table({"n": [*range(7)], "text": texts})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    pa.csv.write_csv(table, tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in table.to_pylist()))
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    (tmp_path / "several").mkdir()
    for place in range(7):
        pa.parquet.write_table(table.slice(place, 1), tmp_path / "several" / f"{place}.parquet")
    expected = dict.fromkeys(("a.parquet", "a.csv", "a.jsonl", "saved", "several"), texts)
    others = {
        "windows.csv": ("text;n\r\nünï;1\r\nb;2\r\n".encode("cp1252"), ["ünï", "b"]),
        "a.tsv": (b"n\ttext\n1\tone\n2\ttwo, three\n", ["one", "two, three"]),
        # an empty line is a text there, and no row of several columns
        "a.txt": (b"one\n\nthree", ["one", "", "three"]),
        "one.csv": (b"text\none\n\nthree", ["one", "", "three"]),
    }
    for name, (data, found) in others.items():
        (tmp_path / name).write_bytes(data)
        expected[name] = found
    assert {name: texts_of(open_rows(tmp_path / name, {"text"})) for name in expected} == expected


BAD = {  # what cannot be answered, by the file's name: its content, and what is told
    "none.parquet": (None, "none.parquet does not exist; give a file"),
    "a.xlsx": (b"", r"a.xlsx is none of \.parquet"),
    "damaged.parquet": (b"PAR1 no", "cannot read .*damaged.parquet as parquet"),
    "empty.csv": (b"", "cannot read .*empty.csv as csv|has no rows"),
    "header.csv": (b"text\n", "has no rows; give a file with some"),
    "ragged.csv": (b"text,n\na,1\nb,2,3\n", "cannot read .*ragged.csv as csv .*2 columns, got 3"),
    "open.csv": (b'text,n\n"a,1\n"b",2\n', "line 2 opens a quote that is not closed up to line 3"),
    "twice.csv": (b"text,text\na,b\n", "more than one column 'text'|more than one column text"),
    "other.csv": (b"title,n\na,1\n", "no column text; its columns are title, n; name those"),
    "list.json": (b'[{"text": "a"}]', "is one list of JSON; write a row in each line"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', "cannot read .*broken.jsonl as json"),
    "numbers.jsonl": (b'{"text": 1}\n', "column text holds int64, not texts"),
    "pairs.jsonl": (b'{"text": ["1", "2"]}\n', "column text holds list.*, not texts"),
    "bytes.txt": (b"\xff\xfe\xfd", "cannot read .*bytes.txt as text"),
    "twins.jsonl": (b'{"text": "a", "predicted_score": 1}\n', "has a column predicted_score, as the"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_one_sentence_and_leaves_nothing(name, tmp_path):
    content, told = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=told) as caught:
        answer_files(numbers(), options(tmp_path / name, tmp_path / "out.parquet"), 2)
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} <= {name}


def test_folders_of_other_things_are_refused(tmp_path):
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.csv").write_text("text\na\n")
    shutil.copy(tmp_path / "mixed" / "a.csv", tmp_path / "mixed" / "a.txt")
    (tmp_path / "splits" / "train").mkdir(parents=True)
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    (tmp_path / "splits" / "train" / "state.json").write_text("{}")
    (tmp_path / "none").mkdir()
    for name, told in {
        "mixed": r"files of 2 formats \(csv, text\)",
        "splits": "holds the splits train; give one",
        "none": "no data file",
    }.items():
        with pytest.raises(UserError, match=told):
            open_rows(tmp_path / name, {"text"})


def test_predictor_answers_a_table_as_ray_gives_it():
    given = {"text": ["7", None, "3"], "more": [1, 2, 3]}
    made = Predictor(numbers())(pa.table(given))
    assert made.to_pydict() == given | {"predicted_score": [7.0, None, 3.0]}
