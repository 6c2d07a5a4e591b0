"""Options that belong together, as a dataclass: a command takes the object, the command line its fields."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose dataclass parameters are options, one for each field, in their place.

    Args:
        command: fields of its dataclasses are annotated as parameters of a command are. Two groups of one
            command must not share a name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {n: kind for n, kind in hints.items() if dataclasses.is_dataclass(kind)}
    shown: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            shown.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        told = get_type_hints(groups[name], include_extras=True)
        for field in dataclasses.fields(groups[name]):
            default = parameter.empty if field.default is dataclasses.MISSING else field.default
            shown.append(
                inspect.Parameter(
                    field.name, parameter.KEYWORD_ONLY, default=default, annotation=told[field.name]
                )
            )

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        command(**given)

    flat.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # what typer reads
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return flat
