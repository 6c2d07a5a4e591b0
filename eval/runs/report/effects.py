"""What quantization changed, in a report: answers, classes, layers, FP16, speed against accuracy."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from qdqbench.eval.bench.results import Bench, BenchConfig, BenchRow, config_label
from qdqbench.eval.reporting import svg
from qdqbench.eval.reporting.document import (
    PAGE,
    TEXT,
    Block,
    Cell,
    Chart,
    Column,
    Columns,
    Fold,
    Pairs,
    Prose,
    Section,
    Table,
    code,
    row,
    table_of,
)
from qdqbench.eval.reporting.formats import count_of, decibel, known, label, with_error
from qdqbench.eval.runs.report.charts import layer_chart, place
from qdqbench.eval.runs.report.verdict import (
    delta_text,
    differing_text,
    last_measured,
    metric_text,
    stage_label,
    stage_name,
)
from qdqbench.quantize.utils.comparison import (
    Change,
    ChangedPrediction,
    ChangedPredictions,
    Classes,
    ClassRow,
    LayerError,
    LayerErrors,
)
from qdqbench.quantize.utils.results import Results, StageResult

WIDEST = 12  # classes whose confusion is shown as tables
MANY_CLASSES = 20  # rows above which a table scrolls
FEW_ANSWERS = 10  # that Markdown lists
RIGHT_BEFORE: tuple[Change, ...] = ("regressed", "still_right")
RIGHT_NOW: tuple[Change, ...] = ("fixed", "still_right")
EVALUATE_FP16 = "qdqbench report RUN --fp16"
MARGIN = (
    "Margin: probability of the class less that of the next; near 0 the answer was near to being another one."
)
STYLES = {"int8": (svg.GREEN, "^"), "fp16": (svg.ORANGE, "s"), "fp32": (svg.BLUE, "o")}


def answer_sections(results: Results) -> list[Section]:
    sections = []
    if (changed := results.changed_predictions) is not None:
        sections.append(Section("changed", "Answers that changed", _changed_blocks(results, changed)))
    if (classes := results.classes) is not None:
        blocks = _class_blocks(classes, stage_label(results, classes.stage))
        sections.append(Section("classes", "Class by class", blocks))
    return sections


def layer_sections(results: Results) -> list[Section]:
    sections = []
    if results.model_changes:
        pairs = Pairs(
            [(change.what, change.description) for change in results.model_changes], definitions=True
        )
        sections.append(Section("besides", "What the recipe changed besides Q/DQ", [pairs]))
    if (errors := results.layer_errors) is not None:
        sections.append(Section("errors", "Error of INT8, layer by layer", _error_blocks(results, errors)))
    return sections


def _changed_blocks(results: Results, changed: ChangedPredictions) -> list[Block]:
    if not changed.rows:
        return [changed_text(results, changed)]
    scores = "moved" in changed.counts
    labels = any(row.label is not None for row in changed.rows)
    margins = any(row.margin is not None for row in changed.rows)
    stage, kind = stage_name(results, changed.stage), changed.prediction_type

    def answer_cell(answer: str, change: Change, right: tuple[Change, ...]) -> Cell:
        return Cell(answer, look="" if scores else "right" if change in right else "wrong-answer")

    columns: list[Column[ChangedPrediction]] = [
        ("sample", lambda row: row.sample),
        ("text", lambda row: Cell("not found" if row.text is None else row.text, look="text")),
        *([("label", lambda row: row.label)] if labels else []),
        (f"{kind}, FP32", lambda row: answer_cell(row.fp32, row.change, RIGHT_BEFORE)),
        (f"{kind}, {stage}", lambda row: answer_cell(row.prediction, row.change, RIGHT_NOW)),
        *([] if scores else [("change", lambda row: row.change)]),
        *([("margin, FP32", lambda row: known(row.fp32_margin, ".3f"))] if margins else []),
        *([(f"margin, {stage}", lambda row: known(row.margin, ".3f"))] if margins else []),
        ("distance", lambda row: f"{row.distance:.3g}"),
    ]
    table = table_of(
        changed.rows,
        *columns,
        texts=range(len(columns)),
        look="full cards sortable",
        filter="texts and answers",
        anchor="changed-answers",
        most=FEW_ANSWERS,
    )
    about = "Distance: how far both answers are apart, whatever is right (`docs/results.md`)."
    rest = [Prose(f"The others are in `{changed.file}`.", on=TEXT)] if changed.count > FEW_ANSWERS else []
    return [
        changed_text(results, changed),
        table,
        Prose(f"{MARGIN} {about}" if margins else about, "quiet", PAGE),
        *rest,
    ]


def changed_text(results: Results, found: ChangedPredictions) -> str:
    stage = stage_label(results, found.stage)
    samples = f"Of {count_of(found.n, 'sample')} of {found.split}"
    if not found.count:
        return f"{samples} each has the answer of FP32 in {stage}."
    scores = "moved" in found.counts
    share = f"{found.count} ({found.count / found.n:.1%})"
    what = f"moved in {stage}, against FP32" if scores else f"have another answer in {stage} than in FP32"
    text = f"{samples} {share} {what}"
    if not scores:
        text += ": " + ", ".join(f"{count} {change}" for change, count in found.counts.items())
    if (kept := len(found.rows)) < found.count:
        which = "farthest" if scores else "first"
        text += f". The {which} {kept} of {found.count} are listed, all are in {found.file}"
    return f"{text}."


def _class_blocks(classes: Classes, stage: str) -> list[Block]:
    def with_fp32(row: ClassRow, text: str) -> str:
        return "" if row.fp32 is None or row.recall is None or row.delta is None else text

    many = len(classes.rows) > MANY_CLASSES
    table = table_of(
        classes.rows,
        ("class", lambda row: row.name),
        ("change", lambda row: with_fp32(row, with_error(row.delta or 0.0, row.delta_stderr, "+.4f"))),
        ("recall, FP32", lambda row: with_fp32(row, known(row.fp32, ".4f"))),
        (f"recall, {stage}", lambda row: with_fp32(row, known(row.recall, ".4f"))),
        ("regressed", lambda row: row.regressed),
        ("fixed", lambda row: row.fixed),
        (classes.unit, lambda row: row.n),
        look="sortable",
        filter="classes" if many else "",
        anchor="recall",
    )
    about = (
        f"Recall: of the {classes.unit} with this label, the share that is answered so. ± is one paired "
        f"standard error. Regressed and fixed: right in FP32 alone, and in {stage} alone."
    )
    blocks: list[Block] = [table, Prose(about, "quiet", PAGE)]
    if len(classes.rows) <= WIDEST:
        pairs = (("FP32", classes.fp32), (stage, classes.confusion))
        blocks.append(Columns([[_confusion_table(classes, *pair)] for pair in pairs], on=PAGE))
    return blocks


def _confusion_table(classes: Classes, title: str, counts: Sequence[Sequence[int]]) -> Table:
    """Return counts [label][prediction], each with its difference from FP32's."""
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


def _error_blocks(results: Results, errors: LayerErrors) -> list[Block]:
    worst = ", ".join(f"`{name}` {error}" for name, error in worst_linears(results))
    text = (
        f"The fake-quant model against FP32 on {errors.n} samples, relative to the norm of FP32's output. "
        "Isolated: both get the same input. Cumulative: each goes its own way from the tokens on."
    )
    columns: list[Column[LayerError]] = [
        ("linear or block", lambda layer: code(layer.name)),
        ("isolated, %", lambda layer: f"{100 * layer.isolated:.2f}"),
        ("isolated, dB", lambda layer: decibel(layer.isolated)),
        ("cumulative, %", lambda layer: known(layer.cumulative and 100 * layer.cumulative, ".2f")),
    ]
    table = table_of(errors.rows, *columns, look="sortable", anchor="layer-errors")
    return [
        f"{text} Largest alone: {worst}." if worst else text,
        Columns([[Chart(partial(errors_svg, results, what))] for what in ("linear", "block")]),
        Fold(f"All {len(errors.rows)} linears and blocks", [table], PAGE),
        table_of([layer for layer in errors.rows if layer.what == "block"], *columns, on=TEXT),
    ]


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
    rows = results.layer_errors.rows if results.layer_errors else []
    linears = sorted((each for each in rows if each.what == "linear"), key=lambda each: -each.isolated)
    return [(each.name, f"{each.isolated:.1%}") for each in linears[:3]]


def evaluate_fp16_blocks(results: Results) -> list[Block]:
    """Show FP16 against FP32, and the stage nearest to deployment against both; or the command for it."""
    last, half, versus = last_measured(results), results.fp16, results.vs_fp16
    if last is None or half is None or versus is None or half.vs_fp32 is None:
        if not results.quantized_layers:
            return []
        text = f"INT8 against FP16: not evaluated; `{EVALUATE_FP16}` evaluates the FP16 twin."
        return [Prose(text, "quiet", PAGE)]
    stage_title = stage_label(results, last[0])
    rows = [
        ("FP16 against FP32", half, half.vs_fp32),
        (f"{stage_title} against FP16", last[1], versus),
        (f"{stage_title} against FP32", last[1], last[1].vs_fp32),
    ]
    table = table_of(
        [(title, stage, against) for title, stage, against in rows if against is not None],
        ("", lambda row: row[0]),
        (label(next(iter(half.metrics))), lambda row: metric_text(row[1], next(iter(row[1].metrics)))),
        ("difference", lambda row: delta_text(row[2])),
        ("differing answers", lambda row: differing_text(row[2])),
        ("McNemar p", lambda row: known(row[2].mcnemar_p, ".2g")),
        title="Against FP16 as well",
        look="cards",
    )
    return [table, Prose(f"{half.detail}. Pairs of the same samples.", "quiet", PAGE)]


def tradeoff_blocks(results: Results, bench: Bench | None) -> list[Block]:
    """Show latency against accuracy of the fastest of each precision, at the shape where INT8 gains least."""
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
    about = f"At the shape where INT8 gains least. Error bars are paired, against FP32.{missing}"
    table = table_of(
        points,
        ("fastest in", lambda point: point[0].upper()),
        ("ms", lambda point: f"{point[1]:.3g}"),
        (label(metric), lambda point: metric_text(point[2], metric)),
        title="Latency against accuracy",
        look="",
    )
    draw = partial(_scatter_svg, points, metric, least)
    return [Columns([[table, Prose(about, "quiet")], [Chart(draw)]], on=PAGE)]


def _fastest(bench: Bench, cell: BenchConfig, precision: str) -> BenchRow | None:
    names = {about.name for about in bench.systems if about.precision == precision}
    if precision == "int8":
        names &= {"int8", "int8-exact"}
    rows = [each for each in cell.rows if each.system in names and each.status == "done" and each.median_ms]
    return min(rows, key=lambda each: each.median_ms or 0.0, default=None)


def _scatter_svg(points: list[tuple[str, float, StageResult]], metric: str, cell: str) -> str:
    figure = svg.figure_of(2.6)
    axes = figure.add_subplot()
    for name, time, stage in points:
        error = stage.vs_fp32.delta_stderr.get(metric, 0.0) if stage.vs_fp32 else 0.0
        color, marker = STYLES[name]
        axes.errorbar(time, stage.metrics[metric], yerr=error, color=color, marker=marker, capsize=3)
        place_at = (time, stage.metrics[metric])
        axes.annotate(name.upper(), place_at, xytext=(7, 4), textcoords="offset points")
    times = [time for _, time, _ in points]
    if max(times) > 5 * min(times):
        svg.log_scale(axes, "x")
        axes.set_xlim(min(times) / 1.5, max(times) * 2)
    else:
        axes.set_xlim(0, max(times) * 1.2)
    axes.margins(y=0.25)
    axes.set_xlabel(f"milliseconds at {cell}")
    svg.dress(axes, label(metric), grid="both")
    return svg.svg_of(figure, "tradeoff", f"Latency at {cell} against {label(metric)}")
