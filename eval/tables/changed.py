"""Results of shipped recipes that have changed since: a mark in the tables, and what differs."""

from typing import Any

from pydantic import ValidationError

from qdqbench.eval.report.formats import code, flat, text
from qdqbench.quantize.recipe.schema import Recipe, load_recipe, shipped_recipes

MARK = "†"
IDLE = ("description", "gate")  # change no result


class Changed:
    """Labels of recipes; those that the shipped one of their name no longer equals are marked, and kept."""

    def __init__(self) -> None:
        self.known: dict[str, dict[str, None]] = {}  # name -> differences, each once

    def label(self, recipe: dict[str, Any]) -> str:
        """A recipe's name as Markdown, with a mark if its results are of other settings."""
        name = str(recipe.get("name"))
        found = differences(recipe)
        if found:
            self.known[name] = self.known.get(name, {}) | dict.fromkeys(found)
        return code(name) + (f" {MARK}" if found else "")

    def text(self) -> str:
        """What the mark means; empty where there is none."""
        if not self.known:
            return ""
        lines = [f"- {code(name)}: {text(', '.join(self.known[name]))}" for name in sorted(self.known)]
        said = f"{MARK} Measured before the shipped recipe of this name changed. What was different:"
        return "\n".join([said, "", *lines])


def differences(recipe: dict[str, Any]) -> list[str]:
    """Settings of a recorded recipe that the shipped one of its name has otherwise, as `key was (now is)`."""
    name = str(recipe.get("name"))
    if name not in shipped_recipes():
        return []
    try:
        then = dict(flat(Recipe.model_validate(recipe).model_dump(mode="json")))
    except ValidationError:
        return ["it is of another version of qdqbench"]
    shipped = load_recipe(name)
    now = dict(flat((shipped if recipe.get("qat") else shipped.ptq).model_dump(mode="json")))
    keys = [key for key in dict.fromkeys((*then, *now)) if then.get(key) != now.get(key)]
    return [f"{key} {then.get(key)} (now {now.get(key)})" for key in keys if key.split(".")[0] not in IDLE]
