"""Options of the command line: models of `qdqbench._options` as parameters that typer reads."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from qdqbench._options import POSITIONAL
from qdqbench.quantize.utils.options import Options, parse_options


def _complete_recipe(typed: str) -> list[str]:
    from qdqbench.quantize.recipe.schema import family_free_recipes, shipped_recipes

    return [name for name in (*family_free_recipes(), *shipped_recipes()) if name.startswith(typed)]


_NAMED = "Shipped name, with or without the family, or YAML file"
_START = f"{_NAMED} (default: the recipe that `recipes list` stars for this machine)."
RecipeName = Annotated[str, typer.Argument(help=f"{_NAMED}.", autocompletion=_complete_recipe)]
StartRecipe = Annotated[
    str | None, typer.Argument(help=_START, show_default=False, autocompletion=_complete_recipe)
]
REQUIRED: Any = inspect.Parameter.empty
Parameters = dict[str, tuple[Any, Any]]  # annotation and default by name
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


def _is_positional(field: FieldInfo) -> bool:
    return bool(field.json_schema_extra == POSITIONAL)


def _annotate(name: str, field: FieldInfo) -> Any:
    """Return the annotation that makes an option of a field; long choices stand in its help, and wrap."""
    shown = _strip(Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation)
    text, more = field.description, dict[str, Any]()
    if _is_positional(field):
        return Annotated[shown, typer.Argument(help=text, show_default=False)]
    choices = next((get_args(each) for each in (shown, *get_args(shown)) if get_origin(each) is Literal), ())
    if len("|".join(map(str, choices))) > LONG_CHOICES:
        more, text = {"metavar": "NAME"}, f"{text} One of {', '.join(map(str, choices))}."
    flags = [f"--{name.replace('_', '-')}"] if field.default is False else []
    if name == "out":
        flags = ["--out", "-o"]
    return Annotated[shown, typer.Option(*flags, help=text, **more)]


def take_typed(
    call: Callable[..., None], schema: type[Options], before: Parameters, after: Parameters
) -> Callable[..., None]:
    """Return `call` with parameters for typer: those `before`, the fields of its `options`, those `after`."""
    fields = {
        name: (_annotate(name, info), REQUIRED if info.is_required() else info.default)
        for name, info in sorted(schema.model_fields.items(), key=lambda item: not _is_positional(item[1]))
    }

    def typed(**values: Any) -> None:
        given = {name: values.pop(name) for name in fields if name in values}
        call(**values, options=parse_options(schema, given, typed=True))

    parameters = before | fields | after
    typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # help and typer read it
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in parameters.items()
        ]
    )
    typed.__annotations__ = {name: annotation for name, (annotation, _) in parameters.items()}
    return typed
