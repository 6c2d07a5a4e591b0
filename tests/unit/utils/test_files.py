"""Files are whole or absent, whatever happens while they are written."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import read_arrays
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import without_formula


def _write_half(path, failure):
    with files.atomic_path(path) as temporary:
        temporary.write_text("half")
        raise failure


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "a.txt"
    files.write_text(path, "old")
    with pytest.raises(failure):
        _write_half(path, failure)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_target_is_absent_until_the_block_ends(tmp_path):
    path = tmp_path / "new" / "folder" / "a.bin"
    with files.atomic_path(path) as temporary:
        temporary.write_bytes(b"12")
        assert not path.exists()
        assert temporary.parent.parent == path.parent  # a rename across file systems would not be atomic
    assert path.read_bytes() == b"12"
    assert [p.name for p in path.parent.iterdir()] == ["a.bin"]


def test_files_are_for_others_too(tmp_path):
    before = os.umask(0o022)
    try:
        files.write_text(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [1.0, float("-inf")]}])
def test_json_is_strict(tmp_path, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a.json", value)
    assert list(tmp_path.iterdir()) == []


def test_json_comes_back_equal(tmp_path):
    value = {"ä\u2028\x00": [1, 0.1, 1e300, None, True], "": {"b": []}}
    files.write_json(tmp_path / "a.json", value)
    assert files.read_json(tmp_path / "a.json") == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; run the stage that writes it first"),
        (b"{", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe", "it is not text"),
    ],
)
def test_unreadable_json_is_one_sentence(tmp_path, content, message):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        files.read_json(path)
    assert str(path) in str(error.value)


def test_what_cannot_be_written_is_told_before_and_nothing_is_left(tmp_path):
    files.require_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "x", Path("/proc/qdqbench")):
        with pytest.raises(UserError, match="choose another --out"):
            files.require_writable(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/x: .*; choose another --out folder"):
        files.write_text(tmp_path / "file" / "x", "")


@pytest.mark.parametrize("reader", [files.read_json, partial(read_arrays, again="write it again")])
def test_what_is_no_regular_file_or_too_large_is_refused_at_once(reader, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UserError, match="is no regular file"):
            reader(path)
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(files.MAX_JSON + 1)
    with pytest.raises(UserError, match=r"at most 33554432 bytes|cannot read"):
        reader(tmp_path / "sparse")


def test_arrays_are_bounded_when_unpacked(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.ones(3), bomb=np.zeros(1 << 20))
    assert set(read_arrays(path, "again")) == {"a", "bomb"}
    with pytest.raises(UserError, match="over the limit of 1024; write less"):
        read_arrays(path, "write less", most=1024)
    data = path.read_bytes()
    unknown_compression = data.replace(b"\x08\x00", b"\x63\x00")
    for broken in (data[:-100], b"", unknown_compression):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"cannot read .*; write it again"):
            read_arrays(path, "write it again")


@pytest.mark.parametrize(("text", "cell"), [("=1+1", "'=1+1"), ("@a", "'@a"), ("a=b", "a=b"), (-1.5, -1.5)])
def test_no_cell_is_a_formula(text, cell):
    assert without_formula(text) == cell


KILLED = """
import os, signal, sys
from pathlib import Path
from qdqbench.quantize.utils import files
with files.atomic_folder(Path(sys.argv[1])) as temporary:
    (temporary / "half").write_text("half")
    print(flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_was_writing_goes_and_of_a_living_one_stays(tmp_path):
    (tmp_path / ".cache.tmp").mkdir()  # of somebody else
    arguments = [sys.executable, "-c", KILLED, tmp_path / "out"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        files.remove_abandoned(tmp_path / "out")
        assert len([*tmp_path.glob(".out.*.tmp")]) == 1
        process.kill()
    files.remove_abandoned(tmp_path / "other")
    assert len([*tmp_path.glob(".out.*.tmp")]) == 1
    (tmp_path / ".old.abcd1234.tmp" / files.REPLACED).mkdir(parents=True)
    files.remove_abandoned_below(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache.tmp", "old"]  # no new one came


def test_a_file_that_vanished_is_named_and_no_other_error():
    def told(name, *given):
        return str(files.vanished(FileNotFoundError(2, "No such file or directory", name), given))

    absolute = str(Path("runs/a/model.onnx").resolve())
    for name in ("runs/a/model.onnx", absolute):
        for word in ("runs", "runs/a/", "--out=runs/a", absolute):
            assert told(name, "run", word).startswith(f"{name} is gone")
    for name in ("nvcc", "/usr/bin/nvcc", "/proc/1/x", "runs-2/model.onnx"):
        assert told(name, "run", "", "--out=runs", "runs/b") == "None"
    assert files.vanished(FileNotFoundError(), ["."]) is None
    assert files.vanished(PermissionError(13, "Permission denied", "a"), ["."]) is None
