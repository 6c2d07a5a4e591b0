"""Ownership of an output folder: whose run it holds, one process at a time, and its default name.

A folder belongs to a kind of command, a recipe name, a model and a task. All else may change from call to
call: an edited recipe, a model retrained in place, other data, seeds and limits are the same run, whose stale
stages run again. A model is the same at the same place (hub: id and revision), or with the same files.
"""

import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from qdqbench.quantize.pipeline.session import CONFIG, RunConfig, Session, read_config
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import hide_credentials
from qdqbench.quantize.utils.progress import reporter
from qdqbench.quantize.utils.schema import Strict, read
from qdqbench.quantize.utils.system.process import is_main_process

MARK = ".qdqbench.json"
LOCK, HOLDER = ".lock", ".lock.json"  # the holder in its own file: others read it while the lock is held
LONGEST_COMMAND = 200  # characters of the holder's command in an error
RUNS = Path("runs")
LONGEST_NAME = 64  # characters of a model in the name of a folder
PLAIN = re.compile(r"model|checkpoint.*|seed-\d+")  # last parts of a path that name no model
CONTENTS = {  # what a folder holds, in words, and the file of one that is finished
    "run": ("run", "results.json"),
    "sensitivity": ("sensitivity run", "sensitivity.json"),
    "methods": ("table of methods", "methods.json"),
    "search": ("search", "search.json"),
    "auto": ("ladder", "auto.json"),
    "finetune": ("fine-tuning", "finetune.json"),
    "study": ("study", "study.json"),
    "bench": ("bench", "bench.json"),
    "compare": ("comparison", "compare.json"),
}


class RunIdentity(Strict):
    """The run that a folder belongs to; `MARK` in it."""

    schema_version: Literal[1] = 1
    kind: str  # of `CONTENTS`
    recipe: str | None = None  # its name; None: there are several, or none
    model: str | None = None  # absolute path, or hub id with @REVISION; None: the built-in BERT
    model_sha256: str | None = None
    task: str | None = None

    def same(self, other: "RunIdentity") -> bool:
        same = (self.kind, self.recipe, self.task) == (other.kind, other.recipe, other.task)
        return same and self._same_model(other)

    def _same_model(self, other: "RunIdentity") -> bool:
        same_files = self.model_sha256 is not None and self.model_sha256 == other.model_sha256
        return self.model == other.model or same_files

    def describe(self, other: "RunIdentity | None" = None) -> str:
        if self.kind == "compare":
            return "finished runs"
        parts = []
        if self.recipe and (other is None or self.recipe != other.recipe):
            parts.append(f"recipe {self.recipe}")
        if other is None or not self._same_model(other):
            parts.append(f"model {self.model}" if self.model else "the built-in BERT")
        if self.task and self.task != "embedded" and (other is None or self.task != other.task):
            parts.append(f"task {self.task}")
        return ", ".join(parts)


def identity_of(kind: str, session: Session) -> RunIdentity:
    config = session.config
    return RunIdentity(
        kind=kind,
        recipe=None if kind == "auto" else config.recipe.name,
        model=model_location(config.model, config.revision),
        model_sha256=session.model_sha256 if config.model else None,
        task=config.task.name,
    )


def model_location(model: str | None, revision: str | None = None) -> str | None:
    """Return where a model is from any working directory: an absolute path, or hub id and revision."""
    if model is None:
        return None
    path = Path(model)
    return str(path.resolve()) if path.exists() else model + (f"@{revision}" if revision else "")


def default_folder(kind: str, model: str | None, *names: str) -> Path:
    parts = ["" if kind == "run" else kind, "" if model is None else model_name(model), *names]
    return RUNS / "-".join(filter(None, parts))


def run_folder(kind: str, config: RunConfig, out: str | Path | None) -> Path:
    if out is not None:
        return Path(out)
    return default_folder(kind, config.model, config.recipe.name, config.task.name)


def model_name(model: str) -> str:
    parts = [part for part in (Path(model).resolve() if Path(model).exists() else Path(model)).parts if part]
    kept: list[str] = []
    for part in reversed(parts):
        if part != "model" or len(parts) == 1:
            kept.insert(0, part)
        if not PLAIN.fullmatch(part):
            break
    name = re.sub(r"[^\w.-]+", "-", "-".join(kept)).strip("-.")
    return name[-LONGEST_NAME:].lstrip("-.") or "model"


@contextmanager
def owned_folder(
    folder: Path,
    identity: RunIdentity,
    *,
    overwrite: bool = False,  # move what is there to an unused FOLDER.old, whatever it belongs to
    ready: Callable[[], object] = lambda: None,  # raises where the command cannot work; before any write
) -> Iterator[None]:
    """Hold a folder for one run in this process; a command that fails before any result leaves it as it was.

    A `UserError` where it belongs to another run, holds other files, is in use or cannot be written.
    """
    if not is_main_process():
        yield
        return
    _require_owner(folder, identity, overwrite)  # before a lock is written into a folder of somebody else
    files.require_writable(folder)
    with locked_folder(folder):
        owner = _require_owner(folder, identity, overwrite)
        ready()
        if owner is not None and overwrite:
            reporter().log(f"{folder}: {_describe(folder, owner)} is now in {_set_aside(folder)}")
            owner = None
        try:
            files.write_json(folder / MARK, identity.model_dump(mode="json"))
            yield
            if not (folder / MARK).exists():
                raise UserError(f"{folder} was removed or renamed meanwhile; run the same command again")
        finally:
            files.restore_json(folder / MARK, identity.model_dump(mode="json"))
            if owner is None:
                _remove_unfinished(folder)


@contextmanager
def open_session(folder: str | Path) -> Iterator[Session]:
    path = Path(folder)
    read_config(path)  # before a lock is written into a folder of somebody else
    with locked_folder(path):
        yield Session(read_config(path), path)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is created where missing; may nest within a process.

    The lock is the kernel's and ends with its process; a `UserError` where another has it. Of a launcher the
    main process holds it for all.
    """
    if not is_main_process():
        yield
        return
    created = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        empty = bool(created) or not any(folder.iterdir())
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.resolve() / LOCK, is_singleton=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"{folder} is in use by {_holder(folder)}; wait until that ends, or give another --out folder"
        ) from error
    except OSError as error:
        raise files.cannot_write(folder, error) from error
    outermost = lock.lock_counter == 1
    try:
        if outermost:
            files.remove_abandoned_below(folder)
            files.write_json(folder / HOLDER, _this_process())
        yield
    finally:
        if outermost:
            (folder / HOLDER).unlink(missing_ok=True)
            if empty and [*folder.iterdir()] == [folder / LOCK]:  # refused input leaves nothing there
                (folder / LOCK).unlink()
                with suppress(OSError):  # another process has come
                    for each in created:
                        each.rmdir()
        lock.release()


def locked_for_reading(folder: Path) -> AbstractContextManager[None]:
    """Return `locked_folder` for a folder that is only read; one on a read-only disk needs no lock."""
    return locked_folder(folder) if os.access(folder, os.W_OK) else nullcontext()


def _require_owner(folder: Path, identity: RunIdentity, overwrite: bool) -> RunIdentity | None:
    kind = CONTENTS[identity.kind][0]
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give --out a folder")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not names - {LOCK, HOLDER}:
        return None
    if (owner := _read_owner(folder)) is None:
        raise UserError(f"{folder} holds other files than a {kind}; give --out an empty or new folder")
    if not overwrite and not owner.same(identity):
        wanted = identity.describe(owner)
        if identity.kind != owner.kind:
            wanted = f"a {kind} of {identity.describe()}"
        raise UserError(
            f"{folder} holds {_describe(folder, owner)}, and asked for is {wanted}; give another --out, or "
            f"--overwrite to move that to {_unused(folder)} and start over"
        )
    return owner


def _read_owner(folder: Path) -> RunIdentity | None:
    if (folder / MARK).is_file():
        return read(folder / MARK, RunIdentity, "mark of a folder", "give another --out")
    if not (folder / CONFIG).is_file():
        return None
    config = read_config(folder)
    try:
        return identity_of("run", Session(config, folder))
    except UserError:  # its model is gone
        model = model_location(config.model, config.revision)
        return RunIdentity(kind="run", recipe=config.recipe.name, model=model, task=config.task.name)


def _describe(folder: Path, owner: RunIdentity) -> str:
    kind, result = CONTENTS[owner.kind]
    return f"a{' finished' if (folder / result).is_file() else 'n unfinished'} {kind} of {owner.describe()}"


def _unused(folder: Path) -> Path:
    place, number = folder.resolve(), 1
    while (old := place.with_name(f"{place.name}.old{f'-{number}' if number > 1 else ''}")).exists():
        number += 1
    return old


def _set_aside(folder: Path) -> Path:
    old = _unused(folder)
    # the mark last: a folder that was moved in part has an owner
    paths = sorted(folder.iterdir(), key=lambda path: path.name == MARK)
    try:
        old.mkdir()
        for path in paths:
            if path.name not in (LOCK, HOLDER):
                path.rename(old / path.name)
    except OSError as error:
        with suppress(OSError):
            old.rmdir()
        raise UserError(
            f"cannot move what is in {folder} to {old} ({error.strerror}); give another --out folder"
        ) from error
    return old


def _remove_unfinished(folder: Path) -> None:
    paths = [path for path in folder.rglob("*") if not path.is_dir()]
    requested = {folder / name for name in (MARK, CONFIG, "recipe.yaml", LOCK, HOLDER)}
    if requested.issuperset(paths):
        for path in {*paths} - {folder / LOCK, folder / HOLDER}:
            path.unlink()
        for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
            path.rmdir()


def _this_process() -> dict[str, Any]:
    since = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
    words = shlex.join([Path(sys.argv[0]).name, *map(hide_credentials, sys.argv[1:])])
    return {"process": os.getpid(), "host": socket.gethostname(), "since": since, "command": words}


def _holder(folder: Path) -> str:
    try:
        holder: dict[str, Any] = files.read_json(folder / HOLDER)
        command = " ".join(str(holder["command"]).split())
        dots = "..." if len(command) > LONGEST_COMMAND else ""
        command = f"`{command[:LONGEST_COMMAND]}{dots}`"
        return f"process {holder['process']} on {holder['host']} since {holder['since']} ({command})"
    except (UserError, KeyError, TypeError):
        return "another process"  # which has not written yet who it is
