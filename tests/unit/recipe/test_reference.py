"""The recipe documents itself: descriptions, JSON Schema for editors, docs/recipe.md."""

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from qdqbench.quantize.recipe import reference, sections, training
from qdqbench.quantize.recipe.schema import Recipe

ROOT = Path(__file__).parents[3]
SECTIONS = [
    Recipe,
    *(
        found
        for module in (sections, training)
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, BaseModel) and found.model_fields
    ),
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_says_what_it_means(section):
    silent = [name for name, field in section.model_fields.items() if not (field.description or "").strip()]
    assert silent == []


def test_the_document_is_that_of_the_schema():
    assert (ROOT / "docs" / "recipe.md").read_text() == reference.markdown(), (
        "write it with `qdqbench recipes schema --markdown > docs/recipe.md`"
    )


def test_the_document_has_every_key_of_every_section():
    parts = reference.markdown().split("\n## ")[1:]
    told = {part.split("\n")[0]: part for part in parts}
    wanted = {section.__name__ for section in SECTIONS} - {"Training"}  # its fields are those of Qat
    assert set(told) == wanted | {"Recipe"}
    for section in SECTIONS:
        if section.__name__ in told:
            for name in section.model_fields:
                assert f"\n| `{name}` | " in told[section.__name__]


def test_the_schema_is_json_and_closed():
    schema = json.loads(json.dumps(reference.json_schema()))
    assert schema["required"] == ["version", "name"]
    closed = [schema, *schema["$defs"].values()]
    assert all(part["additionalProperties"] is False for part in closed)
    assert schema["$defs"]["Calibration"]["properties"]["samples"]["exclusiveMinimum"] == 0
    assert "percentile" in schema["$defs"]["Calibration"]["properties"]["method"]["pattern"]
