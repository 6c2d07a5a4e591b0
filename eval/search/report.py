"""What a search says: on the terminal, in `search.md` and in `search.html` (one file, opens offline)."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.eval.report import svg
from qdqbench.eval.report.formats import delta_points, flat, label, model_label
from qdqbench.eval.report.page import Page, page_of
from qdqbench.eval.report.render import write
from qdqbench.eval.search.results import Confirmed, Search, Trial
from qdqbench.quantize.core.comparison import Comparison
from qdqbench.quantize.core.speedup import Speedup

if TYPE_CHECKING:
    from rich.console import Group

MARKS = (  # what a point of the plot is; shape and colour differ
    ("tried", svg.SKY, "o"),
    ("Pareto front", svg.BLUE, "o"),
    ("shipped recipe", svg.ORANGE, "s"),
    ("given recipe", svg.GREEN, "^"),
    ("chosen", svg.VERMILLION, "*"),
)
SETTINGS = {"method": "activations", "smooth": "smooth", "weights_method": "weights"}


def write_search_reports(found: Search, folder: Path) -> list[Path]:
    """Write `search.md` and `search.html`.

    Raises:
        UserError: the folder cannot be written.
    """
    page = {"page": _page(found), "tiles": _tiles(found), "svg": front_svg(found)}
    return write("search", folder, _context(found) | page)


def search_headline(found: Search) -> str:
    """The answer in one sentence."""
    chosen = chosen_of(found)
    if chosen is None:
        return f"No recipe holds the gate: {found.outcome.why}."
    if not found.outcome.passed:
        problems = "; ".join(found.outcome.failures)
        return f"Trial {chosen.number} was chosen, and validation does not confirm it: {problems}."
    what = "confirmed on validation"
    if found.source.mode == "model":
        what = "accuracy confirmed on validation, latency modelled and not measured"
    return f"Trial {chosen.number}: {found.outcome.why}; {what}."


def chosen_of(found: Search) -> Trial | None:
    """The chosen trial."""
    return next((trial for trial in found.trials if trial.number == found.outcome.chosen), None)


def front_svg(found: Search) -> str:
    """Accuracy against latency of all trials; empty when none is complete."""
    done = [t for t in found.trials if t.accuracy and t.latency and t.duplicate_of is None]
    if not done:
        return ""
    drop = found.objective == "drop"
    measure = "drop, points" if drop else "divergence from FP32"
    twin_ms = statistics.median(t.latency.baseline_ms for t in done if t.latency)  # one scale for all hours
    groups: dict[str, list[tuple[float, float]]] = {name: [] for name, *_ in MARKS}
    for trial in done:
        groups[_mark(found, trial)].append(_point(trial, twin_ms, drop=drop))
    shipped = {
        t.duplicate_of: t
        for t in found.trials
        if t.origin.startswith("shipped") and t.duplicate_of is not None
    }
    for trial in done:  # a shipped recipe that an earlier trial was already
        if trial.number in shipped and _mark(found, trial) not in ("shipped recipe", "chosen"):
            groups["shipped recipe"].append(_point(trial, twin_ms, drop=drop))
    figure = svg.figure_of(3.6)
    axes = figure.add_subplot()
    front = sorted(_point(t, twin_ms, drop=drop) for t in done if t.on_front)
    axes.step(*zip(*front, strict=True), where="post", color=svg.BLUE, linewidth=1, alpha=0.6)
    for name, colour, marker in MARKS:
        if groups[name]:
            size = {"tried": 14, "chosen": 130}.get(name, 34)
            axes.scatter(
                *zip(*groups[name], strict=True), s=size, color=colour, marker=marker, label=name, zorder=3
            )
    modelled = " (modelled)" if found.source.mode == "model" else ""
    axes.set_xlabel(f"latency{modelled}, ms, batch {found.source.batch}, {found.source.length} tokens")
    svg.dress(axes, measure, grid="both")
    svg.legend(figure, 3, 2)
    return svg.svg_of(figure, "search-front", f"{measure} against latency of {len(done)} recipes")


def _point(trial: Trial, twin_ms: float, *, drop: bool) -> tuple[float, float]:
    assert trial.accuracy is not None
    assert trial.latency is not None
    return twin_ms / trial.latency.value, 100 * trial.accuracy.drop if drop else trial.accuracy.divergence


def _mark(found: Search, trial: Trial) -> str:
    if trial.number == found.outcome.chosen:
        return "chosen"
    if trial.origin.startswith("shipped"):
        return "shipped recipe"
    if trial.origin == "given recipe":
        return "given recipe"
    return "Pareto front" if trial.on_front else "tried"


def _context(found: Search) -> dict[str, Any]:
    """Everything in words, ready for the templates."""
    chosen = chosen_of(found)
    order = sorted(
        found.trials, key=lambda t: (not t.on_front, -t.latency.value if t.latency else 0, t.number)
    )
    return {
        "s": found,
        "headline": search_headline(found),
        "chosen": chosen,
        "recipe_yaml": chosen.recipe if chosen else "",
        "trials": [_trial_cells(found, trial) for trial in order],
        "confirmed": [_confirmed_cells(found, row) for row in found.confirmed],
        "agreement": _agreement(found),
        "modelled": found.source.mode == "model",
        "complete": sum(t.state == "complete" and t.duplicate_of is None for t in found.trials),
        "failed": sum(t.state == "failed" for t in found.trials),
        "repeated": sum(t.duplicate_of is not None for t in found.trials),
        "error": _error(found),
    }


def _page(found: Search) -> Page:
    about = [label(found.task), str(found.recipe["name"])]
    facts = {"Settings": flat(found.settings), "Latency": flat(found.source.model_dump())}
    return page_of(found, "search", model_label(found.model), about, "search.json", facts=facts)


def _tiles(found: Search) -> list[tuple[str, str, str, bool]]:
    """The chosen recipe and what it was chosen from."""
    tiles, tried = [], [t for t in found.trials if t.state == "complete" and t.duplicate_of is None]
    row = next(iter(found.confirmed), None)
    if row is not None and row.latency is not None:
        timed = _timed(found, row.latency)
        tiles.append(("speed of the chosen", timed["speedup"], f"over {found.source.twin}", True))
    if row is not None and (versus := next(iter(row.fake_quant.values()), None)):
        noise = "within noise" if versus.within_noise else "beyond noise"
        tiles.append(("drop, points", _drop(versus, found.metric), f"on validation, {noise}", True))
    return [
        *tiles,
        ("recipes tried", str(len(tried)), f"{sum(t.on_front for t in tried)} on the front", True),
    ]


def _trial_cells(found: Search, trial: Trial) -> dict[str, Any]:
    accuracy, latency = trial.accuracy, trial.latency
    how = [f"{name} {trial.params[key]}" for key, name in SETTINGS.items() if key in trial.params]
    return {
        "number": trial.number,
        "origin": trial.origin,
        "what": f"{trial.int8_linears} linears, {trial.int8_attention} attentions",
        "how": ", ".join(how) if trial.int8_linears else "nothing to calibrate",
        "divergence": f"{accuracy.divergence:.3g}" if accuracy else "",
        "drop": delta_points(accuracy.drop, accuracy.drop_stderr) if accuracy else "",
        "noise": "within noise" if accuracy and accuracy.within_noise else "",
        **_timed(found, latency),
        "holds": trial.holds,
        "front": trial.on_front,
        "chosen": trial.number == found.outcome.chosen,
        "remark": trial.reason
        or (f"same recipe as {trial.duplicate_of}" if trial.duplicate_of is not None else ""),
    }


def _confirmed_cells(found: Search, row: Confirmed) -> dict[str, Any]:
    versus = next(iter(row.fake_quant.values()), None)
    engine = next(iter(row.engine.values()), None)
    metric = found.metric
    remarks = _other_splits(row, metric) + ["dominates the chosen recipe"] * row.dominates
    return {
        "name": row.name,
        "value": f"{row.metrics[metric]:.4f}" if metric in row.metrics else "",
        "drop": _drop(versus, metric),
        "noise": "within noise" if versus and versus.within_noise else "",
        "engine": _drop(engine, metric),
        **_timed(found, row.latency),
        "shipped": row.shipped,
        "dominates": row.dominates,
        "remark": row.reason or "; ".join(remarks),
    }


def _drop(versus: Comparison | None, metric: str) -> str:
    return delta_points(-versus.delta[metric], versus.delta_stderr[metric]) if versus else ""


def _other_splits(row: Confirmed, metric: str) -> list[str]:
    """Drops on the evaluation splits behind the first: MNLI has two."""
    found = []
    for split, versus in list(row.fake_quant.items())[1:]:
        engine = f", of the engine {_drop(row.engine[split], metric)}" if split in row.engine else ""
        found.append(f"{split.removeprefix('validation_')}: drop {_drop(versus, metric)}{engine}")
    return found


def _timed(found: Search, latency: Speedup | None) -> dict[str, str]:
    if latency is None:
        return {"latency": "", "speedup": ""}
    how = " modelled" if found.source.mode == "model" else ""
    return {"latency": f"{latency.system_ms:.3g}{how}", "speedup": f"{latency.value:.2f}x{how}"}


def _agreement(found: Search) -> str:
    pair = found.agreement
    if pair is None:
        return ""
    return (
        "Calibrated in full, its drop where it was searched is "
        f"{delta_points(pair.searched, pair.searched_stderr)} points, and on validation "
        f"{delta_points(pair.confirmed, pair.confirmed_stderr)}: they "
        + ("agree within noise." if pair.within_noise else "differ by more than noise.")
    )


def _error(found: Search) -> str:
    error = found.source.error
    if error is None:
        return ""
    return (
        "Error of the cost model on engines left out of its fit, which says nothing of placements that none "
        f"of them has: latency {error['ms_median']:.1%} (median), "
        f"{error['ms_p90']:.1%} (90th percentile); speed-up {error['speedup_median']:.1%} and "
        f"{error['speedup_p90']:.1%}."
    )


def search_summary(found: Search) -> "Group":
    """For the terminal."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    context = _context(found)
    modelled = "\nmodelled" if context["modelled"] else ""
    over = f"over {found.source.twin}{modelled}"
    table = Table(box=None)
    table.add_column("recipe", no_wrap=True)
    for title in (label(found.metric), "drop, points", f"ms{modelled}", over):
        table.add_column(title, no_wrap=True)
    remarks = ["the first row is the chosen recipe; ~: within noise"]
    for number, row in enumerate(context["confirmed"]):
        latency, speedup = (row[name].removesuffix(" modelled") for name in ("latency", "speedup"))
        cells = (row["name"], row["value"], row["drop"] + " ~" * bool(row["noise"]), latency, speedup)
        table.add_row(*map(escape, cells), style=None if number else "bold")
        remarks += [f"{row['name']}: {row['remark']}"] if row["remark"] else []
    colour = "green" if found.outcome.passed else "red"
    lines: list[Any] = [f"[{colour}]{escape(context['headline'])}[/]"]
    counts = (
        f"{context['complete']} recipes tried, {context['repeated']} repeated, {context['failed']} failed"
    )
    lines.append(f"{counts}; asked: {escape(found.outcome.rule)}; latency {escape(found.source.label)}")
    if found.confirmed:
        lines += [table, *map(escape, remarks), escape(context["agreement"])]
    lines += [f"[yellow]warning:[/] {escape(text)}" for text in found.warnings]
    lines += [f"[dim]note: {escape(text)}[/]" for text in found.notes]
    return Group(*lines)
