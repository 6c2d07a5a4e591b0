"""Curves of training as inline SVG, in the style of `plots`: the loss, and what the held-out rows said."""

import math
from typing import Any

from qdqbench.eval.report import svg
from qdqbench.eval.report.formats import label
from qdqbench.quantize.core.training_results import LogRow, TrainingRun

COLOURS = (svg.BLUE, svg.ORANGE, svg.GREEN, svg.PURPLE, svg.SKY, svg.INK)
SEED_DASHES = (
    "-",
    (0, (5, 2)),
    (0, (1, 1.2)),
    (0, (6, 2, 1, 2)),
)  # after six seeds: colour alone is not enough
LEGEND_COLUMNS = 4  # a page's font may be wider than the one that matplotlib measures with
MANY = 25  # points of a curve, above which they are not marked one by one


def charts_of(runs: list[TrainingRun]) -> list[str]:
    """Training loss, the measure that chose the weights, then the other held-out ones; SVG, may be empty."""
    charts = [_curves(runs, "training-loss", "training loss", None)]
    chosen = score_name(runs)
    others = list(dict.fromkeys(name for run in runs for row in run.log for name in row.values))
    for number, name in enumerate([chosen, *(name for name in others if name != chosen)]):
        remark = " (chooses the weights)" if name == chosen else ""
        charts.append(_curves(runs, f"held-out-{number}", f"held-out {labelled_measure(name)}{remark}", name))
    return [chart for chart in charts if chart]


def labelled_measure(name: str) -> str:
    """What people call a held-out measure."""
    known = {
        "distance": "distance from FP32's answers",
        "hidden": "distance from FP32's hidden states",
        "objective": "sum of the distances",
    }
    return known.get(name, label(name))


def score_name(runs: list[TrainingRun]) -> str:
    """The held-out measure that the score is, as it is or with its sign turned; "score" when it is none."""
    rows = [row for run in runs for row in run.log if row.score is not None]
    for name in rows[0].values if rows else ():
        found = [(row.values.get(name, math.nan), row.score or 0.0) for row in rows]
        if all(value == score for value, score in found) or all(value == -score for value, score in found):
            return name
    return "score"


def points_of(run: TrainingRun, name: str | None) -> list[tuple[int, float]]:
    """Step and value of a held-out measure, or of the training loss (None); only what is a number."""

    def value(row: LogRow) -> float | None:
        if name is None:
            return row.loss
        return row.score if name == "score" else row.values.get(name)

    found = [(row.step, value(row)) for row in run.log]
    return [(step, number) for step, number in found if number is not None and math.isfinite(number)]


def _curves(runs: list[TrainingRun], identity: str, title: str, name: str | None) -> str:
    """One measure over the steps, a line per seed, a star where the weights that were kept are."""
    drawn = [(number, run, points_of(run, name)) for number, run in enumerate(runs)]
    drawn = [line for line in drawn if line[2]]
    if not drawn:
        return ""
    several = len(runs) > 1
    rows = -(-(len(drawn) + 1) // LEGEND_COLUMNS) if several else 1
    figure = svg.figure_of(2.3 + 0.17 * rows)
    axes = figure.add_subplot()
    for number, run, points in drawn:
        _line(axes, number, run, points, several=several)
    best = [(run, dict(points).get(run.best_step)) for _, run, points in drawn]
    stars = [(run.best_step, height) for run, height in best if run.status == "done" and height is not None]
    if stars:
        axes.scatter(
            *zip(*stars, strict=True),
            marker="*",
            s=95,
            color=svg.VERMILLION,
            edgecolors="white",
            linewidths=0.5,
            zorder=4,
            label="weights kept",
        )
    if name is not None and not several and drawn[0][2][0][0] == 0:
        start = drawn[0][2][0][1]
        axes.axhline(
            start, color=svg.MUTED, linestyle=(0, (4, 2)), linewidth=1, label="before training (PTQ)"
        )
    _axes(axes, [value for *_, points in drawn for _, value in points], loss=name is None)
    svg.dress(axes, title)
    svg.legend(figure, LEGEND_COLUMNS if several else 3)
    return svg.svg_of(figure, identity, f"{title} by step")


def _line(
    axes: Any, number: int, run: TrainingRun, points: list[tuple[int, float]], *, several: bool
) -> None:
    failed = ", failed" if run.status == "failed" else ""
    axes.plot(
        *zip(*points, strict=True),
        color=COLOURS[number % len(COLOURS)],
        linestyle=SEED_DASHES[number // len(COLOURS) % len(SEED_DASHES)],
        linewidth=1.2,
        marker="o" if len(points) <= MANY else None,
        markersize=2.6,
        label=f"seed {run.seed}{failed}" if several else None,
    )


def _axes(axes: Any, values: list[float], *, loss: bool) -> None:
    if loss and min(values) > 0 and max(values) > 50 * min(values):
        svg.log_scale(axes)
    axes.margins(x=0.02, y=0.1)
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=8)
    axes.set_xlabel("optimizer step")
