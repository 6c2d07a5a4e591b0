"""Files that are whole or absent: written to a temporary name next to the target, then renamed."""

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from qdqbench.quantize.utils.errors import QdqError, Unwritable, UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (*FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)
SAID = re.compile(
    r"no space left|not enough disk space|os error 28|disk is full|disk quota exceeded", re.IGNORECASE
)
MAX_JSON = 32 << 20  # bytes; the largest results.json has 0.5 MB
NOTHING_LEFT = 1 << 16  # bytes: libraries in C++ fail in words of their own on a disk as full as that
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
REPLACED = "replaced"  # name of an old folder until the new one is in its place
PRIVATE = re.compile(r"\.(.+)\.\w{8}\.tmp")  # folder of a file or folder that is being written
SUMS = "SHA256SUMS"  # of a deployed folder
LOOK = Path(__file__).parent / "look.css"  # colors and letters of all pages


def cannot_write(path: Path, error: OSError, needed: int | None = None, written: int = 0) -> Unwritable:
    if error.errno not in FULL:
        return Unwritable(f"cannot write {path}: {error.strerror}; choose another --out folder")
    where = _there(path)
    while not where.is_mount() and where != where.parent:
        where = where.parent
    free = f"{(free_bytes(path) + written) / 1e6:.1f} MB is free on {where}"
    if error.errno == errno.EDQUOT:
        free = f"the quota on {where} is used up"
    need = f"needs {needed / 1e6:.1f} MB, and" if needed else "needs more:"
    return Unwritable(
        f"cannot write {path}: {(error.strerror or 'no space left on device').lower()}; it {need} {free}; "
        "make room there, or choose another --out folder"
    )


def require_room(folder: Path, needed: int, what: str) -> None:
    if needed > free_bytes(folder):
        raise cannot_write(folder / what, NO_SPACE, needed)


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(_there(path)).free


def unwritable(error: Exception, folder: Path) -> OSError | None:
    if isinstance(error, OSError):
        named = error.filename2 or error.filename  # of a copy the second is written
        elsewhere = named is not None and not str(named).startswith(str(folder.parent))
        return error if error.errno in REFUSED and not elsewhere else None
    full = SAID.search(str(error)) or free_bytes(folder) < NOTHING_LEFT
    return NO_SPACE if full and not isinstance(error, QdqError) else None


def full_disk(error: Exception) -> UserError | None:
    if not (isinstance(error, OSError) and error.errno in FULL) and not SAID.search(str(error)):
        return None
    # shutil.copyfile names the file that it reads first, and the one that it writes second
    if named := getattr(error, "filename2", None) or getattr(error, "filename", None):
        return cannot_write(Path(str(named)), NO_SPACE)
    place = min((Path(tempfile.gettempdir()), Path.cwd()), key=free_bytes)
    if free_bytes(place) < NOTHING_LEFT:
        return cannot_write(place / "a temporary file", NO_SPACE)
    return UserError("cannot write the output: no space left on device; make room where the output goes")


def restore_json(path: Path, data: Any) -> None:
    """Write the file that says whose a folder is, where that vanished and was made again in part."""
    if path.parent.is_dir() and not path.exists():
        with suppress(UserError):
            write_json(path, data)


def vanished(error: Exception, given: Iterable[str]) -> UserError | None:
    """Name the file that is gone, if it was in a folder among the words of a command: no program is."""
    if not isinstance(error, FileNotFoundError) or error.filename is None:
        return None
    path, places = Path(str(error.filename)).resolve(), (word.rpartition("=")[2] for word in given)
    if not any(path.is_relative_to(Path(place).resolve()) for place in places if place):
        return None
    return UserError(
        f"{error.filename} is gone, removed or renamed while this command worked; run the same command again"
    )


def _there(path: Path) -> Path:
    found = path.resolve()
    while not found.is_dir() and found != found.parent:
        found = found.parent
    return found


@contextmanager
def _beside(path: Path, needed: int | None = None) -> Iterator[Path]:
    """Yield the name of `path` in a private folder next to it, which goes with the block."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        private = tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise cannot_write(path, error, needed) from error
    with private as name, ExitStack() as stack:
        folder = Path(name)
        with suppress(OSError):  # a file system without locks
            stack.enter_context(locked(folder))
        try:
            yield folder / path.name
        except Exception as error:
            if why := unwritable(error, folder):
                written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                raise cannot_write(path, why, needed, written) from error
            raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the kernel's lock of a folder, which ends with the process; an `OSError` where another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(path: Path) -> None:
    """Remove what killed processes left next to a path that they wrote; what one was replacing goes back."""
    _remove_private(path.parent.glob(f".{glob.escape(path.name)}.*.tmp"))


def remove_abandoned_below(folder: Path) -> None:
    _remove_private(folder.rglob(".*.tmp"))


def _remove_private(folders: Iterable[Path]) -> None:
    for folder in [*folders]:
        with suppress(OSError):
            if (name := PRIVATE.fullmatch(folder.name)) and not folder.is_symlink():
                with locked(folder):
                    if (folder / REPLACED).is_dir() and not (path := folder.with_name(name[1])).exists():
                        (folder / REPLACED).rename(path)
                    shutil.rmtree(folder)


@contextmanager
def atomic_path(path: Path, needed: int | None = None) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` on success; a `UserError` without permission or room."""
    with _beside(path, needed) as temporary:
        yield temporary
        temporary.replace(path)


@contextmanager
def atomic_folder(path: Path, *, replace: bool = True) -> Iterator[Path]:
    """As `atomic_path`, for an empty folder; a `UserError` too where what is there may not be replaced."""
    with _beside(path) as temporary:
        temporary.mkdir()
        yield temporary
        if replace and path.exists():  # goes with the private folder, and is never half gone
            path.rename(temporary.with_name(REPLACED))
        try:
            temporary.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise UserError(
                f"{path} got files of somebody else meanwhile; give an empty or new folder"
            ) from error


def require_writable(folder: Path) -> None:
    """Raise `UserError` where a folder cannot be written, before hours of work; nothing is left behind."""
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".qdqbench-", dir=parent):
            pass
    except OSError as error:
        raise cannot_write(folder, error) from error


def write_bytes(path: Path, data: bytes) -> None:
    with atomic_path(path, len(data)) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 `text` atomically; it is on the disk when this returns."""
    data = text.encode()
    with atomic_path(path, len(data)) as temporary, temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())  # else a power loss leaves an empty file


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, again: str = "delete it and run the stage again") -> Any:
    """Read a JSON file of at most MAX_JSON bytes; else a `UserError`, in which `again` says what to do."""
    if not path.exists():
        raise UserError(f"{path} does not exist; run the stage that writes it first")
    text = read_bounded(path, MAX_JSON, "a JSON file of qdqbench", "the file that the stage wrote")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or a number of any length
        raise UserError(f"{path} is not valid JSON ({error}); {again}") from error


def read_bounded(path: Path, most: int, what: str, give: str) -> str:
    """Return the text of a regular file of at most `most` bytes; else a `UserError` says what to `give`."""
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for its writer
            raise UserError(f"{path} is no regular file; give {give}")
        with path.open("rb") as stream:  # a file may grow, and those of /proc have no size
            data = stream.read(most + 1)
        if len(data) > most:
            raise UserError(f"{path} is too large: {what} has at most {most} bytes; give {give}")
        return data.decode("utf-8")
    except (OSError, ValueError) as error:  # ValueError: not text, or no possible path
        why = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"cannot read {path} ({why}); give {give}") from error


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
