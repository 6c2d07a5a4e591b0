"""Measured tables: the golden files give the golden text, byte for byte, in any order."""

import copy
import itertools
import json
import shutil
from pathlib import Path

import pytest
from tools import tables
from tools.tables import BEGIN, END, differences, figures_of, insert, markdown, read_records, run_of

from qdqbench.eval.bench.results import headline_of, row_of, write_bench
from qdqbench.eval.runs.results import write_results
from qdqbench.quantize.recipe.schema import adapt_recipe, load_recipe
from qdqbench.quantize.tasks.types.embedding import PAIRS
from qdqbench.quantize.utils.errors import UserError

from ...support.benches import sample_bench
from ...support.runs import sample as sample_run
from ...support.trainings import qat_run

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "tables"
MEASURED = ROOT / "docs" / "measured"


def golden():
    """The bench, and the runs of fp16 and int8-linears on SST-2 and STS-B."""
    records = read_records([GOLDEN])
    by_name = {(each.recipe["name"], each.task.name): each for each in records if each is not records[0]}
    return records[0], *(by_name[key] for key in sorted(by_name))


def shipped(name="bert-int8-linears"):
    return load_recipe(name).model_dump(mode="json")


def of(kind, folder=MEASURED):
    return [each for each in read_records([folder]) if getattr(each, "kind", "bench") == kind]


def test_golden_results_give_the_golden_tables():
    expected = (GOLDEN / "expected.md").read_text(encoding="utf-8").rstrip("\n")
    assert markdown(read_records([GOLDEN])) == expected


def test_the_pages_and_the_figures_hold_what_was_measured():
    made = {path.relative_to(ROOT).as_posix(): (path.read_text(encoding="utf-8"), text)
            for path, text in tables.contents()}  # fmt: skip
    assert made.keys() == {*tables.PAGES, tables.FIGURES}
    for name, (there, text) in made.items():
        assert there == text, f"write {name} with `python tools/tables.py`"


@pytest.mark.long
def test_pages_that_hold_something_else_are_an_exit_status_and_are_written(tmp_path, monkeypatch, capsys):
    page = tmp_path / "docs" / "results" / "recipes.md"
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "recipes").mkdir()
    shutil.copy(ROOT / tables.FIGURES, tmp_path / tables.FIGURES)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    before = page.read_text()
    page.write_text(insert(before, "", "README.md"))
    assert tables.main(["--check"]) == 2
    assert capsys.readouterr().out == "docs/results/recipes.md does not hold these results\n"
    assert page.read_text() != before
    assert tables.main([]) == 0
    assert page.read_text() == before


def test_what_tables_read_of_a_run_stays(tmp_path):
    write_results(tmp_path, sample_run())
    before = markdown(read_records([tmp_path]))
    assert tables.main(["--summarize", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert markdown(read_records([tmp_path])) == before
    assert before.count("minilm") == 1


def test_results_of_a_recipe_that_changed_since_are_marked():
    bench, _, run, _ = golden()
    bench.recipe, run["recipe"] = shipped(), shipped()
    assert "†" not in markdown([run, bench])
    run["recipe"]["calibration"]["smoothing"] = 0.25
    run["recipe"]["gate"]["max_drop"] = 0.9  # decides nothing that a table shows
    made = markdown([run, bench])
    assert made.count("| `bert-int8-linears` † |") == 1
    assert "- `bert-int8-linears`: calibration.smoothing 0.25 (now 0.65)" in made
    del bench.recipe["calibration"]["outlier_channel_splitting"]  # of a version that did not have it
    assert "calibration.outlier_channel_splitting 0 (now 64)" in markdown([run, bench])


def test_what_a_run_was_given_is_told_and_is_no_change():
    _, _, run, _ = golden()
    for given, said in (({"max_length": 256}, "256 tokens"), ({"shapes": "auto"}, "shapes: auto")):
        run["recipe"] = adapt_recipe(load_recipe("bert-int8-linears"), **given).model_dump(mode="json")
        assert differences(run.recipe) == []
        assert f"| `bert-int8-linears`, {said} |" in markdown([run])
    run["recipe"]["calibration"]["smoothing"] = 0.25
    assert "| `bert-int8-linears`, shapes: auto † |" in markdown([run])
    fields = {"export.max_length": 384}  # which leaves the shapes
    run["recipe"] = adapt_recipe(load_recipe("bert-int8-linears"), fields=fields).model_dump(mode="json")
    assert differences(run.recipe) == []


def test_real_lengths_are_in_sequences_per_second(tmp_path):
    bench = sample_bench()
    cell = bench.configs[-1]
    cell.kind, cell.padded_to, cell.real_tokens, cell.padded_tokens = "dataset", [16, 40], 60, 80
    cell.headline = headline_of(bench.systems, cell)
    bench.settings.dataset, bench.settings.engine_shapes = "sst2", "both"
    bench.recipe = adapt_recipe(load_recipe("bert-int8-linears"), shapes="auto").model_dump(mode="json")
    write_bench(tmp_path / "bench.json", bench)
    made = markdown(read_records([tmp_path]))
    line = next(line for line in made.partition("### Real lengths")[2].splitlines() if "SST-2" in line)
    ours, fastest = (row_of(cell, name) for name in (cell.headline.system, cell.headline.baseline))
    for part in ("shapes: auto", "| 16, 40 | 25.0% |", f"{ours.sequences_per_s:,.0f} (INT8"):
        assert part in line
    assert f"| {fastest.sequences_per_s:,.0f} (" in line
    assert f"{cell.headline.value:.2f}x" in line
    assert "those of the data (shapes: auto)" in made


def test_the_order_of_the_files_does_not_matter():
    paths = sorted(GOLDEN.rglob("*.json"))
    assert len(paths) == 4
    expected = markdown(read_records([GOLDEN]))
    for order in itertools.permutations(paths):
        assert markdown(read_records(order)) == expected
    assert read_records([GOLDEN, *paths]) == read_records([GOLDEN])  # named twice, counted once


def test_every_number_is_from_a_file():
    """Changing a figure in a file changes the table, and without files there is no table."""
    bench, run, *_ = golden()
    before = markdown([bench, run])
    run.stages.fp32.metrics[run.task.metrics[0]] = 0.123456
    bench.configs[0].rows[0].median_ms = 777.25
    after = markdown([bench, run])
    for figure in ("12.35", "777.2"):
        assert figure in after
        assert figure not in before
    assert "|" not in markdown([])


def test_no_path_of_the_machine_gets_into_the_tables():
    _, run, *_ = golden()
    run.model["name"] = f"/home/someone/{run.model.name}"
    made = markdown([run])
    assert "/home" not in made
    assert "minilm-l6-sst2" in made


def test_no_mean_is_taken_over_results_of_different_settings():
    _, _, *both = golden()
    for run in both:
        run["recipe"] = shipped()
    assert ": mean over" in markdown(both)
    both[0]["recipe"]["calibration"]["outlier_channel_splitting"] = 0
    assert ": mean over" not in markdown(both)
    studies = of("study")
    mean = "| mean of 5 |  | `bert-int8-linears-per-tensor-qat` |"
    assert mean in markdown(studies)
    studies[0].recipes["bert-int8-linears-per-tensor-qat"]["calibration"]["smoothing"] = 0.25
    assert mean not in markdown(studies)


TEXT = f"# Recipes\n\nbefore\n\n{BEGIN}\nold | table\n{END}\n\nafter\n"


def test_only_what_is_between_the_markers_changes():
    made = insert(TEXT, "new\n\n", "README.md")
    assert made == f"# Recipes\n\nbefore\n\n{BEGIN}\nnew\n{END}\n\nafter\n"
    assert insert(made, "new", "README.md") == made


@pytest.mark.parametrize(
    "text", ["nothing", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}", f"{BEGIN}\n{END}\n{END}"]
)
def test_markers_must_be_there_once(text):
    with pytest.raises(UserError, match=r"README\.md must hold the line"):
        insert(text, "new", "README.md")


def test_two_files_of_one_measurement_are_refused(tmp_path):
    for name in ("a", "b"):
        shutil.copytree(GOLDEN, tmp_path / name)
    with pytest.raises(UserError, match="measured the same thing; name only one"):
        read_records([tmp_path])


def test_benches_of_other_shapes_are_tables_of_their_own(tmp_path):
    bench = sample_bench()
    for number, batches in enumerate(([1, 8], [32])):
        settings = bench.settings.model_copy(update={"batches": batches})
        (tmp_path / str(number)).mkdir()
        write_bench(tmp_path / str(number) / "bench.json", bench.model_copy(update={"settings": settings}))
    assert [each.settings.batches for each in read_records([tmp_path])] == [[1, 8], [32]]


def test_folders_without_results_and_files_of_something_else(tmp_path):
    with pytest.raises(UserError, match=r"holds no results\.json"):
        read_records([tmp_path])
    with pytest.raises(UserError, match="does not exist"):
        read_records([tmp_path / "results.json"])
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match="of this version"):
        read_records([tmp_path])


def test_attention_and_gate_are_shown():
    run = sample_run()
    run.gate.passed = False
    run.engine.expected_attention_int8, run.engine.attention_int8 = 6, 5
    made = markdown([run_of(run)])
    assert "36/36, attention 5/6" in made
    assert "| ✗ |" in made


def test_another_learning_rate_is_named_and_no_duplicate(tmp_path):
    for rate in (1.0, 0.5):
        recipe = shipped("bert-int8-residual-qat")
        recipe["qat"]["learning_rate"] *= rate
        record = run_of(qat_run(recipe=recipe))
        (tmp_path / str(rate)).mkdir()
        (tmp_path / str(rate) / tables.SUMMARY_FILE).write_text(json.dumps(record))
    made = markdown(read_records([tmp_path]))
    assert made.count("| `bert-int8-residual-qat` |") == 2  # its accuracy, and its held-out rows
    other = f"`bert-int8-residual-qat`, learning rate {recipe['qat']['learning_rate']:g} †"
    assert made.count(f"| {other} |") == 2


# Figures of `recipes list`


def test_an_embedder_has_a_task_of_its_own():
    """STS-B by the cosine of embeddings is not STS-B by a regression head."""
    task = sample_run().task | {"name": "stsb"}
    assert run_of(sample_run(task=task)).task.name == "stsb"
    assert run_of(sample_run(task=task | {"type": PAIRS.name})).task.name == "embed"


def test_figures_of_a_recipe_that_changed_since_count_no_more():
    _, _, run, _ = golden()
    run["recipe"] = shipped()
    (found,) = figures_of([run])
    versus = run.stages.engine.vs_fp32
    (row,) = found.accuracy
    assert (found.recipe, found.device, row.stage, row.task) == ("bert-int8-linears", "gpu", "engine", "sst2")
    assert (row.points, row.stderr) == (
        round(100 * versus.delta["accuracy"], 4),
        round(100 * versus.delta_stderr["accuracy"], 4),
    )
    run["recipe"]["calibration"]["smoothing"] = 0.25
    assert figures_of([run]) == []


def test_without_an_engine_that_ran_the_graph_is_what_was_measured():
    _, _, run, _ = golden()
    run["recipe"] = shipped()
    run.stages.engine["vs_fp32"] = None
    (found,) = figures_of([run])
    assert found.accuracy[0].stage == "onnxruntime"
    assert "TensorRT" not in found.accuracy[0].where
    assert not found.holds


def test_speed_is_of_the_recipe_and_of_those_beside_it_over_the_fastest_that_is_not_int8():
    bench = sample_bench()
    bench.recipe, bench.settings.engine_shapes = shipped(), "both"
    cell = bench.configs[0]
    found = {each.recipe: each for each in figures_of([bench])}
    over = [each.value for each in cell.speedups if each.system == "int8" and "fp16" in each.baseline]
    (speed,) = (each for each in found["bert-int8-linears"].speed if each.batch == cell.batch)
    assert speed.value == round(min(over), 4)
    assert (speed.over, speed.padded) == ("FP16", True)
    timed = copy.deepcopy(bench)
    timed.configs[0].rows.append(cell.rows[0].model_copy(update={"system": "unpadded-fp16"}))
    timed = {each.recipe: each for each in figures_of([timed])}["bert-int8-linears"].speed
    assert {(row.over, row.padded) for row in timed if row.batch == cell.batch} == {("FP16", False)}
    assert json.loads(json.dumps(found["bert-int8-linears"].model_dump()))
    slower = copy.deepcopy(bench)
    for row in slower.configs[0].speedups:
        row.value /= 2
    for both in ([bench, slower], [slower, bench]):  # the least of several benches of a shape
        least = {each.recipe: each for each in figures_of(both)}["bert-int8-linears"].speed
        assert [row.value for row in least if row.batch == cell.batch] == [round(min(over) / 2, 4)]
        assert len(least) == len(found["bert-int8-linears"].speed)
    alone = bench.model_copy(
        update={"settings": bench.settings.model_copy(update={"engine_shapes": "exact"})}
    )
    assert figures_of([alone]) == []
    bench.recipe["calibration"]["smoothing"] = 0.25  # the same kernels
    assert "bert-int8-linears" in {each.recipe for each in figures_of([bench])}
    bench.recipe["calibration"]["smoothing"] = "none"  # one operator less
    assert "bert-int8-linears" not in {each.recipe for each in figures_of([bench])}


def test_recipes_beside_it_that_changed_since_count_no_more_and_are_left_out():
    """`--also` engines carry their recipe as the bench carries its own."""
    bench, *_ = golden()
    own, other = shipped(), shipped("bert-int8-ffn")
    bench.recipe, bench.settings.engine_shapes = own, "both"
    fastest = next(each for each in bench.systems if each.name == "int8")
    also = fastest.model_copy(update={"name": "int8-bert-int8-ffn", "label": "beside", "recipe": other})
    bench.systems.append(also)
    for cell in bench.configs:
        for rows in (cell.rows, cell.speedups):
            rows += [row.model_copy(update={"system": also.name}) for row in rows if row.system == "int8"]
    assert "bert-int8-ffn" in {each.recipe for each in figures_of([bench])}
    assert "| beside |" in markdown([bench])
    other["calibration"]["outlier_channel_splitting"] = 0
    assert "bert-int8-ffn" not in {each.recipe for each in figures_of([bench])}
    made = markdown([bench])
    assert "| beside" not in made
    assert "- left out because the shipped recipe has changed since: beside" in made
