"""What commands print with --json that have no file of results; docs/json.md names all others too."""

from pathlib import Path
from typing import Any, Literal

from qdqbench.quantize.core.strict import Strict


class Recipes(Strict):
    """Of `recipes list`."""

    recipes: list[dict[str, Any]]  # name, family, model types, description, measured figures


class ShownRecipe(Strict):
    """Of `recipes show`."""

    name: str
    source: str  # its file
    recipe: dict[str, Any]  # with every default


class ValidRecipes(Strict):
    """Of `recipes validate`."""

    valid: list[str]


class HandedOver(Strict):
    """Of `deploy`."""

    folder: str
    files: dict[str, int]  # bytes by path inside it
    begin: str  # what to call first


class TritonRepository(Strict):
    """Of `export-triton`."""

    folder: str
    name: str  # of the ensemble that clients ask
    backend: str
    ensembles: list[str]
    plan: Literal["built", "script", "none"]  # TensorRT's
    lengths: list[int]  # tokens
    max_batch: int


class CostRows(Strict):
    """Of `cost measure`."""

    file: str
    rows: int  # new ones
    engines: int
    ended: str  # why


class CostFit(Strict):
    """Of `cost fit`."""

    file: str
    rows: int
    engines: int
    gpu: str
    backend: str
    version: str
    leave_one_out: dict[str, float]  # error on engines left out


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by its path inside."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in found}
