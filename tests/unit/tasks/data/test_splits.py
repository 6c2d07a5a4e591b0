"""Texts without labels: lines of a file, each once, parts of a file, and names of splits."""

import pytest

from qdqbench.quantize.tasks.data.files import find_files, read_lines
from qdqbench.quantize.tasks.data.splits import count_judged, draw_part, drop_duplicates
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.utils.errors import UserError

NAMES = ("train", "validation")


def lines_of(path, data):
    path.write_bytes(data)
    return read_lines([path])


def test_a_line_of_utf8_is_a_text(tmp_path):
    path = tmp_path / "a.txt"
    assert lines_of(path, b"\xef\xbb\xbfone\r\ntwo, \xc3\xa4\n\n  3  ") == ["one", "two, ä", "", "  3  "]
    assert lines_of(path, "a\u2028b\x0bc\nd".encode()) == ["a\u2028b\x0bc", "d"]
    assert lines_of(path, b"") == []
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 text \(invalid start byte at byte 1\); conv"):
        lines_of(tmp_path / "a.txt", b"a\xff\n")


def test_each_text_is_there_once_and_what_was_left_out_is_said():
    texts, notes = drop_duplicates(["a b", "c", "", "a  b ", "c", " \t", None, "d"], "a.txt")
    assert texts == ["a b", "c", "d"]
    assert notes == [
        "3 of 8 texts of a.txt are empty and were left out",
        "2 of 8 texts of a.txt are duplicates and were left out",
    ]
    assert drop_duplicates(texts, "a.txt") == (texts, [])


@pytest.mark.parametrize("count", [0, 1, 2, 9, 100, 872, 10_000])
def test_the_parts_of_a_file_share_no_text_and_lose_none(count):
    whole = [f"{number:5}" for number in range(count)]
    first, second = (draw_part(whole, NAMES, name, "a.txt") for name in NAMES)
    assert sorted(first + second) == whole
    assert (first, second) == (sorted(first), sorted(second))
    if count >= 100:  # not the start and the end, which may be of two kinds
        assert 0.15 < sum(int(text) < count / 2 for text in first) / len(first) < 0.85


@pytest.mark.parametrize(
    ("count", "calibrates"), [(2, 1), (100, 50), (200, 64), (872, 218), (2048, 512), (100_000, 512)]
)
def test_a_single_file_calibrates_with_few_and_judges_on_all_others(count, calibrates):
    assert count - count_judged(count, trained=False) == calibrates
    assert count_judged(count, trained=True) == max(1, round(count / 5))


def test_a_file_has_no_other_split():
    said = r"is a single file: one part is split 'train' and the other .*'test'"
    with pytest.raises(UserError, match=said):
        draw_part(["a"], NAMES, "test", "a.txt")


@pytest.mark.parametrize(
    ("name", "split", "found"),
    [
        ("own", "validation", "dev.csv"),
        ("own", "validation", "test.csv"),
        ("own", "validation", "Reviews_Test.csv"),
        ("own", "train", "reviews-train.csv"),
        ("own", "train", "Training.csv"),
        ("sst2", "validation", "dev.csv"),
        ("sst2", "validation", "test.csv"),  # of GLUE, which has no labels
    ],
)
def test_a_split_is_found_under_its_usual_names(tmp_path, name, split, found):
    task = get_task(name, text_columns=["text"], num_labels=2)
    (tmp_path / found).write_text("text,label\na,1\n")
    (tmp_path / "notes.csv").write_text("text,label\nb,0\n")
    if name == "sst2" and found == "test.csv":
        with pytest.raises(UserError, match="no file for split 'validation'"):
            find_files(task, tmp_path, split)
        return
    (path,), warnings = find_files(task, tmp_path, split)
    assert path.name == found
    assert bool(warnings) is not path.stem.lower().endswith(split)
    own = tmp_path / f"{split}.csv"
    own.write_text("text,label\na,1\n")
    assert find_files(task, tmp_path, split) == ([own], [])


def test_a_train_file_alone_is_offered_to_be_split_and_a_test_file_is_not(tmp_path):
    task = get_task("own", text_columns=["text"], num_labels=2)
    (tmp_path / "train.csv").write_text("text,label\na,1\n")
    with pytest.raises(UserError, match=r"give --data .*train\.csv, which is split in two, or a folder"):
        find_files(task, tmp_path, "validation")
    (tmp_path / "train.csv").rename(tmp_path / "test.csv")
    with pytest.raises(UserError, match=r"give --data a folder that holds it"):
        find_files(task, tmp_path, "train")
