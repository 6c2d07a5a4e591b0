"""What is supported is said by the code."""

from pathlib import Path

from qdqbench.quantize.families.known import FAMILIES, family_of
from qdqbench.quantize.recipe import supported
from qdqbench.quantize.recipe.schema import shipped_recipes
from qdqbench.quantize.tasks.task import KINDS

ROOT = Path(__file__).parents[3]


def test_the_document_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "supported.md").read_text() == supported.markdown(), f"run `{supported.COMMAND}`"


def test_the_readme_names_every_model_type_and_kind_of_task() -> None:
    types = ", ".join(f"`{name}`" for family in FAMILIES for name in family.model_types)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"- Model types: {types}." in text
    assert f"- Kinds of tasks: {', '.join(KINDS)}." in text


def test_every_model_type_and_recipe_is_told() -> None:
    text = supported.markdown()
    for family in FAMILIES:
        assert all(f"`{name}`" in text for name in (*family.model_types, *family.needs))
    recipes = text.partition("## Measured")[0]
    rows = {
        line.split("`")[1]: line.split("|")[2:-1] for line in recipes.splitlines() if line.startswith("| `")
    }
    assert all(f"| {kind} |" in text for kind in KINDS)
    told = {
        f"{family.name}-{recipe}"
        for recipe, marks in rows.items()
        for family, mark in zip(FAMILIES, marks, strict=True)
        if mark.strip()
    }
    assert told == set(shipped_recipes()) == {row.recipe for row in supported.recipes()}


def test_recipes_of_one_family() -> None:
    rows = supported.recipes(family_of("xlm-roberta"))
    assert {row.recipe for row in rows} == {name for name in shipped_recipes() if name.startswith("roberta-")}
    assert all("xlm-roberta" in row.model_types and row.description for row in rows)
