"""Options of the command line: models of `qdqbench._options` as parameters that typer reads."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Union, get_args, get_origin

import annotated_types
import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from qdqbench.quantize.utils.options import take_options

RecipeName = Annotated[str, typer.Argument(help="Shipped name, with or without the family, or YAML file.")]


def note(text: str) -> None:
    """Print a line on stderr, beside what is printed."""
    sys.stderr.write(f"{text}\n")


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
    """Return the annotation that makes an option of a field: its help, bounds, and no flag to switch off."""
    bounds: dict[str, Any] = {}
    for each in field.metadata:
        if isinstance(each, annotated_types.Ge):
            bounds["min"] = each.ge
        elif isinstance(each, annotated_types.Le):
            bounds["max"] = each.le
    kind = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    flags = [f"--{name.replace('_', '-')}"] if field.default is False else []
    return Annotated[_strip(kind), typer.Option(*flags, help=field.description, **bounds)]


command: Callable[[Callable[..., None]], Callable[..., None]] = partial(take_options, annotate=_annotate)
