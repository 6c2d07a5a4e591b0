"""What quantization changed, in a report: answers, classes, layers, FP16, speed against accuracy."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from qdqbench.eval.bench.results import Bench, BenchConfig, BenchRow, config_label
from qdqbench.eval.report.formats import count_of, label
from qdqbench.eval.report.svg import BLUE, GREEN, ORANGE, dress, figure_of, log_scale, svg_of
from qdqbench.eval.runreport.charts import layer_chart, place
from qdqbench.eval.runreport.verdict import delta_text, last_measured, metric_text, stage_label, stage_name
from qdqbench.quantize.core.comparison import Change, ChangedAnswers, Classes
from qdqbench.quantize.core.results import Results, StageResult

WIDEST = 12  # classes whose confusion is shown as tables
RIGHT_BEFORE: tuple[Change, ...] = ("right to wrong", "still right")
RIGHT_NOW: tuple[Change, ...] = ("wrong to right", "still right")
EVALUATE_FP16 = "qdqbench report RUN --fp16"
STYLES = {"int8": (GREEN, "^"), "fp16": (ORANGE, "s"), "fp32": (BLUE, "o")}


@dataclass(frozen=True)
class Tradeoff:
    """Latency against accuracy where both are known."""

    svg: str = ""
    rows: list[tuple[str, list[str]]] = field(default_factory=list)  # who, latency, accuracy
    note: str = ""


def effects_context(results: Results, bench: Bench | None) -> dict[str, Any]:
    """What templates need of it."""
    changed, classes = results.changed, results.classes
    compared = changed or classes
    return {
        "changed": changed,
        "changed_said": changed_text(results, changed) if changed else "",
        "changed_columns": _columns(results, changed) if changed else [],
        "right_before": RIGHT_BEFORE,
        "right_now": RIGHT_NOW,
        "classes": classes,
        "compared_stage": stage_label(results, compared.stage) if compared else "",
        "class_rows": class_rows(classes) if classes else [],
        "confusions": confusions(results, classes) if classes and len(classes.rows) <= WIDEST else {},
        "error_charts": error_charts(results),
        "worst_linears": worst_linears(results),
        "fp16_rows": fp16_rows(results),
        "evaluate_fp16": EVALUATE_FP16,
        "tradeoff": tradeoff(results, bench),
    }


def changed_text(results: Results, found: ChangedAnswers) -> str:
    """How many answers changed, which way, and how many of them are listed."""
    stage = stage_label(results, found.stage)
    samples = f"Of {count_of(found.n, 'sample')} of {found.split}"
    if not found.found:
        return f"{samples} each has the answer of FP32 in {stage}."
    scores = "nearer or farther" in found.counts
    share = f"{found.found} ({found.found / found.n:.1%})"
    what = f"moved in {stage}, against FP32" if scores else f"have another answer in {stage} than in FP32"
    said = f"{samples} {share} {what}"
    if not scores:
        said += ": " + ", ".join(f"{count} {change}" for change, count in found.counts.items())
    if (kept := len(found.rows)) < found.found:
        which = "farthest" if scores else "first"
        said += f". The {which} {kept} of {found.found} are listed, all are in {found.file}"
    return f"{said}."


def _columns(results: Results, found: ChangedAnswers) -> list[str]:
    """Headings: what no sample has is left out."""
    stage = stage_name(results, found.stage)
    margins = any(row.margin is not None for row in found.rows)
    columns = ["sample", "text"]
    columns += ["label"] if any(row.label is not None for row in found.rows) else []
    columns += [f"{found.answers_are}, FP32", f"{found.answers_are}, {stage}"]
    columns += [] if "nearer or farther" in found.counts else ["change"]
    return columns + (["margin, FP32", f"margin, {stage}"] if margins else []) + ["distance"]


def class_rows(classes: Classes) -> list[tuple[str, list[str]]]:
    """The change of each class's recall, and what it was and is."""
    rows = []
    for row in classes.rows:
        known = row.fp32 is not None and row.recall is not None and row.delta is not None
        numbers = [f"{row.delta:+.4f} ± {row.delta_stderr:.4f}", f"{row.fp32:.4f}", f"{row.recall:.4f}"]
        cells = numbers if known else [""] * 3
        rows.append((row.name, [*cells, str(row.lost), str(row.won), str(row.n)]))
    return rows


def confusions(results: Results, classes: Classes) -> dict[str, list[list[tuple[int, int]]]]:
    """Counts [label][answer] by stage, each with its difference from FP32's."""
    pairs = {
        "FP32": (classes.fp32, classes.fp32),
        stage_label(results, classes.stage): (classes.confusion, classes.fp32),
    }
    return {
        name: [
            [(count, count - before) for count, before in zip(row, base, strict=True)]
            for row, base in zip(made, reference, strict=True)
        ]
        for name, (made, reference) in pairs.items()
    }


def error_charts(results: Results) -> list[str]:
    """Errors of linears alone, and of blocks alone and accumulated, by encoder layer, in percent."""
    if results.layer_errors is None:
        return []
    linears: dict[str, dict[int, float]] = defaultdict(dict)
    blocks: dict[str, dict[int, float]] = defaultdict(dict)
    for row in results.layer_errors.rows:
        if row.what == "linear":
            layer, kind = place(row.name)
            if layer is not None:
                linears[kind][layer] = 100 * row.alone
        elif row.accumulated is not None and row.name.startswith("layer."):
            number = int(row.name.rpartition(".")[2])
            blocks["alone"][number] = 100 * row.alone
            blocks["accumulated"][number] = 100 * row.accumulated
    charts = (
        layer_chart(linears, "error of each linear's output alone, %", "linear-errors", None),
        layer_chart(blocks, "error of each layer's output, %", "block-errors", None),
    )
    return [svg for svg in charts if svg]


def worst_linears(results: Results) -> list[tuple[str, str]]:
    """The three linears with the largest error alone, and that in percent."""
    rows = results.layer_errors.rows if results.layer_errors else []
    linears = sorted((row for row in rows if row.what == "linear"), key=lambda row: -row.alone)
    return [(row.name, f"{row.alone:.1%}") for row in linears[:3]]


def fp16_rows(results: Results) -> list[tuple[str, list[str]]]:
    """FP16 against FP32, and the stage nearest to deployment against both; none before FP16 was evaluated."""
    last, half, versus = last_measured(results), results.fp16, results.vs_fp16
    if last is None or half is None or versus is None or half.vs_fp32 is None:
        return []
    name, row = last
    return [
        ("FP16 against FP32", _against(half)),
        (f"{stage_label(results, name)} against FP16", _against(row.model_copy(update={"vs_fp32": versus}))),
        (f"{stage_label(results, name)} against FP32", _against(row)),
    ]


def _against(row: StageResult) -> list[str]:
    metric, versus = next(iter(row.metrics)), row.vs_fp32
    assert versus is not None
    differing = "" if versus.disagreements is None else f"{versus.disagreements} of {versus.n}"
    p = "" if versus.mcnemar_p is None else f"{versus.mcnemar_p:.2g}"
    return [metric_text(row, metric), delta_text(row), differing, p]


def tradeoff(results: Results, bench: Bench | None) -> Tradeoff:
    """The fastest of each precision at the shape where INT8 gains least; nothing without both."""
    base, last = results.stages.get("fp32"), last_measured(results)
    if bench is None or not results.speed or base is None or last is None or not base.metrics:
        return Tradeoff()
    least = min(results.speed, key=lambda row: row.value).config
    task = bench.settings.dataset
    cell = next((cell for cell in bench.configs if config_label(cell, task) == least), None)
    metric = next(iter(base.metrics))
    known = {"int8": last[1], "fp16": results.fp16, "fp32": base}
    points: list[tuple[str, float, StageResult]] = []
    missing = []
    for precision, scored in known.items():
        row = _fastest(bench, cell, precision) if cell else None
        if row is None or row.median_ms is None:
            continue
        if scored is None:
            missing.append(
                f"{precision.upper()} ({row.median_ms:.3g} ms) is not shown: `{EVALUATE_FP16}` evaluates it"
            )
        else:
            points.append((precision, row.median_ms, scored))
    if len(points) < 2:
        return Tradeoff()
    return Tradeoff(
        svg=_scatter(points, metric, least),
        rows=[(name.upper(), [f"{time:.3g}", metric_text(row, metric)]) for name, time, row in points],
        note=". ".join(missing),
    )


def _fastest(bench: Bench, cell: BenchConfig, precision: str) -> BenchRow | None:
    """The fastest contestant of a precision; of INT8 of this run's own engines."""
    names = {about.name for about in bench.systems if about.precision == precision}
    if precision == "int8":
        names &= {"int8", "int8-exact"}
    rows = [row for row in cell.rows if row.system in names and row.status == "done" and row.median_ms]
    return min(rows, key=lambda row: row.median_ms or 0.0, default=None)


def _scatter(points: list[tuple[str, float, StageResult]], metric: str, cell: str) -> str:
    figure = figure_of(2.6)
    axes = figure.add_subplot()
    for name, time, row in points:
        error = row.vs_fp32.delta_stderr.get(metric, 0.0) if row.vs_fp32 else 0.0
        colour, marker = STYLES[name]
        axes.errorbar(time, row.metrics[metric], yerr=error, color=colour, marker=marker, capsize=3)
        place_at = (time, row.metrics[metric])
        axes.annotate(name.upper(), place_at, xytext=(7, 4), textcoords="offset points")
    times = [time for _, time, _ in points]
    if max(times) > 5 * min(times):
        log_scale(axes, "x")
        axes.set_xlim(min(times) / 1.5, max(times) * 2)
    else:
        axes.set_xlim(0, max(times) * 1.2)
    axes.margins(y=0.25)
    axes.set_xlabel(f"milliseconds at {cell}")
    dress(axes, label(metric), grid="both")
    return svg_of(figure, "tradeoff", f"Latency at {cell} against {label(metric)}")
