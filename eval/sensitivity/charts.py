"""Pictures of a sensitivity report: heat maps of layers by kinds, and the curve of linears kept."""

import math
from collections.abc import Callable

from qdqbench.eval.report import svg
from qdqbench.eval.sensitivity.results import CandidateRow, Sensitivity
from qdqbench.quantize.families.any_family import part_of
from qdqbench.quantize.families.family import QKV

CHART_COLUMNS = (*QKV, "output", "ffn-in", "ffn-out", "attention")
DECADES = 3.0  # below the largest value; what is smaller has the palest colour
DARKEST = 0.75  # opacity: text in the page's colour stays readable on it


def only_svg(found: Sensitivity) -> str:
    """Divergence with one linear, or one attention, in INT8."""
    return _heat_map(
        found,
        "only",
        "divergence with only this in INT8, times 1,000",
        lambda row: row.only.divergence if row.only else None,
        lambda value: f"{1000 * value:.3g}",
    )


def all_but_svg(found: Sensitivity) -> str:
    """Part of the divergence of everything in INT8 that goes when one is taken out."""
    whole = found.full.divergence

    def saved(row: CandidateRow) -> float | None:
        return 1 - row.all_but.divergence / whole if row.all_but and whole else None

    return _heat_map(
        found,
        "all-but",
        "part of the divergence that goes with this out of INT8, %",
        saved,
        lambda value: f"{100 * value:.0f}",
        linear=True,
    )


def column(row: CandidateRow) -> str:
    """Column of a row: q, k and v stand apart."""
    place = part_of(row.name) if row.kind == "qkv" else None
    return place[1] if place else row.kind


def _heat_map(  # noqa: PLR0913
    found: Sensitivity,
    name: str,
    title: str,
    value: Callable[[CandidateRow], float | None],
    text: Callable[[float], str],
    *,
    linear: bool = False,
) -> str:
    from matplotlib.patches import Rectangle

    rows = [row for row in found.rows if row.group in ("linear", "attention") and row.layer is not None]
    cells = {(row.layer, column(row)): amount for row in rows if (amount := value(row)) is not None}
    if not cells:
        return ""
    layers = sorted({layer for layer, _ in cells if layer is not None})
    columns = [each for each in CHART_COLUMNS if any(each == of for _, of in cells)]
    largest = max(cells.values())
    figure = svg.figure_of(0.9 + 0.24 * len(layers))
    axes = figure.add_subplot()
    for (layer, kind), amount in cells.items():
        if layer is None or kind not in columns:
            continue
        x, y = columns.index(kind), layers.index(layer)
        shade = DARKEST * _shade(amount, largest, linear)
        corner, colour = (x - 0.48, y - 0.46), svg.VERMILLION
        axes.add_patch(Rectangle(corner, 0.96, 0.92, facecolor=colour, alpha=shade, edgecolor="none"))
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


def _shade(amount: float, largest: float, linear: bool) -> float:
    """0 to 1: the logarithm over some decades, or the value itself."""
    if largest <= 0 or amount <= 0:
        return 0.0
    if linear:
        return amount / largest
    return max(0.03, 1 + math.log10(amount / largest) / DECADES)


def curve_svg(found: Sensitivity) -> str:
    """Divergence and drop over the number of linears kept out of INT8."""
    if len(found.curve) < 2:
        return ""
    figure = svg.figure_of(4.2)
    upper, lower = figure.subplots(2, 1, sharex=True)
    places = [point.kept for point in found.curve]
    judged = [point.judged for point in found.curve]
    line = {"color": svg.BLUE, "marker": "o", "markersize": 4, "linewidth": 1.4, "capsize": 3}
    chosen = next(point for point in found.curve if point.kept == found.choice.kept)
    upper.errorbar(places, [j.divergence for j in judged], [j.divergence_stderr for j in judged], **line)
    upper.axhline(found.full.divergence / 2, **svg.LIMIT_LINE, label="half of all in INT8")
    lower.errorbar(places, [j.drop for j in judged], [j.drop_stderr for j in judged], **line)
    lower.axhline(float(found.recipe["gate"]["max_drop"]), **svg.LIMIT_LINE)
    for axes, value in ((upper, chosen.judged.divergence), (lower, chosen.judged.drop)):
        axes.plot(chosen.kept, value, marker="o", markersize=11, markerfacecolor="none", color=svg.ORANGE)
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xticks(places, [str(place) for place in places])
        axes.minorticks_off()
    svg.dress(upper, "divergence; dashed: half of everything in INT8")
    svg.dress(lower, f"drop of {found.metric}; dashed: gate.max_drop")
    lower.set_xlabel("linears kept out of INT8, the worst first; circle: the written recipe")
    return svg.svg_of(figure, "sensitivity-curve", "divergence and drop by the number of linears out of INT8")
