"""What is supported, read from the families and the shipped recipes: `recipes list` and docs/supported.md."""

from typing import NamedTuple

from qdqbench.quantize.families.family import Family
from qdqbench.quantize.families.known import FAMILIES
from qdqbench.quantize.recipe.schema import family_free_recipes, load_recipe
from qdqbench.quantize.tasks.task import KINDS, KNOWN

COMMAND = "qdqbench recipes list --markdown > docs/supported.md"


class Shipped(NamedTuple):
    """A recipe that comes with the package."""

    recipe: str
    family: str
    model_types: tuple[str, ...]  # of config.json
    description: str


def recipes(family: Family | None = None) -> list[Shipped]:
    """Shipped recipes, family by family; of one family only where it is given."""
    free = family_free_recipes()
    return [
        Shipped(recipe, each.name, each.model_types, load_recipe(recipe).description)
        for each in (FAMILIES if family is None else (family,))
        for recipe in (f"{each.name}-{name}" for name, having in free.items() if each.name in having)
    ]


def markdown() -> str:
    """docs/supported.md: families with their model types, the recipes of each, and kinds of tasks."""
    free, names = family_free_recipes(), [family.name for family in FAMILIES]
    lines = [
        "# What is supported",
        "",
        f"Written by `{COMMAND}`; a test compares. For a model of another `model_type`",
        "`qdqbench recipes new` writes a recipe that describes its layout.",
        "",
        "| family | `model_type` in config.json | inputs of the graph |",
        "|---|---|---|",
    ]
    for family in FAMILIES:
        types = ", ".join(f"`{name}`" for name in family.model_types)
        lines.append(f"| {family.name} | {types} | {', '.join(f'`{name}`' for name in family.inputs)} |")
    for family in FAMILIES:
        if family.needs:
            wanted = ", ".join(f"`{name}` {values[0]}" for name, values in family.needs.items())
            lines += ["", f"Of {family.name} only models with {wanted}."]
    lines += [
        "",
        "A recipe is called FAMILY-NAME. With a model NAME alone is enough: its type says which family.",
        "",
        f"| recipe | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for recipe, having in free.items():
        marks = " | ".join("yes" if name in having else "" for name in names)
        lines.append(f"| `{recipe}` | {marks} |")
    lines += [
        "",
        "| kind of task | `--task` | model class | metrics, the default ones first |",
        "|---|---|---|---|",
    ]
    for kind in KINDS.values():
        tasks = ", ".join(f"`{name}`" for name, task in KNOWN.items() if task.kind is kind)
        metrics = ", ".join(dict.fromkeys((*kind.default_metrics, *kind.metrics)))
        lines.append(f"| {kind.name} | {tasks} | {kind.model_class} | {metrics} |")
    return "\n".join(lines) + "\n"
