"""Texts without labels: lines of a file, each once, parts of a file, and names of splits."""

import re

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


SST2, OWN = get_task("sst2"), get_task("own", text_columns=["text"], num_labels=2)
SHARDS = "train-00000-of-00002.csv train-00001-of-00002.csv"
INSTEAD = r"there is no split '\w+': .* is in its place"


@pytest.mark.parametrize(
    ("task", "split", "there", "found", "told"),
    [
        (SST2, "validation", "validation.csv a.csv", "validation.csv", ""),
        (SST2, "validation", "validation.csv sst2/validation.csv", "sst2/validation.csv", ""),
        (SST2, "validation", "validation.csv validation.json", "validation.csv", ".*validation.json not"),
        (
            SST2,
            "train",
            "train_subset.csv a.csv",
            "train_subset.csv",
            ".* holds only a part of the train split",
        ),
        (SST2, "validation", "validation_subset.csv a.csv", "", "no file"),
        (SST2, "train", "train_subset.csv train.csv", "train.csv", ""),
        (SST2, "train", "train-00001-of-00002.csv", "", "1 shards .* say 2; complete the download"),
        (SST2, "train", SHARDS, SHARDS, ""),
        (
            SST2,
            "test",
            "sst2/train.csv",
            "",
            r"looked for .*sst2.test.*\.jsonl.*shards.*sst2 holds train\.csv",
        ),
        (SST2, "validation", "dev.csv a.csv", "dev.csv", INSTEAD),
        (SST2, "validation", "test.csv a.csv", "", "no file for split 'validation'"),  # it has no labels
        (OWN, "validation", "dev.csv a.csv", "dev.csv", INSTEAD),
        (OWN, "validation", "test.csv a.csv", "test.csv", INSTEAD),
        (OWN, "validation", "Reviews_Test.csv a.csv", "Reviews_Test.csv", INSTEAD),
        (OWN, "train", "reviews-train.csv a.csv", "reviews-train.csv", ""),
        (OWN, "train", "Training.csv a.csv", "Training.csv", INSTEAD),
        (OWN, "train", "Training.csv train.csv my-train.csv", "train.csv", ""),
        # a train file alone is offered to be split, and a test file is not
        (OWN, "validation", "train.csv", "", r"give --data .*train\.csv, which is split in two, or a folder"),
        (OWN, "train", "test.csv", "", "give --data a folder that holds it"),
    ],
)
def test_files_of_a_split_are_found_by_their_names(task, split, there, found, told, *, tmp_path):
    for name in there.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if not found:
        with pytest.raises(UserError, match=told):
            find_files(task, tmp_path, split)
        return
    paths, warnings = find_files(task, tmp_path, split)
    assert [str(path.relative_to(tmp_path)) for path in paths] == found.split()
    assert re.fullmatch(told, "; ".join(warnings))
