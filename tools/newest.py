"""Run the fast unit tests with the newest versions that the registry has, in an environment of its own.

python tools/newest.py [PACKAGE ...]

The newest are those within the bounds of `pyproject.toml`. A package named here goes past its bound, which
shows whether the bound can be raised.
"""

import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands(python: Path, beyond: Sequence[str]) -> list[list[str | Path]]:
    """Return what installs, lists and tests the versions."""
    upgrade: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--upgrade"]
    return [
        [*upgrade, "pip"],
        [*upgrade, "--upgrade-strategy", "eager", "--editable", f"{ROOT}[dev]"],
        *([[*upgrade, *beyond]] if beyond else []),
        [python, "-m", "pip", "list"],
        [python, "-m", "pytest", "tests/unit", "-q", "-n", "auto", "-m", "not slow and not long"],
    ]


def main() -> int:
    """Entry point; the first command that fails is the answer."""
    with tempfile.TemporaryDirectory(prefix="qdqbench-newest-") as folder:
        venv.create(folder, with_pip=True)
        for command in commands(Path(folder) / "bin" / "python", sys.argv[1:]):
            if failed := subprocess.run(command, cwd=ROOT, check=False).returncode:
                return failed
    return 0


if __name__ == "__main__":
    sys.exit(main())
