"""The commands `recipes ...`. What loads models is imported inside."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from qdqbench._options import CacheRecipeOptions, ListOptions, NewRecipeOptions, ShowOptions, ValidateOptions
from qdqbench.cli.answer import Answer
from qdqbench.cli.schemas import Recipes, ShownRecipe, ValidRecipes
from qdqbench.cli.terminal import console
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.recipe import schema, shipped
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import clean, name_list
from qdqbench.quantize.utils.options import Options

if TYPE_CHECKING:
    from qdqbench.quantize.lint.cache_import import FromCache
    from qdqbench.quantize.recipe.new import NewRecipe

WIDE = 100  # columns of a terminal that shows all of a table
SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def list_recipes(options: ListOptions) -> Answer:
    from qdqbench.quantize.models.load import load_config

    rows = shipped.list_shipped(None if options.model is None else family_of(load_config(options.model)))
    listed = []
    for row in rows:
        figures = [
            figure.model_dump(mode="json")
            | {"mean": figure.mean and figure.mean.model_dump(mode="json")}
            | {"held_out": figure.held_out and figure.held_out.model_dump(mode="json")}
            for figure in row.figures
        ]
        listed.append(row._asdict() | {"figures": figures})
    return Answer(Recipes(recipes=listed), _recipe_table(rows))


def show(recipe: str, options: ShowOptions) -> Answer:
    loaded = schema.find_recipe(recipe, options.model)  # without a model that of `run`, the built-in BERT
    source, text = schema.read_source(recipe, loaded)
    found = ShownRecipe(name=loaded.name, source=str(source), recipe=loaded.model_dump(mode="json"))
    return Answer(found, schema.dump_recipe(loaded) if options.resolved else text)


def validate(options: ValidateOptions) -> Answer:
    for name in options.recipe:
        schema.load_recipe(name)
    return Answer(ValidRecipes(valid=options.recipe), None, [f"{name}: valid" for name in options.recipe])


def new(options: NewRecipeOptions) -> Answer:
    from qdqbench.quantize.recipe.new import new_recipe, render_new

    made = new_recipe(options.model, options.revision)
    return _write_new(made, options, render_new(made))


def from_cache(options: CacheRecipeOptions) -> Answer:
    from qdqbench.quantize.lint.cache_import import recipe_from_cache

    made = recipe_from_cache(options.cache, options.model, options.onnx, revision=options.revision)
    return _write_new(made, options, _cache_lines(made))


def print_schema(options: Options) -> Answer:
    found = {"$schema": SCHEMA_DIALECT, **schema.Recipe.model_json_schema()}
    return Answer(found, json.dumps(found, indent=2) + "\n")


def _write_new(made: "NewRecipe | FromCache", options: NewRecipeOptions, shown: Any) -> Answer:
    path = options.out or Path(f"{made.recipe}.yaml")
    if path.exists():
        raise UserError(f"{path} is there already; give another --out")
    files.write_text(path, made.text)
    told = f"wrote {path}; run it with `qdqbench run {path} --model {options.model} --task ...`"
    return Answer(made, shown, [told])


def _recipe_table(rows: Sequence[shipped.Shipped]) -> Group:
    table, titles = Table(box=None, padding=(0, 1, 0, 0)), ("recipe", "in", *shipped.TITLES)
    narrow, lines = console().width < WIDE, list[str]()
    hidden = {"held out", "lost"} if narrow else set[str]()
    for title in (each for each in titles if each not in hidden):
        table.add_column(title, no_wrap=True)
    for row in rows:
        for number, figure in enumerate(row.figures):
            on = f"{shipped.BACKENDS[figure.backends]}{' *' if figure.backends in row.start_in else ''}"
            found = shipped.format_figure(figure, briefly=narrow)
            cells = (cell.replace(shipped.NOT_MEASURED, "") for cell in found)
            named = zip(titles, ("" if number else row.recipe, on, *cells), strict=True)
            table.add_row(*(cell for title, cell in named if title not in hidden))
    if left := [f"{row.recipe}{' *' if row.start_in else ''}" for row in rows if not row.figures]:
        lines.append(f"\nNot measured: {', '.join(left)}.")
    measured = [figure for row in rows for figure in row.figures]
    choice = f"* {shipped.describe_choice(shipped.choose_start())}"
    lines += [f"\n{line}" for line in (choice, *shipped.describe_conditions(measured, briefly=narrow))]
    about: dict[str, str] = {}
    for row in rows:
        about.setdefault(row.name, row.description)
    described = (Text.assemble((name, "bold"), f": {text}") for name, text in about.items())
    return Group(table, *lines, "", *described)


def _cache_lines(made: "FromCache") -> Group:
    total = len(made.given) + len(made.calibrated)
    lines = [
        f"TensorRT {made.version}, {made.calibrator}: amax of {len(made.given)} of {total} INT8 linears, "
        f"matched with {made.graph}; {made.unused} tensors of the cache are not used"
    ]
    for reason in dict.fromkeys(made.calibrated.values()):
        linears = [linear for linear, why in made.calibrated.items() if why == reason]
        lines.append(f"calibrated from data, because {reason}: {name_list(linears, 1)}")
    return Group(*(Text(clean(line)) for line in lines))
