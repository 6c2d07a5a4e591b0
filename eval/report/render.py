"""Templates."""

from pathlib import Path
from typing import Any

from qdqbench.eval.report.formats import (
    _number,
    _share_text,
    code,
    fenced,
    label,
    seconds,
    size,
    text,
    types,
)

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, context: dict[str, Any]) -> str:
    """Text of a template of the package; an unknown variable is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=select_autoescape(enabled_extensions=("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for function in (label, size, seconds, types, text, code, fenced):
        environment.filters[function.__name__] = function
    environment.globals |= {"number": _number, "share_text": _share_text}
    return environment.get_template(template).render(context)
