"""No run is lost under another one: the owner of a folder, its lock, its default name, and --overwrite."""

import errno
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from qdqbench.quantize.pipeline.ownership import (
    HOLDER,
    MARK,
    RunIdentity,
    default_folder,
    locked_folder,
    locked_for_reading,
    model_name,
    owned_folder,
)
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.progress import Reporter, reporting_to

RUN = RunIdentity(kind="run", recipe="bert-int8-linears", model="/m/one", model_sha256="1", task="sst2")


def refusal(folder):
    """The sentence that refuses a folder."""
    with pytest.raises(UserError) as caught, folder:
        pass
    return str(caught.value)


def begun(folder, identity=RUN, *names):
    """A folder in which a command left these files."""
    with owned_folder(folder, identity):
        for name in ("results.json", *names):
            files.write_text(folder / name, "1234")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"recipe": "bert-fp16"}, "asked for is recipe bert-fp16"),
        ({"model": "/n/one", "model_sha256": "2"}, "asked for is model /n/one"),
        ({"task": "cola"}, "asked for is task cola"),
        ({"model": None, "model_sha256": None, "task": "embedded"}, "asked for is the built-in BERT"),
        ({"kind": "methods"}, "asked for is a table of methods of recipe bert-int8-linears, model /m/one"),
    ],
)
def test_another_recipe_model_task_or_command_is_refused(tmp_path, change, told):
    folder = tmp_path / "run"
    begun(folder)
    said = refusal(owned_folder(folder, RUN.model_copy(update=change)))
    assert "holds a finished run of recipe bert-int8-linears, model /m/one, task sst2, and" in said
    mended = r"give another --out, or --overwrite to move that to .*run\.old and start over$"
    assert re.search(f"{told}.*; {mended}", said)
    assert (folder / "results.json").read_text() == "1234"


@pytest.mark.parametrize(
    "change",
    [{}, {"model": "/moved/one"}, {"model_sha256": "trained on"}],
    ids=["the same", "model moved", "model trained on in its place"],
)
def test_the_same_goes_on(tmp_path, change):
    begun(tmp_path / "run")
    with owned_folder(tmp_path / "run", RUN.model_copy(update=change)):
        assert (tmp_path / "run" / "results.json").is_file()


def everything(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_overwrite_moves_everything_aside_and_deletes_nothing(tmp_path):
    folder, other, told = tmp_path / "run", RUN.model_copy(update={"recipe": "bert-fp16"}), list[str]()
    begun(folder, RUN, "logits/fp32.npz", "work/thesis/chapter1.tex", "report.docx", "notes.tmp/todo.txt")
    (tmp_path / "run.old").mkdir()
    (folder / "link").symlink_to(tmp_path / "run.old")
    before = {name: text for name, text in everything(folder).items() if name != ".lock"}
    hears = Reporter()
    hears.log = told.append
    with reporting_to(hears), owned_folder(folder, other, overwrite=True):
        assert sorted(path.name for path in folder.iterdir()) == [".lock", HOLDER, MARK]
    old = tmp_path / "run.old-2"
    assert everything(old) == before
    assert (old / "link").is_symlink()
    moved = "a finished run of recipe bert-int8-linears, model /m/one, task sst2 is now in"
    assert told == [f"{folder}: {moved} {old}"]


def test_what_cannot_be_moved_stays(tmp_path, monkeypatch):
    def mounted(path, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    folder = tmp_path / "run"
    begun(folder)
    monkeypatch.setattr(Path, "rename", mounted)
    assert "cannot move what is in" in (said := refusal(owned_folder(folder, RUN, overwrite=True)))
    assert "(Invalid cross-device link); give another --out" in said
    assert (folder / "results.json").is_file()
    assert not (tmp_path / "run.old").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_is_removed_before_what_is_asked_can_be_done(tmp_path, overwrite):
    folder = tmp_path / "run"
    begun(folder)

    def ready():
        raise UserError("no such data")

    assert refusal(owned_folder(folder, RUN, overwrite=overwrite, ready=ready)) == "no such data"
    assert (folder / "results.json").is_file()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_else_is_never_touched(tmp_path, overwrite):
    (tmp_path / "thesis.txt").touch()
    assert "holds other files than a run" in refusal(owned_folder(tmp_path, RUN, overwrite=overwrite))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def fail(folder, name, error):
    """Own a folder, and fail with one file in it."""
    with pytest.raises(error), owned_folder(folder, RUN):  # noqa: PT012
        files.write_text(folder / name, "{}")
        (folder / "work").mkdir()
        raise error


@pytest.mark.parametrize("there", [False, True])
def test_what_comes_to_nothing_leaves_nothing(tmp_path, there):
    folder = tmp_path / "runs" / "deep" / "run"
    if there:
        folder.mkdir(parents=True)
    fail(folder, "run.json", UserError)
    assert [*tmp_path.rglob("*")] == ([folder.parent.parent, folder.parent, folder] if there else [])


def test_a_folder_that_vanished_and_is_made_again_in_part_has_its_owner(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="was removed or renamed"), owned_folder(folder, RUN):  # noqa: PT012
        folder.rename(tmp_path / "gone")
        (folder / "logits").mkdir(parents=True)
        (folder / "logits" / "fp32.npz").write_text("half")
    with owned_folder(folder, RUN):
        assert (folder / "logits" / "fp32.npz").is_file()


def test_what_was_begun_stays(tmp_path):
    fail(tmp_path / "run", "stages.json", KeyboardInterrupt)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", MARK, "stages.json", "work"}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("textattack/bert-base-uncased-SST-2", "bert-base-uncased-SST-2"),
        ("runs/finetune-minilm-mrpc/seed-0/model", "finetune-minilm-mrpc-seed-0"),
        ("trained/checkpoint-500", "trained-checkpoint-500"),
        ("model", "model"),
        ("a b/c:d", "c-d"),
    ],
)
def test_names_of_models(model, name):
    assert model_name(model) == name


def test_default_folders_carry_the_model(tmp_path, monkeypatch):
    assert default_folder("run", "x/m", "r", "t") == Path("runs/m-r-t")
    assert default_folder("methods", "x/m", "r", "t") == Path("runs/methods-m-r-t")
    assert default_folder("run", None, "r", "embedded") == Path("runs/r-embedded")
    here = tmp_path / "my model"
    here.mkdir()
    monkeypatch.chdir(here)
    assert default_folder("finetune", ".", "t") == Path("runs/finetune-my-model-t")


CODE = """
import sys
from pathlib import Path
from qdqbench.quantize.pipeline.ownership import locked_folder
with locked_folder(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another(folder):
    """A process that holds a folder."""
    command = [sys.executable, "-c", CODE, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_second_process_says_who_is_there_and_a_killed_one_blocks_nobody(tmp_path):
    folder = tmp_path / "run"
    with another(folder) as process:
        said = refusal(locked_folder(folder))
        assert re.fullmatch(
            rf"{folder} is in use by process {process.pid} on {socket.gethostname()} since "
            rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00 \(`-c {folder}`\); wait until that ends, or give "
            r"another --out folder",
            said,
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (folder / HOLDER).is_file()  # it had no time to tidy up
        with locked_folder(folder):
            pass


def test_one_process_may_hold_it_twice(tmp_path):
    with locked_folder(tmp_path):
        with locked_folder(tmp_path):
            pass
        assert (tmp_path / HOLDER).is_file()
    assert not (tmp_path / HOLDER).exists()


def test_a_folder_that_got_no_file_goes_again_unless_it_was_there(tmp_path):
    new, old, used = (tmp_path / name for name in ("new", "old", "used"))
    old.mkdir()
    for folder in (new, old, used):
        with locked_folder(folder):
            if folder == used:
                (folder / "file").touch()
    assert (new.exists(), old.exists(), (used / "file").exists()) == (False, True, True)
    with locked_folder(new):
        assert new.is_dir()


def test_processes_of_one_launcher_share_it(tmp_path, monkeypatch):
    with another(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with locked_folder(tmp_path):
            pass


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    assert re.search(r"cannot write .*--out", refusal(locked_folder(tmp_path / "file")))


def test_a_folder_that_is_only_read_is_locked_where_it_can_be_written(tmp_path, monkeypatch):
    with locked_for_reading(tmp_path):
        assert (tmp_path / HOLDER).is_file()
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr("qdqbench.quantize.pipeline.ownership.os.access", lambda path, mode: False)
    with locked_for_reading(tmp_path):  # a read-only disk
        assert [*tmp_path.iterdir()] == []
