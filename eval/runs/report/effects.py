"""What quantization changed, in a report: answers, classes, layers, FP16, speed against accuracy."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Literal

from qdqbench.eval.bench.results import Bench, BenchConfig, BenchRow, config_label
from qdqbench.eval.reporting.document import (
    PAGE,
    TEXT,
    Block,
    Cell,
    Chart,
    Columns,
    Fold,
    Pairs,
    Prose,
    Row,
    Section,
    Table,
    code,
    row,
)
from qdqbench.eval.reporting.formats import count_of, decibel, label
from qdqbench.eval.reporting.svg import BLUE, GREEN, ORANGE, dress, figure_of, log_scale, svg_of
from qdqbench.eval.runs.report.charts import layer_chart, place
from qdqbench.eval.runs.report.verdict import delta_text, last_measured, metric_text, stage_label, stage_name
from qdqbench.quantize.utils.comparison import Change, ChangedPrediction, ChangedPredictions, Classes
from qdqbench.quantize.utils.results import Results, StageResult

WIDEST = 12  # classes whose confusion is shown as tables
MANY_CLASSES = 20  # rows above which a table scrolls
FEW_ANSWERS = 10  # that Markdown lists
RIGHT_BEFORE: tuple[Change, ...] = ("regressed", "still_right")
RIGHT_NOW: tuple[Change, ...] = ("fixed", "still_right")
EVALUATE_FP16 = "qdqbench report RUN --fp16"
STYLES = {"int8": (GREEN, "^"), "fp16": (ORANGE, "s"), "fp32": (BLUE, "o")}


def effect_sections(results: Results, of: Literal["answers", "layers"]) -> list[Section]:
    """Return the sections on what changed in answers, or in the model and its layers; what a run has."""
    if of == "answers":
        found = [_answers_section(results), _classes_section(results)]
    else:
        found = [_model_section(results), _errors_section(results)]
    return [section for section in found if section is not None]


def _answers_section(results: Results) -> Section | None:
    if (changed := results.changed_predictions) is None:
        return None
    blocks: list[Block] = [changed_text(results, changed)]
    if changed.rows:
        scores = "moved" in changed.counts
        labels = any(each.label is not None for each in changed.rows)
        margins = any(each.margin is not None for each in changed.rows)
        stage, kind = stage_name(results, changed.stage), changed.prediction_type
        columns = [
            "sample", "text", *(["label"] if labels else []), f"{kind}, FP32", f"{kind}, {stage}",
            *([] if scores else ["change"]),
            *(["margin, FP32", f"margin, {stage}"] if margins else []), "distance",
        ]  # fmt: skip
        rows = [_answer_row(each, scores, labels, margins) for each in changed.rows]
        about = (
            "Margin: probability of the class less that of the next; near 0 the answer was near to being "
            "another one. "
            if margins
            else ""
        )
        about += "Distance: how far both answers are apart, whatever is right (`docs/results.md`)."
        blocks += [
            Table(
                columns,
                rows,
                texts=range(len(columns)),
                look="full cards sortable",
                filter="texts and answers",
                anchor="changed-answers",
                most=FEW_ANSWERS,
            ),
            Prose(about, "quiet", PAGE),
        ]
        if changed.count > FEW_ANSWERS:
            blocks.append(Prose(f"The others are in `{changed.file}`.", on=TEXT))
    return Section("changed", "Answers that changed", blocks)


def _answer_row(each: ChangedPrediction, scores: bool, labels: bool, margins: bool) -> Row:
    looks = ["", ""]
    if not scores:
        looks = ["right" if each.change in right else "wrong-answer" for right in (RIGHT_BEFORE, RIGHT_NOW)]
    values = (each.fp32_margin, each.margin)
    return row(
        str(each.sample),
        Cell("not found" if each.text is None else each.text, look="text"),
        *([each.label] if labels else []),
        Cell(each.fp32, look=looks[0]),
        Cell(each.prediction, look=looks[1]),
        *([] if scores else [each.change.replace("_", " ")]),
        *(["" if value is None else f"{value:.3f}" for value in values] if margins else []),
        f"{each.distance:.3g}",
    )


def changed_text(results: Results, found: ChangedPredictions) -> str:
    """Return how many answers changed, which way, and how many of them are listed."""
    stage = stage_label(results, found.stage)
    samples = f"Of {count_of(found.n, 'sample')} of {found.split}"
    if not found.count:
        return f"{samples} each has the answer of FP32 in {stage}."
    scores = "moved" in found.counts
    share = f"{found.count} ({found.count / found.n:.1%})"
    what = f"moved in {stage}, against FP32" if scores else f"have another answer in {stage} than in FP32"
    text = f"{samples} {share} {what}"
    if not scores:
        text += ": " + ", ".join(
            f"{count} {change.replace('_', ' ')}" for change, count in found.counts.items()
        )
    if (kept := len(found.rows)) < found.count:
        which = "farthest" if scores else "first"
        text += f". The {which} {kept} of {found.count} are listed, all are in {found.file}"
    return f"{text}."


def _classes_section(results: Results) -> Section | None:
    if (classes := results.classes) is None:
        return None
    stage = stage_label(results, classes.stage)
    columns = ["class", "change", "recall, FP32", f"recall, {stage}", "regressed", "fixed", classes.unit]
    rows = []
    for each in classes.rows:
        known = each.fp32 is not None and each.recall is not None and each.delta is not None
        numbers = [f"{each.delta:+.4f} ± {each.delta_stderr:.4f}", f"{each.fp32:.4f}", f"{each.recall:.4f}"]
        counts = map(str, (each.regressed, each.fixed, each.n))
        rows.append(row(each.name, *(numbers if known else [""] * 3), *counts))
    about = (
        f"Recall: of the {classes.unit} with this label, the share that is answered so. ± is one paired "
        f"standard error. Regressed and fixed: right in FP32 alone, and in {stage} alone."
    )
    table = Table(
        columns, rows, look="sortable", filter="classes" if len(rows) > MANY_CLASSES else "", anchor="recall"
    )
    blocks: list[Block] = [table, Prose(about, "quiet", PAGE)]
    if len(rows) <= WIDEST:
        pairs = (("FP32", classes.fp32), (stage, classes.confusion))
        blocks.append(
            Columns([[_confusion_table(classes, name, counts)] for name, counts in pairs], on=(PAGE))
        )
    return Section("classes", "Class by class", blocks)


def _confusion_table(classes: Classes, title: str, counts: Sequence[Sequence[int]]) -> Table:
    """Return counts [label][answer], each with its difference from FP32's."""
    names = [each.name for each in classes.rows]
    rows = []
    for at, (line, base) in enumerate(zip(counts, classes.fp32, strict=True)):
        cells = [
            Cell(
                str(count),
                note=f"({count - before:+d})" if count != before else "",
                look="diagonal" if at == answer else "",
            )
            for answer, (count, before) in enumerate(zip(line, base, strict=True))
        ]
        rows.append(row(names[at], *cells))
    return Table(["label \\ answer", *names], rows, title, look="confusion", on=PAGE)


def _model_section(results: Results) -> Section | None:
    if not results.model_changes:
        return None
    pairs = [(change.what, change.description) for change in results.model_changes]
    return Section("besides", "What the recipe changed besides Q/DQ", [Pairs(pairs, definitions=True)])


def _errors_section(results: Results) -> Section | None:
    if (errors := results.layer_errors) is None:
        return None
    worst = ", ".join(f"`{name}` {error}" for name, error in worst_linears(results))
    text = (
        f"The fake-quant model against FP32 on {errors.n} samples, relative to the norm of FP32's output. "
        "Alone: both get the same input. Accumulated: each goes its own way from the tokens on."
    )
    columns = ["linear or block", "alone, %", "alone, dB", "accumulated, %"]
    rows = [
        row(
            code(each.name),
            f"{100 * each.isolated:.2f}",
            decibel(each.isolated),
            "" if each.cumulative is None else f"{100 * each.cumulative:.2f}",
        )
        for each in errors.rows
    ]
    blocks = [line for line, each in zip(rows, errors.rows, strict=True) if each.what == "block"]
    table = Table(columns, rows, look="sortable", anchor="layer-errors")
    charts = [Chart(partial(errors_svg, results, what)) for what in ("linear", "block")]
    return Section(
        "errors",
        "Error of INT8, layer by layer",
        [
            f"{text} Largest alone: {worst}." if worst else text,
            Columns([[chart] for chart in charts]),
            Fold(f"All {len(rows)} linears and blocks", [table], PAGE),
            Table(columns, blocks, on=TEXT),
        ],
    )


def errors_svg(results: Results, what: str) -> str:
    """Draw errors of linears alone, or of blocks alone and accumulated, by encoder layer, in percent."""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    for each in results.layer_errors.rows if results.layer_errors else ():
        if each.what != what:
            continue
        if what == "linear":
            layer, kind = place(each.name)
            if layer is not None:
                points[kind][layer] = 100 * each.isolated
        elif each.cumulative is not None and each.name.startswith("layer."):
            number = int(each.name.rpartition(".")[2])
            points["alone"][number] = 100 * each.isolated
            points["accumulated"][number] = 100 * each.cumulative
    if what == "linear":
        return layer_chart(points, "error of each linear's output alone, %", "linear-errors")
    return layer_chart(points, "error of each layer's output, %", "block-errors")


def worst_linears(results: Results) -> list[tuple[str, str]]:
    """Return the three linears with the largest error alone, and that in percent."""
    rows = results.layer_errors.rows if results.layer_errors else []
    linears = sorted((each for each in rows if each.what == "linear"), key=lambda each: -each.isolated)
    return [(each.name, f"{each.isolated:.1%}") for each in linears[:3]]


def evaluate_fp16_blocks(results: Results) -> list[Block]:
    """Return FP16 against FP32, and the stage nearest to deployment against both; or the command for it."""
    last, half, versus = last_measured(results), results.fp16, results.vs_fp16
    if last is None or half is None or versus is None or half.vs_fp32 is None:
        if not results.quantized_layers:
            return []
        text = f"INT8 against FP16: not evaluated; `{EVALUATE_FP16}` evaluates the FP16 twin."
        return [Prose(text, "quiet", PAGE)]
    name, stage = last
    rows = [
        _against("FP16 against FP32", half),
        _against(f"{stage_label(results, name)} against FP16", stage.model_copy(update={"vs_fp32": versus})),
        _against(f"{stage_label(results, name)} against FP32", stage),
    ]
    columns = ["", label(next(iter(half.metrics))), "difference", "differing answers", "McNemar p"]
    return [
        Table(columns, rows, "Against FP16 as well", look="cards"),
        Prose(f"{half.detail}. Pairs of the same samples.", "quiet", PAGE),
    ]


def _against(title: str, stage: StageResult) -> Row:
    metric, versus = next(iter(stage.metrics)), stage.vs_fp32
    assert versus is not None
    differing = "" if versus.disagreements is None else f"{versus.disagreements} of {versus.n}"
    p = "" if versus.mcnemar_p is None else f"{versus.mcnemar_p:.2g}"
    return row(title, metric_text(stage, metric), delta_text(stage), differing, p)


def tradeoff_blocks(results: Results, bench: Bench | None) -> list[Block]:
    """Return the fastest of each precision at the shape where INT8 gains least; nothing without both.

    It is latency against accuracy, where both are known.
    """
    base, last = results.stages.get("fp32"), last_measured(results)
    if bench is None or not results.speed or base is None or last is None or not base.metrics:
        return []
    least = min(results.speed, key=lambda speed: speed.value).config
    task = bench.settings.dataset
    cell = next((cell for cell in bench.configs if config_label(cell, task) == least), None)
    metric = next(iter(base.metrics))
    known = {"int8": last[1], "fp16": results.fp16, "fp32": base}
    points: list[tuple[str, float, StageResult]] = []
    missing = ""
    for precision, scored in known.items():
        timed = _fastest(bench, cell, precision) if cell else None
        if timed is None or timed.median_ms is None:
            continue
        if scored is None:
            time = f"{precision.upper()} ({timed.median_ms:.3g} ms)"
            missing = f" {time} is not shown: `{EVALUATE_FP16}` evaluates it."
        else:
            points.append((precision, timed.median_ms, scored))
    if len(points) < 2:
        return []
    rows = [row(name.upper(), f"{time:.3g}", metric_text(stage, metric)) for name, time, stage in points]
    about = f"At the shape where INT8 gains least. Error bars are paired, against FP32.{missing}"
    table = Table(["fastest in", "ms", label(metric)], rows, "Latency against accuracy", look="")
    draw = partial(_scatter_svg, points, metric, least)
    return [Columns([[table, Prose(about, "quiet")], [Chart(draw)]], on=PAGE)]


def _fastest(bench: Bench, cell: BenchConfig, precision: str) -> BenchRow | None:
    """Return the fastest system of a precision; of INT8 of this run's own engines."""
    names = {about.name for about in bench.systems if about.precision == precision}
    if precision == "int8":
        names &= {"int8", "int8-exact"}
    rows = [each for each in cell.rows if each.system in names and each.status == "done" and each.median_ms]
    return min(rows, key=lambda each: each.median_ms or 0.0, default=None)


def _scatter_svg(points: list[tuple[str, float, StageResult]], metric: str, cell: str) -> str:
    figure = figure_of(2.6)
    axes = figure.add_subplot()
    for name, time, stage in points:
        error = stage.vs_fp32.delta_stderr.get(metric, 0.0) if stage.vs_fp32 else 0.0
        color, marker = STYLES[name]
        axes.errorbar(time, stage.metrics[metric], yerr=error, color=color, marker=marker, capsize=3)
        place_at = (time, stage.metrics[metric])
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
