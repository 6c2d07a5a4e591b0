"""Schemas of what commands without a results file print with --json."""

from typing import Any

from qdqbench.quantize.utils.schema import Strict, field


class Recipes(Strict):
    """Output of `recipes list`."""

    recipes: list[dict[str, Any]] = field(
        "For each recipe `recipe`, `name` (without the family), `family`, `model_types`, `description`, "
        "`figures`, and `start_in` (backends in which it is the one to start with). `figures` are by "
        "`backends`, `cuda`, `tensorrt` or `cpu`: the `mean` over tasks, and over `held_out` ones."
    )


class ShownRecipe(Strict):
    """Output of `recipes show`."""

    name: str = field("Name of the recipe.")
    source: str = field("Path of its file.")
    recipe: dict[str, Any] = field("The recipe with every default filled in.")


class ValidRecipes(Strict):
    """Output of `recipes validate`."""

    valid: list[str] = field("Names or paths as given; the first that is not valid is an error.")


class HandedOver(Strict):
    """Output of `deploy`."""

    folder: str = field("Path of the written folder.")
    files: dict[str, int] = field("Size of each file in bytes, by its path in the folder.")
    entry_point: str = field("Program to call first.")


class Pushed(Strict):
    """Output of `push`."""

    repository: str = field("Repository on the Hub.")
    url: str = field("URL of the commit or pull request.")


class TritonRepository(Strict):
    """Output of `export-triton`."""

    folder: str = field("Path of the written repository.")
    name: str = field("Name of the model that clients call.")
    runtime: str = field("Runtime of the model.")
    runtimes: list[str] = field("Runtimes that the folder has files for.")
    max_batch: int = field("Largest batch, in rows.")
