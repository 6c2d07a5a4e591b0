"""What trtexec wrote: good files, its own oddities, and files that are broken."""

from pathlib import Path

import pytest

from qdqbench.quantize.engine import trtexec
from qdqbench.quantize.engine.trtexec import read_profile
from qdqbench.quantize.utils.errors import UserError

MADE = Path(__file__).parents[2] / "golden" / "trtexec"  # by hand


def written(folder: Path, text: str) -> Path:
    (folder / "file.json").write_text(text)
    return folder / "file.json"


def test_a_profile_has_its_kernels_in_order():
    assert [*read_profile(MADE / "profile.json").values()] == [0.021, 0.05, 0.0]


def test_kernels_of_one_name_are_added(tmp_path):
    path = written(tmp_path, '[{"name": "a", "ms": 1}, {"name": "b", "ms": 2}, {"name": "a", "ms": 3}]')
    assert read_profile(path) == {"a": 4, "b": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"count": 3}]', "has no kernels"),
        ('[{"name": "a", "ms": true}]', "no kernel profile"),
        ('[{"name": "a", "ms": -1}]', "no kernel profile"),
        ('[{"name": "a", "ms": nan}]', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("nothing", "is not JSON"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, said):
    with pytest.raises(UserError, match=said):
        read_profile(written(tmp_path, text))


def test_a_large_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(trtexec, "MAX_BYTES", 100)
    with pytest.raises(UserError, match="at most 100"):
        read_profile(written(tmp_path, "[" + " " * 100 + "]"))


def test_a_file_of_many_empty_lists_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(trtexec, "MAX_PARTS", 10)
    with pytest.raises(UserError, match="more than 10 lists"):
        read_profile(written(tmp_path, "[" + "[]," * 10 + "[]]"))
