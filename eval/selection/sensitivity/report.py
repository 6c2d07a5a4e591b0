"""The report of `sensitivity`: a page with charts, Markdown and a screen."""

import math
from collections.abc import Callable
from functools import partial

from qdqbench.eval.metrics import figures
from qdqbench.eval.selection.sensitivity.results import SENSITIVITY_FILE, CandidateRow, Sensitivity, ranking
from qdqbench.quantize.models.families.family import QKV
from qdqbench.quantize.models.families.known import part_of
from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report import svg
from qdqbench.quantize.report.formats import cleaned, label, seconds, sentence
from qdqbench.quantize.utils.names import count_of

WORST = 10
WIDE = "full sortable names"
WIDEST = 36  # characters of a name in a terminal
COLUMNS = (
    "name",
    "only this in INT8: SQNR",
    "against FP32",
    "differing answers",
    "all but this in INT8: SQNR",
    "of everything's noise power",
    "against FP32",
)


def sensitivity_report(sensitivity: Sensitivity) -> doc.Report:
    sensitivity = cleaned(sensitivity)
    reached, full, worst = sensitivity.choice.reached, sensitivity.full, ranking(sensitivity.rows)
    linears, attention, blocks, kinds = (
        [each for each in sensitivity.rows if each.group == group]
        for group in ("linear", "attention", "block", "kind")
    )
    linears = [*worst, *(each for each in linears if not each.all_but)]
    sections = [
        doc.Section(anchor, title, [doc.Table(COLUMNS, [_row(sensitivity, row) for row in rows], look=WIDE)])
        for anchor, title, rows in (
            ("linears", "Linears, the worst first", linears),
            ("attention", "Attention of a layer: q, k, v and softmax", attention),
            ("layers", "Layers", blocks),
            ("kinds", "Kinds", kinds),
        )
        if rows
    ]
    charts = [doc.Chart(partial(draw, sensitivity)) for draw in (only_svg, all_but_svg, curve_svg)]
    curve = doc.table_of(
        sensitivity.curve,
        ("kept", lambda point: point.kept),
        ("SQNR", lambda point: figures.sqnr(point.comparison)),
        ("against FP32", lambda point: figures.change(point.comparison)),
        ("differing answers", lambda point: point.comparison.disagreements),
        texts=(),
    )
    screens: list[doc.Block] = [
        _screen_table(f"the {WORST} worst linears", worst[:WORST]),
        _screen_table("kinds", kinds),
        doc.Prose("~ marks changes within noise.", on=doc.SCREEN),
    ]
    change, kept = f"{0 - full.drop:+.4f}", count_of(sensitivity.choice.kept, "linear")
    tiles = [
        doc.Tile(
            f"{label(sensitivity.metric)} against FP32", change, f"everything in INT8, {figures.noise(full)}"
        ),
        doc.Tile("SQNR", figures.sqnr(full).text, "everything in INT8"),
    ]
    if worst and (share := figures.noise_share(worst[0].only, full)):
        tiles.append(doc.Tile("noise power of the worst linear", share, worst[0].name))
    tiles.append(doc.Tile("kept out of INT8", kept, f"by {sensitivity.choice.file}", doc.bad_unless(reached)))
    data = sensitivity.data
    explanation = (
        "SQNR is the power of FP32's logits over that of the difference, the noise power. The ranking goes "
        f"by it and not by the metric: on {data['samples']} samples most changes are noise. ± is one "
        "standard error, and within noise are changes of at most two (~), paired with FP32.",
        f"Measured on split {data['split']!r}, on other rows than those that calibrate; no evaluation "
        f"split was read. Everything in INT8 means {count_of(len(sensitivity.int8), 'module')}.",
    )
    settings = [
        ("batch size", str(sensitivity.batch_size)),
        ("time of all candidates", seconds(sensitivity.timings["candidates_s"])),
    ]
    return doc.Report(
        doc.page_of_choice(sensitivity, "sensitivity", SENSITIVITY_FILE, *settings),
        [
            doc.Section("charts", "Charts", [doc.Columns([[each] for each in charts])], on=doc.PAGE),
            *sections,
            doc.Section("kept", "Linears kept out of INT8, the worst first", [curve]),
        ],
        doc.Verdict(
            "good" if reached else "bad",
            "The gate holds" if reached else "The gate does not hold",
            sensitivity_headline(sensitivity),
            notes=[sentence(choice_text(sensitivity))],
        ),
        lead=[*screens, *(doc.Prose(text, "quiet") for text in explanation)],
        tiles=tiles,
        warnings=sensitivity.warnings,
        notes=[sentence(note) for note in sensitivity.notes],
    )


def sensitivity_headline(sensitivity: Sensitivity) -> str:
    metric, full, fp32 = label(sensitivity.metric), sensitivity.full, sensitivity.fp32
    value = fp32.metrics[sensitivity.metric]
    text = (
        f"Everything in INT8: {metric} {value - full.drop:.4f} against {value:.4f} in FP32 on "
        f"{sensitivity.data['samples']} training samples, {figures.change(full).text}, "
        f"SQNR {figures.sqnr(full).text}."
    )
    if worst := ranking(sensitivity.rows):
        share = figures.noise_share(worst[0].only, full)
        alone = f"{share} of its noise power" if share else "nothing"
        text += f" The worst linear, {worst[0].name}, alone makes {alone}."
    return text


def choice_text(sensitivity: Sensitivity) -> str:
    choice, own, limit = sensitivity.choice, sensitivity.chosen.comparison, sensitivity.max_drop
    drop = figures.change(own).text
    if not choice.reached:
        reason = (
            f"no measured number of linears kept out of INT8 holds the drop to {limit:g} and halves the "
            f"noise power; {choice.kept} leave the least"
        )
    elif choice.kept == 0:
        reason = f"the change by everything in INT8 ({drop}) is within noise: nothing to keep out"
    else:
        noise = "" if own.drop <= limit else " within noise"
        reason = (
            f"with them the noise power is {figures.noise_share(own, sensitivity.full)} of that of "
            f"everything in INT8, and the change ({drop}) is a drop of at most {limit:g}{noise}"
        )
    return f"{choice.file} keeps {count_of(choice.kept, 'linear')} out of INT8: {reason}"


def _row(sensitivity: Sensitivity, candidate: CandidateRow) -> doc.Row:
    only, rest, full = candidate.only, candidate.all_but, sensitivity.full
    name = doc.code(f"{candidate.name}{' (diagnostic)' if candidate.diagnostic else ''}")
    cells: list[doc.Cell | str | int | None] = [figures.sqnr(only), figures.change(only), only.disagreements]
    if rest is None:
        return doc.row(name, *cells, doc.Cell("not part of everything", "quiet"))
    share = figures.noise_share(rest, full)
    return doc.row(name, *cells, figures.sqnr(rest), share, figures.change(rest))


def _screen_table(title: str, rows: list[CandidateRow]) -> doc.Table:
    return doc.table_of(
        rows,
        (f"{title}, by SQNR", lambda each: _shorten(each.name.removeprefix("encoder."))),
        ("only this", lambda each: figures.sqnr(each.only)),
        ("against FP32", lambda each: figures.change(each.only)),
        ("all but", lambda each: figures.sqnr(each.all_but) if each.all_but else ""),
        on=doc.SCREEN,
    )


def _shorten(name: str) -> str:
    """Return a name that is too wide as its layer and its end: `0: attention.query`."""
    place = part_of(name) if len(name) > WIDEST else None
    if place is None:
        return name
    parts = [part for part in place[2].split(".") if not part.isdecimal()]
    return f"{place[0]}: {'.'.join(parts[-2:])}"


CHART_COLUMNS = (*QKV, "output", "ffn-in", "ffn-out", "attention")
DECADES = 3.0  # below the largest value; what is smaller has the palest color
DARKEST = 0.75  # opacity: text in the page's color stays readable on it


def only_svg(sensitivity: Sensitivity) -> str:
    amounts = [(row, row.only.noise_power) for row in sensitivity.rows]
    text = lambda amount: f"{-10 * math.log10(amount):.1f}" if amount else "equal"  # noqa: E731
    return _heat_map(amounts, "only", "SQNR with only this in INT8, dB", text)


def all_but_svg(sensitivity: Sensitivity) -> str:
    rows, whole = [row for row in sensitivity.rows if row.all_but], sensitivity.full.noise_power
    amounts = [(row, 1 - row.all_but.noise_power / whole) for row in rows if row.all_but and whole]
    title = "part of the noise power that goes with this out of INT8, %"
    return _heat_map(amounts, "all-but", title, lambda amount: f"{100 * amount:.0f}", linear=True)


def column(row: CandidateRow) -> str:
    place = part_of(row.name) if row.kind == "qkv" else None
    return place[1] if place else row.kind


def _heat_map(
    amounts: list[tuple[CandidateRow, float]],
    name: str,
    title: str,
    text: Callable[[float], str],
    *,
    linear: bool = False,
) -> str:
    from matplotlib.patches import Rectangle

    cells = {
        (row.layer, column(row)): amount
        for row, amount in amounts
        if row.group in ("linear", "attention") and row.layer is not None
    }
    if not cells:
        return ""
    layers = sorted({layer for layer, _ in cells})
    columns = [each for each in CHART_COLUMNS if any(each == of for _, of in cells)]
    largest = max(cells.values())
    figure, axes = svg.axes_of(0.9 + 0.24 * len(layers))
    for (layer, kind), amount in cells.items():
        if kind not in columns:
            continue
        x, y = columns.index(kind), layers.index(layer)
        share = amount / largest if min(amount, largest) > 0 else 0.0
        if share and not linear:
            share = max(0.03, 1 + math.log10(share) / DECADES)
        corner, color = (x - 0.48, y - 0.46), svg.VERMILLION
        axes.add_patch(
            Rectangle(corner, 0.96, 0.92, facecolor=color, alpha=DARKEST * share, edgecolor="none")
        )
        axes.text(x, y, text(amount), ha="center", va="center")
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.tick_params(length=0)
    axes.set_ylabel("encoder layer")
    svg.dress(axes, title, grid=None)
    for side in axes.spines.values():
        side.set_visible(False)
    return svg.svg_of(figure, f"sensitivity-{name}", f"{title}, by encoder layer and kind")


def curve_svg(sensitivity: Sensitivity) -> str:
    if len(sensitivity.curve) < 2:
        return ""
    figure = svg.figure_of(4.2)
    upper, lower = figure.subplots(2, 1, sharex=True)
    places = [point.kept for point in sensitivity.curve]
    curve = [point.comparison for point in sensitivity.curve]
    line = {"color": svg.BLUE, "marker": "o", "markersize": 4, "linewidth": 1.4, "capsize": 3}
    chosen, full = sensitivity.chosen.comparison, sensitivity.full
    decibels = [math.nan if each.sqnr_db is None else each.sqnr_db for each in curve]  # nan is not drawn
    upper.errorbar(places, decibels, [each.sqnr_db_stderr or 0.0 for each in curve], **line)
    if full.sqnr_db is not None:
        upper.axhline(full.sqnr_db + 10 * math.log10(2), **svg.LIMIT_LINE)
    lower.errorbar(places, [each.drop for each in curve], [each.drop_stderr for each in curve], **line)
    lower.axhline(sensitivity.max_drop, **svg.LIMIT_LINE)
    for axes, value in ((upper, chosen.sqnr_db), (lower, chosen.drop)):
        circle = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "color": svg.ORANGE}
        axes.plot(sensitivity.choice.kept, math.nan if value is None else value, **circle)
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xticks(places, [str(place) for place in places])
        axes.minorticks_off()
    svg.dress(upper, "SQNR, dB; dashed: 3 dB above everything in INT8")
    svg.dress(lower, f"drop of {sensitivity.metric}; dashed: gate.max_drop")
    lower.set_xlabel("linears kept out of INT8, the worst first; circle: the written recipe")
    return svg.svg_of(figure, "sensitivity-curve", "SQNR and drop by the number of linears out of INT8")
