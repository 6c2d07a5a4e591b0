"""Schemas of what commands without a results file print with --json."""

from typing import Any, Literal

from qdqbench.quantize.utils.schema import Strict


class Recipes(Strict):
    """Output of `recipes list`."""

    recipes: list[dict[str, Any]]
    """For each recipe `recipe`, `name` (without the family), `family`, `model_types`, `description`,
    `figures` (measured on each device), and `start_on` (devices on which it is the one to start with).
    A figure has the `mean` over tasks, and over `held_out` ones."""


class ShownRecipe(Strict):
    """Output of `recipes show`."""

    name: str
    """Name of the recipe."""
    source: str
    """Path of its file."""
    recipe: dict[str, Any]
    """The recipe with every default filled in."""


class ValidRecipes(Strict):
    """Output of `recipes validate`."""

    valid: list[str]
    """Names or paths as given; the first that is not valid is an error."""


class HandedOver(Strict):
    """Output of `deploy`."""

    folder: str
    """Path of the written folder."""
    files: dict[str, int]
    """Size of each file in bytes, by its path in the folder."""
    entry_point: str
    """Program to call first."""


class Pushed(Strict):
    """Output of `push`."""

    repository: str
    """Repository on the Hub."""
    url: str
    """URL of the commit or pull request."""


class TritonRepository(Strict):
    """Output of `export-triton`."""

    folder: str
    """Path of the written repository."""
    name: str
    """Name of the ensemble that clients call."""
    backend: str
    """Runtime of the model."""
    ensembles: list[str]
    """Names of all ensembles."""
    plan: Literal["built", "script", "none"]
    """TensorRT plan: that of the run, a script that builds it, or none."""
    lengths: list[int]
    """Lengths that it accepts, in tokens."""
    max_batch: int
    """Largest batch, in rows."""
