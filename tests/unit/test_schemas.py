"""Every field of a file of results, or of what is printed as JSON, stands in its document, and no other."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from qdqbench.eval.bench.results import Bench
from qdqbench.eval.compare.results import RunComparison
from qdqbench.eval.runs.made import Made
from qdqbench.eval.runs.study_results import Study
from qdqbench.quantize.cli import schemas
from qdqbench.quantize.core.results import SCHEMA_VERSION, Results
from qdqbench.quantize.core.training_results import Finetuning

DOCS = Path(__file__).parents[2] / "docs"
OURS = schemas.__name__
PAGES: dict[str, tuple[Any, ...]] = {
    "results": (Results, Made, Finetuning, Bench),
    "compare": (RunComparison,),
    "qat": (Study,),
    "json": tuple(each for each in vars(schemas).values() if getattr(each, "__module__", "") == OURS),
}
SHARED = ("results",)  # pages of what other files have too


def models(*roots: Any) -> dict[str, type[BaseModel]]:
    """Every model of schemas by name, from their roots down."""
    found: dict[str, type[BaseModel]] = {}
    waiting = [*roots]
    while waiting:
        item = waiting.pop()
        if isinstance(item, type) and issubclass(item, BaseModel):
            found[item.__name__] = item
            waiting += [field.annotation for field in item.model_fields.values()]
        waiting += get_args(item)
    return found


def documented(page: str) -> dict[str, list[str]]:
    """Fields in the tables of a page's sections, by the model that the heading names."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    sections = re.findall(r"(?ms)^##+ [^\n]*\(`(\w+)`\)\n(.*?)(?=^##|\Z)", text)
    return {name: re.findall(r"(?m)^\| `(\w+)` \|", section) for name, section in sections}


@pytest.mark.parametrize("page", PAGES)
def test_every_field_is_documented_and_no_other(page: str) -> None:
    found, own = models(*PAGES[page]), documented(page)
    assert own == {name: [*found[name].model_fields] for name in own if name in found}
    elsewhere = {name for other in SHARED for name in documented(other)}
    assert found.keys() <= own.keys() | elsewhere


def test_the_document_names_the_current_version() -> None:
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    assert f"The current version is {SCHEMA_VERSION}." in text
