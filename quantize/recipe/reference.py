"""The recipe format for editors (JSON Schema) and for readers (docs/recipe.md), both from the schema."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from qdqbench.quantize.recipe.schema import Recipe

DIALECT = "https://json-schema.org/draft/2020-12/schema"
HEADING = """# The recipe format

Written by `qdqbench recipes schema --markdown > docs/recipe.md` from the schema; do not edit by hand. What
recipes are for, with examples: [recipes/README.md](../recipes/README.md).

Unknown keys are refused, and the nearest one is named. An editor with a YAML language server completes them
and shows these texts when a recipe starts with the comment below, and `recipe.schema.json` beside it is what
`qdqbench recipes schema` prints:

```yaml
# yaml-language-server: $schema=recipe.schema.json
version: 1
name: mine
```
"""


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe."""
    return {"$schema": DIALECT, **Recipe.model_json_schema()}


def markdown() -> str:
    """The text of docs/recipe.md: one table for the recipe and for each section."""
    schema = json_schema()
    sections = {"Recipe": schema, **schema["$defs"]}
    order = dict.fromkeys(_reached("Recipe", sections))
    return "\n".join([HEADING, *(_table(name, sections) for name in order)])


def _reached(name: str, sections: Mapping[str, Any]) -> Iterator[str]:
    """A section, and those that its fields are made of, in their order."""
    yield name
    for field in sections[name]["properties"].values():
        for inner in _references(field):
            yield from _reached(inner, sections)


def _references(part: Any) -> Iterator[str]:
    values = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, value in values:
        if key == "$ref":
            yield value.rpartition("/")[2]
        else:
            yield from _references(value)


def _table(name: str, sections: Mapping[str, Any]) -> str:
    section = sections[name]
    rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for key, field in section["properties"].items():
        meant = field.get("description") or sections[next(_references(field))]["description"]  # when equal
        cells = [f"`{key}`", _values(field), _default(field), meant]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([f"## {name}\n", section["description"] + "\n", *rows, ""])


def _default(field: Mapping[str, Any]) -> str:
    if "default" not in field:
        return "required"
    value = field["default"]
    return "see there" if isinstance(value, dict) else _code(value)


BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "over",
    "maximum": "at most",
    "exclusiveMaximum": "under",
    "multipleOf": "a multiple of",
}


def _values(field: Mapping[str, Any]) -> str:
    """Allowed values in a few words."""
    told = [f"{text} {field[key]:g}" for key, text in BOUNDS.items() if key in field]
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        told = [f"[{name}](#{name.lower()})"]
    elif choices := field.get("anyOf") or field.get("oneOf"):
        told = [", or ".join(_values(choice) for choice in choices)]
    elif "enum" in field or "const" in field:
        told = [_code(value) for value in field.get("enum", [field.get("const")])]
    elif "prefixItems" in field:
        told = [f"{len(field['prefixItems'])} of: {_values(field['prefixItems'][0])}"]
    elif "items" in field:
        told = [f"list of: {_values(field['items'])}"]
    elif "pattern" in field:
        told = ["string that fits `" + field["pattern"].replace("|", "\\|") + "`"]
    else:
        told.insert(0, field["type"])
    return ", ".join(told)


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"
