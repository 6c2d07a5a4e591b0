"""The commit of this code; `setup.py` runs this file by its path, so it imports the standard library only."""

import subprocess
from pathlib import Path

RECORD = Path(__file__).with_name("commit.txt")  # in an sdist and in a wheel; never in a checkout


def find_commit(root: Path) -> str | None:
    """Return the commit of the checkout at `root`, with "-dirty", or the one that the build recorded."""
    try:
        ours = 'name = "qdqbench"' in (root / "pyproject.toml").read_text(encoding="utf-8")
        if ours and Path(_git(root, "rev-parse", "--show-toplevel")) == root:
            return _git(root, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    except (OSError, subprocess.SubprocessError):
        pass  # no git, no repository
    return RECORD.read_text(encoding="utf-8").strip() if RECORD.is_file() else None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)  # noqa: S603
    return done.stdout.strip()
