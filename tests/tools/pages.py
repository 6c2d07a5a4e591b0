"""Documents that the code determines: docs/supported.md, docs/recipe.md and docs/reference/json.md.

    python tests/tools/pages.py             write them
    python tests/tools/pages.py --check     change nothing; exit status 2 where something would change

The meaning of a field is its `description`, or the docstring below it, which is read from the source, so that
schemas stay quick to import.
"""

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from qdqbench.cli import schemas
from qdqbench.eval.bench.results import Bench
from qdqbench.eval.runs.comparison import RunComparison
from qdqbench.eval.runs.study import Study
from qdqbench.eval.selection.auto.results import Auto
from qdqbench.eval.selection.methods import Methods
from qdqbench.eval.selection.search.results import Search
from qdqbench.eval.selection.sensitivity.results import Sensitivity
from qdqbench.quantize.models.families.known import FAMILIES
from qdqbench.quantize.recipe import shipped
from qdqbench.quantize.recipe.schema import Recipe, family_free_recipes
from qdqbench.quantize.tasks.task import KINDS, KNOWN
from qdqbench.quantize.utils.results import Finetuning, Results

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = "Written by `python tests/tools/pages.py`"
FILES: dict[str, tuple[type[BaseModel], ...]] = {  # in this order, each schema where it is met first
    "results.json": (Results,),
    "finetune.json": (Finetuning,),
    "study.json": (Study,),
    "bench.json": (Bench,),
    "compare.json": (RunComparison,),
    "sensitivity.json": (Sensitivity,),
    "methods.json": (Methods,),
    "search.json": (Search,),
    "auto.json": (Auto,),
    "What other commands print with `--json`": tuple(
        value
        for value in vars(schemas).values()
        if isinstance(value, type) and value.__module__ == schemas.__name__
    ),
}
JSON_HEAD = f"""# JSON files

{WRITTEN} from the schemas; a test compares. Files are strict: no key
that is not here, no NaN and no infinity. What the figures mean is explained where each command is.
"""
RECIPE_HEAD = f"""# The recipe format

{WRITTEN} from the schema; do not edit by hand. What recipes are for, with
examples: [recipes/README.md](../recipes/README.md).

Unknown keys are refused, and the nearest one is named. An editor with a YAML language server completes them
and shows these texts when a recipe starts with the comment below and lies next to `recipe.schema.json`, which
`qdqbench recipes schema` prints:

```yaml
# yaml-language-server: $schema=recipe.schema.json
version: 1
name: mine
```
"""
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "over",
    "maximum": "at most",
    "exclusiveMaximum": "under",
    "multipleOf": "a multiple of",
}
Schema = Mapping[str, Any]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(cells)} |".replace("  |", " |") for cells in (header, *rows)]
    return [lines[0], f"|{'---|' * len(header)}", *lines[1:]]


# Schemas


def reached(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return a schema and those that its fields are made of, by name, in the order of the fields."""
    models, waiting = {}, [model]
    while waiting:
        item: Any = waiting.pop(0)
        if isinstance(item, type) and issubclass(item, BaseModel):
            if item.__name__ not in models:
                models[item.__name__] = item
                waiting = [field.annotation for field in item.model_fields.values()] + waiting
        else:
            waiting = [*get_args(item), *waiting]
    return models


@cache
def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each field of a schema."""
    if model is BaseModel or not issubclass(model, BaseModel):
        return {}
    tree = ast.parse(Path(inspect.getsourcefile(model)).read_text(encoding="utf-8"))
    (body,) = (
        node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == model.__name__
    )
    meaning: dict[str, str] = {}
    for base in model.__bases__:
        meaning |= meanings(base)
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            documented = isinstance(after, ast.Expr) and isinstance(getattr(after.value, "value", None), str)
            text = model.model_fields[node.target.id].description or (after.value.value if documented else "")
            meaning[node.target.id] = " ".join(text.split())
    return meaning


def values(field: Schema, anchors: Mapping[str, str]) -> str:
    """Return the values that a JSON Schema allows, in a few words.

    Args:
        anchors: of the tables of schemas, by their names in references.
    """
    if choices := field.get("anyOf") or field.get("oneOf"):
        text = ", or ".join(values(choice, anchors) for choice in choices)
    elif "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        text = f"[{name}](#{anchors[name]})"
    elif "enum" in field or "const" in field:
        text = ", ".join(_code(value) for value in field.get("enum", [field.get("const")]))
    elif "prefixItems" in field:
        text = f"{len(field['prefixItems'])} of: {values(field['prefixItems'][0], anchors)}"
    elif field.get("items"):
        text = f"list of: {values(field['items'], anchors)}"
    elif "pattern" in field:
        text = "string that fits `" + field["pattern"].replace("|", "\\|") + "`"
    elif isinstance(inner := field.get("additionalProperties"), dict):
        text = f"object of: {values(inner, anchors)}"
    else:
        bounds = (f"{word} {field[key]:g}" for key, word in BOUNDS.items() if key in field)
        text = ", ".join([field.get("type", "any"), *bounds])
    return text


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def json_page() -> str:
    """Return the text of docs/reference/json.md: for each file a table of each of its schemas."""
    lines, headings = [JSON_HEAD], {}
    for title, roots in FILES.items():
        models = [model for root in roots for model in reached(root).values()]
        own = [model for model in dict.fromkeys(models) if model not in headings]
        for model in own:
            taken = model.__name__ in headings.values()
            headings[model] = f"{model.__name__} of {title}" if taken else model.__name__
        lines += [f"## {title}", ""]
        named = {
            model.__name__: headings[model].lower().replace(" ", "-").replace(".", "") for model in models
        }
        for model in own:
            fields = model.model_json_schema(mode="serialization")
            fields = fields.get("properties") or fields["$defs"][model.__name__]["properties"]
            about = " ".join(inspect.cleandoc(model.__doc__ or "").split())
            meaning = meanings(model)
            rows = [[f"`{key}`", values(field, named), meaning.get(key, "")] for key, field in fields.items()]
            lines += [f"### {headings[model]}", "", about, "", *table(["field", "type", "meaning"], rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def recipe_page() -> str:
    """Return the text of docs/recipe.md: one table for the recipe and for each section."""
    schema = Recipe.model_json_schema()
    sections = {"Recipe": schema, **schema["$defs"]}
    anchors = {name: name.lower() for name in sections}
    lines = [RECIPE_HEAD]
    for name in (name for name in reached(Recipe) if name in sections):
        rows = []
        for key, field in sections[name]["properties"].items():
            meaning = (
                field.get("description") or sections[next(_references(field))]["description"]
            )  # when equal
            default = field.get("default")
            shown = "see there" if isinstance(default, dict) else _code(default)
            shown = shown if "default" in field else "required"
            rows.append([f"`{key}`", values(field, anchors), shown, meaning])
        about = sections[name]["description"]
        lines += [f"## {name}", "", about, "", *table(["key", "values", "default", "meaning"], rows), ""]
    return "\n".join(lines)


def _references(part: Any) -> Iterator[str]:
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, value in items:
        if key == "$ref":
            yield value.rpartition("/")[2]
        else:
            yield from _references(value)


# What is supported


def supported_page() -> str:
    """Return the text of docs/supported.md: families, their model types and recipes, and kinds of tasks."""
    free, names = family_free_recipes(), [family.name for family in FAMILIES]
    lines = [
        "# What is supported",
        "",
        f"{WRITTEN}; a test compares. For a model of another `model_type`",
        "`qdqbench recipes new` writes a recipe that describes its layout.",
        "",
    ]
    rows = [[family.name, _list(family.model_types), _list(family.inputs)] for family in FAMILIES]
    lines += table(["family", "`model_type` in config.json", "inputs of the graph"], rows)
    for family in FAMILIES:
        if family.needs:
            needs = ", ".join(f"`{name}` {values[0]}" for name, values in family.needs.items())
            lines += ["", f"Of {family.name} only models with {needs}."]
    names_text = (
        "A recipe is called FAMILY-NAME. With a model NAME alone is enough: its type says which family."
    )
    rows = [
        [f"`{recipe}`", *("yes" if name in having else "" for name in names)]
        for recipe, having in free.items()
    ]
    lines += ["", names_text, "", *table(["recipe", *names], rows), ""]
    rows = [
        [
            kind.name,
            _list(name for name, task in KNOWN.items() if task.kind is kind),
            kind.model_class,
            ", ".join(dict.fromkeys((*kind.default_metrics, *kind.metrics))),
        ]
        for kind in KINDS.values()
    ]
    lines += table(["kind of task", "`--task`", "model class", "metrics, the default ones first"], rows)
    lines += ["", "## Measured", "", shipped.describe_choice(shipped.choose_start())]
    lines += [f"\n{line}" for line in shipped.describe_conditions(shipped.read_figures())]
    rows = [
        [
            f"`{figure.recipe}`",
            shipped.DEVICES[figure.device],
            shipped.format_worst(figure),
            shipped.format_speed(figure),
            ", ".join(dict.fromkeys(f"{row.task} (n = {row.n})" for row in figure.accuracy)),
            ", ".join(dict.fromkeys(row.model for row in figure.accuracy)),
        ]
        for figure in shipped.read_figures()
    ]
    lines += [
        "",
        "From `recipes/figures.json`, which `tests/tools/tables.py` writes. A recipe that is not here was",
        "not measured in the form that is shipped.",
        "",
        *table(["recipe", "on", "accuracy, worst task", "speed-up", "tasks", "models"], rows),
    ]
    return "\n".join(lines) + "\n"


def _list(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


PAGES = {
    "docs/supported.md": supported_page,
    "docs/recipe.md": recipe_page,
    "docs/reference/json.md": json_page,
}


def main(arguments: list[str]) -> int:
    """Write or check the pages; returns the exit status."""
    stale = []
    for name, page in PAGES.items():
        path, text = ROOT / name, page()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if arguments != ["--check"]:
                path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} {'is not what the code says' if arguments == ['--check'] else 'written'}")
    return 2 if stale and arguments == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
