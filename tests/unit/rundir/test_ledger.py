"""The file that a killed comparison leaves, and goes on from."""

import json
from pathlib import Path

import pytest

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.rundir.ledger import Ledger


def test_ledger_goes_on(tmp_path: Path) -> None:
    path, settings = tmp_path / "partial.jsonl", {"samples": 8}
    first = Ledger(path, settings)
    first.append("a", {"x": 1.5}, 2.0)
    first.append("b", {"x": 0.1}, 1.0)
    again = Ledger(path, settings)
    assert (again.anew, again.resumed, again.seconds) == (False, 2, 3.0)
    assert again.found["a"]["value"] == {"x": 1.5}


@pytest.mark.parametrize(
    "tail", ['{"key": "c", "val', '{"key": "c"}\n', "[]\n", '{"key": "c", "value": {}, "seconds": 1}']
)
def test_torn_line_is_dropped(tmp_path: Path, tail: str) -> None:
    path, settings = tmp_path / "partial.jsonl", {"samples": 8}
    Ledger(path, settings).append("a", {"x": 1}, 1.0)
    with path.open("a") as stream:
        stream.write(tail)
    again = Ledger(path, settings)
    assert [*again.found] == ["a"]
    again.append("c", {"x": 2}, 1.0)
    assert [*Ledger(path, settings).found] == ["a", "c"]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 3


def test_other_settings_begin_anew(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    assert not Ledger(path, {"samples": 8}).anew
    Ledger(path, {"samples": 8}).append("a", {}, 1.0)
    other = Ledger(path, {"samples": 9})
    assert (other.anew, other.found) == (True, {})
    assert Ledger(path, {"samples": 8}).anew  # what was there is gone


def test_torn_header_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    path.write_text('{"setti')
    assert Ledger(path, {}).found == {}


def test_ledger_that_cannot_be_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "partial.jsonl", {})
    ledger.path.unlink()
    ledger.path.mkdir()
    with pytest.raises(UserError, match="cannot write"):
        ledger.append("a", {}, 1.0)
