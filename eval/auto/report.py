"""What a ladder says in words, in `auto.md` and in `auto.html` (one file, opens offline)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqbench.eval.auto.results import AUTO_FILE, Auto, Measured, Step
from qdqbench.eval.report import svg
from qdqbench.eval.report.formats import cleaned, delta_points, flat, label, points, seconds, sentence
from qdqbench.eval.report.page import Page, page_of_choice
from qdqbench.eval.report.render import write
from qdqbench.quantize.core.comparison import Comparison

WHAT = {
    "shipped": "shipped recipe",
    "methods": "calibration methods",
    "islands": "islands by sensitivity",
    "search": "search",
    "qat": "training (QAT)",
}
MARKS = {"holds": "✓", "fails": "✗", "skipped": "-", "failed": "!"}


@dataclass(frozen=True)
class Line:
    """A step in words."""

    step: Step
    mark: str
    title: str
    cells: list[str]  # value, against FP32, against the step before, ms, speed-up; empty where not measured
    time: str
    told: list[str]  # how its recipe was found, what it lacks, why it was skipped
    chosen: bool


@dataclass(frozen=True)
class AutoView:
    """A ladder in words, ready for templates."""

    found: Auto  # cleaned
    page: Page
    headline: str
    asked: str
    story: list[str]
    columns: list[str]
    lines: list[Line]
    deploy: list[tuple[str, str]]
    explanation: list[str]
    notes: list[str]
    chart: str  # SVG; empty where nothing was measured
    tiles: list[tuple[str, str, str, bool]]


def write_auto(found: Auto, folder: Path) -> list[Path]:
    """Write `auto.md` and `auto.html`.

    Raises:
        UserError: the folder cannot be written.
    """
    shown = auto_view(found)
    return write("auto", folder, {"s": shown, "page": shown.page})


def auto_view(found: Auto) -> AutoView:
    """Words and figures for people; every one of them is in `auto.json`."""
    found = cleaned(found)
    over = found.source.twin if found.source else "its twin"
    return AutoView(
        found=found,
        page=page_of_choice(found, "ladder to a recipe", AUTO_FILE, *flat(found.gate.model_dump(), "gate")),
        headline=headline(found),
        asked=asked(found),
        story=[sentence(line) for line in story(found)],
        columns=[label(found.metric), "against FP32", "against the step before", "ms", f"over {over}"],
        lines=[line_of(found, step) for step in found.steps],
        deploy=[(name, value) for name, value in _deploy(found) if value],
        explanation=_explanation(found),
        notes=[sentence(note) for note in found.notes],
        chart=steps_svg(found),
        tiles=_tiles(found),
    )


def _tiles(found: Auto) -> list[tuple[str, str, str, bool]]:
    step, tiles = _chosen(found), []
    if step is not None and (measured := step.measured) is not None:
        versus = next(iter(measured.vs_fp32.values()))
        value, error = versus.delta[found.metric], versus.delta_stderr[found.metric]
        noise = "within noise" if versus.within_noise else "beyond noise"
        title, change = f"{label(found.metric)} against FP32", delta_points(value, error)
        held = versus.within_noise or value >= -found.gate.max_drop
        tiles.append((title, change, f"points, {noise}", held))
        if measured.latency:
            twin = f"over {found.source.twin}{_modelled(found)}" if found.source else ""
            tiles.append(("speed", f"{measured.latency.value:.2f}x", twin, measured.latency.value >= 1))
    done = sum(each.status == "done" for each in found.steps)
    tiles.append(("steps climbed", f"{done} of {len(found.steps)}", seconds(found.spent_s), True))
    return tiles


def headline(found: Auto) -> str:
    """The answer in one sentence."""
    step = _chosen(found)
    if step is None or step.measured is None:
        return f"No recipe: {found.choice.why}."
    what, measured = step.measured.recipe, step.measured
    speed = f", {measured.latency.value:.2f}x{_modelled(found)}" if measured.latency else ""
    figures = f"{label(found.metric)} {_difference(measured.vs_fp32, found.metric)} against FP32{speed}"
    if found.choice.passed:
        return f"Deploy {what}: {figures}."
    return f"No recipe holds. The best that was found is {what}: {figures}."


def asked(found: Auto) -> str:
    """The gate and the budget in words."""
    speed = f", at least {found.gate.min_speedup:g}x as fast as the twin" if found.gate.min_speedup else ""
    return (
        f"Asked: at most {points(found.gate.max_drop)} of {label(found.metric)} lost, or no more than noise"
        f"{speed}, within {seconds(found.budget_s)}; {seconds(found.spent_s)} were spent."
    )


def story(found: Auto) -> list[str]:
    """What was tried, step by step, and what the choice rests on."""
    lines = [found.choice.why]
    if not found.choice.passed:
        lines += [f"What it lacks: {lack}" for lack in found.choice.lacks if found.choice.step]
    step = _chosen(found)
    final = step.measured.final if step and step.measured else None
    if final is not None:
        lines.append(
            "Evaluation data decided how far the ladder was climbed, so its figure on them is a little too "
            f"good. With each sample judged by the choice of the others ({final.folds} folds) the "
            f"ladder comes to {_difference(final.vs_fp32, found.metric)}; {final.others:.0%} of the samples "
            "got the answers of another step there"
        )
    elif found.choice.passed:
        lines.append("It was the first to be tried, so no evaluation data chose it")
    return lines


def line_of(found: Auto, step: Step) -> Line:
    """A step in words."""
    measured, told = step.measured, [*step.proposal]
    if step.reason:
        told.append(f"{'Skipped' if step.status == 'skipped' else 'Failed'}: {step.reason}")
    if measured is not None:
        told += [f"Lacks: {lack}" for lack in measured.missing.all]
        if measured.latency is None:
            told.append(f"No latency: {measured.latency_note}")
    title = step.name if step.kind == "shipped" else f"{WHAT[step.kind]}"
    estimate = "" if step.estimate_s is None else f"{seconds(step.estimate_s)} estimated"
    took = f"{seconds(step.seconds)} taken" if step.status != "skipped" else ""
    return Line(
        step=step,
        mark=_mark(step),
        title=title,
        cells=_cells(found, measured) if measured else [],
        time=", ".join(text for text in (estimate, took) if text),
        told=[sentence(text) for text in told],
        chosen=step.name == found.choice.step,
    )


def _mark(step: Step) -> str:
    if step.status != "done":
        return MARKS[step.status]
    return MARKS["holds" if step.holds else "fails"]


def _cells(found: Auto, measured: Measured) -> list[str]:
    latency = measured.latency
    return [
        f"{100 * measured.metrics[found.metric]:.2f}",
        _delta(measured.vs_fp32, found.metric),
        _delta(measured.vs_before, found.metric) if measured.vs_before else "",
        f"{latency.system_ms:.3g}{_modelled(found)}" if latency else "",
        f"{latency.value:.2f}x{_modelled(found)}" if latency else "",
    ]


def _modelled(found: Auto) -> str:
    return " modelled" if found.source and found.source.mode == "model" else ""


def _delta(versus: dict[str, Comparison], metric: str) -> str:
    """Differences of the primary metric in points, by evaluation split."""
    cells = []
    for row in versus.values():
        noise = " ~" if row.within_noise else ""
        cells.append(f"{delta_points(row.delta[metric], row.delta_stderr[metric])}{noise}")
    return " / ".join(cells)


def _difference(versus: dict[str, Comparison], metric: str) -> str:
    """The same in a sentence."""
    cells = []
    for row in versus.values():
        noise = " (within noise)" if row.within_noise else ""
        cells.append(f"{delta_points(row.delta[metric], row.delta_stderr[metric])} points{noise}")
    return " and ".join(cells)


def _chosen(found: Auto) -> Step | None:
    return next((step for step in found.steps if step.name == found.choice.step), None)


def _deploy(found: Auto) -> list[tuple[str, str | None]]:
    choice = found.choice
    return [
        ("recipe", choice.recipe),
        ("engine", choice.engine),
        ("run", choice.run),
        ("repeats it", choice.command),
    ]


def _explanation(found: Auto) -> list[str]:
    lines = [
        "✓ holds, ✗ does not, - was skipped, ! failed. Differences are in points with one paired standard "
        "error; ~ marks those of at most two. They are of the last stage that ran: "
        f"{', '.join(dict.fromkeys(label(s.measured.stage) for s in found.steps if s.measured)) or 'none'}. "
        "In the chart bars are two standard errors, and the dashed line is what was allowed.",
        f"What a step proposes is chosen on at most {found.data['proposals']} rows of the train split that "
        "do not calibrate; evaluation data only say whether to climb on.",
    ]
    if found.source is not None:
        shape = f"batch {found.source.batch}, {found.source.length} tokens"
        lines.append(
            f"Latency: {found.source.label}; {shape}, beside the {found.source.twin} twin without INT8."
        )
        lines += [f"Outside of what the cost model was fitted to: {text}." for text in found.source.outside]
    return lines


def steps_svg(found: Auto) -> str:
    """Difference from FP32 of every step that was measured, and the drop that is allowed."""
    done = [(line_of(found, step), step.measured) for step in found.steps if step.measured]
    if not done:
        return ""
    figure = svg.figure_of(0.9 + 0.3 * len(done))
    axes: Any = figure.add_subplot()
    axes.axvline(0.0, color=svg.MUTED, linewidth=0.8)
    axes.axvline(-100 * found.gate.max_drop, **svg.LIMIT_LINE)
    for place, (line, measured) in enumerate(done):
        row = next(iter(measured.vs_fp32.values()))
        colour, marker = (svg.GREEN, "o") if line.step.holds else (svg.VERMILLION, "X")
        value, error = 100 * row.delta[found.metric], 200 * row.delta_stderr[found.metric]
        axes.errorbar(value, place, xerr=error, color=colour, marker=marker, markersize=6, capsize=3)
    axes.set_yticks(range(len(done)), [f"{line.mark} {line.title}" for line, _ in done])
    axes.set_ylim(len(done) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    title = f"{label(found.metric)} against FP32, points"
    svg.dress(axes, title, grid="x")
    return svg.svg_of(figure, "auto-steps", f"{title}, of every step that was measured")
