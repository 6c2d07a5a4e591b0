"""--json of every command: declared, documented, one object and nothing else on stdout."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from qdqbench.cli import run, schemas
from qdqbench.cli.app import main
from qdqbench.cli.commands import COMMANDS, EXAMPLES, PAGES
from qdqbench.eval.metrics.results import Gate, GateIssue
from qdqbench.eval.runs.results import Results
from qdqbench.quantize.recipe.schema import shipped_files
from qdqbench.quantize.utils.errors import CheckFailed

from ...support.runs import sample

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
ROWS = {name: row for rows in COMMANDS.values() for name, row in rows.items()}


@pytest.mark.parametrize("name", ROWS)
def test_each_row_has_its_function_and_the_pages_name_it(name):
    row = ROWS[name]
    module, _, function = row.function.partition(".")
    call = getattr(importlib.import_module(f"qdqbench.cli.{module}"), function)
    assert {*inspect.signature(call).parameters} - {"options"} == {*row.arguments}
    assert row.help.rstrip().endswith("."), "the options' docstring is the help"
    assert not row.json or re.search(rf"`{name}[` ]", DOCUMENT), f"docs/reference/json.md lacks {name}"
    assert (ROOT / PAGES / EXAMPLES[name][0]).is_file()


def said(monkeypatch, capsys, *words):
    """What a command prints, as JSON, and its exit status."""
    monkeypatch.setattr("sys.argv", ["qdqbench", *map(str, words), "--json"])
    capsys.readouterr()
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    told = capsys.readouterr()
    assert told.err == "" or code
    return json.loads(told.out), code


def test_recipes(monkeypatch, capsys):
    name = "bert-int8-linears"
    listed, _ = said(monkeypatch, capsys, "recipes", "list")
    assert name in [row["recipe"] for row in schemas.Recipes.model_validate(listed).recipes]
    shown = schemas.ShownRecipe.model_validate(said(monkeypatch, capsys, "recipes", "show", name)[0])
    assert (shown.name, Path(shown.source)) == (name, shipped_files()["int8-linears"])
    assert shown.recipe["calibration"]["samples"] > 0
    assert said(monkeypatch, capsys, "recipes", "validate", name)[0] == {"valid": [name]}


def test_the_schema_of_a_recipe_is_closed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["qdqbench", "recipes", "schema"])
    main()
    schema = json.loads(capsys.readouterr().out)
    assert schema["required"] == ["version", "name"]
    assert all(part["additionalProperties"] is False for part in (schema, *schema["$defs"].values()))


@pytest.mark.parametrize("as_json", [True, False])
def test_what_does_not_hold_is_printed_and_is_exit_status_2(as_json, capsys):
    failures = "11 of 12 GEMMs run in INT8", "the answers differ"
    issues = [GateIssue(code="verification", state="failed", detail=text) for text in failures]
    results = sample(until="build", gate=Gate(passed=False, max_drop=0.01, issues=issues))
    answer = run.answer(results, Path("runs/a"))
    assert isinstance(answer.error, CheckFailed)
    assert str(answer.error) == "11 of 12 GEMMs run in INT8; the answers differ"
    answer.show(json=as_json)
    out = capsys.readouterr().out
    if as_json:
        assert Results.model_validate_json(out) == results
    else:
        assert "✗ the answers differ" in out
        assert "qdqbench report runs/a" in out
