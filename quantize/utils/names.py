"""Names and numbers in messages."""

from collections.abc import Iterable
from typing import Any

DEFAULT_RECIPE = "int8-linears"  # of the model's family, for commands that are not given one
MAX_NAMED = 12  # offenders named in one sentence before "and N more"


def name_list(names: Iterable[str], most: int = MAX_NAMED) -> str:
    """Return the first names, then how many more."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def without_formula(value: Any) -> Any:
    """Return a cell of a CSV file; a text that a spreadsheet would compute gets an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value[:1] in {*"=+-@\t\r"} else value
