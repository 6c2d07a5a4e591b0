"""Models of a results schema, and the fields that its document lists."""

import re
from typing import Any, get_args

from pydantic import BaseModel


def schema_models(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Every model of a schema by name, from its root down."""
    found: dict[str, type[BaseModel]] = {}
    waiting: list[Any] = [root]
    while waiting:
        item = waiting.pop()
        if isinstance(item, type) and issubclass(item, BaseModel):
            found[item.__name__] = item
            waiting += [field.annotation for field in item.model_fields.values()]
        waiting += get_args(item)
    return found


def documented_fields(document: str, name: str) -> list[str] | None:
    """Fields in the table of a model's section; None where there is no such section."""
    section = re.search(rf"(?ms)^## [^\n]*\(`{name}`\)\n(.*?)(?=^##? |\Z)", document)
    return None if section is None else re.findall(r"(?m)^\| `(\w+)` \|", section[1])
