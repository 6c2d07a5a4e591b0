"""Files that are whole or absent: written to a temporary name beside the target, then renamed."""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qdqbench.quantize.core.errors import UserError

LOOK = Path(__file__).parent / "look.css"  # colours and letters of all pages


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield the name of `path` in a private folder beside it, which goes with the block."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        private = tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another --out folder") from error
    with private as folder:
        yield Path(folder) / path.name


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` on success and is deleted on failure.

    Raises:
        UserError: the folder above cannot be written.
    """
    with _beside(path) as temporary:
        yield temporary
        temporary.replace(path)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """As `atomic_path`, for a folder, which is there and empty."""
    with _beside(path) as temporary:
        temporary.mkdir()
        yield temporary
        if path.exists():
            path.rename(
                temporary.with_name("replaced")
            )  # goes with the private folder, and is never half gone
        temporary.rename(path)


def require_writable(folder: Path) -> None:
    """Find out that a folder cannot be written before hours of work; nothing is left behind.

    Raises:
        UserError: it cannot.
    """
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".qdqbench-", dir=parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; choose another --out folder") from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 `text` to `path` atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as strict, indented JSON (NaN and infinity are errors) to `path` atomically."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; run the stage that writes it first") from error
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, not text, or a number of any length
        raise UserError(f"{path} is not valid JSON ({error}); delete it and run the stage again") from error


def read_bounded(path: Path, most: int, what: str, give: str) -> str:
    """Text of a file from anywhere, of at most so many bytes.

    Args:
        what: it should be, and `give` what to give instead, in errors.

    Raises:
        UserError: missing, too large, or not text.
    """
    try:
        size = path.stat().st_size
        if size > most:
            raise UserError(f"{path} has {size} bytes, and {what} at most {most}")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not text, or no possible path
        why = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"cannot read {path} ({why}); give {give}") from error


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in 1 MiB blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
