"""Figures of the documents: each is that of its file, one wherever it stands, and of the code as it is."""

import json
import re

import pytest
from tools import tables
from tools.tables import BENCHES, RUNS, Data, differences, figures_of, fill, measurement, read_data, run_of

from qdqbench.eval.bench.results import write_bench
from qdqbench.eval.runs.results import write_results
from qdqbench.quantize.recipe.schema import adapt_recipe, load_recipe
from qdqbench.quantize.tasks.kinds.embedding import PAIRS
from qdqbench.quantize.utils.errors import UserError

from ...support.benches import sample_bench
from ...support.prose import DOCS, ROOT
from ...support.runs import sample as sample_run
from ...support.trainings import qat_run, reconstruction

PAGES = [ROOT / "README.md", *DOCS]
MEASURED = ROOT / "docs" / "measured"
LATER = "2030-01-01T00:00"


def shipped(name="bert-int8-linears", **changes):
    return adapt_recipe(load_recipe(name), **changes).model_dump(mode="json")


def bench_of(recipe="bert-int8-linears", factor=1.0, **settings):
    """A bench of a shipped recipe, with its speed-ups multiplied."""
    bench = sample_bench()
    bench.recipe = shipped(recipe)
    for row in (row for cell in bench.configs for row in cell.speedups):
        row.value *= factor
    return bench.model_copy(update={"settings": bench.settings.model_copy(update=settings)})


def run_record():
    return run_of(sample_run(recipe=shipped()))


def test_the_pages_the_figures_and_the_csv_files_hold_what_was_measured():
    made = dict(tables.contents())
    assert {path.name for path in made} > {"README.md", "accuracy.csv", "speed.csv", "figures.json"}
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"write {path} with `python tools/tables.py`"


def test_every_measured_file_is_read_and_every_figure_is_shown():
    read = {path.name for path in MEASURED.rglob("*") if path.is_file() and path.parent != MEASURED}
    read -= {path.name for path in (*(MEASURED / RUNS).glob("*.json"), *(MEASURED / BENCHES).glob("*.json"))}
    assert read == {"results.json"}
    pages = "".join(path.read_text() for path in PAGES)
    assert [name for name in tables.FIGURES if tables.BEGIN.format(name) not in pages] == []
    loose = {path.name for path in MEASURED.iterdir() if path.is_file()}
    assert [name for name in loose if f"measured/{name}" not in pages] == []


def test_a_figure_within_a_sentence_begins_no_line():
    """A line that begins with a comment is HTML, in which links are none."""
    marks = re.compile(r"^\s*(?:[-*] )?<!-- figures:[\w-]+ -->\S", re.MULTILINE)
    assert [path.name for path in PAGES if marks.search(path.read_text())] == []


def test_a_figure_is_that_of_its_file():
    run = json.loads((MEASURED / RUNS / "bert-base-fourth-sst2-int8-attention-cuda.json").read_text())
    fp32, engine = (run["stages"][stage]["metrics"]["accuracy"] for stage in ("fp32", "engine"))
    row = f"SST-2, accuracy, n = 872 | {fp32:.4f} | {100 * (engine - fp32):+.2f} ± "
    assert row in (ROOT / "docs" / "results" / "real-size.md").read_text()


def test_two_results_of_one_measurement_are_refused_and_a_newer_one_replaces(tmp_path):
    measured, new = tmp_path / "measured", tmp_path / "runs" / "newer"
    for folder in (measured / RUNS, measured / BENCHES, new):
        folder.mkdir(parents=True)
    write_results(new, sample_run(created=LATER))
    write_bench(new / "bench.json", sample_bench())
    (measured / RUNS / "older.json").write_text(json.dumps(run_of(sample_run())))
    assert [path.relative_to(measured).as_posix() for path in tables.add(new, measured)] == [
        "runs/newer.json", "benches/newer.json",
    ]  # fmt: skip
    assert not (measured / RUNS / "older.json").exists()
    data = read_data(measured)
    assert (len(data.runs), len(data.benches)) == (1, 1)
    assert measurement(data.runs[0]) == measurement(run_of(sample_run()))
    (measured / RUNS / "again.json").write_text((measured / RUNS / "newer.json").read_text())
    with pytest.raises(UserError, match="measured the same thing; keep only one"):
        read_data(measured)
    with pytest.raises(UserError, match=r"holds no results\.json or bench\.json"):
        next(tables.add(measured / BENCHES, measured))


def test_accuracy_from_before_a_change_of_calibration_is_refused_by_name(tmp_path):
    (tmp_path / RUNS).mkdir()
    for seed, (name, created) in enumerate([("old", "2026-11-28T11:59"), ("new", LATER)]):
        record = run_of(sample_run(seed=seed, created=created))
        (tmp_path / RUNS / f"{name}.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"calibration has changed since old\.json; measure again"):
        read_data(tmp_path)


def test_only_what_is_between_the_marks_changes():
    text = "a <!-- figures:real -->old<!-- figures:end --> b <!-- figures:cpu --><!-- figures:end -->"
    made = fill(text, "page.md", str.upper)
    assert (
        made
        == "a <!-- figures:real -->REAL<!-- figures:end --> b <!-- figures:cpu -->CPU<!-- figures:end -->"
    )
    assert fill(made, "page.md", str.upper) == made


@pytest.mark.parametrize(
    "text",
    [
        "<!-- figures:real -->",
        "<!-- figures:end -->",
        "<!-- figures:end --><!-- figures:real -->",
        "<!-- figures:real --><!-- figures:cpu --><!-- figures:end --><!-- figures:end -->",
    ],
)
def test_marks_come_in_pairs(text):
    with pytest.raises(UserError, match=r"page\.md: each figure begins with"):
        fill(text, "page.md", str)


def test_an_unknown_figure_is_named():
    with pytest.raises(UserError, match="unknown figures: brt; there are speed, "):
        fill("<!-- figures:brt --><!-- figures:end -->", "page.md", str)


def test_what_a_run_was_given_is_no_change_and_other_settings_are():
    for given in ({"max_length": 256}, {"shapes": "auto"}, {"fields": {"export.max_length": 384}}):
        assert differences(shipped(**given)) == []
    recipe = shipped()
    recipe["gate"]["max_drop"] = 0.9  # decides nothing that a figure shows
    recipe["engine"]["shapes"] = [{"batch": [1, 32, 32], "length": [128, 128, 128]}]
    assert differences(recipe) == []
    assert [each.split()[0] for each in differences(recipe, timed=True)] == ["engine.shapes"]
    recipe = shipped()
    recipe["calibration"]["smoothing"] = 0.25
    assert differences(recipe) == ["calibration.smoothing 0.25 (now 0.65)"]
    assert differences(recipe, timed=True) == []  # the same kernels
    del recipe["calibration"]["outlier_channel_splitting"]  # of a version that did not have it
    assert differences(recipe, timed=True) == ["calibration.outlier_channel_splitting 0 (now 64)"]


def test_an_embedder_has_a_task_of_its_own():
    """STS-B by the cosine of embeddings is not STS-B by a regression head."""
    task = sample_run().task | {"name": "stsb"}
    assert run_of(sample_run(task=task)).task.name == "stsb"
    assert run_of(sample_run(task=task | {"type": PAIRS.name})).task.name == "embed"


def test_accuracy_is_of_the_engine_that_ran_else_of_the_graph_and_of_the_recipe_as_it_is():
    run = run_record()
    versus = run.stages.onnxruntime.vs_fp32
    for stage in ("onnxruntime", "engine"):
        run.stages.engine["vs_fp32"] = versus if stage == "engine" else None
        (found,) = figures_of([run], [])
        (row,) = found.accuracy
        named = found.recipe, found.backends, row.stage, row.task
        assert named == ("bert-int8-linears", "tensorrt", stage, "sst2")
        assert row.points == round(100 * versus.delta["accuracy"], 4)
        assert row.stderr == round(100 * versus.delta_stderr["accuracy"], 4)
        assert ("TensorRT" in row.where) == (stage == "engine")
    assert not found.holds
    run.recipe["calibration"]["smoothing"] = 0.25
    assert figures_of([run], []) == []


def test_a_cell_of_tensorrt_has_points_and_sqnr_and_is_empty_where_nothing_ran():
    ran, other = run_record(), run_record()
    ran.stages.engine["vs_fp32"] = ran.stages.onnxruntime.vs_fp32
    other.task["name"] = "mrpc"
    (row,) = [line for line in tables.tensorrt_table(Data([ran, other], [])).splitlines() if "MiniLM" in line]
    assert row == "| MiniLM-L6, `int8-linears` | -0.12 ± 0.21 | -0.12/21.4 |  |"


def test_the_lowest_of_several_benches_is_the_one_figure_of_a_shape():
    once, twice = bench_of(), bench_of(factor=0.5, engine_shapes="exact")
    cell = once.configs[0]
    alone = min(row.value for row in cell.speedups if row.system == "int8" and "fp16" in row.baseline)
    for benches in ([once, twice], [twice, once]):
        (found,) = figures_of([], benches)
        (row,) = (row for row in found.speed if (row.batch, row.length) == (cell.batch, cell.length))
        assert (row.value, row.over, row.padded) == (round(alone / 2, 4), "FP16", True)
        key = once.environment["gpu"], once.target.name, "int8-linears", "tensorrt_rtx"
        assert Data([], benches).lowest[*key, cell.batch, cell.length].value == alone / 2
    once.recipe["calibration"]["smoothing"] = "none"  # one operator less: other kernels
    assert figures_of([], [once]) == []


def test_former_kernels_of_cuda_are_in_no_figure():
    bench = bench_of(engine_shapes="exact")
    for system in (each for each in bench.systems if each.precision == "int8"):
        system.backend = "cuda 0.1.0"
    shown = []
    for bench.created in ("2026-11-30T03:00", "2026-11-29T23:00"):
        data = Data([], [bench])
        shown.append((len(data.lowest), len(data.figures), len([*tables.speed_rows(data)])))
    assert all(now > former for now, former in zip(*shown, strict=True))
    assert shown[1][:2] == (0, 0)
    assert shown[1][2] > 0  # other systems of the bench


def test_noise_is_in_decibels():
    bench = bench_of()
    cell = bench.configs[0]
    fp8 = cell.rows[0].model_copy(update={"system": "unpadded-fp8", "rel_error": 0.1})
    cell.rows = [cell.rows[0].model_copy(update={"system": "int8", "rel_error": 0.01}), fp8]
    (row,) = tables.fp8_noise_table(Data([], [bench])).strip().splitlines()[2:]
    assert row == f"| {bench.target.name}, {cell.batch} x {cell.length} | 40.0 | 20.0 |"
    bench.target.kind = "model"  # trained, and calibrated on random ids
    assert tables.fp8_noise_table(Data([], [bench])) == tables.fp8_noise_table(Data([], []))


def test_an_engine_of_another_recipe_in_a_bench_is_of_that_recipe():
    bench = bench_of()
    fastest = next(each for each in bench.systems if each.name == "int8")
    other = fastest.model_copy(update={"name": "int8-other", "recipe": shipped("bert-int8-ffn")})
    bench.systems.append(other)
    for cell in bench.configs:
        cell.speedups += [
            row.model_copy(update={"system": other.name}) for row in cell.speedups if row.system == "int8"
        ]
    assert {each.recipe for each in figures_of([], [bench])} == {"bert-int8-linears", "bert-int8-ffn"}


def test_training_is_compared_with_the_model_before_it():
    trained = run_of(qat_run(recipe=shipped("bert-int8-residual-qat")))
    head, _, row = tables.qat_table(Data([trained], [])).strip().splitlines()
    assert head == "| model | SST-2 |"
    assert row == "| `minilm-l6` `int8-residual`, TensorRT-RTX | 21.4/21.4/21.4 |"
    given = qat_run(recipe=shipped("bert-int8-attention"), reconstruction=reconstruction())
    assert run_of(given).recipe["name"] == "bert-int8-attention-reconstructed-qat"
    assert "21.4" not in tables.qat_table(Data([run_of(given)], []))
    alone = run_of(given.model_copy(update={"training": None}))
    assert alone.recipe["name"] == "bert-int8-attention-reconstructed"
    assert tables.qat_table(Data([alone], [])).count("21.4/21.4/21.4") == 1
    assert "minilm" not in tables.qat_layers_table(Data([alone, run_of(given)], []))
    *_, row = tables.qat_layers_table(Data([alone, alone], [])).strip().splitlines()
    assert row == "| `minilm-l6` | 1.5/1.5/1.5/1.5/1.5/1.5 |"
    head, _, gain, *counts = tables.qat_aims_table(Data([alone], [])).strip().splitlines()
    assert gain.endswith("| 0.0 (0.0-0.0) |")
    assert [row[row.rindex("| ", 0, -2) :] for row in counts] == ["| 0/0 of 1 |", "| 0/1 |", "| 1/1 |"]


def test_a_trainer_is_shown_at_its_best_rate(tmp_path, monkeypatch):
    given = {"system": "nncf-qat", "seconds": 9.0, "peak_bytes": 2**30, "f1": 0.8}
    trained = [
        given | {"sqnr_db": sqnr, "learning_rate": rate} for rate, sqnr in ((1e-6, 20.0), (1e-5, 19.0))
    ]
    alone = [{"system": "without-weight", "sqnr_db": 21.0}]
    folder = tmp_path / "docs" / "measured"
    folder.mkdir(parents=True)

    def write(model, trainings, centering=False):
        told = {"model": model, "recipe": "r", "task": "mrpc", "centering": centering, "trainings": trainings}
        (folder / f"trainings-{model}.json").write_text(json.dumps(told))

    def lines(table):
        return table(Data([], [])).strip().splitlines()

    monkeypatch.setattr(tables, "ROOT", tmp_path)
    write("m", [{"system": "ptq", "sqnr_db": 18.0, "f1": 0.7}, *trained])
    head, _, row = lines(tables.qat_trainers_table)
    assert head == "| model | PTQ | NNCF's QAT |"
    assert row == "| `m` `r` | 18.0/0.7000 | 20.0/0.8000/9/1.0 |"
    write("n", trained, centering=True)
    write("o", trained[:1])
    *_, own, other = lines(tables.qat_trainers_table)
    assert (own, other) == (row, "| `o` `r` |  | 20.0/0.8000/9/1.0 |")
    assert "centered" not in tables.qat_holds_table(Data([], []))
    write("m", alone, centering=True)
    assert "| `m` `r` |  | 21.0 |  |  |  |  |" in lines(tables.qat_holds_table)
    assert "`m`" not in tables.qat_trainers_table(Data([], []))
