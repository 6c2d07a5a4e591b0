"""Options of commands and functions: one model gives the parameters of both, their help and their checks."""

import difflib
import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, ValidationError, ValidationInfo, field_validator

from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.schema import Frozen
from qdqbench.quantize.utils.system.process import invoked_as

LONGEST = 100  # characters of a value in an error
SECONDS = {"s": 1, "m": 60, "h": 3600, "": 1}
Result = TypeVar("Result")
Schema = TypeVar("Schema", bound="Options")


class Options(Frozen):
    """Options of a command and keyword arguments of its function."""

    @field_validator("*", mode="before")
    @classmethod
    def _accept_paths(cls, value: Any, info: ValidationInfo) -> Any:
        """Take a path as text, and one value as a list of one."""
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        kinds = get_args(cls.model_fields[str(info.field_name)].annotation)
        listed = any(get_origin(kind) is list for kind in kinds)
        return [value] if listed and isinstance(value, str | int | float) else value


def path_of(value: Any, name: str) -> Path:
    """Return an argument that is a path; a `UserError` says what it is else."""
    if isinstance(value, str | os.PathLike) and os.fspath(value):
        return Path(value)
    raise UserError(f"{name}={str(value)[:LONGEST]!r} of type {type(value).__name__} is no path; give one")


def parse_duration(text: str | float | None) -> float | None:
    """Return seconds of a number, or of one followed by s, m or h."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([smh]?)", str(text).strip())
    if match is None or not float(match[1]) > 0:
        raise ValueError("no duration; give one such as 90s, 30m or 2h")
    return float(match[1]) * SECONDS[match[2]]


Duration = Annotated[float, BeforeValidator(parse_duration, json_schema_input_type=str)]


def parse_options(schema: type[Schema], values: dict[str, Any], *, typed: bool = False) -> Schema:
    """Return options; a `UserError` names those that are wrong, as they were `typed` or as arguments."""
    try:
        return schema(**values)
    except ValidationError as error:
        sentences = []
        for item in error.errors():
            name, value = str(item["loc"][0]), " ".join(str(item["input"])[:LONGEST].split())
            shown = f"--{name.replace('_', '-')} {value}" if typed else f"{name}={value}"
            text = (
                "no such argument"
                if item["type"] == "extra_forbidden"
                else item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            )
            sentences.append(f"{shown}: {text}")
        raise UserError("; ".join(sentences)) from error


def take_options(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function with a keyword argument for each field of its parameter of a type `Options`."""
    hints = get_type_hints(function, include_extras=True)
    own = inspect.signature(function).parameters
    name = next(each for each in own if isinstance(hints[each], type) and issubclass(hints[each], Options))
    schema: type[Options] = hints[name]
    parameters: list[inspect.Parameter] = []
    for each, parameter in own.items():
        if each != name:
            parameters.append(parameter.replace(annotation=hints[each]))
            continue
        parameters += [
            inspect.Parameter(
                key,
                parameter.kind,
                default=parameter.empty if info.is_required() else info.default,
                annotation=info.annotation,
            )
            for key, info in schema.model_fields.items()
        ]
    signature = inspect.Signature(parameters)

    @functools.wraps(function)
    def call(*positional: Any, **keywords: Any) -> Result:
        if unknown := next((key for key in keywords if key not in signature.parameters), None):
            near = difflib.get_close_matches(unknown, signature.parameters, n=1, cutoff=0.0)[0]
            raise TypeError(f"{function.__name__}() has no argument {unknown!r}; the nearest is {near!r}")
        try:
            values = signature.bind(*positional, **keywords).arguments
        except TypeError as error:
            raise TypeError(f"{function.__name__}(): {error}") from None
        given = {key: values.pop(key) for key in schema.model_fields if key in values}
        with invoked_as(f"qdqbench.{function.__name__}"):
            return function(**values, **{name: parse_options(schema, given)})

    call.__signature__ = signature  # type: ignore[attr-defined]  # help reads it
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    lines = (f"    {key}: {info.description}" for key, info in schema.model_fields.items())
    call.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines])
    return call
