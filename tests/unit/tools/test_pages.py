"""The generated documents are what the code says; every field of a recipe says what it means."""

import re

import pytest
from tools import pages

import qdqbench
from qdqbench.quantize.lint.findings import read_kinds
from qdqbench.quantize.models.families.known import FAMILIES
from qdqbench.quantize.recipe.schema import Recipe, shipped_recipes
from qdqbench.quantize.recipe.shipped import list_shipped
from qdqbench.quantize.tasks.task import TASK_KINDS

from ...support.commands import COMMANDS


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_is_what_the_code_says(name):
    _, mark, body = (pages.ROOT / name).read_text(encoding="utf-8").partition(pages.MARK)
    assert mark
    assert body == f"\n{pages.PAGES[name]()}", "write it with `python tools/pages.py`"


@pytest.mark.parametrize("name", pages.MACHINE_PAGES)
def test_the_table_of_machines_is_what_the_file_says(name):
    text = (pages.ROOT / name).read_text(encoding="utf-8")
    assert pages.MACHINES[0] in text
    assert pages.fill_machines(name, text) == text, "write it with `python tools/pages.py`"


def test_every_parameter_and_every_function_has_a_meaning():
    for page in (pages.cli_page(), pages.api_page()):
        rows = [line for line in page.splitlines() if re.match(r"\| `(?!\w+Error)", line)]
        assert len(rows) > 100
        assert [row for row in rows if row.endswith("| |")] == []


def test_the_command_line_is_whole():
    page = pages.cli_page()
    for words, command in COMMANDS.items():
        if not hasattr(command, "commands"):
            assert f"### `{' '.join(words)}`" in page
            assert all(
                not option.help or option.help.replace("|", "\\|") in page for option in command.params
            )


def test_every_public_name_and_every_code_is_there():
    page = pages.api_page()
    for name in qdqbench.__all__:
        assert re.search(rf"^(### |\| )`{name}[`(]", page, re.MULTILINE), name
    page = pages.checks_page()
    for code, kind in read_kinds("graph").items():
        assert re.search(rf"^\| `{code}` \|.*{re.escape(kind.edit)}.* \|$", page, re.MULTILINE), code


@pytest.mark.parametrize("section", pages.reached(Recipe).values(), ids=lambda section: section.__name__)
def test_every_field_of_a_recipe_says_what_it_means(section):
    assert [name for name, field in section.model_fields.items() if not field.description] == []


def test_every_schema_of_every_file_has_its_fields_and_an_anchor():
    text = pages.json_page()
    anchors = {line.lstrip("# ").lower().replace(" ", "-").replace(".", "").replace("`", "")
               for line in text.splitlines() if line.startswith("#")}  # fmt: skip
    roots = [root for roots in pages.FILES.values() for root in roots]
    for model in {model for root in roots for model in pages.reached(root).values()}:
        assert f"\n### {model.__name__}" in text
        assert [name for name, meaning in pages.meanings(model).items() if not meaning] == []
        for name in model.model_fields:
            assert f"\n| `{name}` | " in text
    assert {part.partition(")")[0] for part in text.split("](#")[1:]} <= anchors


def test_what_a_schema_allows_in_words():
    told = {
        '{"type": "integer", "exclusiveMinimum": 0}': "integer, over 0",
        '{"anyOf": [{"type": "number"}, {"type": "null"}]}': "number, or null",
        '{"type": "array", "items": {"$ref": "#/$defs/Row"}}': "list of: [Row](#row)",
        '{"type": "object", "additionalProperties": {"type": "number"}}': "object of: number",
        '{"type": "object", "additionalProperties": true}': "object",
        '{"const": 1}': "`1`",
        "{}": "any",
    }
    assert {text: pages.values(pages.json.loads(text), {"Row": "row"}) for text in told} == told


def test_every_model_type_and_recipe_is_named():
    text = pages.supported_page()
    for family in FAMILIES:
        assert all(f"`{name}`" in text for name in (*family.model_types, *family.needs))
    recipes = text.partition("## Measured")[0]
    rows = {
        line.split("`")[1]: line.split("|")[2:-1] for line in recipes.splitlines() if line.startswith("| `")
    }
    assert all(f"| {kind} |" in text for kind in TASK_KINDS)
    marked = {
        f"{family.name}-{recipe}"
        for recipe, marks in rows.items()
        for family, mark in zip(FAMILIES, marks, strict=True)
        if mark.strip()
    }
    assert marked == set(shipped_recipes()) == {row.recipe for row in list_shipped()}


def test_pages_that_are_not_are_an_exit_status_and_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PAGES", {"page.md": lambda: "text\n"})
    monkeypatch.setattr(pages, "MACHINE_PAGES", ())
    (tmp_path / "page.md").write_text(f"# By hand\n\n{pages.MARK}old")
    assert pages.main(["--check"]) == 2
    assert capsys.readouterr().out == "page.md is not what the code says\n"
    assert pages.main([]) == 0
    assert (tmp_path / "page.md").read_text() == f"# By hand\n\n{pages.MARK}\ntext\n"
    assert pages.main(["--check"]) == 0
