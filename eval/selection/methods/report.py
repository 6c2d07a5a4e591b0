"""The report of `methods`: a page, Markdown and a screen."""

from functools import partial
from pathlib import Path
from typing import Any

from qdqbench.eval.reporting import svg
from qdqbench.eval.reporting.document import (
    EVERYWHERE,
    SCREEN,
    Bullets,
    Cell,
    Chart,
    Columns,
    Prose,
    Report,
    Row,
    Section,
    Table,
    Tile,
    Verdict,
    page_of_choice,
    row,
)
from qdqbench.eval.reporting.formats import DIVERGENCES, cleaned, label, seconds, sentence
from qdqbench.eval.reporting.render import write_report
from qdqbench.eval.selection.methods.results import METHODS_FILE, MethodRow, Methods
from qdqbench.eval.selection.trials.cells import change_cell, divergence_cell, noise_text, sqnr_text
from qdqbench.eval.selection.trials.results import DRAW, Trial
from qdqbench.quantize.utils import files


def write_methods(methods: Methods, folder: Path) -> list[Path]:
    files.write_text(folder / METHODS_FILE, methods.model_dump_json(indent=2) + "\n")
    return [folder / METHODS_FILE, *write_report(methods_report(methods), folder, "methods")]


def methods_report(methods: Methods) -> Report:
    methods = cleaned(methods)
    settings = [
        ("batch size", str(methods.batch_size)),
        ("time of all rows", seconds(methods.timings["total_s"])),
    ]
    failures = [(each.name, each.trial.failure.text) for each in methods.rows if each.trial.failure]
    return Report(
        page_of_choice(methods, "calibration methods", METHODS_FILE, *settings),
        [
            Section(
                "methods",
                "Methods",
                [
                    _table(methods),
                    Prose(f"{_caption(methods)} ~ marks differences within noise.", on=SCREEN),
                    Bullets([f"failed: {name}: {text}" for name, text in failures], "bad", SCREEN),
                    Prose(_caption(methods), "quiet"),
                    *(Prose(text, "quiet") for text in _explanation(methods)),
                ],
            ),
            Section(
                "charts",
                "Charts",
                [
                    Columns(
                        [
                            [Chart(partial(divergence_svg, methods))],
                            [Chart(partial(delta_svg, methods))] if methods.fp32 else [],
                        ]
                    )
                ],
                on=("page",),
            ),
        ],
        Verdict("", "The best method", methods_headline(methods)),
        tiles=_tiles(methods),
        warnings=methods.warnings,
        notes=[sentence(note) for note in methods.notes],
    )


def methods_headline(methods: Methods) -> str:
    best, given = methods.best, methods.given
    text = f"Best: {best.name}, with a divergence of {best.trial.divergence:.2e}"
    if best is given:
        text += "; that is the recipe as it is."
    elif given.trial.failure:
        text += "; the recipe as it is failed."
    else:
        noise = ", which is within noise" if given.ties else ""
        text += f" against {given.trial.divergence:.2e} of the recipe as it is{noise}."
    scores = [
        f"{_metric(methods, split)} {change_cell(-versus.drop, versus).text}"
        for split in methods.fp32
        for versus in [best.trial.scores[split]]
    ]
    return f"{text} Against FP32 on validation: {', '.join(scores)}." if scores else text


def _caption(methods: Methods) -> str:
    data = methods.data
    return (
        f"The best row is chosen on {data['split']} data only: by the divergence from FP32 on "
        f"{data['samples']} rows that calibration ({data['calibration']} rows) did not see. Validation "
        + ("is the judge and chose nothing." if methods.fp32 else "was not looked at.")
    )


def _explanation(methods: Methods) -> list[str]:
    return [
        f"Divergence is {DIVERGENCES[methods.divergence]}; ± is one standard error over the samples. "
        "= marks rows that are not worse than the best one by more than two standard errors, paired by "
        "sample.",
        "Against FP32 is INT8 minus FP32 in fake-quant with the paired standard error; (noise) marks "
        "differences of at most two of them. amax / rms is the largest of an activation. Time is that of the "
        "passes over the calibration data, also where rows share them, and of what the row adds.",
    ]


def _tiles(methods: Methods) -> list[Tile]:
    best = methods.best.trial
    share = _share(methods, best)
    tiles = [
        Tile("divergence of the best", f"{best.divergence:.2e}", f"{share} of the recipe's" * bool(share))
    ]
    for split in methods.fp32:
        versus = best.scores[split]
        title = f"{_metric(methods, split)} against FP32"
        tiles.append(Tile(title, f"{-versus.drop + 0.0:+.4f}", noise_text(versus)))
    return [*tiles, Tile("methods", str(len(methods.rows)), seconds(methods.timings["total_s"]))]


def _metric(methods: Methods, split: str) -> str:
    of = f" ({split.removeprefix('validation_')})" if len(methods.fp32) > 1 else ""
    return f"{label(methods.metric)}{of}"


def _share(methods: Methods, trial: Trial) -> str:
    given = methods.given.trial
    return "" if given.failure or not given.divergence else f"{trial.divergence / given.divergence:.0%}"


def _table(methods: Methods) -> Table:
    metrics = [_metric(methods, split) for split in methods.fp32]
    pairs = [name for metric in metrics for name in (metric, f"{metric} against FP32")]
    return Table(
        ["method", "divergence", "of the recipe's", *pairs, "time", "SQNR", "amax / rms"],
        [_row(methods, each) for each in methods.rows],
        look="full sortable",
        screen=(0, 1, *range(4, 3 + len(pairs), 2)),
        on=EVERYWHERE,
    )


def _row(methods: Methods, method: MethodRow) -> Row:
    states = [("best", method.best), ("=", method.ties and not method.best)]
    marks = ", ".join(mark for mark, holds in [*states, ("the recipe", method.is_given)] if holds)
    name = Cell(method.name, note=marks, short=f"{method.name} ({marks})" if marks else None)
    trial = method.trial
    if trial.failure:
        return row(name, Cell(f"failed: {trial.failure.text}", "bad", short="failed"))
    assert trial.calibration is not None
    widest = trial.calibration.amax_over_rms
    scores = []
    for split in methods.fp32:
        versus = trial.scores[split]
        scores += [Cell(f"{methods.value(method, split):.4f}"), change_cell(-versus.drop, versus)]
    return row(
        name,
        divergence_cell(trial.scores[DRAW]),
        _share(methods, trial),
        *scores,
        f"{trial.calibration.seconds:.0f} s",
        sqnr_text(trial.scores[DRAW]),
        None if widest is None else f"{widest:.0f}",
        chosen=method.best,
    )


def divergence_svg(methods: Methods) -> str:
    done = [(each, each.trial.scores[DRAW]) for each in methods.rows if not each.trial.failure]
    points = [(each, versus.distance, versus.divergence_stderr or 0.0) for each, versus in done]
    return _chart(points, "divergence from FP32, train rows", "methods-divergence", None)


def delta_svg(methods: Methods) -> str:
    split = next(iter(methods.fp32))
    done = [(each, each.trial.scores[split]) for each in methods.rows if not each.trial.failure]
    points = [(each, -versus.drop, versus.drop_stderr) for each, versus in done]
    return _chart(points, f"{label(methods.metric)} against FP32, {split}", "methods-delta", 0.0)


def _short(method: MethodRow) -> str:
    own = method.section
    parts = [
        own.method.replace("percentile/", "p"),
        f"smooth {own.smoothing}" if own.smoothing != "none" else "",
    ]
    parts += ["w. mse" if own.weights_method == "mse" else "", "bias" if own.bias_correction else ""]
    parts += [f"split {own.outlier_channel_splitting}" if own.outlier_channel_splitting else ""]
    return ", ".join(part for part in parts if part)


def _chart(points: list[tuple[MethodRow, float, float]], title: str, name: str, zero: float | None) -> str:
    figure = svg.figure_of(0.7 + 0.24 * len(points))
    axes: Any = figure.add_subplot()
    if zero is not None:
        axes.axvline(zero, color=svg.MUTED, linewidth=0.8)
    for place, (method, value, error) in enumerate(points):
        color, marker = (svg.GREEN, "*") if method.best else (svg.BLUE, "o")
        axes.errorbar(value, place, xerr=error, color=color, marker=marker, markersize=5, capsize=3)
    labels = [f"{_short(method)}{' (recipe)' if method.is_given else ''}" for method, _, _ in points]
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
