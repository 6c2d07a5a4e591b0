"""A search and a cost measurement on a GPU: engines are built, proven and timed beside their twin."""

import pytest
from typer.testing import CliRunner

from qdqbench.eval.placement.cost_fit import fit_costs, read_rows
from qdqbench.eval.search.results import read_search
from qdqbench.quantize.cli.app import app
from qdqbench.quantize.recipe.schema import Recipe, dump_recipe, load_recipe

SHAPES = {"batch": [1, 8, 8], "length": [16, 32, 64]}


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_search_measures_engines(sst2, tmp_path):
    recipe = load_recipe("bert-int8-linears").model_dump(mode="json")
    recipe |= {"name": "mine", "gate": {"max_drop": 0.2}}
    recipe["calibration"] |= {"samples": 64, "bias_correction": False}
    recipe["engine"]["shapes"] = SHAPES
    recipe["export"]["max_length"] = 64
    path = tmp_path / "mine.yaml"
    path.write_text(dump_recipe(Recipe.model_validate(recipe)))
    words = [path, *sst2.options, "--out", tmp_path / "out", "--trials", 5, "--samples", 64, "--batch", 8]
    outcome = invoke("search", *words, "--length", 32, "--latency", "engine")
    assert outcome.exit_code == 0 or "gate does not hold" in str(outcome.exception)
    found = read_search(tmp_path / "out" / "search.json")
    assert found.source.mode == "engine"
    tried = [trial for trial in found.trials if trial.state == "complete"]
    assert len(tried) >= 5, [trial.reason for trial in found.trials]
    for trial in tried:
        assert trial.latency.ms > 0
        assert trial.latency.int8_gemms in (None, trial.latency.expected_int8_gemms)
        assert trial.latency.value == pytest.approx(
            trial.latency.baseline_ms / trial.latency.system_ms, rel=0.01
        )
    chosen = found.confirmed[0]
    assert chosen.engine["validation"].n == chosen.fake_quant["validation"].n
    assert not list((tmp_path / "out" / "work").glob("engines-*"))


def test_costs_are_measured_and_fitted(sst2, tmp_path):
    shapes = ["--batch", 1, "--batch", 8, "--length", 32, "--length", 64]
    rows = tmp_path / "rows.jsonl"
    outcome = invoke("cost", "measure", "--model", sst2.model, *shapes, "--placements", 4, "--out", rows)
    assert outcome.exit_code == 0, outcome.exception
    found = read_rows(rows)
    assert len(found) == 4 * 4
    assert all(row.ms_int8 > 0 and row.ms_fp16 > 0 for row in found)
    assert fit_costs(found).engines == 4
