"""A recipe for a model of any type: a shipped one where its family is known, else one with its layout."""

import re
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.models.detection import detect_layout as detection
from qdqbench.quantize.models.families.family import Family
from qdqbench.quantize.models.families.known import BERT, known_family
from qdqbench.quantize.models.load import create_untrained, read_model_config
from qdqbench.quantize.recipe.schema import Recipe, dump_short_recipe, load_recipe
from qdqbench.quantize.recipe.sections import FamilyLayout
from qdqbench.quantize.recipe.shipped import list_shipped
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import HEAD_SIZES_TEXT, INT8_HEAD_SIZES
from qdqbench.quantize.utils.names import DEFAULT_RECIPE
from qdqbench.quantize.utils.schema import Strict

if TYPE_CHECKING:
    from rich.console import Group


class NewRecipe(Strict):
    """A recipe for a model, and what it was made from."""

    model: str
    model_type: str
    recipe: str  # its name
    text: str  # YAML
    shipped: list[str]  # recipes that fit as they are; none of a family that is not known here
    modules: list[detection.ModuleRow]  # none of a known family
    left: dict[str, str]  # not recognized: module, * for numbers, and the reason
    notes: list[str]


def new_recipe(name: str, revision: str | None = None) -> NewRecipe:
    """Write a recipe that puts every recognized linear of the encoder's layers in INT8.

    Raises:
        UserError: a model that cannot be used here, or in which no encoder layers were recognized.
    """
    config = read_model_config(name, revision)
    about = {"model": name, "model_type": config.model_type}
    if family := known_family(config.model_type):
        recipe = _fit_recipe(load_recipe(DEFAULT_RECIPE, lambda: family), config, family, name)
        shipped = [row.recipe for row in list_shipped(family)]
        text = dump_short_recipe(recipe)
        return NewRecipe(
            **about, recipe=recipe.name, text=text, shipped=shipped, modules=[], left={}, notes=[]
        )
    model = create_untrained(name, config)
    layout = detection.detect_layout(model)
    recipe, notes = _add_layout(layout, config, name)
    comments = [
        f"Written by `qdqbench recipes new` for models of type {config.model_type}.",
        *notes,
        *(f"stays in FP16: {module}: {why}" for module, why in layout.left.items()),
    ]
    text = "".join(f"# {line}\n" for line in comments) + dump_short_recipe(recipe)
    modules = detection.list_modules(model, layout)
    return NewRecipe(
        **about, recipe=recipe.name, text=text, shipped=[], modules=modules, left=layout.left, notes=notes
    )


def _add_layout(layout: detection.Recognized, config: Any, name: str) -> tuple[Recipe, list[str]]:
    family, notes = layout.family, []
    base = _fit_recipe(load_recipe(DEFAULT_RECIPE, lambda: BERT), config, family, name)
    int8 = {"weights": "int8/per-channel", "input": "int8/per-tensor"}
    rules: list[dict[str, Any]] = [{"match": f"{family.layers}.*", "type": "Linear", **int8}]
    rules += [
        {"match": f"{family.layers}.*.{path}", "type": "Linear", "precision": "fp16"}
        for path, role in family.linears.items()
        if role == "other"
    ]
    calibration = base.calibration.model_dump(mode="json")
    if family.attention is None:
        notes.append(
            "The attention stays in FP16: it does not go through transformers' AttentionInterface, or it "
            "rotates q and k."
        )
    elif layout.head_size in INT8_HEAD_SIZES:
        notes.append(
            "INT8 attention can be tried: attention: int8, with precision.never_quantize: [layernorm]."
        )
    else:
        notes.append(
            f"No INT8 attention: it needs a head size of {HEAD_SIZES_TEXT}, and this one has "
            f"{layout.head_size}."
        )
    if layout.gated:
        calibration["outlier_channel_splitting"] = 0
        notes.append("No outlier channels are split: the feed-forward is gated.")
    data = base.model_dump(mode="json") | {
        "name": re.sub(r"[^a-z0-9._-]", "-", f"{family.name}-{DEFAULT_RECIPE}".lower()),
        "description": f"Every recognized linear in the layers of {family.name} in INT8; attention in FP16.",
        "model": {"family": family.name, "layout": FamilyLayout.of(family).model_dump(mode="json")},
        "rules": rules,
        "calibration": calibration,
    }
    return Recipe.model_validate(data), notes


def _fit_recipe(recipe: Recipe, config: Any, family: Family, name: str) -> Recipe:
    try:
        longest = min(family.positions(config), recipe.export.max_length)
    except AttributeError as error:
        raise UserError(
            f"the configuration of model {name} does not say how many positions it has ({error})"
        ) from error
    data = recipe.model_dump(mode="json")
    data["export"]["max_length"] = longest
    if getattr(config, family.activation) != "gelu":
        data["export"]["gelu"] = "exact"  # the tanh form is of GELU alone
    for shapes in data["engine"]["shapes"]:
        shapes["length"] = [min(length, longest) for length in shapes["length"]]
    return Recipe.model_validate(data)


def render_new(new: NewRecipe) -> "Group":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if new.shipped:
        return Group(
            Text(f"{new.model} is of type {new.model_type}, which has recipes:", style="bold"),
            *(Text(f"  {name}") for name in new.shipped),
        )
    table = Table("module", "class", "count", "role", "becomes", box=None)
    table.columns[0].overflow = "fold"
    colors = {"INT8": "green", "FP16": "default", "": "dim"}
    for row in new.modules:
        becomes = Text(row.becomes, style=colors[row.becomes])
        table.add_row(Text(row.module or "(any)"), Text(row.class_name), str(row.number), row.role, becomes)
    left = [f"not recognized, stays in FP16: {module}: {why}" for module, why in new.left.items()]
    whole = Text("Every linear, convolution and product was recognized.", style="green")
    return Group(
        Text(f"{new.model} is of type {new.model_type}, which has no recipes here", style="bold"),
        table,
        *([Text(line, style="yellow") for line in left] or [whole]),
        *(Text(f"note: {note}") for note in new.notes),
    )
