"""Measured tables: the golden files give the golden text, byte for byte, in any order."""

import copy
import itertools
import json
import shutil
from pathlib import Path

import pytest

from qdqbench.eval.bench.results import headline_of, row_of, write_bench
from qdqbench.eval.tables.changed import differences
from qdqbench.eval.tables.write import (
    BEGIN,
    END,
    find_results,
    find_searches,
    find_studies,
    insert,
    tables_markdown,
)
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.rundir.config import adapted

from ..bench.test_results import sample_bench
from ..runreport.test_report import sample as sample_run

ROOT = Path(__file__).parents[3]

GOLDEN = Path(__file__).parents[2] / "golden" / "tables"


def test_golden_results_give_the_golden_tables():
    made = tables_markdown(*find_results([GOLDEN]))
    assert made == (GOLDEN / "expected.md").read_text(encoding="utf-8").rstrip("\n")


def test_results_of_a_recipe_that_changed_since_are_marked():
    runs, benches = find_results([GOLDEN])
    recipe = load_recipe("bert-int8-linears").model_dump(mode="json")
    for result in (runs[1], benches[0]):
        result.recipe = copy.deepcopy(recipe)
    assert "†" not in tables_markdown(runs, benches)
    runs[1].recipe["calibration"]["smooth"] = 0.25
    runs[1].recipe["gate"]["max_drop"] = 0.9  # decides nothing that a table shows
    made = tables_markdown(runs, benches)
    assert made.count("| `bert-int8-linears` † |") == 1
    assert "- `bert-int8-linears`: calibration.smooth 0.25 (now 0.65)" in made
    del benches[0].recipe["calibration"]["split_outliers"]  # of a version that did not have it
    assert "calibration.split_outliers 0 (now 64)" in tables_markdown(runs, benches)


def test_a_length_that_the_run_was_given_is_told_and_is_no_change():
    runs, _ = find_results([GOLDEN])
    runs[1].recipe = adapted(load_recipe("bert-int8-linears"), max_length=256).model_dump(mode="json")
    assert differences(runs[1].recipe) == []
    made = tables_markdown(runs, [])
    assert "| `bert-int8-linears`, 256 tokens |" in made
    assert "†" not in made
    runs[1].recipe["calibration"]["smooth"] = 0.25
    made = tables_markdown(runs, [])
    assert "| `bert-int8-linears`, 256 tokens † |" in made
    assert "max_length" not in made


def test_shapes_of_the_data_are_told_and_are_no_change():
    runs, _ = find_results([GOLDEN])
    runs[1].recipe = adapted(load_recipe("bert-int8-linears"), shapes="auto").model_dump(mode="json")
    assert differences(runs[1].recipe) == []
    assert "| `bert-int8-linears`, shapes: auto |" in tables_markdown(runs, [])


def test_dataset_are_in_sequences_per_second(tmp_path):
    bench = sample_bench()
    cell = bench.configs[-1]
    cell.kind, cell.padded_to, cell.real_tokens, cell.padded_tokens = "dataset", [16, 40], 60, 80
    cell.headline = headline_of(bench.systems, cell)
    bench.settings.dataset, bench.settings.engine_shapes = "sst2", "both"
    bench.recipe = adapted(load_recipe("bert-int8-linears"), shapes="auto").model_dump(mode="json")
    write_bench(tmp_path / "bench.json", bench)
    made = tables_markdown(*find_results([tmp_path]))
    line = next(line for line in made.partition("### Real lengths")[2].splitlines() if "SST-2" in line)
    ours, fastest = (row_of(cell, name) for name in (cell.headline.system, cell.headline.baseline))
    for part in ("shapes: auto", "| 16, 40 | 25.0% |", f"{ours.sequences_per_s:,.0f} (INT8"):
        assert part in line
    assert f"| {fastest.sequences_per_s:,.0f} (" in line
    assert f"{cell.headline.value:.2f}x" in line
    assert "those of the data (shapes: auto)" in made


def test_an_engine_before_training_is_that_of_the_recipe():
    recipe = load_recipe("bert-int8-residual-qat")
    assert differences(recipe.model_dump(mode="json")) == []
    assert differences(recipe.ptq.model_dump(mode="json")) == []
    assert differences({"name": "bert-int8-residual-qat", "rules": 3}) == [
        "it is of another version of qdqbench"
    ]
    assert differences({"name": "mine"}) == []


def test_the_order_of_the_files_does_not_matter():
    paths = sorted(GOLDEN.rglob("*.json"))
    assert len(paths) == 4
    expected = tables_markdown(*find_results([GOLDEN]))
    for order in itertools.permutations(paths):
        assert tables_markdown(*find_results(order)) == expected


def test_every_number_is_from_a_file():
    """Changing a figure in a file changes the table, and without files there is no table."""
    runs, benches = find_results([GOLDEN])
    before = tables_markdown(runs, benches)
    runs[0].stages["fp32"].metrics[runs[0].task["metrics"][0]] = 0.123456
    benches[0].configs[0].rows[0].median_ms = 777.25
    after = tables_markdown(runs, benches)
    assert "12.35" in after
    assert "777.2" in after
    assert "12.35" not in before
    assert "|" not in tables_markdown([], [])


def test_no_path_of_the_machine_gets_into_the_tables():
    runs, benches = find_results([GOLDEN])
    for run in runs:
        run.model["name"] = f"/home/someone/{run.model['name']}"
    made = tables_markdown(runs, benches)
    assert "/home" not in made
    assert "minilm-l6-sst2" in made


def test_what_a_reader_must_know_stands_beside_the_figures():
    made = tables_markdown(*find_results([GOLDEN]))
    for needle in (
        "bert-base (random weights)",
        "NVIDIA H200",
        "TensorRT-RTX 1.4.0.76",
        "not officially supported",
        "torch 2.11.0",
        "36/36",
        "INT8 proven in 72 of 72 GEMMs",
        "1755 to 1755 MHz",
        "± 1.03",
        "slower ✗",
        r"Partial data: `fp16`: \--limit 64",
        "no engine",
    ):
        assert needle in made, needle


def test_every_row_has_the_width_of_its_table():
    widths = []
    for line in tables_markdown(*find_results([GOLDEN])).splitlines():
        if not line.startswith("|"):
            widths = []
            continue
        widths.append(line.count("|") - line.count(r"\|"))
        assert widths[-1] == widths[0]


def test_the_mean_is_over_recipes_that_have_every_task():
    made = tables_markdown(*find_results([GOLDEN]))
    section = made.partition("### Mean over")[2].partition("###")[0]
    assert "`int8-linears`" in section
    assert "`fp16`" not in section  # only one task
    assert "Mean over" not in tables_markdown(find_results([GOLDEN])[0][:1], [])


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
        find_results([tmp_path])


def test_benches_of_other_shapes_are_tables_of_their_own(tmp_path):
    bench = sample_bench()
    for number, batches in enumerate(([1, 8], [32])):
        settings = bench.settings.model_copy(update={"batches": batches})
        (tmp_path / str(number)).mkdir()
        write_bench(tmp_path / str(number) / "bench.json", bench.model_copy(update={"settings": settings}))
    assert [each.settings.batches for each in find_results([tmp_path])[1]] == [[1, 8], [32]]


def test_the_same_file_named_twice_counts_once():
    assert find_results([GOLDEN, *GOLDEN.rglob("*.json")]) == find_results([GOLDEN])


@pytest.mark.parametrize("content", ['{"configs": []}', "{}", "[]", "3"])
def test_files_of_something_else_are_refused(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(UserError, match="of this version"):
        find_results([path])


def test_folders_without_results_and_missing_files(tmp_path):
    with pytest.raises(UserError, match=r"holds no results\.json"):
        find_results([tmp_path])
    with pytest.raises(UserError, match="does not exist"):
        find_results([tmp_path / "results.json"])


def test_attention_and_gate_are_shown():
    run = sample_run()
    run.gate.passed = False
    assert run.engine is not None
    run.engine.expected_attention_int8, run.engine.attention_int8 = 6, 5
    made = tables_markdown([run], [])
    assert "36/36, attention 5/6" in made
    assert "| ✗ |" in made


def test_throughput_and_interrupted_benches(tmp_path):
    write_bench(tmp_path / "bench.json", sample_bench(complete=False))
    made = tables_markdown(*find_results([tmp_path]))
    assert "interrupted" in made
    assert "Sequences per second" in made
    assert json.loads((tmp_path / "bench.json").read_text())["complete"] is False


def test_the_shipped_tables_are_those_of_the_shipped_results():
    runs, benches = find_results([ROOT / "docs" / "measured"])
    text = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    studies = find_studies([ROOT / "docs" / "measured"])
    searches = find_searches([ROOT / "docs" / "measured"])
    assert insert(text, tables_markdown(runs, benches, studies, searches), "recipes/README.md") == text


def test_searches_show_what_was_chosen_and_what_would_have_been_better():
    searches = find_searches([ROOT / "docs" / "measured"])
    assert len(searches) == 3
    found = searches[0]
    made = tables_markdown([], [], [], [found])
    assert "| **found by the search** |" in made
    kept = [each for each in found.confirmed if each.status == "done" and not differences(each.recipe)]
    assert 1 < len(kept) < len(found.confirmed)
    assert made.count("| MRPC | F1 |") == len(kept)
    assert f"left out: {len(found.confirmed) - len(kept)} rows of shipped recipes" in made
    assert "agree within noise" in made
    assert "dominates" not in made
    kept[1].dominates = True
    found.agreement.within_noise = False
    found.outcome.failures = ["it lost 3 points"]
    made = tables_markdown([], [], [], [found])
    assert f"`{kept[1].name}` ✗ dominates the chosen one" in made
    assert "✗ they do not agree" in made
    assert "it lost 3 points" in made
    found.confirmed[3].status, found.confirmed[3].reason = "failed", "out of memory"
    made = tables_markdown([], [], [], [found])
    assert f"{found.confirmed[3].name} failed: out of memory" in made


def test_no_mean_is_taken_over_results_of_different_settings():
    runs, _ = find_results([GOLDEN])
    both = [run for run in runs if run.recipe["name"] == "int8-linears"]
    for run in both:
        run.recipe = load_recipe("bert-int8-linears").model_dump(mode="json")
    assert "### Mean over" in tables_markdown(both, [])
    both[0].recipe["calibration"]["split_outliers"] = 0
    assert "### Mean over" not in tables_markdown(both, [])
    studies = find_studies([ROOT / "docs" / "measured"])
    mean = "| mean of 5 |  | `bert-int8-linears-per-tensor-qat` |"
    assert mean in tables_markdown([], [], studies)
    studies[0].recipes["bert-int8-linears-per-tensor-qat"]["calibration"]["smooth"] = 0.25
    assert mean not in tables_markdown([], [], studies)


def test_memory_of_engines_by_shape():
    _, (bench,) = find_results([GOLDEN / "bert-base"])
    assert "Memory on the GPU" not in tables_markdown([], [bench])
    for cell in bench.configs:
        for row in cell.rows:
            if row.system in ("int8", "fp16"):
                row.engine_bytes, row.activation_bytes = 181_000_000, 252_000_000
    made = tables_markdown([], [bench])
    assert "Memory on the GPU, engine + one context:\n\n| shape | INT8 engine | FP16 engine |\n" in made
    assert made.count("| 181 MB + 252 MB | 181 MB + 252 MB |") == len(bench.configs)


DOCS = {
    "docs/cpu.md": "docs/measured-cpu",
    "docs/families.md": "docs/measured-families",
    "docs/heads.md": "docs/measured-heads",
    "docs/issue-4058.md": "docs/measured-embeddings",
    "docs/real_lengths.md": "docs/measured-lengths",
    "recipes/README.md": "docs/measured",
}


@pytest.mark.parametrize("page", DOCS)
def test_the_pages_hold_the_tables_of_their_results(page):
    before = (ROOT / page).read_text(encoding="utf-8")
    runs, benches = find_results([ROOT / DOCS[page]])
    studies, searches = find_studies([ROOT / DOCS[page]]), find_searches([ROOT / DOCS[page]])
    assert insert(before, tables_markdown(runs, benches, studies, searches), page) == before


def test_runs_on_a_cpu_name_backend_and_cpu():
    runs, _ = find_results([ROOT / "docs" / "measured-cpu"])
    made = tables_markdown(runs, [])
    assert "`bert-int8-linears`, OpenVINO" in made
    assert "†" not in made
    ran = [run for run in runs if run.engine.backend == "openvino" and run.task["name"] == "sst2"]
    (run,) = (run for run in ran if run.recipe["name"] == "bert-int8-linears")
    assert f"CPU {run.environment['cpu']}, {run.environment['cores']} cores, OpenVINO 2026" in made


def test_embeddings_are_listed_with_what_they_keep():
    runs, _ = find_results([ROOT / "docs" / "measured-embeddings"])
    made = tables_markdown(runs, [])
    kept = runs[0].stages["engine"].vs_fp32.agreement.values["neighbors"]
    assert made.count(", last stage: ") == len(runs) == 2
    assert f"neighbours kept {kept:.4f} ±" in made
