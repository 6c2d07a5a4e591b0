"""The reports say what the numbers say, whatever stages ran and whatever the names hold."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.eval.metrics.results import Agreement, Gate, GateIssue
from qdqbench.eval.runs.report import charts, report, sections
from qdqbench.eval.runs.report import verdict as wording
from qdqbench.eval.verification.results import BlockCheck, Verification
from qdqbench.quantize.report import formats
from qdqbench.quantize.report import svg as plots

from ....support.pages import on_terminal
from ....support.records import speedup
from ....support.runs import (
    bare,
    built,
    failed,
    finding,
    mnli,
    parity_of,
    parity_row,
    sample,
    unscored,
    written,
)


def test_a_recipe_without_int8_is_not_called_unproven():
    none = built(int8_gemms=0, expected_int8_gemms=0)
    said = wording.run_verdict(sample(engine=none, quantized_layers=[]))
    assert said.lines[0] == ("INT8", "nothing runs in INT8, as the recipe asks", "")
    assert said.lines[1][1].startswith("SST-2")


def test_an_engine_that_never_ran_is_not_a_passed_gate():
    unclear = GateIssue(code="engine", state="not_evaluated", stage="engine", detail="no GPU")
    said = wording.run_verdict(sample(gate=Gate(passed=True, max_drop=0.01, issues=[unclear])))
    assert (said.state, said.title) == ("unclear", "Graph passed, engine not run")


@pytest.mark.parametrize(("asked", "state"), [(None, ""), (1.2, ""), (9.0, "bad")])
def test_a_speed_below_what_the_gate_asks_is_red(asked, state):
    gate = Gate(passed=True, max_drop=0.01, min_speedup=asked)
    assert report._speed_tile(sample(speed=[speedup(1.31, 1.2, 1.4)], gate=gate)).state == state


def test_where_a_cpu_is_as_fast_without_int8_the_verdict_says_so_first():
    rows = [
        speedup(1.4, 1.3, 1.5, baseline="OpenVINO BF16", config="1 x 128"),
        speedup(0.9, 0.8, 0.95, baseline="OpenVINO BF16", config="8 x 128"),
        speedup(1.0, 0.99, 1.01, baseline="OpenVINO BF16", config="32 x 32"),
    ]
    gate = Gate(passed=True, max_drop=0.01)
    engine = built(backend="openvino", version="2026.4.1")
    said = wording.run_verdict(sample(engine=engine, gate=gate, speed=rows))
    assert said.title.endswith("but INT8 is slower at 1 of 3 shapes")
    assert said.notes[0].startswith(
        "Take OpenVINO BF16 for batches of 8 x 128, 32 x 32, where it is as fast or faster: "
        "`qdqbench run fp16 --backend openvino`; INT8 saves memory there, with a file 0."
    )
    same = wording.run_verdict(sample(engine=engine, gate=gate, speed=rows[2:]))
    assert (same.state, same.title.endswith("but INT8 is no faster")) == ("unclear", True)
    assert "`qdqbench run fp16" in same.notes[0]
    for others in (rows[:1], []):
        assert not any("run fp16" in note for note in wording.run_verdict(sample(speed=others)).notes)
    assert not any("run fp16" in note for note in wording.run_verdict(sample(gate=gate, speed=rows)).notes)


WRONG = finding(severity="error", effect="refused", code="uint8")
TENSORS = [parity_row("a.0.b", 100, 1), parity_row("a.1.b", 1000, 1, 2), parity_row("a.2.b", 1000, 5)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"findings": 2 * [WRONG]}, "check of the ONNX file: 2 errors: uint8 (2)"),
        ({"parity": parity_of(TENSORS)}, "layer parity: 2 of 3 tensors are over their own limit"),
        ({"engine": built(not_int8=["/x/MatMul"], int8_gemms=35)}, "not in INT8 in the engine: /x/MatMul"),
    ],
)
def test_a_failed_check_beside_a_passed_gate_is_red(change, reason, tmp_path):
    said = wording.run_verdict(sample(**change))
    assert (said.state, said.title, said.failures) == ("bad", "A check does not hold", [reason])
    assert 'class="verdict is-bad"' in written(sample(**change), tmp_path)[1]


def test_the_grid_reads_the_kernel_that_multiplies():
    grid = charts.precision_grid(failed())
    assert grid.kinds == ["query", "key", "value", "attention", "attention output", "intermediate", "output"]
    assert [layer for layer, _ in grid.rows] == list(range(6))
    for layer, cells in grid.rows:
        found = {
            kind: (cell.datatype, cell.as_asked) for kind, cell in zip(grid.kinds, cells, strict=True) if cell
        }
        expected = dict.fromkeys(grid.kinds, ("INT8", True)) | {"attention": ("FP16", True)}
        assert found == expected | ({"intermediate": ("FP16", False)} if layer == 2 else {})
    assert sum(grid.datatypes.values()) == 6 * 7 + 2
    outside = {module: cell.datatype for module, cell in grid.outside}
    assert outside == dict.fromkeys(("bert.pooler.dense", "classifier"), "FP16")


@pytest.mark.parametrize(
    ("inputs", "datatype", "as_asked"),
    [
        (["Int8", "Int8", "Int8", "Half"], "INT8", True),
        (["Half", "Half", "Half", "Half"], "FP16", False),
        (["Int8", "Half", "Half", "Half"], "FP16", False),
    ],
)
def test_the_grid_shows_attention_against_the_recipe(inputs, datatype, as_asked):
    results = sample(recipe={"attention": "int8"})
    assert results.engine is not None
    for row in results.engine.layers:
        if "_gemm_mha" in row.name:
            row.inputs = inputs
    grid = charts.precision_grid(results)
    column = [cells[grid.kinds.index("attention")] for _, cells in grid.rows]
    assert {(cell.datatype, cell.as_asked) for cell in column if cell} == {(datatype, as_asked)}


def test_the_grid_admits_a_layer_that_the_engine_does_not_list():
    results = sample()
    assert results.engine is not None
    results.engine.layers = [row for row in results.engine.layers if "layer.3" not in " ".join(row.onnx)]
    cells = dict(charts.precision_grid(results).rows)[3]
    assert {(cell.datatype, cell.as_asked) for cell in cells if cell} == {("absent", False)}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("bert.encoder.layer.11.attention.output.dense", (11, "attention output")),
        ("roberta.encoder.layer.0.output.dense", (0, "output")),
        ("distilbert.transformer.layer.4.ffn.lin1", (4, "intermediate")),
        ("deberta.encoder.layer.2.attention.self.query_proj", (2, "query")),
        ("model.layers.21.attn.Wqkv", (21, "query, key, value")),
        ("blocks.3.unknown", (3, "unknown")),
        ("classifier", (None, "classifier")),
    ],
)
def test_modules_are_placed_in_every_family(module, expected):
    assert charts.place(module) == expected


def test_reports_are_two_files_and_the_same_on_every_run(tmp_path):
    paths = report.write_reports(sample(), tmp_path)
    assert paths == [tmp_path / "report.md", tmp_path / "report.html"]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert tuple(path.read_text(encoding="utf-8") for path in paths) == written(sample(), tmp_path)


def test_charts_carry_no_date_and_no_metadata():
    run = sample()
    for svg in (charts.accuracy_svg(run, {}), charts.parity_svg(run), charts.ranges_svg(run, "amax")):
        assert "<metadata" not in svg
        assert "dc:date" not in svg
        assert plots.INK not in svg


def test_the_accuracy_chart_holds_every_stage_and_metric():
    svg = charts.accuracy_svg(mnli(), formats.LABELS | {"accuracy_mm": "accuracy (mismatched)"})
    for text in ("FP32", "ONNX Runtime", "accuracy (mismatched)", "0.8421", "0.8387", "0.8466", "0.8441"):
        assert f">{text}</text>" in svg
    assert ">skipped</text>" in charts.accuracy_svg(sample(), {})
    assert charts.accuracy_svg(unscored(), {}) == ""


def test_blocks_that_hold_are_not_marked_for_what_else_failed():
    limits = {"quantization_error": 0.2, "limit": 0.2, "position_error": 0.1, "position_limit": 0.2}
    limits |= {"systematic_error": 0.0, "systematic_limit": 0.1}
    block = BlockCheck(name="layer.0", n=1, error=0.1, nonfinite=0, nonfinite_shapes=[], **limits)
    results = sample()
    for error, shown in ((0.1, ("1 of 1", "")), (0.3, ("0 of 1", "bad"))):
        blocks = [block.model_copy(update={"error": error})]
        results.verification = Verification.model_construct(
            reference="fake_quant", blocks=blocks, blocks_not_checked=None, passed=False
        )
        (tile,) = (row for row in report._tiles(results) if row.title == "engine blocks")
        assert (tile.value, tile.state) == shown


@pytest.mark.parametrize("error", [0.0004, 0.0021, 0.0032, 0.0091, 0.03])
def test_numbers_below_the_accuracy_chart_stand_apart(error):
    results = sample()
    for row in results.stages.values():
        row.metrics, row.stderr = dict.fromkeys(row.metrics, 0.9391), dict.fromkeys(row.metrics, error)
    svg = charts.accuracy_svg(results, formats.LABELS)
    ticks = re.findall(r'xtick_.*?<text [^>]* x="([\d.]+)"[^>]*>([^<]+)</text>', svg, re.DOTALL)
    middles = [(float(x), len(number) * plots.TEXT * 0.64 / 2) for x, number in ticks]  # DejaVu Sans
    assert len(middles) >= 2
    for (left, half), (right, other) in pairwise(middles):
        assert right - left > half + other or right < left  # the next metric's


def test_the_spread_of_amax_is_one_sentence_if_it_is_known():
    results, said = sample(), "parts of the calibration rows is 2.5% in the median, and 5.0% at most ("
    assert f"{said}`bert.encoder.layer.0.output.dense`, input)." in sections._ranges_text(results)
    for row in results.quantizers:
        row.amax_spread = None
    assert "spread" not in sections._ranges_text(results)


def test_inputs_that_share_a_tensor_share_a_line():
    svg = charts.ranges_svg(sample(), "amax")
    assert ">query, key, value</text>" in svg
    assert ">attention output</text>" in svg
    assert charts.ranges_svg(bare(), "amax") == ""
    assert charts.parity_svg(bare()) == ""
    assert ">own limit, 100%</text>" in charts.parity_svg(sample())


@given(st.text())
def test_markdown_text_is_one_line_without_open_pipes_or_tags(value):
    for written_text in (formats.text(value), formats.code(value)):
        assert not {"\n", "\r"} & set(written_text)
        assert not re.search(r"(?<!\\)\|", written_text)
    assert not {"<", ">"} & set(formats.text(value))


@given(st.text(alphabet="`~a\n", max_size=30))
def test_no_text_closes_its_fence(value):
    fence, *body, last = formats.fenced(value).split("\n")
    assert fence == last
    assert all(fence not in line for line in body)


def test_the_terminal_shows_one_screen():
    results = sample(warnings=[f"warning number {index}" for index in range(30)])
    shown = on_terminal(report.run_report(results), 100)
    assert len(shown.splitlines()) <= 24
    assert "and 27 more in the report" in shown


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (formats.size, 512, "512 B"),
        (formats.size, 35_200_000, "35.2 MB"),
        (formats.size, 999_700, "1 MB"),
        (formats.size, 2_310_000_000, "2.31 GB"),
        (formats.seconds, 0.2399, "0.24 s"),
        (formats.seconds, 61.04, "61.0 s"),
        (formats.seconds, 245.2, "4 min 05 s"),
        (formats.types, ["Half", "Int8", "Half"], "2 FP16, INT8"),
        (formats.label, "accuracy_mm", "accuracy (mismatched)"),
        (formats.label, "my_task", "my task"),
    ],
)
def test_numbers_have_sensible_digits_and_units(function, value, expected):
    assert function(value) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/models/minilm-sst2", "minilm-sst2"),
        ("owner/minilm", "minilm"),
        ("runs/a/embedded/model", "built-in BERT"),
        ("model", "model"),
    ],
)
def test_a_model_is_called_by_its_last_part(name, expected):
    assert formats.model_label(name) == expected


@pytest.mark.parametrize(
    ("kept", "state", "title"),
    [(0.951, "good", "Gate passed"), (0.918, "unclear", "Gate passed, but 8.2% of the nearest texts change")],
)
def test_an_embedder_that_loses_neighbors_is_amber(kept, state, title):
    results = sample()
    last = wording.last_measured(results)
    assert last is not None
    assert wording.neighbors_kept(results) is None
    agreement = Agreement(
        n=200,
        values={"cosine": 0.996, "cosine_p1": 0.99, "neighbors": kept},
        stderr={"cosine": 0.001, "cosine_p1": 0.001, "neighbors": 0.005},
        cosine_counts=[0] * 29,
        neighbor_counts=[0] * 11,
    )
    last[1].vs_fp32 = last[1].vs_fp32.model_copy(update={"agreement": agreement})
    said = wording.run_verdict(results)
    assert (said.state, said.title) == (state, title)
    line = (
        "Neighbors",
        f"{kept:.4f} ± 0.0050 of the 10 nearest texts of FP32 stay",
        "" if state == "good" else state,
    )
    assert line in said.lines
