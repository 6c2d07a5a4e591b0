"""The folder itself: whole or absent, never over what somebody else wrote in it."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list

SUMS = "SHA256SUMS"
CACHE = "__pycache__"  # which Python writes beside scripts that ran
Content = Mapping[
    str, bytes | Path
]  # of each file by its name in the folder: what it holds, or where that lies


def place(folder: Path, content: Content, *, link: bool) -> bool:
    """Make a folder hold these files and their checksums, and nothing else; whether anything changed.

    Args:
        link: hard links of files that lie elsewhere, where the file system can; else copies.

    Raises:
        UserError: it cannot be written, or holds what was not written here; lists that.
    """
    wanted = {name: _sum(given) for name, given in content.items()}
    for left in folder.parent.glob(f".{folder.name}.*.tmp") if link else ():  # of a run that was killed
        if not folder.exists() and (left / files.REPLACED).is_dir():  # between its two renames
            (left / files.REPLACED).rename(folder)
        shutil.rmtree(left, ignore_errors=True)
    if folder.exists():
        if folder.is_dir() and _sums_of(folder, content, wanted) == wanted:
            return False
        refuse_foreign(folder)
    try:
        with files.atomic_folder(folder) as made:
            for name, given in content.items():
                _write(made / name, given, link)
            files.write_text(made / SUMS, "".join(f"{wanted[name]}  {name}\n" for name in sorted(wanted)))
    except OSError as error:
        raise UserError(
            f"cannot write {folder}: {error.strerror}; make room, or choose another folder"
        ) from error
    return True


def remove(folder: Path) -> None:
    """Remove a folder that holds only what was written here; any other stays as it is."""
    if folder.is_dir() and not folder.is_symlink() and not foreign(folder):
        shutil.rmtree(folder, ignore_errors=True)


def refuse_foreign(folder: Path) -> None:
    """Refuse to touch what somebody else wrote.

    Raises:
        UserError: it is a file or a link, or holds files that its checksums do not list, or others now.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"{folder} is a file or a link, and what is deployed goes there; move it away")
    if others := foreign(folder):
        one = len(others) == 1
        raise UserError(
            f"{folder} was left as it is: {name_list(others)} in it {'is' if one else 'are'} not of qdqbench "
            f"or changed since; move {'it' if one else 'them'} away, then `qdqbench deploy {folder.parent}`"
        )


def foreign(folder: Path) -> list[str]:
    """Files that the checksums in a folder do not list, or that are others now."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    known = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    there = {name for name in _names(folder) if name != SUMS}
    return sorted(name for name in there if known.get(name) != _sum(folder / name))


def _names(folder: Path) -> list[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return [path.as_posix() for path in found if CACHE not in path.parts]


def _sums_of(folder: Path, content: Content, wanted: Mapping[str, str]) -> dict[str, str]:
    """Checksums of what is there; one that is a link to a wanted file is not read again."""
    found = {}
    for name in _names(folder):
        path, given = folder / name, content.get(name)
        if name != SUMS:
            linked = isinstance(given, Path) and path.exists() and path.samefile(given)
            found[name] = wanted[name] if linked else _sum(path)
    return found


def _sum(given: bytes | Path) -> str:
    """Checksum; empty of a file that cannot be read."""
    if isinstance(given, bytes):
        return hashlib.sha256(given).hexdigest()
    try:
        return files.sha256(given)
    except OSError:
        return ""


def _write(path: Path, given: bytes | Path, link: bool) -> None:
    if isinstance(given, bytes):
        files.write_bytes(path, given)
        if path.suffix == ".sh":
            path.chmod(0o755)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if link:
        try:
            os.link(given, path)
        except OSError:  # another file system, or one without links
            link = False
    if not link:
        shutil.copyfile(given, path)
