"""Data as people have it: labels, separators, encodings, one file."""

from datetime import datetime

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from qdqbench.quantize.tasks.data import files
from qdqbench.quantize.tasks.data.load import add_label_values, count_classes, load_split
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.utils.errors import UserError

from ....support.tables import write_table

OWN = get_task("own", text_columns=["text"], num_labels=2)
ROWS = [('good, "really"; fine', "pos"), ("bad", "neg"), ("so\tso", "neg"), ("NA", "pos")]


def write(folder, name, rows, mark=",", encoding="utf-8", *, header=("text", "label")):
    lines = [header, *rows]
    quoted = [mark.join('"' + str(cell).replace('"', '""') + '"' for cell in line) for line in lines]
    path = folder / name
    path.write_bytes("\n".join([*quoted, ""]).encode(encoding))
    return path


def write_both(folder, suffix, **columns):
    for split in ("train", "validation"):
        write_table(folder / f"{split}{suffix}", columns)
    return str(folder)


def read(task, source, split="validation"):
    found = load_split(task, str(source), split)
    return list(found.dataset["text"]), list(found.dataset["label"]), found.notes


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "validation"):
        write(tmp_path, f"{split}.csv", ROWS)
    return tmp_path


@pytest.mark.parametrize(
    ("classes", "labels"),
    [(("Neg", "POS"), [1, 0, 0, 1]), (("pos", "neg"), [0, 1, 1, 0]), (("LABEL_0", "LABEL_1"), [1, 0, 0, 1])],
)
def test_texts_are_matched_with_the_models_classes_or_sorted(folder, classes, labels):
    task = add_label_values(OWN, str(folder), classes)
    texts, found, notes = read(task, folder)
    assert (texts, found) == ([text for text, _ in ROWS], labels)
    assert any("numbered" in note and "pos = " in note for note in notes)


def test_texts_that_are_numbers_are_in_their_order(tmp_path):
    """As words, 10 and 11 came before 2: most answers of a model with eleven classes or more were wrong."""
    texts, labels = [f"text {n}" for n in range(12)], [*map(str, range(12))]
    folder = write_both(tmp_path, ".parquet", text=texts, label=labels)
    task = add_label_values(OWN.model_copy(update={"num_labels": 12}), folder, [f"LABEL_{n}" for n in labels])
    assert read(task, tmp_path)[1] == [*range(12)]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['"one,1', "two,0", '"three",1'], "line 2 opens a quote that is not closed up to line 4"),
        (["one,1", '"two,0', "three,1"], "line 3 opens a quote that is not closed up to line 4"),
        (['"one""",1', '"two', 'lines""",0', '"three" words,1', 'a "fourth",0'], None),
    ],
)
def test_a_quote_that_joins_rows_is_refused(tmp_path, lines, said):
    path = tmp_path / "validation.csv"
    path.write_text("\n".join(["text,label", *lines]))
    if said is not None:
        with pytest.raises(UserError, match=said):
            read(OWN, tmp_path)
        return
    assert read(OWN, tmp_path)[0] == ['one"', 'two\nlines"', "three words", 'a "fourth"']


def test_an_open_quote_is_read_no_further_than_a_text_can_be_long(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_TEXT", 40)
    (tmp_path / "validation.csv").write_text(f"text,label\n{'long' * 20},0\n" + '"open,1\n' + "row,1\n" * 50)
    with pytest.raises(UserError, match="line 3 opens a quote that is not closed up to line 9"):
        read(OWN, tmp_path)


def test_texts_that_are_more_than_the_classes_are_named(folder):
    write(folder, "validation.csv", [*ROWS, ("odd", "neutral")])
    with pytest.raises(
        UserError, match=r"3 different texts \(neg, neutral, pos\), but task 'own' has 2 classes"
    ):
        add_label_values(OWN, str(folder), ["neg", "pos"])
    task = add_label_values(OWN.model_copy(update={"num_labels": 3}), str(folder), [])
    write(folder, "validation.csv", [("odd", "other")])
    with pytest.raises(UserError, match="hold other, which is none of neg, neutral, pos"):
        read(task, folder)


def test_classes_are_counted(folder):
    def count(outputs=None, *labels):
        if labels:
            write(folder, "train.csv", [(f"text {row}", label) for row, label in enumerate(labels)])
            write(folder, "validation.csv", [("few", labels[0])])
        return count_classes(OWN, str(folder), outputs)

    assert [count(), count(3)] == [2, 3]  # texts, of which the data may lack one
    assert [count(None, True, False), count(None, 0, 3), count(None, 5, 1)] == [2, 4, 5]
    assert [count(3, 1, 0), count(1, 4, 5), count(None, 0.5, 2.5), count(2, 0.5)] == [3, 1, 1, 2]
    with pytest.raises(UserError, match="has no column stars; its columns are text, label"):
        count_classes(OWN.model_copy(update={"label_column": "stars"}), str(folder))


def test_the_only_file_of_a_folder_and_text_labels_of_a_known_task(tmp_path):
    path = write(tmp_path, "reviews.csv", ROWS * 5)
    known = get_task("sst2", text_columns=["text"])
    assert add_label_values(known, str(tmp_path)).values == ("neg", "pos")
    task = add_label_values(OWN, str(tmp_path))
    assert read(task, tmp_path) == read(task, path)


def test_reading_a_file_asks_no_server(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.load.get_session", lambda: pytest.fail("a server was asked"))
    write(tmp_path, "validation.csv", [("a text", 1), ("another", 0)])
    assert read(OWN, tmp_path)[1] == [1, 0]


def test_numbers_from_one_are_told_by_all_splits_together(tmp_path):
    five = OWN.model_copy(update={"num_labels": 5})
    write(tmp_path, "train.csv", [(f"text {n}", n) for n in range(1, 6)])
    write(tmp_path, "validation.csv", [("few", 1), ("stars", 4)])
    task = add_label_values(five, str(tmp_path))
    assert read(task, tmp_path)[1] == [0, 3]
    write(tmp_path, "train.csv", [(f"text {n}", n) for n in range(5)])
    assert add_label_values(five, str(tmp_path)).values == ()


@pytest.mark.parametrize(
    ("name", "mark", "encoding", "said"),
    [
        ("validation.tsv", "\t", "utf-8", None),
        ("validation.csv", ";", "utf-8", "semicolons"),
        ("validation.csv", "\t", "utf-8-sig", "tabs"),
        ("validation.csv", ",", "cp1252", "cp1252"),
        ("validation.csv", ";", "utf-16", "utf-16"),
        ("validation.csv", ",", "utf-16-le", "utf-16-le"),
        ("validation.tsv", "\t", "utf-16-be", "utf-16-be"),
        ("validation.csv", ",", "utf-32", "utf-32"),
        ("validation.csv", ";", "latin-1", "cp1252"),
    ],
)
def test_separators_and_encodings_are_found_and_said(tmp_path, name, mark, encoding, said):
    rows = [('café; crème, "brûlée"', 1), ("naïve", 0)]
    write(tmp_path, name, rows, mark, encoding, header=("Überschrift", "état"))
    task = get_task("own", text_columns=["Überschrift"], label_column="état", num_labels=2)
    loaded = load_split(task, str(tmp_path), "validation")
    found, warnings, notes = loaded.dataset, loaded.warnings, loaded.notes
    assert (list(found["Überschrift"]), list(found["état"])) == ([text for text, _ in rows], [1, 0])
    guessed = not encoding.startswith("utf-8") and encoding not in ("utf-16", "utf-32")
    assert any("look at its texts" in line for line in warnings) is guessed
    assert any(said in line for line in (*notes, *warnings)) if said else not notes


@pytest.mark.parametrize(
    ("start", "encoding", "said"),
    [(b"\xef\xbb\xbf", "latin-1", "begins as UTF-8"), (b"", "mac_roman", "neither UTF-8 nor cp1252")],
)
def test_an_encoding_that_is_none_of_these_is_refused_with_what_to_do(tmp_path, start, encoding, said):
    path = write(tmp_path, "validation.csv", [("très café", 1)], encoding=encoding)
    path.write_bytes(start + path.read_bytes())
    with pytest.raises(UserError, match=f"validation.csv.* {said}.*; save it as UTF-8$"):
        read(OWN, tmp_path)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("labels", [("yes", "no"), (1.0, 0.0), (True, False), (1, 0), ("1", "0")])
def test_labels_are_words_floats_booleans_or_numbers(tmp_path, labels, suffix):
    write_both(tmp_path, suffix, text=["good", "bad"], label=labels)
    assert count_classes(OWN, str(tmp_path), 2) == 2
    assert read(add_label_values(OWN, str(tmp_path)), tmp_path)[:2] == (["good", "bad"], [1, 0])


@pytest.mark.parametrize("suffix", [".csv", ".json", ".parquet"])
def test_texts_that_are_not_utf8_are_refused_and_only_read_where_the_reader_takes_them(
    tmp_path, suffix, monkeypatch
):
    validated, real = [], datasets.table.Table.validate
    monkeypatch.setattr(
        datasets.table.Table, "validate", lambda *a, **more: (validated.append(suffix), real(*a, **more))
    )
    path = tmp_path / f"validation{suffix}"
    for text, fault in ((b"fine", False), (b"\xffine", True)):
        codes = pyarrow.array([text], pyarrow.binary())
        column = pyarrow.StringArray.from_buffers(1, *codes.buffers()[1:])
        if suffix == ".parquet":
            parquet.write_table(pyarrow.table({"text": column, "label": [1]}), path)
        else:
            row = b'{"text": "%s", "label": 1}' if suffix == ".json" else b"text,label\n%s,1\n"
            path.write_bytes(row % text)
        if fault and suffix != ".csv":  # a CSV is read in another encoding, and a warning says so
            with pytest.raises(UserError, match=r"cannot read .*[Ii]nvalid"):
                read(OWN, tmp_path)
        else:
            assert read(OWN, tmp_path)[1] == [1]
    assert bool(validated) is (suffix != ".csv")


def test_one_file_is_split_the_same_way_each_time_if_it_can_be(tmp_path):
    path = write(tmp_path, "all.csv", [(f"text {n}", n % 2) for n in range(50)])
    judged, trained = read(OWN, path)[0], read(OWN, path, "train")[0]
    assert len(judged) == 25
    assert 5 < sum(int(text.split()[1]) < 25 for text in judged) < 20  # neither the start nor the end
    assert sorted(judged + trained) == sorted(f"text {n}" for n in range(50))
    assert judged == read(OWN, path)[0]
    assert "one file" in read(OWN, path)[2][0]
    path = write(tmp_path, "all.csv", [("text", 0)])
    assert len(read(OWN, path, "train")[0]) == 1
    with pytest.raises(UserError, match="is one file of 1 rows, too few"):
        read(OWN, path)


def test_labels_of_one_file_stay_with_their_texts(tmp_path, capfd):
    names = ("bad", "good")
    path = write(tmp_path, "all.csv", [(f"{names[n % 2]} {n}", names[n % 2]) for n in range(50)])
    task = add_label_values(OWN, str(path))
    for split, rows in (("validation", 25), ("train", 25)):
        texts, labels, _ = read(task, path, split)
        assert [names[label] for label in labels] == [text.split()[0] for text in texts]
        assert len(texts) == rows
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ([[0], [1]], "are list<.*list<.*, neither numbers nor texts"),
        ({"a": 1}, "are struct.*, neither numbers nor texts"),
        (datetime(2026, 1, 1), "are timestamp.*, neither numbers nor texts"),
        (b"a", "are binary, neither numbers nor texts"),
    ],
)
@pytest.mark.parametrize("read", [count_classes, lambda task, source: add_label_values(task, source, ())])
def test_labels_of_other_types_are_named(tmp_path, label, said, read):
    with pytest.raises(UserError, match=said):
        read(OWN, write_both(tmp_path, ".parquet", text=["a", "b"], label=[label] * 2))
