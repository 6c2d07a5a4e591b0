"""Two processes never work in one folder."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.machine.lock import HOLDER, LOCK, held, held_for_reading
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.rundir.pipeline import open_run, run_stages
from qdqbench.quantize.rundir.session import CONFIG, RunConfig, Session
from qdqbench.quantize.tasks.task import GLUE

CODE = """
import sys
from pathlib import Path
from qdqbench.quantize.machine.lock import held
with held(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds a folder."""
    command = [sys.executable, "-c", CODE, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_second_process_says_who_is_there_and_a_killed_one_blocks_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with another(folder) as process:
        with pytest.raises(UserError) as caught, held(folder):
            pass
        said = str(caught.value)
        assert re.fullmatch(
            rf"{folder} is in use by process {process.pid} on {socket.gethostname()} since "
            rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00 \(`-c {folder}`\); wait until that ends, or give "
            r"another --out folder",
            said,
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (folder / HOLDER).is_file()  # it had no time to tidy up
        with held(folder):
            pass


def test_one_process_may_hold_it_twice(tmp_path: Path) -> None:
    with held(tmp_path):
        with held(tmp_path):
            pass
        assert (tmp_path / HOLDER).is_file()
    assert not (tmp_path / HOLDER).exists()


def test_a_folder_that_got_no_file_goes_again_unless_it_was_there(tmp_path: Path) -> None:
    new, old, used = (tmp_path / name for name in ("new", "old", "used"))
    old.mkdir()
    for folder in (new, old, used):
        with held(folder):
            if folder == used:
                (folder / "file").touch()
    assert (new.exists(), old.exists(), (used / "file").exists()) == (False, True, True)
    with held(new):
        assert new.is_dir()


def test_processes_of_one_launcher_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with another(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with held(tmp_path):
            pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*--out"), held(tmp_path / "file"):
        pass


def test_a_run_is_neither_reconfigured_nor_run_by_two(tmp_path: Path) -> None:
    config = RunConfig(recipe=load_recipe("bert-fp16"), model="m", task=GLUE["sst2"], data="d")
    open_run(config, tmp_path)
    before = (tmp_path / CONFIG).read_bytes()
    other = config.model_copy(update={"seed": 1})
    with another(tmp_path):
        with pytest.raises(UserError, match="is in use by process"):
            open_run(other, tmp_path)
        with pytest.raises(UserError, match="is in use by process"):
            run_stages(Session(other, tmp_path), [])
    assert (tmp_path / CONFIG).read_bytes() == before
    assert run_stages(Session(other, tmp_path), []) == {}


def test_a_folder_that_is_only_read_is_held_where_it_can_be_written(tmp_path, monkeypatch):
    with held_for_reading(tmp_path), pytest.raises(Timeout):
        FileLock(tmp_path / LOCK).acquire(timeout=0)
    (tmp_path / LOCK).unlink(missing_ok=True)
    monkeypatch.setattr(
        "qdqbench.quantize.machine.lock.os.access", lambda path, mode: False
    )  # a read-only disk
    with held_for_reading(tmp_path):
        assert not [*tmp_path.iterdir()]
