"""What is supported, read from the families and the shipped recipes: `recipes list` and docs/supported.md."""

from typing import NamedTuple

from qdqbench.quantize.families.family import Family
from qdqbench.quantize.families.known import FAMILIES
from qdqbench.quantize.recipe import figures
from qdqbench.quantize.recipe.schema import family_free_recipes, load_recipe
from qdqbench.quantize.tasks.task import KINDS, KNOWN

COMMAND = "qdqbench recipes list --markdown > docs/supported.md"


class Shipped(NamedTuple):
    """A recipe that comes with the package."""

    recipe: str
    name: str  # without the family
    family: str
    model_types: tuple[str, ...]  # of config.json
    description: str
    figures: tuple[figures.Figure, ...]  # by device; none where nothing was measured
    # devices on which it, or the one of its name in another family, is to start with
    start_on: tuple[figures.Device, ...]


def recipes(family: Family | None = None) -> list[Shipped]:
    """Shipped recipes, family by family; of one family only where it is given."""
    found, known = [], figures.figures()
    for each in FAMILIES if family is None else (family,):
        first = start_with(each)
        for name in (name for name, having in family_free_recipes().items() if each.name in having):
            recipe = f"{each.name}-{name}"
            measured = tuple(
                each
                for device in figures.DEVICES
                for each in known
                if (each.recipe, each.device) == (recipe, device)
            )
            on = tuple(device for device, chosen in first.items() if chosen == name)
            about = load_recipe(recipe).description
            found.append(Shipped(recipe, name, each.name, each.model_types, about, measured, on))
    return found


def start_with(family: Family | None = None) -> dict[figures.Device, str]:
    """By device the recipe to start with, without its family; for a family one of its own that holds."""
    known, free = figures.figures(), family_free_recipes()
    lost = {(each.recipe, each.device) for each in known if each.lost}
    names = {
        f"{other}-{name}": name
        for name, having in free.items()
        for other in having
        if family is None or family.name in having
    }

    def able(each: figures.Figure) -> bool:
        own = family and f"{family.name}-{names.get(each.recipe)}"
        return each.recipe in names and (own, each.device) not in lost

    measured = tuple(filter(able, known))
    chosen = {device: figures.start_with(device, measured) for device in figures.DEVICES}
    return {device: names[recipe] for device, recipe in chosen.items() if recipe is not None}


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
    lines += [
        "",
        "## Measured",
        "",
        figures.rule(start_with()),
        *(f"\n{line}" for line in figures.conditions(figures.figures())),
        "",
        "From `recipes/figures.json`, which `qdqbench tables` writes. A recipe that is not here was not",
        "measured in the form that is shipped.",
        "",
        "| recipe | on | accuracy, worst task | speed-up | tasks | models |",
        "|---|---|---|---|---|---|",
    ]
    for figure in figures.figures():
        tasks = ", ".join(dict.fromkeys(f"{row.task} (n = {row.n})" for row in figure.accuracy))
        models = ", ".join(dict.fromkeys(row.model for row in figure.accuracy))
        lines.append(
            f"| `{figure.recipe}` | {figures.DEVICES[figure.device]} | {figures.worst_text(figure)} "
            f"| {figures.speed_text(figure)} | {tasks} | {models} |"
        )
    return "\n".join(lines) + "\n"
