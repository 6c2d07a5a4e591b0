"""What the stages of a run have made, on a terminal."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from qdqbench.eval.report.formats import count_of, first, label, remarks, seconds, size
from qdqbench.eval.runreport.verdict import delta_text, headline, part_text, remark_of, worst_first
from qdqbench.eval.runs.made import Made
from qdqbench.quantize.core.results import EngineResult

if TYPE_CHECKING:
    from rich.console import Group

MOST_FILES = 6


def made_lines(made: Made) -> "Group":
    """One row a stage, then the files, as a rich renderable."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table("stage", "what it made", "time", box=None, pad_edge=False)
    table.columns[0].no_wrap = table.columns[2].no_wrap = True
    for name, cost in made.timings.items():
        text = Text(stage_text(made, name), style="yellow" if _scored(name) in made.skipped else "")
        table.add_row(Text(name), text, "unchanged" if cost.reused else seconds(cost.wall_s))
    largest = sorted(made.files, key=lambda row: -row.bytes)
    names = [f"{row.name} {size(row.bytes)}" for row in largest]
    files = Text(f"{count_of(len(names), 'file')} in {made.folder}: ")
    files.append(", ".join(first(names, MOST_FILES, "there")))
    told = remarks(*(first(lines, 3, "the report") for lines in (made.warnings, made.notes)))
    failed = [Text(f"✗ {line}", style="red") for line in first(made.failures, 5, "the report")]
    return Group(table, files, *failed, *told)


def stage_text(made: Made, name: str) -> str:
    """What a stage made, in one line; empty where its files say it."""
    if reason := made.skipped.get(_scored(name)):
        return f"skipped: {reason}"
    if _scored(name) in made.stages:
        return _accuracy(made, _scored(name))
    told: dict[str, Callable[[Made], str]] = {
        "embedded": lambda made: "a small BERT and its data",
        "quantize": _calibration,
        "qat": _training,
        "export": _export,
        "check": _check,
        "parity": _parity,
        "build": lambda made: _engine(made.engine),
        "gpu_build": lambda made: _engine(made.gpu_engine),
        "verify": _verification,
    }
    return told[name](made) if name in told else ""


def _scored(stage: str) -> str:
    """How `stages` calls what a stage evaluates."""
    return "fp32" if stage == "baseline" else stage


def _accuracy(made: Made, name: str) -> str:
    row = made.stages[name]
    text = f"{headline(row)}, n = {row.n:,}"
    if (versus := row.vs_fp32) is not None:
        text += f"; against FP32 {delta_text(row)}"
        if versus.disagreements is not None:
            text += f"; {versus.disagreements} of {versus.n:,} answers differ"
    return text


def _calibration(made: Made) -> str:
    found = made.calibration
    assert found is not None
    text = f"{found.linears} of {count_of(found.of_linears, 'linear')} in INT8"
    for count, what in ((found.attention, "attention"), (found.residual, "residual")):
        text += f", {count_of(count, what)}" if count else ""
    return f"{text}; scales by {found.method} of {count_of(found.samples, 'sample')} of {found.split}"


def _training(made: Made) -> str:
    found = made.training
    assert found is not None
    text = f"{found.steps} of {found.planned_steps} steps in {seconds(found.seconds)}"
    if found.best_step == 0:
        return f"{text}; the weights before training are the best"
    return f"{text}; step {found.best_step} is the best"


def _export(made: Made) -> str:
    graphs = [row for row in made.files if row.fp32_ratio is not None]
    sizes = ", ".join(f"{row.name} {row.fp32_ratio:.2f}" for row in graphs if row.fp32_ratio != 1)
    return f"{count_of(len(graphs), 'ONNX file')}; of the size of FP32: {sizes}"


def _check(made: Made) -> str:
    counts = Counter((row.severity, row.code) for row in made.findings)
    listed = ", ".join(f"{n} of {code} ({severity})" for (severity, code), n in counts.items())
    return f"{count_of(len(made.findings), 'finding')}{': ' if listed else ''}{listed}"


def _parity(made: Made) -> str:
    found = made.parity
    assert found is not None
    if not found.rows:
        return "no tensor is quantized"
    worst = worst_first(found)[0]
    held = f"{sum(row.holds for row in found.rows)} of {count_of(len(found.rows), 'tensor')}"
    return (
        f"{held} agree with ONNX Runtime; nearest to its limit, at {part_text(worst)}: "
        f"{remark_of(worst)}; n = {found.n}"
    )


def _engine(built: EngineResult | None) -> str:
    assert built is not None
    text = f"{built.file} {size(built.bytes)}, {label(built.backend)} {built.version}"
    for done, asked, what in (
        (built.int8_gemms, built.expected_int8_gemms, "GEMMs"),
        (built.attention_int8, built.expected_attention_int8, "attentions"),
        (built.int8_residuals, built.expected_int8_residuals, "residuals"),
    ):
        text += f"; {done} of {asked} {what} in INT8" if asked else ""
    return f"{text}; ahead of time, not run" if built.ahead_of_time else text


def _verification(made: Made) -> str:
    found = made.verification
    assert found is not None
    held = f"{sum(row.holds for row in found.blocks)} of {count_of(len(found.blocks), 'block')}"
    blocks = found.blocks_not_checked or f"{held} follow {label(found.reference)}"
    bad = [name for name, part in (("padding", found.padding), ("answers", found.answers)) if not part.holds]
    rest = f"{' and '.join(bad)} do not hold" if bad else "padding and answers hold"
    return f"{blocks}; {rest}; {count_of(len(found.shapes), 'shape')}, n = {found.answers.n}"
