"""One process at a time in a folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError

LOCK, HOLDER = ".lock", ".lock.json"  # the holder's number in its own file: others read it while it is locked


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made where it is missing; may be nested in a process.

    The lock is the kernel's and ends with its process, however that ends. Of the processes of a launcher the
    first one holds it for all.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.resolve() / LOCK, is_singleton=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"{folder} is in use by {_holder(folder)}; wait until that ends, or give another --out folder"
        ) from error
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; choose another --out folder") from error
    outermost = lock.lock_counter == 1
    try:
        if outermost:
            since = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
            files.write_json(folder / HOLDER, {"process": os.getpid(), "since": since})
        yield
    finally:
        if outermost:
            (folder / HOLDER).unlink(missing_ok=True)
            if made and [*folder.iterdir()] == [folder / LOCK]:  # refused input leaves no folder
                (folder / LOCK).unlink()
                folder.rmdir()
        lock.release()


def _holder(folder: Path) -> str:
    try:
        found: dict[str, Any] = files.read_json(folder / HOLDER)
        return f"process {found['process']} since {found['since']}"
    except (UserError, KeyError, TypeError):
        return "another process"  # which has not said yet who it is
