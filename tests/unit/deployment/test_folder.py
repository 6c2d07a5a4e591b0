"""The folder is whole or absent, and what somebody else wrote in it stays."""

import hashlib
import os

import pytest

from qdqbench.quantize.deployment import write as under_test
from qdqbench.quantize.deployment.write import place, remove
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import REPLACED, SUMS


@pytest.fixture
def content(tmp_path):
    large = tmp_path / "run" / "model.int8.onnx"
    large.parent.mkdir()
    large.write_bytes(b"weights" * 1000)
    return {
        "model.onnx": large,
        "model.py": b"print()\n",
        "1_Pooling/config.json": b"{}",
        "build.sh": b"ls\n",
    }


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "deploy"


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_it_holds_links_and_true_checksums_and_copies_elsewhere(content, folder, tmp_path):
    place(folder, content, link=True)
    assert names(folder) == sorted([*content, SUMS])
    assert (folder / "model.onnx").samefile(content["model.onnx"])
    assert os.access(folder / "build.sh", os.X_OK)
    for line in (folder / SUMS).read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    place(tmp_path / "elsewhere", content, link=False)
    assert not (tmp_path / "elsewhere" / "model.onnx").samefile(content["model.onnx"])


def test_where_links_cannot_be_made_there_are_copies(content, folder, monkeypatch):
    def refuse(*paths):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(under_test.os, "link", refuse)
    place(folder, content, link=True)
    assert (folder / "model.onnx").read_bytes() == content["model.onnx"].read_bytes()
    assert not (folder / "model.onnx").samefile(content["model.onnx"])


def test_the_same_again_changes_nothing_not_even_what_others_added(content, folder):
    place(folder, content, link=True)
    before = {name: (folder / name).stat().st_mtime_ns for name in names(folder)}
    cache = folder / "__pycache__" / "model.pyc"
    cache.parent.mkdir()
    cache.write_bytes(b"made by Python")
    place(folder, content, link=True)
    assert {name: (folder / name).stat().st_mtime_ns for name in before} == before


def test_a_changed_run_replaces_all_of_it(content, folder):
    place(folder, content, link=True)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "model.pyc").write_bytes(b"made by Python")
    (folder / "model.py").unlink()  # what is missing is nobody's work
    del content["build.sh"]
    content["model.py"] = b"print(2)\n"
    place(folder, content, link=True)
    assert names(folder) == sorted([*content, SUMS])
    assert (folder / "model.py").read_bytes() == b"print(2)\n"
    assert not [*folder.parent.glob(".deploy*")]


@pytest.mark.parametrize(
    "name", ["tensorrt.engine", "model.py", "dangling", "1_Pooling/__pycache__/diary.txt"]
)
def test_what_somebody_wrote_is_never_replaced(content, folder, name):
    place(folder, content, link=True)
    (folder / "1_Pooling" / "__pycache__").mkdir()
    (folder / "1_Pooling" / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"bytecode")  # of Python alone
    if name == "dangling":
        (folder / name).symlink_to("nowhere")
    else:
        (folder / name).write_bytes(b"mine")
    told = f": {name} in it is not of qdqbench or changed since; move it away"
    with pytest.raises(UserError, match=told):
        place(folder, content | {"model.json": b"{}"}, link=True)
    remove(folder)
    assert (folder / name).is_symlink() or (folder / name).read_bytes() == b"mine"
    assert not (folder / "model.json").exists()


def test_a_folder_of_somebody_else_is_left_alone(content, folder):
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis.txt in it is not of qdqbench"):
        place(folder, content, link=True)
    assert names(folder) == ["thesis.txt"]
    folder = folder.with_name("file")
    folder.write_text("years of work")
    with pytest.raises(UserError, match="is a file or a link"):
        place(folder, content, link=True)
    remove(folder)
    assert folder.read_text() == "years of work"


def test_a_link_is_neither_followed_nor_replaced(content, folder, tmp_path):
    place(tmp_path / "theirs", content, link=True)
    folder.symlink_to(tmp_path / "theirs")
    remove(folder)
    with pytest.raises(UserError, match="is a file or a link"):
        place(folder, content | {"model.json": b"{}"}, link=True)
    assert names(tmp_path / "theirs") == sorted([*content, SUMS])
    assert folder.is_symlink()


def test_what_is_only_of_qdqbench_is_removed(content, folder):
    place(folder, content, link=True)
    remove(folder)
    assert not folder.exists()
    assert content["model.onnx"].is_file()
    remove(folder)


@pytest.mark.parametrize("there", [False, True])
def test_a_stop_in_the_middle_leaves_it_whole_or_absent(content, folder, monkeypatch, there):
    if there:
        place(folder, content, link=True)
    before = names(folder) if there else []

    def stop(path, given, link):
        if path.name == "config.json":
            raise KeyboardInterrupt
        real(path, given, link)

    real = under_test._write
    monkeypatch.setattr(under_test, "_write", stop)
    with pytest.raises(KeyboardInterrupt):
        place(folder, content | {"model.json": b"{}"}, link=True)
    assert folder.exists() == there
    assert (names(folder) if there else []) == before


def test_what_a_killed_process_left_is_cleared_away(content, folder):
    left = folder.parent / ".deploy.abcdefgh.tmp" / "deploy"
    left.mkdir(parents=True)
    (left / "model.onnx").write_bytes(b"half")
    place(folder, content, link=True)
    assert not left.parent.exists()


def test_a_process_that_was_killed_between_two_renames_lost_nothing(content, folder):
    place(folder, content, link=True)
    (folder / "mine.txt").write_text("mine")
    private = folder.parent / ".deploy.abcdefgh.tmp"
    private.mkdir()
    folder.rename(private / REPLACED)
    with pytest.raises(UserError, match=r"mine\.txt in it is not of qdqbench"):
        place(folder, content | {"model.json": b"{}"}, link=True)
    assert (folder / "mine.txt").read_text() == "mine"
    assert not private.exists()


def test_a_full_disk_is_told_in_a_sentence(content, folder, monkeypatch):
    def full(path, given, link):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(under_test, "_write", full)
    with pytest.raises(UserError, match=r"write .*deploy: no space left on device; it needs more: .* free"):
        place(folder, content, link=True)
    assert not folder.exists()
