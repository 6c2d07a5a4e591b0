"""The figures of shipped recipes are those of the results files, and of recipes as they are shipped."""

import copy
import json
from pathlib import Path

from qdqbench.eval.tables.figures import figures_json, figures_of
from qdqbench.eval.tables.write import find_results, tables_markdown
from qdqbench.quantize.recipe.schema import load_recipe

from ..bench.test_results import sample_bench

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parents[2] / "golden" / "tables"
FOLDERS = [ROOT / "docs" / name for name in (
    "measured", "measured-cpu", "measured-families", "measured-heads", "measured-lengths",
)]  # fmt: skip


def shipped(name="bert-int8-linears"):
    return load_recipe(name).model_dump(mode="json")


def test_the_package_holds_the_figures_of_the_results():
    assert (ROOT / "recipes" / "figures.json").read_text(encoding="utf-8") == figures_json(FOLDERS)


def test_the_document_names_the_command_that_writes_them():
    command = f"qdqbench tables {' '.join(str(folder.relative_to(ROOT)) for folder in FOLDERS)}"
    assert f"`{command} --figures recipes/figures.json`" in (ROOT / "CONTRIBUTING.md").read_text()


def test_results_of_a_recipe_that_changed_since_count_no_more():
    runs, _ = find_results([GOLDEN])
    (run,) = (each for each in runs if (each.recipe["name"], each.task["name"]) == ("int8-linears", "sst2"))
    run.recipe = shipped()
    (found,) = figures_of([run], [])
    versus = run.stages["engine"].vs_fp32
    (row,) = found.accuracy
    assert (found.recipe, found.device, row.stage, row.task) == ("bert-int8-linears", "gpu", "engine", "sst2")
    assert (row.points, row.stderr) == (
        round(100 * versus.delta["accuracy"], 4),
        round(100 * versus.delta_stderr["accuracy"], 4),
    )
    run.recipe["calibration"]["smooth"] = 0.25
    assert figures_of([run], []) == []


def test_without_an_engine_that_ran_the_graph_is_what_was_measured():
    runs, _ = find_results([GOLDEN])
    run = copy.deepcopy(next(each for each in runs if each.recipe["name"] == "int8-linears"))
    run.recipe = shipped()
    run.stages["engine"].vs_fp32 = None
    (found,) = figures_of([run], [])
    assert found.accuracy[0].stage == "onnxruntime"
    assert "TensorRT" not in found.accuracy[0].where
    assert not found.holds


def test_speed_is_of_the_recipe_and_of_those_beside_it_over_the_fastest_that_is_not_int8():
    bench = sample_bench()
    bench.recipe, bench.settings.engine_shapes = shipped(), "both"
    cell = bench.configs[0]
    found = {each.recipe: each for each in figures_of([], [bench])}
    over = [each.value for each in cell.speedups if each.system == "int8" and "fp16" in each.baseline]
    (speed,) = (each for each in found["bert-int8-linears"].speed if each.batch == cell.batch)
    assert speed.value == round(min(over), 4)
    assert speed.over == "FP16"
    assert json.loads(json.dumps(found["bert-int8-linears"].model_dump()))
    slower = copy.deepcopy(bench)
    for row in slower.configs[0].speedups:
        row.value /= 2
    for both in ([bench, slower], [slower, bench]):  # the least of several benches of a shape
        least = {each.recipe: each for each in figures_of([], both)}["bert-int8-linears"].speed
        assert [row.value for row in least if row.batch == cell.batch] == [round(min(over) / 2, 4)]
        assert len(least) == len(found["bert-int8-linears"].speed)
    alone = bench.model_copy(
        update={"settings": bench.settings.model_copy(update={"engine_shapes": "exact"})}
    )
    assert figures_of([], [alone]) == []
    bench.recipe["calibration"]["smooth"] = 0.25
    assert "bert-int8-linears" not in {each.recipe for each in figures_of([], [bench])}


def test_recipes_beside_it_that_changed_since_count_no_more_and_are_left_out():
    """`--extra-recipe` engines carry their recipe as the bench carries its own."""
    (bench,) = (copy.deepcopy(each) for each in find_results([GOLDEN / "bert-base"])[1])
    own, other = (load_recipe(f"bert-int8-{name}").model_dump(mode="json") for name in ("linears", "ffn"))
    bench.recipe, bench.settings.engine_shapes = own, "both"
    fastest = next(each for each in bench.systems if each.name == "int8")
    also = fastest.model_copy(update={"name": "int8-bert-int8-ffn", "label": "beside", "recipe": other})
    bench.systems.append(also)
    for cell in bench.configs:
        same = [row.model_copy(update={"system": also.name}) for row in cell.rows if row.system == "int8"]
        more = [s.model_copy(update={"system": also.name}) for s in cell.speedups if s.system == "int8"]
        cell.rows += same
        cell.speedups += more
    assert "bert-int8-ffn" in {each.recipe for each in figures_of([], [bench])}
    assert "| beside |" in tables_markdown([], [bench])
    other["calibration"]["smooth"] = 0.25
    assert "bert-int8-ffn" not in {each.recipe for each in figures_of([], [bench])}
    tables = tables_markdown([], [bench])
    assert "| beside" not in tables
    assert "- left out, as what is shipped has changed since: beside" in tables
