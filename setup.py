"""Hooks of the build: an sdist and a wheel know the commit that they were made from."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
HOME = "quantize/utils/system"
CODE = runpy.run_path(str(ROOT / HOME / "commit.py"))


def write_commit(package: Path) -> None:
    """Write the commit into a package that is being built; in an earlier build's folder it may be old."""
    record = package / HOME / CODE["RECORD"].name
    commit = CODE["find_commit"](ROOT)
    record.unlink(missing_ok=True)
    if commit:
        record.write_text(f"{commit}\n", encoding="utf-8")


class BuildPy(build_py):
    """A build of a wheel; an editable installation asks git each time."""

    def run(self) -> None:
        """Copy the modules and write the commit next to its reader."""
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib) / "qdqbench")


class Sdist(sdist):
    """A build of an sdist."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files and write the commit next to its reader."""
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
