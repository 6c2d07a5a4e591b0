"""`methods.md`, `methods.html` and the terminal's table, all from one `Methods`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.eval.methods.results import METHODS_FILE, MethodRow, Methods
from qdqbench.eval.report import svg
from qdqbench.eval.report.formats import DIVERGENCES, cleaned, label, remarks, seconds, sentence
from qdqbench.eval.report.page import Page, page_of_choice
from qdqbench.eval.report.render import write
from qdqbench.eval.trials.results import DRAW, Trial
from qdqbench.quantize.core import files
from qdqbench.quantize.core.comparison import Comparison

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class MethodLine:
    """One row in words."""

    name: str
    settings: list[str]  # method, smooth, weights, bias correction, split
    cells: list[str]
    marks: str  # best, recipe
    best: bool
    failure: str


@dataclass(frozen=True)
class MethodsView:
    """A table of methods in words, ready for templates."""

    found: Methods  # cleaned
    page: Page
    headline: str
    caption: str
    explanation: list[str]
    columns: list[str]
    lines: list[MethodLine]
    notes: list[str]
    charts: list[str]  # SVG
    tiles: list[tuple[str, str, str, bool]]
    settings: tuple[str, ...] = ("method", "smooth", "weights", "bias", "split")


def write_methods(found: Methods, folder: Path) -> list[Path]:
    """Write `methods.json`, `methods.md` and `methods.html` (one file, no external request).

    Raises:
        UserError: the folder cannot be written.
    """
    shown = methods_view(found)
    files.write_text(folder / METHODS_FILE, found.model_dump_json(indent=2) + "\n")
    return [folder / METHODS_FILE, *write("methods", folder, {"s": shown, "page": shown.page})]


def methods_view(found: Methods) -> MethodsView:
    """Words and figures for people; every one of them is in `methods.json`."""
    found = cleaned(found)
    splits = list(found.fp32)
    settings = [
        ("batch size", str(found.batch_size)),
        ("time of all rows", seconds(found.timings["total_s"])),
    ]
    judged = [f"{label(found.metric)}{_of(split, splits)}" for split in splits]
    return MethodsView(
        found=found,
        page=page_of_choice(found, "calibration methods", METHODS_FILE, *settings),
        headline=methods_headline(found),
        caption=caption(found),
        explanation=_explanation(found),
        columns=[
            "divergence",
            "of the recipe's",
            "SQNR",
            "amax / rms",
            *(column for name in judged for column in (name, f"{name} against FP32")),
            "time",
        ],
        lines=[_line(found, row) for row in found.rows],
        notes=[sentence(note) for note in found.notes],
        charts=[divergence_svg(found), *([delta_svg(found)] if found.fp32 else [])],
        tiles=_tiles(found),
    )


def methods_headline(found: Methods) -> str:
    """The best row, and what it gains over the recipe as it is."""
    best, given = found.best, found.given
    text = f"Best: {best.name}, with a divergence of {best.trial.divergence:.2e}"
    if best is given:
        text += "; that is the recipe as it is."
    elif given.trial.failure:
        text += "; the recipe as it is failed."
    else:
        noise = ", which is within noise" if given.ties else ""
        text += f" against {given.trial.divergence:.2e} of the recipe as it is{noise}."
    scores = [
        f"{label(found.metric)}{_of(split, list(found.fp32))} {method_delta(best.trial.scores[split])}"
        for split in found.fp32
    ]
    return f"{text} Against FP32 on validation: {', '.join(scores)}." if scores else text


def caption(found: Methods) -> str:
    """What chose, and what judges."""
    data = found.data
    return (
        f"The best row is chosen on {data['split']} data only: by the divergence from FP32 on "
        f"{data['samples']} rows that calibration ({data['calibration']} rows) did not see. Validation "
        + ("is the judge and chose nothing." if found.fp32 else "was not looked at.")
    )


def method_delta(comparison: Comparison) -> str:
    """INT8 minus FP32 with its standard error, and whether it is noise; negative is a loss."""
    noise = " (noise)" if comparison.within_noise else ""
    return f"{-comparison.drop:+.4f} ± {comparison.drop_stderr:.4f}{noise}"


def methods_summary(found: Methods) -> "Group":
    """One screen for the terminal, as a rich renderable."""
    from rich.console import Group, RenderableType
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    shown = methods_view(found)
    head = Panel(
        Text(shown.headline), title=Text(shown.page.heading), border_style="green", title_align="left"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("method", *_screen(shown.columns)):
        table.add_column(name)
    for line in shown.lines:
        cells = _screen(line.cells) if not line.failure else ["failed"]
        style = "green" if line.best else "red" if line.failure else ""
        marks = f" ({line.marks})" if line.marks else ""
        table.add_row(Text(f"{line.name}{marks}"), *(Text(cell, no_wrap=True) for cell in cells), style=style)
    failed = [
        Text(f"failed: {line.name}: {line.failure}", style="red") for line in shown.lines if line.failure
    ]
    told = Text(f"{shown.caption} ~ marks differences within noise.")
    parts: list[RenderableType] = [head, table, told, *failed, *remarks(shown.found.warnings, shown.notes)]
    return Group(*parts)


def _screen(cells: list[str]) -> list[str]:
    """What fits 80 columns: the divergence without its error, and the difference to FP32 of every split."""
    return [cells[0].split(" ± ")[0], *(cell.replace(" (noise)", " ~") for cell in cells[5:-1:2])]


def _tiles(found: Methods) -> list[tuple[str, str, str, bool]]:
    best = found.best.trial
    share = _share(found, best)
    of_given = f"{share} of the recipe's" if share else ""
    tiles = [("divergence of the best", f"{best.divergence:.2e}", of_given, True)]
    for split in found.fp32:
        versus = best.scores[split]
        name = f"{label(found.metric)}{_of(split, list(found.fp32))} against FP32"
        noise = "within noise" if versus.within_noise else "beyond noise"
        tiles.append((name, f"{-versus.drop:+.4f}", noise, True))
    return [*tiles, ("methods", str(len(found.rows)), seconds(found.timings["total_s"]), True)]


def _explanation(found: Methods) -> list[str]:
    return [
        f"Divergence is {DIVERGENCES[found.divergence]}; ± is one standard error over the samples. "
        "= marks rows that are not worse than the best one by more than two standard errors, paired by "
        "sample.",
        "Against FP32 is INT8 minus FP32 in fake-quant with the paired standard error; (noise) marks "
        "differences of at most two of them. amax / rms is the largest of an activation. Time is that of the "
        "passes over the calibration data, also where rows share them, and of what the row adds.",
    ]


def _line(found: Methods, row: MethodRow) -> MethodLine:
    section = row.section
    settings = [section.method, str(section.smooth), section.weights_method]
    settings += ["on" if section.bias_correction else "off", str(section.split_outliers or "off")]
    marks = [("best", row.best), ("=", row.ties and not row.best), ("the recipe", row.is_given)]
    failure = row.trial.failure
    return MethodLine(
        name=row.name,
        settings=settings,
        cells=[] if failure else _cells(found, row),
        marks=", ".join(mark for mark, holds in marks if holds),
        best=row.best,
        failure=failure.text if failure else "",
    )


def _share(found: Methods, trial: Trial) -> str:
    given = found.given.trial
    return "" if given.failure or not given.divergence else f"{trial.divergence / given.divergence:.0%}"


def _cells(found: Methods, row: MethodRow) -> list[str]:
    trial, versus = row.trial, row.trial.scores[DRAW]
    assert trial.calibration is not None
    widest = trial.calibration.amax_over_rms
    cells = [
        f"{versus.divergence:.2e} ± {versus.divergence_stderr:.0e}",
        _share(found, trial),
        "equal" if versus.sqnr_db is None else f"{versus.sqnr_db:.1f} dB",
        "" if widest is None else f"{widest:.0f}",
    ]
    for split in found.fp32:
        cells += [f"{found.value(row, split):.4f}", method_delta(trial.scores[split])]
    return [*cells, f"{trial.calibration.seconds:.0f} s"]


def _of(split: str, splits: list[str]) -> str:
    return f" ({split.removeprefix('validation_')})" if len(splits) > 1 else ""


def divergence_svg(found: Methods) -> str:
    """Divergence of every row with one standard error."""
    points = [
        (row, row.trial.divergence, row.trial.scores[DRAW].divergence_stderr or 0.0)
        for row in found.rows
        if not row.trial.failure
    ]
    title = "divergence from FP32, train rows"
    return _chart(points, title, "methods-divergence", None)


def delta_svg(found: Methods) -> str:
    """Difference of the primary metric on the first evaluation split with its paired standard error."""
    split = next(iter(found.fp32))
    done = [(row, row.trial.scores[split]) for row in found.rows if not row.trial.failure]
    points = [(row, -versus.drop, versus.drop_stderr) for row, versus in done]
    return _chart(points, f"{label(found.metric)} against FP32, {split}", "methods-delta", 0.0)


def _short(row: MethodRow) -> str:
    own = row.section
    parts = [own.method.replace("percentile/", "p"), f"smooth {own.smooth}" if own.smooth != "none" else ""]
    parts += ["w. mse" if own.weights_method == "mse" else "", "bias" if own.bias_correction else ""]
    parts += [f"split {own.split_outliers}" if own.split_outliers else ""]
    return ", ".join(part for part in parts if part)


def _chart(points: list[tuple[MethodRow, float, float]], title: str, name: str, zero: float | None) -> str:
    figure = svg.figure_of(0.7 + 0.24 * len(points))
    axes: Any = figure.add_subplot()
    if zero is not None:
        axes.axvline(zero, color=svg.MUTED, linewidth=0.8)
    for place, (row, value, error) in enumerate(points):
        colour, marker = (svg.GREEN, "*") if row.best else (svg.BLUE, "o")
        axes.errorbar(value, place, xerr=error, color=colour, marker=marker, markersize=5, capsize=3)
    labels = [f"{_short(row)}{' (recipe)' if row.is_given else ''}" for row, _, _ in points]
    axes.set_yticks(range(len(points)), labels)
    axes.set_ylim(len(points) - 0.4, -0.6)
    if zero is None and all(value > 0 for _, value, _ in points):
        svg.log_scale(axes, "x")
    else:
        axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
        axes.locator_params(axis="x", nbins=5)
    axes.tick_params(axis="y", length=0)
    svg.dress(axes, f"{title}; star: best", grid="x")
    return svg.svg_of(figure, name, title)
