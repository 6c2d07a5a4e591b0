"""A disk that gets full: which file, how much is needed, how much is free where, and nothing half-written."""

import errno
import os
import shutil
import subprocess

import pytest

from qdqbench.eval.selection.trials.results import failure_of
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import Unwritable, UserError

MEGABYTE = 1_000_000


@pytest.fixture
def small(tmp_path):
    """A file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    if mount is None or unmount is None or os.geteuid():
        pytest.skip("needs root, to mount a file system of one MiB")
    command = [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system of one MiB")
    try:
        yield folder
    finally:
        subprocess.run([unmount, "-l", str(folder)], check=False)


def test_a_full_disk_is_told_with_what_is_needed_and_free(small):
    files.write_bytes(small / "old", b"kept")
    with pytest.raises(UserError) as caught:
        files.write_bytes(small / "run" / "model.onnx", b"x" * 3 * MEGABYTE)
    assert str(caught.value) == (
        f"cannot write {small}/run/model.onnx: no space left on device; it needs 3.0 MB, and 1.0 MB is free "
        f"on {small}; make room there, or choose another --out folder"
    )
    assert sorted(path.name for path in small.rglob("*")) == ["old", "run"]
    files.write_bytes(small / "run" / "half", b"x" * (MEGABYTE // 2))


def test_what_a_library_in_another_language_says_of_it(small):
    import torch

    def save():
        with files.atomic_path(small / "weights.pt") as temporary:
            torch.save(torch.zeros(MEGABYTE), temporary)

    with pytest.raises(UserError, match=r"cannot write .*weights\.pt: .* 1\.0 MB is free on .*small;"):
        save()
    assert not [*small.iterdir()]


def test_it_is_told_before_the_work_where_the_size_is_known(small):
    files.require_room(small / "new" / "folder", MEGABYTE // 2, "model.onnx")
    with pytest.raises(UserError, match=r"model\.onnx: no space .* it needs 2\.0 MB, and 1\.0 MB is free"):
        files.require_room(small / "new" / "folder", 2 * MEGABYTE, "model.onnx")
    assert not [*small.iterdir()]


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, r"no space left on device; it needs .* MB is free on /"),
        (errno.EDQUOT, r"the quota on /.* is used up; make room there"),
        (errno.EACCES, r"Permission denied; choose another --out"),
        (errno.EROFS, r"Read-only file system; choose another --out"),
    ],
)
def test_why_a_file_cannot_be_written(tmp_path, number, told):
    def write():
        with files.atomic_path(tmp_path / "a") as temporary:
            temporary.write_text("half")
            raise OSError(number, os.strerror(number))

    with pytest.raises(UserError, match=rf"cannot write {tmp_path}/a: .*{told}"):
        write()
    assert not [*tmp_path.iterdir()]


def test_another_failure_stays_what_it_is(tmp_path):
    def write(error):
        with files.atomic_path(tmp_path / "a"):
            raise error

    elsewhere = PermissionError(errno.EACCES, "Permission denied", "/etc/other")
    for error in (
        ValueError("no number"),
        elsewhere,
        FileNotFoundError(errno.ENOENT, "no such file", "model"),
    ):
        with pytest.raises(type(error)):
            write(error)


def test_a_temporary_file_is_told_too(monkeypatch):
    assert files.full_disk(ValueError("x")) is None
    copied = OSError(errno.ENOSPC, "No space left on device", "/from", None, "/x/to")
    assert "cannot write /x/to: no space" in str(files.full_disk(copied))
    nameless = OSError(errno.ENOSPC, "No space left on device")
    assert "cannot write the output: no space" in str(files.full_disk(nameless))  # of stdout
    monkeypatch.setattr(files, "free_bytes", lambda path: 0)
    told = files.full_disk(nameless)
    assert "a temporary file: no space left on device; it needs more: " in str(told)
    assert "/x/y: no space" in str(files.full_disk(OSError(errno.ENOSPC, "No space left on device", "/x/y")))
    assert files.full_disk(RuntimeError("(sqlite3.OperationalError) database or disk is full")) is not None


def test_a_full_disk_is_no_result_of_a_trial(tmp_path):
    with pytest.raises(Unwritable, match="no space left"):
        failure_of(files.cannot_write(tmp_path / "a", files.NO_SPACE))
    assert failure_of(UserError("wrong")).is_retryable
