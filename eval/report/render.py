"""Templates, and the two files that each report is: Markdown and HTML."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.eval.report.formats import (
    _number,
    _share_text,
    code,
    decibel,
    fenced,
    flat,
    label,
    seconds,
    size,
    text,
    ticked,
    types,
    yaml_text,
)
from qdqbench.eval.report.page import contents
from qdqbench.quantize.core.files import LOOK, write_text

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, context: dict[str, Any]) -> str:
    """Text of a template of the package; an unknown variable is an error."""
    return _templates().get_template(template).render(context)


@cache
def _templates() -> "Environment":
    """What keeps compiled templates: compiling takes longer than rendering."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FileSystemLoader([TEMPLATES, LOOK.parent]),
        autoescape=select_autoescape(enabled_extensions=("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for function in (
        label,
        decibel,
        size,
        seconds,
        types,
        text,
        code,
        fenced,
        flat,
        yaml_text,
        contents,
        ticked,
    ):
        environment.filters[function.__name__] = function
    environment.globals |= {"number": _number, "share_text": _share_text}
    return environment


def write(name: str, folder: Path, context: dict[str, Any]) -> list[Path]:
    """Write `NAME.md` and `NAME.html` (one file, no external request); neither where one cannot be rendered.

    Raises:
        UserError: the folder cannot be written.
    """
    texts = {folder / f"{name}.{kind}": render(f"{name}.{kind}.j2", context) for kind in ("md", "html")}
    for path, content in texts.items():
        write_text(path, content)
    return list(texts)
