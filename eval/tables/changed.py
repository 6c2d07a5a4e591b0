"""Results of shipped recipes that have changed since: a mark in the tables, and what differs."""

from typing import Any

from pydantic import ValidationError

from qdqbench.eval.report.formats import code, flat, label, text
from qdqbench.quantize.recipe.schema import Recipe, load_recipe, shipped_recipes
from qdqbench.quantize.recipe.shapes import AUTO
from qdqbench.quantize.rundir.config import adapted

MARK = "†"
IDLE = ("description", "gate")  # change no result


class Changed:
    """Labels of recipes; those that the shipped one of their name no longer equals are marked, and kept."""

    def __init__(self) -> None:
        self.known: dict[str, dict[str, None]] = {}  # name -> differences, each once

    def label(self, recipe: dict[str, Any]) -> str:
        """A recipe's name as Markdown, the run's own length and backend, a mark if more differs."""
        name, length, backend = str(recipe.get("name")), _own_length(recipe), _own_backend(recipe)
        found = differences(recipe)
        if found:
            self.known[name] = self.known.get(name, {}) | dict.fromkeys(found)
        own = [f", {length} tokens" if length else "", f", {label(backend)}" if backend else ""]
        own += [", shapes: auto" if _auto(recipe) else ""]
        return code(name) + "".join(own) + (f" {MARK}" if found else "")

    def text(self) -> str:
        """What the mark means; empty where there is none."""
        if not self.known:
            return ""
        lines = [f"- {code(name)}: {text(', '.join(self.known[name]))}" for name in sorted(self.known)]
        said = f"{MARK} Measured before the shipped recipe of this name changed. What was different:"
        return "\n".join([said, "", *lines])


def differences(recipe: dict[str, Any]) -> list[str]:
    """Settings of a recorded recipe that the shipped one of its name has otherwise, as `key was (now is)`.

    Not the length that samples are cut at, the backend, nor shapes of the data: a run is given those apart.
    """
    name = str(recipe.get("name"))
    if name not in shipped_recipes():
        return []
    try:
        then = dict(flat(Recipe.model_validate(recipe).model_dump(mode="json")))
    except ValidationError:
        return ["it is of another version of qdqbench"]
    shipped = adapted(
        load_recipe(name),
        max_length=_own_length(recipe),
        backend=_own_backend(recipe),
        shapes=AUTO if _auto(recipe) else None,
    )
    now = dict(flat((shipped if recipe.get("qat") else shipped.ptq).model_dump(mode="json")))
    keys = [key for key in dict.fromkeys((*then, *now)) if then.get(key) != now.get(key)]
    return [f"{key} {then.get(key)} (now {now.get(key)})" for key in keys if key.split(".")[0] not in IDLE]


def _auto(recipe: dict[str, Any]) -> bool:
    """Whether the profiles of a run followed its data."""
    return bool(recipe.get("engine", {}).get("shapes") == AUTO)


def _own_backend(recipe: dict[str, Any]) -> str | None:
    """The backend that a run was given; None: as the shipped recipe of that name has it, or there is none."""
    name, backend = str(recipe.get("name")), recipe.get("engine", {}).get("backend")
    own = name in shipped_recipes() and backend not in (None, load_recipe(name).engine.backend)
    return str(backend) if own else None


def _own_length(recipe: dict[str, Any]) -> int | None:
    """Tokens that samples were cut at; None: as the shipped recipe of that name has it, or there is none."""
    name, length = str(recipe.get("name")), recipe.get("export", {}).get("max_length")
    own = name in shipped_recipes() and length not in (None, load_recipe(name).export.max_length)
    return int(length) if own else None
