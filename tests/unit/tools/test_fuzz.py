"""The random search finds a reader's fault once, and shortens the case."""

import base64
import contextlib
import itertools
import json

import pytest
from tools import fuzz

from qdqbench.quantize.utils.errors import UserError

BROKEN = 24  # files of each reader; `python -m tools.fuzz` searches among many more


def fragile(path):
    data = path.read_bytes()
    if b"\x00" in data and len(data) > 3:
        raise IndexError("list index out of range")
    raise UserError("no good file; give another")


def test_a_fault_is_found_and_shortened(tmp_path):
    path = tmp_path / "file"
    assert not fuzz.fault_of(fragile, path, b"harmless")
    fault = fuzz.fault_of(fragile, path, bytes(range(200)))
    assert fault.startswith("IndexError at test_fuzz.py:")
    shortest = fuzz.shortened(fragile, path, bytes(range(200)), fault, float("inf"))
    assert (len(shortest), b"\x00" in shortest) == (4, True)


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_every_reader_takes_its_samples_and_refuses_broken_ones(tmp_path, name):
    target, read = fuzz.TARGETS[name], 0
    path, samples = target.place(tmp_path), target.samples()
    for data in [*samples, *itertools.islice(fuzz.cases(target, 0), BROKEN)]:
        assert not fuzz.fault_of(target.read, path, data)
        with contextlib.suppress(UserError):
            target.read(path)
            read += 1
    assert read


@pytest.mark.parametrize("row", json.loads(fuzz.FOUND.read_text()), ids=lambda row: row["target"])
def test_what_once_broke_a_reader_does_not(tmp_path, row):
    target = fuzz.TARGETS[row["target"]]
    assert not fuzz.fault_of(target.read, target.place(tmp_path), base64.b64decode(row["data"]))


def test_a_search_ends_in_time_and_keeps_each_kind_of_fault_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(fuzz.TARGETS, "fragile", fuzz.Target(fragile, lambda: [bytes(50)]))
    monkeypatch.setattr(fuzz, "FOUND", tmp_path / "found.json")
    known = set()
    assert fuzz.search("fragile", 0, 0.3, known) > 1
    assert len(known) == 1
    assert "fragile, seed 0: IndexError" in capsys.readouterr().out
    (row,) = json.loads(fuzz.FOUND.read_text())
    assert len(base64.b64decode(row["data"])) == 4
