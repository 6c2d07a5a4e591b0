"""Results of a run without a report on a terminal: rows of stages, files, and what does not hold."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qdqbench.eval.reporting.formats import count_of, first, label, remarks, seconds, size
from qdqbench.eval.runs.gate.gate import issue_sentence
from qdqbench.eval.runs.report.verdict import delta_text, headline, part_text, remark_of, worst_first
from qdqbench.quantize.utils.results import EngineResult, Results

if TYPE_CHECKING:
    from rich.console import Group

MOST_FILES = 6


def stage_table(results: Results, folder: Path) -> "Group":
    """Return one row for each stage, then the files in the run directory, as a rich renderable."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table("stage", "result", "time", box=None, pad_edge=False)
    table.columns[0].no_wrap = table.columns[2].no_wrap = True
    for name, cost in results.timings.items():
        text = Text(stage_text(results, name), style="yellow" if _scored(name) in results.skipped else "")
        table.add_row(Text(name), text, "unchanged" if cost.reused else seconds(cost.wall_s))
    largest = sorted(results.files, key=lambda row: -row.bytes)
    names = [f"{row.name} {size(row.bytes)}" for row in largest]
    files = Text(f"{count_of(len(names), 'file')} in {folder}: ")
    files.append(", ".join(first(names, MOST_FILES, "there")))
    notes = remarks(*(first(lines, 3, "the report") for lines in (results.warnings, results.notes)))
    failures = first([*map(issue_sentence, results.gate.failures)], 5, "the report")
    return Group(table, files, *(Text(f"✗ {line}", style="red") for line in failures), *notes)


def stage_text(results: Results, name: str) -> str:
    """Return the result of a stage in one line; empty where its files say it."""
    if reason := results.skipped.get(_scored(name)):
        return f"skipped: {reason}"
    if _scored(name) in results.stages:
        return _accuracy(results, _scored(name))
    texts: dict[str, Callable[[Results], str]] = {
        "embedded": lambda results: "a small BERT and its data",
        "quantize": _calibration,
        "qat": _training,
        "export": _export,
        "check": _check,
        "parity": _parity,
        "build": lambda results: _engine(results.engine),
        "gpu_build": lambda results: _engine(results.gpu_engine),
        "verify": _verification,
    }
    return texts[name](results) if name in texts else ""


def _scored(stage: str) -> str:
    """Return the key in `stages` of what a stage evaluates."""
    return "fp32" if stage == "baseline" else stage


def _accuracy(results: Results, name: str) -> str:
    row = results.stages[name]
    text = f"{headline(row)}, n = {row.n:,}"
    if (versus := row.vs_fp32) is not None:
        text += f"; against FP32 {delta_text(row)}"
        if versus.disagreements is not None:
            text += f"; {versus.disagreements} of {versus.n:,} answers differ"
    return text


def _calibration(results: Results) -> str:
    int8, calibration = len(results.quantized_layers), results.data["calibration"]
    text = f"{int8} of {count_of(int8 + len(results.high_precision_layers), 'linear')} in INT8"
    for modules, what in (
        (results.quantized_attention, "attention"),
        (results.quantized_residual, "residual"),
    ):
        text += f", {count_of(len(modules), what)}" if modules else ""
    source = f"{count_of(calibration['samples'], 'sample')} of {calibration['split']}"
    return f"{text}; scales by {calibration['method']} of {source}"


def _training(results: Results) -> str:
    training = results.training
    assert training is not None
    text = f"{training.steps} of {training.planned_steps} steps in {seconds(training.seconds)}"
    if training.best_step == 0:
        return f"{text}; the weights before training are the best"
    return f"{text}; step {training.best_step} is the best"


def _export(results: Results) -> str:
    graphs = [row for row in results.files if row.fp32_ratio is not None]
    sizes = ", ".join(f"{row.name} {row.fp32_ratio:.2f}" for row in graphs if row.fp32_ratio != 1)
    return f"{count_of(len(graphs), 'ONNX file')}; of the size of FP32: {sizes}"


def _check(results: Results) -> str:
    counts = Counter((row.severity, row.code) for row in results.findings)
    listed = ", ".join(f"{n} of {code} ({severity})" for (severity, code), n in counts.items())
    return f"{count_of(len(results.findings), 'finding')}{': ' if listed else ''}{listed}"


def _parity(results: Results) -> str:
    parity = results.parity
    assert parity is not None
    if not parity.rows:
        return "no tensor is quantized"
    worst = worst_first(parity)[0]
    agreeing = f"{sum(row.holds for row in parity.rows)} of {count_of(len(parity.rows), 'tensor')}"
    return (
        f"{agreeing} agree with ONNX Runtime; nearest to its limit, at {part_text(worst)}: "
        f"{remark_of(worst)}; n = {parity.n}"
    )


def _engine(engine: EngineResult | None) -> str:
    assert engine is not None
    text = f"{engine.file} {size(engine.bytes)}, {label(engine.backend)} {engine.version}"
    for count, expected, what in (
        (engine.int8_gemms, engine.expected_int8_gemms, "GEMMs"),
        (engine.attention_int8, engine.expected_attention_int8, "attentions"),
        (engine.int8_residuals, engine.expected_int8_residuals, "residuals"),
    ):
        text += f"; {count} of {expected} {what} in INT8" if expected else ""
    return f"{text}; ahead of time, not run" if engine.ahead_of_time else text


def _verification(results: Results) -> str:
    verified = results.verification
    assert verified is not None
    passing = f"{sum(row.holds for row in verified.blocks)} of {count_of(len(verified.blocks), 'block')}"
    blocks = verified.blocks_not_checked or f"{passing} follow {label(verified.reference)}"
    parts = (("padding", verified.padding), ("answers", verified.predictions))
    bad = [name for name, part in parts if not part.holds]
    rest = f"{' and '.join(bad)} do not hold" if bad else "padding and answers hold"
    return f"{blocks}; {rest}; {count_of(len(verified.shapes), 'shape')}, n = {verified.predictions.n}"
