"""What a stage command prints: one line a stage with its figures, and what does not hold."""

import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from qdqbench.eval.metrics.results import Gate, GateIssue, StageResult
from qdqbench.eval.runs.gate import issue_sentence, judge_stages
from qdqbench.eval.runs.report.report import stages_report
from qdqbench.eval.runs.results import FileRow, Results
from qdqbench.quantize.lint.findings import FindingRow
from qdqbench.quantize.pipeline.pipeline import Timing
from qdqbench.quantize.report.render import render_screen

from ...support.records import comparison, engine_result
from ...support.runs import parity_of, parity_row


def partial_results(*stages, failures=(), **fields):
    """Results of these stages, the first one reused."""
    cost = {"wall_s": 12.3, "cpu_s": 20.5, "peak_rss_bytes": 1}
    timings = {name: Timing(**cost, reused=name == stages[0]) for name in stages}
    about = dict.fromkeys(("created", "command"), "") | {"seed": 0}
    about |= {name: {} for name in ("recipe", "model", "task", "environment")}
    issues = [GateIssue(code="verification", state="failed", detail=text) for text in failures]
    gate = Gate(passed=not issues, max_drop=0.01, issues=issues)
    given = {"data": {}, "warnings": [], "gate": gate, "timings": timings, "until": stages[-1]}
    return Results(**about | given | fields)


def engine(**changes):
    layer = {"name": "k", "kind": "gemm", "onnx": ["/a/MatMul"], "inputs": ["f32"], "constants": []}
    fields = {"backend": "openvino", "version": "2026.4", "ahead_of_time": False, "file": "model.int8.engine"}
    fields |= {"bytes": 23_400_000, "attention_fused": 2, "attention_int8": 1, "expected_attention_int8": 1}
    return engine_result(12, **fields | {"layers": [layer | {"outputs": ["f32"]}]} | changes)


def parity(differing):
    return parity_of([parity_row("a", 1000, 0, 0, 0.001), parity_row("b", 1000, differing, 1, 0.001)])


SCORED = StageResult(
    status="done",
    metrics={"accuracy": 0.875},
    stderr={"accuracy": 0.0125},
    n=1200,
    vs_fp32=comparison({"accuracy": -0.01}, 0.002, n=1200, disagreements=31),
)


def test_every_stage_has_a_row_and_names_are_no_markup():
    results = partial_results(
        "baseline",
        "export",
        "[red]odd",
        stages={"fp32": SCORED},
        files=[FileRow(name=f"{n}.onnx", bytes=1000 * n, fp32_ratio=None) for n in range(1, 10)],
        notes=["n1", "n2", "n3", "n4", "[bold]n5"],
        warnings=["part of the data"],
        failures=["the [gate]"],
    )
    shown = StringIO()
    Console(file=shown, width=80).print(render_screen(stages_report(results, Path("runs/a"))))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(shown.getvalue().split())
    assert re.search(r"baseline accuracy 0\.8750 .* unchanged", text)
    assert "[red]odd 12.3 s" in text
    assert "9 files in runs/a: 9.onnx 9 kB, 8.onnx 8 kB" in text
    assert "and 3 more in there" in text
    assert "and 2 more in the report" in text
    places = [text.index(each) for each in ("✗ the [gate]", "warning: part of the data", "note: n1")]
    assert places == sorted(places)  # as in a report


def test_what_does_not_hold_is_named():
    finding = {"node": "/a", "why": "so", "fix": "mend"}
    wrong = FindingRow(severity="error", effect="wrong", code="wrong-axis", **finding)
    odd = FindingRow(severity="warning", effect="note", code="odd", **finding)
    lost = {"engine": engine(int8_gemms=11, not_int8=["/a/MatMul"])}
    results = partial_results("build", findings=[wrong, wrong, odd], parity=parity(9), **lost)
    *checks, second, third = failures_of(results)
    assert checks == ["check: wrong-axis at /a: so"] * 2
    assert second == "ONNX Runtime does not follow the fake-quant model in b"
    assert "1 GEMM that should be in INT8 is not" in third
    assert failures_of(partial_results("build", engine=engine(), parity=parity(0))) == []
    # a recipe may ask for no INT8; who builds the engine asks whether it has it
    assert failures_of(partial_results("engine", **lost), None) == []
    assert len(failures_of(partial_results("verify", **lost), None)) == 1


def failures_of(results, require_int8="all"):
    gate = SimpleNamespace(require_int8=require_int8, max_drop=0.01)
    judged = judge_stages(SimpleNamespace(recipe=SimpleNamespace(gate=gate)), results)
    assert judged.passed == (not judged.issues)
    return [*map(issue_sentence, judged.failures)]
