"""The random search finds a reader's fault once, and shortens the case."""

import contextlib
from pathlib import Path

import pytest

from qdqbench.quantize.utils.errors import UserError

from ...tools import fuzz


def fragile(path: Path) -> None:
    data = path.read_bytes()
    if b"\x00" in data and len(data) > 3:
        raise IndexError("list index out of range")
    raise UserError("no good file; give another")


def test_a_fault_is_found_and_shortened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert not fuzz.fault_of(fragile, path, b"harmless")
    fault = fuzz.fault_of(fragile, path, bytes(range(200)))
    assert fault.startswith("IndexError at test_fuzz.py:")
    shortest = fuzz.shortened(fragile, path, bytes(range(200)), fault, float("inf"))
    assert (len(shortest), b"\x00" in shortest) == (4, True)


def test_every_target_reads_one_of_its_samples(tmp_path: Path) -> None:
    for name, (reader, samples) in fuzz.TARGETS.items():
        path, read = tmp_path / ("file.yaml" if name == "recipe" else "file"), 0
        for data in samples():
            path.write_bytes(data)
            with contextlib.suppress(UserError):
                reader(path)
                read += 1
        assert read, name


def test_a_search_ends_in_time_and_reports_each_kind_of_fault_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(fuzz.TARGETS, "fragile", (fragile, lambda: [bytes(50)]))
    assert len(fuzz.search("fragile", 0, 0.3)) == 1
    assert "fragile, seed 0: IndexError" in capsys.readouterr().out
