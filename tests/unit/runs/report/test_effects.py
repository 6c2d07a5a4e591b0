"""The report says what quantization changed, with the figures of its results and nothing made up."""

import re

import pytest

from qdqbench.eval.bench import results as timed
from qdqbench.eval.runs.report import sections
from qdqbench.eval.runs.report.report import run_report
from qdqbench.quantize.report.document import Columns, Report, Table
from qdqbench.quantize.report.formats import cleaned
from qdqbench.quantize.report.render import render_html, render_markdown

from ....support.records import speedup
from ....support.runs import answer, changed, confusion, effects, measured, sample


def written_sections(results):
    """Markdown and HTML of these sections alone."""
    results = cleaned(results)
    both = [*sections.answer_sections(results), *sections.layer_sections(results)]
    report = Report(run_report(results).page, both)
    return render_markdown(report), render_html(report)


PARTS = ["changed_predictions", "classes", "layer_errors", "model_changes"]


@pytest.mark.parametrize("part", PARTS)
def test_what_a_run_has_not_is_not_shown(part):
    _, html = written_sections(effects(**{part: [] if part == "model_changes" else None}))
    anchor = dict(zip(PARTS, ("changed", "classes", "errors", "besides"), strict=True))
    assert f'id="{anchor[part]}"' not in html
    assert sum(f'id="{name}"' in html for name in anchor.values()) == 3


def test_columns_that_no_sample_fills_are_left_out():
    row = answer(1, "moved", label=None, margin=None, fp32_margin=None)
    _, html = written_sections(sample(changed_predictions=changed([row], **{"moved": 1})))
    heads = re.search(r'id="changed-answers".*?</thead>', html, re.DOTALL)[0]
    names = "sample|text|class, FP32|class, ONNX Runtime|distance"
    assert re.findall(r"<th [^>]*>(.*?)</th>", heads) == names.split("|")
    assert "1 (0.1%) moved in ONNX Runtime, against FP32." in html


def test_a_list_that_was_cut_says_so():
    some = changed([answer(n) for n in range(3)], count=90, **{"regressed": 90})
    results = sample(changed_predictions=some)
    said = sections.changed_text(results, results.changed_predictions)
    assert said.endswith("The first 3 of 90 are listed, all are in changed.csv.")
    none = changed([])
    assert sections.changed_text(results, none).endswith("each has the answer of FP32 in ONNX Runtime.")


def confusions(results):
    blocks = next(sections.answer_sections(results)).blocks
    parts = [part for block in blocks if isinstance(block, Columns) for part in block.parts]
    return [block for part in parts for block in part if isinstance(block, Table)]


def test_confusion_of_many_classes_is_no_table():
    few, many = (sample(classes=confusion(tuple(map(str, range(n))))) for n in (12, 13))
    assert [table.title for table in confusions(few)] == ["FP32", "ONNX Runtime"]
    assert confusions(many) == []


def bench(times):
    rows = [
        timed.BenchRow(system=name, status="done", launches=9, median_ms=time, sequences_per_s=1.0)
        for name, time in times.items()
    ]
    cell = {"kind": "fixed", "batch": 1, "length": 16, "sequences": 1, "shapes": 1, "real_tokens": 16}
    return timed.Bench.model_construct(
        systems=[
            timed.BenchSystem.model_construct(
                name=name, label=name, precision=name.rpartition("-")[2], backend="b"
            )
            for name in times
        ],
        configs=[timed.BenchConfig.model_construct(**cell, rows=rows)],
        settings=timed.BenchSettings.model_construct(dataset=None),
        target=timed.BenchTarget.model_construct(name="m"),
    )


SPEED = [speedup(1.5, baseline="FP16", config="1 x 16")]


def tradeoff(results, measured_speed):
    """Rows, note and chart of latency against accuracy."""
    [[[table, note], [chart]]] = [block.parts for block in sections.tradeoff_blocks(results, measured_speed)]
    return [[cell.text for cell in row.cells] for row in table.rows], note.text, chart.draw()


def test_latency_stands_against_accuracy_where_both_are_known():
    times = {"int8": 1.0, "fp16": 1.5, "torch-fp32": 9.0, "fp32": 3.0}
    rows, note, _ = tradeoff(sample(speed=SPEED), bench(times))
    assert rows == [["INT8", "1", "0.8956 ± 0.0103"], ["FP32", "3", "0.8968 ± 0.0103"]]
    assert "FP16 (1.5 ms) is not shown" in note
    half = measured({"accuracy": 0.8945}, -0.0023)
    rows, note, svg = tradeoff(sample(speed=SPEED, fp16=half), bench(times))
    assert [row[0] for row in rows] == ["INT8", "FP16", "FP32"]
    assert "not shown" not in note
    assert all(f">{name}</text>" in svg for name in ("INT8", "FP16", "FP32"))


def test_no_chart_of_one_point_or_without_a_speed_of_these_files():
    assert sections.tradeoff_blocks(sample(speed=SPEED), bench({"int8": 1.0})) == []
    assert sections.tradeoff_blocks(sample(), bench({"int8": 1.0, "fp32": 2.0})) == []
    assert sections.tradeoff_blocks(sample(speed=SPEED), None) == []
