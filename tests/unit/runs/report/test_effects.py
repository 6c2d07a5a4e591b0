"""Sections of a report that stand only where something was measured."""

import pytest

from qdqbench.eval.runs.report import sections
from qdqbench.eval.runs.report.report import run_report
from qdqbench.quantize.report.document import Columns

from ....support.benches import sample_bench
from ....support.records import speedup
from ....support.runs import confusion, effects, sample

PARTS = {"changed_predictions": "changed", "classes": "classes", "layer_errors": "errors"}
PARTS |= {"model_changes": "besides"}


@pytest.mark.parametrize("part", PARTS)
def test_what_a_run_has_not_is_not_shown(part):
    report = run_report(effects(**{part: [] if part == "model_changes" else None}))
    assert {*PARTS.values()} - {section.anchor for section in report.sections} == {PARTS[part]}


@pytest.mark.parametrize(("classes", "shown"), [(12, ["FP32", "ONNX Runtime"]), (13, [])])
def test_confusion_of_many_classes_is_no_table(classes, shown):
    section = next(sections.answer_sections(sample(classes=confusion(tuple(map(str, range(classes)))))))
    columns = [block for block in section.blocks if isinstance(block, Columns)]
    assert [table.title for block in columns for (table,) in block.parts] == shown


def test_latency_stands_against_accuracy_where_both_are_known():
    bench, timed = sample_bench(), sample(speed=[speedup(1.5, baseline="FP16", config="1 x 128")])
    [[[table, note], _]] = [block.parts for block in sections.tradeoff_blocks(timed, bench)]
    texts = [[cell.text for cell in row.cells] for row in table.rows]
    assert texts == [["INT8", "0.8", "0.8956 ± 0.0103"], ["FP32", "1.9", "0.8968 ± 0.0103"]]
    assert "FP16 (0.72 ms) is not shown" in note.text
    alone = bench.model_copy(update={"systems": bench.systems[:1]})
    for results, times in ((timed, alone), (sample(), bench), (timed, None)):
        assert sections.tradeoff_blocks(results, times) == []
