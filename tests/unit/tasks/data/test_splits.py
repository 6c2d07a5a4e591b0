"""Texts without labels: lines of a file, each once, and two halves that share none."""

from pathlib import Path

import pytest

from qdqbench.quantize.tasks.data.files import read_lines
from qdqbench.quantize.tasks.data.splits import draw_half, drop_duplicates
from qdqbench.quantize.utils.errors import UserError

NAMES = ("train", "validation")


def lines_of(path: Path, data: bytes) -> list[str]:
    path.write_bytes(data)
    return read_lines([path])


def test_a_line_of_utf8_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    assert lines_of(path, b"\xef\xbb\xbfone\r\ntwo, \xc3\xa4\n\n  3  ") == ["one", "two, ä", "", "  3  "]
    assert lines_of(path, "a\u2028b\x0bc\nd".encode()) == ["a\u2028b\x0bc", "d"]
    assert lines_of(path, b"") == []
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 text \(invalid start byte at byte 1\); conv"):
        lines_of(tmp_path / "a.txt", b"a\xff\n")


def test_each_text_is_there_once_and_what_was_left_out_is_said() -> None:
    texts, notes = drop_duplicates(["a b", "c", "", "a  b ", "c", " \t", None, "d"], "a.txt")
    assert texts == ["a b", "c", "d"]
    assert notes == [
        "3 of 8 texts of a.txt are empty and were left out",
        "2 of 8 texts of a.txt are duplicates and were left out",
    ]
    assert drop_duplicates(texts, "a.txt") == (texts, [])


@pytest.mark.parametrize("count", [0, 1, 2, 9, 100])
def test_the_halves_of_a_file_share_no_text_and_lose_none(count: int) -> None:
    whole = [f"{number:3}" for number in range(count)]
    first, second = (draw_half(whole, NAMES, name, "a.txt") for name in NAMES)
    assert sorted(first + second) == whole
    assert abs(len(first) - len(second)) <= 1
    assert (first, second) == (sorted(first), sorted(second))
    if count == 100:  # not the start and the end, which may be of two kinds
        assert 15 < sum(int(text) < 50 for text in first) < 35


def test_a_file_has_no_other_split() -> None:
    said = r"is a single file: one half is split 'train' and the other .*'test'"
    with pytest.raises(UserError, match=said):
        draw_half(["a"], NAMES, "test", "a.txt")
