"""One process at a time in a folder."""

import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.machine.process import leads
from qdqbench.quantize.machine.secrets import hide_credentials

LOCK, HOLDER = ".lock", ".lock.json"  # the holder's number in its own file: others read it while it is locked
LONGEST_COMMAND = 200  # characters of the holder's command in an error


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made where it is missing; may be nested in a process.

    The lock is the kernel's and ends with its process, however that ends. Of the processes of a launcher the
    first one holds it for all.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    if not leads():
        yield
        return
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        bare = bool(made) or not any(folder.iterdir())
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
            files.write_json(folder / HOLDER, _me())
        yield
    finally:
        if outermost:
            (folder / HOLDER).unlink(missing_ok=True)
            if bare and [*folder.iterdir()] == [folder / LOCK]:  # refused input leaves nothing behind
                (folder / LOCK).unlink()
                with suppress(OSError):  # another process has come
                    for each in made:
                        each.rmdir()
        lock.release()


def held_for_reading(folder: Path) -> AbstractContextManager[None]:
    """As `held`, of a folder that is only read; one on a read-only disk needs no lock."""
    return held(folder) if os.access(folder, os.W_OK) else nullcontext()


def _me() -> dict[str, Any]:
    words = [Path(sys.argv[0]).name, *(hide_credentials(word) for word in sys.argv[1:])]
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds"),
        "command": shlex.join(words),
    }


def _holder(folder: Path) -> str:
    try:
        found: dict[str, Any] = files.read_json(folder / HOLDER)
        command = " ".join(str(found["command"]).split())
        short = command if len(command) <= LONGEST_COMMAND else f"{command[:LONGEST_COMMAND]}..."
        return f"process {found['process']} on {found['host']} since {found['since']} (`{short}`)"
    except (UserError, KeyError, TypeError):
        return "another process"  # which has not said yet who it is
