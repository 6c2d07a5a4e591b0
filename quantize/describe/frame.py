"""A model taken apart: the list of its layers, and where in them a module is."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.describe.flow import Flow


@dataclass(frozen=True)
class Frame:
    """A model taken apart into its layers and what is around them."""

    layers: str  # full name, * for numbers
    prefix: str  # of the base model, with a dot
    modules: Mapping[str, Any]
    flow: Flow

    def path(self, name: str) -> tuple[str, str] | None:
        """Layer and path inside of it; None outside of the layers."""
        pattern = re.escape(self.layers).replace(r"\*", r"\d+")
        found = re.match(rf"({pattern}\.\d+)(?:\.(.+))?$", name)
        return (found[1], found[2] or "") if found else None

    def pattern(self, name: str) -> str:
        """A module's name with * for the number of its layer."""
        place = self.path(name)
        return f"{self.layers}.*.{place[1]}" if place else name

    def linears(self) -> list[str]:
        """Every linear by full name."""
        from torch import nn

        return [name for name, module in self.modules.items() if isinstance(module, nn.Linear)]


def list_of_layers(attentions: Collection[str], modules: Mapping[str, Any], name: str) -> str:
    """Full name of the list whose elements hold an attention each; * stands for a number.

    Args:
        attentions: full names of modules.
        modules: all of the model by full name.
        name: of the model type, for messages.

    Raises:
        UserError: there is no such list, or there are several.
    """
    patterns, numbers = set(), set()
    for attention in attentions:
        place = _list_around(attention, modules)
        if place is None:
            raise UserError(
                f"the layers of a {name!r} are no modules of one list (its attention is {attention}); its "
                "family needs a description by hand"
            )
        patterns.add(any_number(place[0]))
        numbers.add(place)
    if len(patterns) > 1 or len({number for _, number in numbers}) < len(numbers):
        lists = ", ".join(sorted({path for path, _ in numbers}))
        raise UserError(
            f"the layers of a {name!r} stand in several lists ({lists}), "
            "so that a number does not say which one is meant; its family needs a description by hand"
        )
    return patterns.pop()


def any_number(name: str) -> str:
    """A module's name with * for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _list_around(attention: str, modules: Mapping[str, Any]) -> tuple[str, int] | None:
    """The innermost list with an attention inside of an element, and the element's number."""
    from torch import nn

    parts = attention.split(".")
    for end in range(len(parts) - 1, 0, -1):
        path, number = ".".join(parts[:end]), parts[end]
        if isinstance(modules[path], nn.ModuleList) and number.isdecimal() and end + 1 < len(parts):
            return path, int(number)
    return None
