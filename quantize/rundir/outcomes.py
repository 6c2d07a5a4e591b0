"""What the stages that need an engine leave behind: their result, or why there is none."""

from pathlib import Path
from typing import Any, TypeVar

from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.results import EngineResult, Verification
from qdqbench.quantize.core.strict import Strict, read

BUILD, VERIFY, ENGINE = "build.json", "verify.json", "engine.json"


class Skipped(Strict):
    """Why a stage has no result."""

    skipped: str


class Ran(Strict):
    """How the engine was evaluated; its answers are logits/engine.npz."""

    detail: str  # what ran, on what, with how much memory
    memory: dict[str, Any]  # `EngineMemory`


Result = TypeVar("Result", bound=Strict)


def record(path: Path, outcome: Strict) -> Path:
    """Write an outcome; its path."""
    files.write_json(path, outcome.model_dump(mode="json"))
    return path


def read_built(folder: Path) -> EngineResult | Skipped:
    """The engine of a run directory.

    Raises:
        UserError: it was not asked for yet, or the record is of another version.
    """
    if not (folder / BUILD).is_file():
        raise UserError(f"{folder} has no engine yet; run `qdqbench build {folder}` first")
    return _read(folder / BUILD, EngineResult)


def engine_file(folder: Path, built: EngineResult) -> Path:
    """Where the engine of a run directory lies.

    Raises:
        UserError: the record names a file elsewhere.
    """
    if Path(built.file).name != built.file:
        raise UserError(
            f"{folder / BUILD} names an engine outside of the run, {built.file!r}; run "
            f"`qdqbench build {folder}` again"
        )
    return folder / "engine" / built.file


def read_verified(folder: Path) -> Verification | Skipped:
    """What the engine of a run directory computes, as it was judged; skipped where nobody asked.

    Raises:
        UserError: the record is of another version.
    """
    path = folder / VERIFY
    return _read(path, Verification) if path.is_file() else Skipped(skipped="not asked for")


def read_ran(folder: Path) -> Ran | Skipped:
    """How the engine of a run directory was evaluated.

    Raises:
        UserError: the record is of another version.
    """
    return _read(folder / ENGINE, Ran)


def _read(path: Path, schema: type[Result]) -> Result | Skipped:
    found = files.read_json(path)
    skipped = isinstance(found, dict) and "skipped" in found
    about = "record of a stage", f"run `qdqbench build {path.parent}` again"
    return read(path, Skipped, *about) if skipped else read(path, schema, *about)
