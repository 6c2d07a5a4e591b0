"""Options of the command line: models of `qdqbench._options` as parameters that typer reads."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from qdqbench._options import POSITIONAL
from qdqbench.quantize.utils.options import take_options


def _complete_recipe(typed: str) -> list[str]:
    from qdqbench.quantize.recipe.schema import family_free_recipes, shipped_recipes

    return [name for name in (*family_free_recipes(), *shipped_recipes()) if name.startswith(typed)]


RecipeName = Annotated[
    str,
    typer.Argument(
        help="Shipped name, with or without the family, or YAML file.", autocompletion=_complete_recipe
    ),
]
LONG_CHOICES = 16  # characters; wider ones squeeze the help


def _strip(annotation: Any) -> Any:
    """Return a type as typer takes it: without constraints, a dict as a list of KEY=VALUE."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return list[str]
    if origin is Annotated:
        return str if any(isinstance(each, BeforeValidator) for each in inner[1:]) else _strip(inner[0])
    if origin is list:
        return list[_strip(inner[0])]  # type: ignore[misc]  # a type that is known here only
    if type(None) in inner:
        return Union[tuple(map(_strip, inner))]  # noqa: UP007  (of a tuple)
    return annotation


def _annotate(name: str, field: FieldInfo) -> Any:
    """Return the annotation that makes an option of a field; long choices stand in its help, and wrap."""
    shown = _strip(Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation)
    text, more = field.description, dict[str, Any]()
    if field.json_schema_extra == POSITIONAL:
        return Annotated[shown, typer.Argument(help=text, show_default=False)]
    choices = next((get_args(each) for each in (shown, *get_args(shown)) if get_origin(each) is Literal), ())
    if len("|".join(map(str, choices))) > LONG_CHOICES:
        more, text = {"metavar": "NAME"}, f"{text} One of {', '.join(map(str, choices))}."
    flags = [f"--{name.replace('_', '-')}"] if field.default is False else []
    if name == "out":
        flags = ["--out", "-o"]
    return Annotated[shown, typer.Option(*flags, help=text, **more)]


command: Callable[[Callable[..., None]], Callable[..., None]] = partial(take_options, annotate=_annotate)
