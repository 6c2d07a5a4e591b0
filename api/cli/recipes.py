"""The commands `recipes ...`. Everything heavy is imported inside."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdqbench._options import CacheRecipeOptions, NewRecipeOptions
from qdqbench.cli.examples import epilog
from qdqbench.cli.options import RecipeName, command
from qdqbench.cli.terminal import Json, console, print_json, show, show_json
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import clean, name_list

if TYPE_CHECKING:
    from qdqbench.quantize.lint.cache_import import FromCache
    from qdqbench.quantize.recipe.new import NewRecipe
    from qdqbench.quantize.recipe.shipped import Shipped

WIDE = 100  # columns of a terminal that shows all of a table
SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
recipes_app = typer.Typer(no_args_is_help=True, help="List, show, write, validate and document recipes.")


@recipes_app.command("list", epilog=epilog("recipes list"))
def recipes_list(
    model: Annotated[str | None, typer.Option(help="Folder or hub id; list only what fits it.")] = None,
    json: Json = False,
) -> None:
    """List the shipped recipes with measured accuracy and speed, and which to start with."""
    from qdqbench.cli.schemas import Recipes
    from qdqbench.quantize.models.families.known import family_of
    from qdqbench.quantize.models.load import load_config
    from qdqbench.quantize.recipe.shipped import list_shipped

    rows = list_shipped(None if model is None else family_of(load_config(model)))
    if json:
        figures = (
            [
                figure.model_dump(mode="json")
                | {"mean": figure.mean and figure.mean.model_dump(mode="json")}
                | {"held_out": figure.held_out and figure.held_out.model_dump(mode="json")}
                for figure in row.figures
            ]
            for row in rows
        )
        show_json(
            Recipes(recipes=[row._asdict() | {"figures": of} for row, of in zip(rows, figures, strict=True)])
        )
    else:
        _print_recipes(rows)


@recipes_app.command("show", epilog=epilog("recipes show"))
def recipes_show(
    recipe: RecipeName,
    resolved: Annotated[bool, typer.Option("--resolved", help="Write every default out.")] = False,
    model: Annotated[str | None, typer.Option(help="Folder or hub id; its family completes a name.")] = None,
    json: Json = False,
) -> None:
    """Print a recipe as YAML."""
    from qdqbench.cli.schemas import ShownRecipe
    from qdqbench.quantize.recipe.schema import dump_recipe, find_recipe, load_recipe, read_source

    loaded = find_recipe(recipe, model) if model else load_recipe(recipe)
    source, text = read_source(recipe, loaded)
    if json:
        show_json(ShownRecipe(name=loaded.name, source=str(source), recipe=loaded.model_dump(mode="json")))
    else:
        sys.stdout.write(dump_recipe(loaded) if resolved else text)


@recipes_app.command("validate", epilog=epilog("recipes validate"))
def recipes_validate(
    recipe: Annotated[list[str], typer.Argument(help="Shipped names or YAML files.")], json: Json = False
) -> None:
    """Check recipe files without loading a model."""
    from qdqbench.cli.schemas import ValidRecipes
    from qdqbench.quantize.recipe.schema import load_recipe

    for name in recipe:
        load_recipe(name)
        if not json:
            console().print(f"{name}: valid", soft_wrap=True)
    if json:
        show_json(ValidRecipes(valid=recipe))


@recipes_app.command("new", epilog=epilog("recipes new"))
@command
def recipes_new(*, options: NewRecipeOptions, json: Json = False) -> None:
    """Write a recipe for a model of any type, and list what was recognized in it and what was not."""
    from qdqbench.quantize.recipe.new import new_recipe, render_new

    _write_new(new_recipe(options.model, options.revision), options, json, render_new)


@recipes_app.command("from-cache", epilog=epilog("recipes from-cache"))
@command
def recipes_from_cache(
    cache: Annotated[Path, typer.Argument(help="Calibration cache of TensorRT 5 to 10.", show_default=False)],
    *,
    options: CacheRecipeOptions,
    json: Json = False,
) -> None:
    """Write a recipe with the amax of a calibration cache, for the tensors that can be matched."""
    from qdqbench.quantize.lint.cache_import import recipe_from_cache

    made = recipe_from_cache(cache, options.model, options.onnx, revision=options.revision)
    _write_new(made, options, json, _cache_lines)


@recipes_app.command("schema", epilog=epilog("recipes schema"))
def recipes_schema() -> None:
    """Print the JSON Schema of a recipe: editors complete and check YAML with it."""
    from qdqbench.quantize.recipe.schema import Recipe

    print_json({"$schema": SCHEMA_DIALECT, **Recipe.model_json_schema()})


def _write_new(
    made: "NewRecipe | FromCache", options: NewRecipeOptions, json: bool, render: Callable[[Any], Any]
) -> None:
    from qdqbench.quantize.utils import files

    path = options.out or Path(f"{made.recipe}.yaml")
    if path.exists():
        raise UserError(f"{path} is there already; give another --out")
    files.write_text(path, made.text)
    told = f"wrote {path}; run it with `qdqbench run {path} --model {options.model} --task ...`"
    show(made, json, render, told)


def _print_recipes(rows: "Sequence[Shipped]") -> None:
    from rich.table import Table

    from qdqbench.quantize.recipe import shipped

    to, table = console(), Table(box=None, padding=(0, 1, 0, 0))
    titles = ("recipe", "on", *shipped.TITLES)
    narrow = to.width < WIDE
    hidden = {"held out"} if narrow else set[str]()
    for title in (each for each in titles if each not in hidden):
        table.add_column(title, no_wrap=True)
    for row in rows:
        for number, figure in enumerate(row.figures):
            on = f"{shipped.DEVICES[figure.device]}{' *' if figure.device in row.start_on else ''}"
            found = shipped.format_figure(figure, briefly=narrow)
            cells = (cell.replace(shipped.NOT_MEASURED, "") for cell in found)
            named = zip(titles, ("" if number else row.recipe, on, *cells), strict=True)
            table.add_row(*(cell for title, cell in named if title not in hidden))
    to.print(table)
    if left := [f"{row.recipe}{' *' if row.start_on else ''}" for row in rows if not row.figures]:
        to.print(f"\nNot measured: {', '.join(left)}.")
    measured = [figure for row in rows for figure in row.figures]
    choice = f"* {shipped.describe_choice(shipped.choose_start())}"
    for line in (choice, *shipped.describe_conditions(measured)):
        to.print(f"\n{line}")
    to.print()
    about: dict[str, str] = {}
    for row in rows:
        about.setdefault(row.name, row.description)
    for name, text in about.items():
        to.print(f"[bold]{name}[/bold]: {text}")


def _cache_lines(made: "FromCache") -> Any:
    from rich.console import Group
    from rich.text import Text

    total = len(made.given) + len(made.calibrated)
    lines = [
        f"TensorRT {made.version}, {made.calibrator}: amax of {len(made.given)} of {total} INT8 linears, "
        f"matched with {made.graph}; {made.unused} tensors of the cache are not used"
    ]
    for reason in dict.fromkeys(made.calibrated.values()):
        linears = [linear for linear, why in made.calibrated.items() if why == reason]
        lines.append(f"calibrated from data, because {reason}: {name_list(linears, 1)}")
    return Group(*(Text(clean(line)) for line in lines))
