"""Options of commands and functions: one model gives the parameters of both, their help and their checks."""

import functools
import inspect
import os
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BeforeValidator, ValidationError, field_validator
from pydantic.fields import FieldInfo

from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.schema import Frozen

SECONDS = {"s": 1, "m": 60, "h": 3600, "": 1}
Result = TypeVar("Result")
Schema = TypeVar("Schema", bound="Options")


class Options(Frozen):
    """Options of a command and keyword arguments of its function."""

    @field_validator("*", mode="before")
    @classmethod
    def _accept_paths(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value


def parse_duration(text: str | float | None) -> float | None:
    """Return seconds of a number, or of one followed by s, m or h.

    Raises:
        ValueError: neither, or not positive.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([smh]?)", str(text).strip())
    if match is None or not float(match[1]) > 0:
        raise ValueError("no duration; give one such as 90s, 30m or 2h")
    return float(match[1]) * SECONDS[match[2]]


Duration = Annotated[float, BeforeValidator(parse_duration, json_schema_input_type=str)]


def parse_options(schema: type[Schema], values: dict[str, Any]) -> Schema:
    try:
        return schema(**values)
    except ValidationError as error:
        sentences = [
            f"--{str(item['loc'][0]).replace('_', '-')} {str(item['input'])[:100]}: "
            f"{item['msg'].removeprefix('Value error, ').removeprefix('Input ')}"
            for item in error.errors()
        ]
        raise UserError("; ".join(sentences)) from error


def take_options(
    function: Callable[..., Result],
    annotate: Callable[[str, FieldInfo], Any] | None = None,
) -> Callable[..., Result]:
    """Return a function whose parameters of type `Options` are keyword arguments, one for each field.

    Args:
        annotate: annotation of such a parameter; None: its type, with its help in the docstring.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    schemas: dict[str, type[Options]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if not (isinstance(hints[name], type) and issubclass(hints[name], Options)):
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        schemas[name] = hints[name]
        parameters += [
            inspect.Parameter(
                field,
                parameter.kind,
                default=parameter.empty if info.is_required() else info.default,
                annotation=annotate(field, info) if annotate else info.annotation,
            )
            for field, info in hints[name].model_fields.items()
        ]
    signature = inspect.Signature(parameters)

    @functools.wraps(function)
    def call(*positional: Any, **keywords: Any) -> Result:
        values = signature.bind(*positional, **keywords).arguments
        for name, schema in schemas.items():
            given = {field: values.pop(field) for field in schema.model_fields if field in values}
            values[name] = parse_options(schema, given)
        return function(**values)

    call.__signature__ = signature  # type: ignore[attr-defined]  # help and typer read it
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    if annotate is None:
        fields = [each for schema in schemas.values() for each in schema.model_fields.items()]
        lines = [f"    {field}: {info.description}" for field, info in fields]
        call.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines])
    return call
