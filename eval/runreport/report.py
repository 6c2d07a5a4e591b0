"""`report.md`, `report.html` and the terminal's summary, all written from one `Results` and nothing else."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.eval.accuracy.gate import judge
from qdqbench.eval.benchreport.report import BenchView, bench_of
from qdqbench.eval.gate.gate import issue_sentence, judge_speed, read_engine_sizes, read_speed
from qdqbench.eval.report.formats import (
    LABELS,
    clean,
    first,
    flat,
    label,
    model_label,
    remarks,
    seconds,
    size,
    yaml_text,
)
from qdqbench.eval.report.page import page_of
from qdqbench.eval.report.render import write
from qdqbench.eval.runreport import charts, sizes
from qdqbench.eval.runreport.agreement_chart import agreement_svg, agreements
from qdqbench.eval.runreport.effects import effects_context
from qdqbench.eval.runreport.handoff import refresh, where_to_begin
from qdqbench.eval.runreport.parity import (
    limits_text,
    nearest_text,
    parity_svg,
    part_text,
    remark_of,
    share,
    worst_first,
)
from qdqbench.eval.runreport.training_report import section_of
from qdqbench.eval.runreport.verdict import (
    delta_text,
    headline,
    last_measured,
    metric_text,
    noise,
    qat_clause,
    stage_label,
    stage_name,
    verdict,
)
from qdqbench.quantize.core.comparison import MAX_OUTPUT_ERROR, Comparison
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.results import RESULTS_FILE, Results, read_results, write_results
from qdqbench.quantize.engine.facts import facts_of
from qdqbench.quantize.kinds.embedding import AGREEMENT

if TYPE_CHECKING:
    from rich.console import Group


def write_reports(results: Results, folder: Path) -> list[Path]:
    """Write `report.md` and `report.html` (one file, no external request) to `folder`; return their paths.

    Raises:
        UserError: the folder cannot be written.
    """
    words = {
        "value": metric_text,
        "noise": noise,
        "share": share,
        "nearest": nearest_text,
        "part": part_text,
        "limits": limits_text,
    }
    shown, bench = printable(results), bench_of(folder)
    effects = effects_context(shown, bench.measured if bench else None)
    own = {
        "bench": bench,
        "speed_mark": _speed_mark(results, bench),
        "deploy": where_to_begin(folder),
    }
    return write("report", folder, _context(shown) | effects | own | words)


def refresh_reports(folder: Path) -> tuple[list[Path], str | None]:
    """Judge a finished run's speed again by its bench, and write its reports; and why that could not be.

    Raises:
        UserError: the folder cannot be written.
    """
    if not (folder / RESULTS_FILE).is_file():
        return [], None
    try:
        results = read_results(folder)
    except UserError:  # what was measured must not be lost to it
        why = f"{RESULTS_FILE} is not of this version"
        return [], f"{why}: run `qdqbench report` for a report with this bench"
    speed = read_speed(folder)
    twins = read_engine_sizes(folder, results.engine.backend if results.engine else None)
    gate = judge_speed(results.gate, speed)
    results = results.model_copy(update={"speed": speed, "twins": twins, "gate": gate})
    results.warnings[:0] = [line for line in refresh(folder, results) if line not in results.warnings]
    write_results(folder, results)
    return write_reports(results, folder), None


def too_slow(folder: Path) -> list[str]:
    """Where a finished run is slower than its gate asks, by its last bench; empty before it has a report."""
    if not (folder / RESULTS_FILE).is_file():
        return []
    failures = read_results(folder).gate.failures
    return [issue_sentence(issue) for issue in failures if issue.code == "min_speedup"]


def summary_lines(results: Results) -> "Group":
    """One screen for the end of a run, as a rich renderable: verdict, stages, the first warnings."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    results = printable(results)
    said = verdict(results)
    colour = {"passed": "green", "failed": "red"}.get(said.state, "yellow")
    body = Text(said.sentence)
    for line in first(said.failures, 5, "the report"):
        body.append(f"\n✗ {line}", style="red")
    for line in first(said.notes, 3, "the report"):
        body.append(f"\n{line}", style="yellow")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("stage", "result", "against FP32", "differ"):
        table.add_column(title)
    for name, row in results.stages.items():
        versus = row.vs_fp32
        cells = (
            stage_name(results, name),
            headline(row) or row.status,
            delta_text(row) if versus else "",
            f"{versus.disagreements} of {versus.n}" if versus and versus.disagreements is not None else "",
        )
        table.add_row(*(Text(cell) for cell in cells))  # Text: names are never read as markup
    said_too = remarks(*(first(lines, 3, "the report") for lines in (results.warnings, results.notes)))
    panel = Panel(body, title=Text(said.title), border_style=colour, title_align="left")
    return Group(panel, table, *said_too)


def _tiles(results: Results) -> list[tuple[str, str, str, bool]]:
    """Label, value, remark and whether it does not fail, of the numbers under the verdict."""
    tiles = []
    engine, parity = results.engine, results.parity
    last = last_measured(results)
    if engine is not None and engine.expected_int8_gemms:
        done, asked = engine.int8_gemms, engine.expected_int8_gemms
        tiles.append(
            ("INT8 linears", f"{done} / {asked}", "in the engine", done >= asked and not engine.not_int8)
        )
    elif engine is None and results.quantized_layers:
        tiles.append(("INT8 linears", str(len(results.quantized_layers)), "planned, not proven", True))
    if last is not None and (versus := last[1].vs_fp32) is not None:
        metric = next(iter(last[1].metrics))
        stderr = versus.delta_stderr.get(metric, 0.0)
        holds = judge(-versus.delta[metric], stderr, results.gate.max_drop) != "fails"
        tiles.append((f"{label(metric)} against FP32", *_delta_cells(versus, metric), holds))
    if (gain := results.qat_vs_ptq) is not None:
        metric, delta = next(iter(gain.delta.items()))
        holds = gain.within_noise or delta > 0
        tiles.append((f"{label(metric)}, QAT against PTQ", *_delta_cells(gain, metric), holds))
    tiles.append(_speed_tile(results))
    tiles += sizes.tiles(results)
    if parity is not None and parity.rows:
        worst = worst_first(parity)[0]
        tiles.append(
            ("layer parity", part_text(worst), f"of its own limit: {remark_of(worst)}", parity.passed)
        )
    if (verified := results.verification) is not None:
        held = f"{sum(row.holds for row in verified.blocks)} / {len(verified.blocks)}"
        place = "this CPU" if engine is not None and engine.on_cpu else "the GPU"
        remark = f"follow {label(verified.reference)} on {place}"
        if verified.blocks_not_checked:
            held, remark = "not checked", verified.blocks_not_checked
        tiles.append(("engine blocks", held, remark, all(row.holds for row in verified.blocks)))
    if results.timings:
        peak = max(row.peak_rss_bytes for row in results.timings.values())
        total = seconds(sum(row.wall_s for row in results.timings.values()))
        tiles.append(("stages, added up", total, f"peak memory {size(peak)}", True))
    return tiles


def _speed_tile(results: Results) -> tuple[str, str, str, bool]:
    if not results.speed:
        return "speed", "unknown", "`qdqbench bench RUN` measures it", True
    least = min(results.speed, key=lambda row: row.value)
    asked = results.gate.min_speedup
    holds = least.standing != "slower" and (asked is None or least.value >= asked)
    where = f"{least.cell}, the least of {len(results.speed)}" if len(results.speed) > 1 else least.cell
    than = "not told apart from" if least.standing == "not told apart" else "over"
    return "speed", f"{least.value:.2f}x", f"{than} {least.over} at {where}", holds


def _speed_mark(results: Results, bench: BenchView | None) -> bool | None:
    """Whether the bench holds: no error, no measured shape is slower, none below what the gate asks.

    None: nothing was measured, or an interval holds 1, so that nobody can tell.
    """
    slower = any(row.standing == "slower" for row in results.speed)
    if slower or (bench is not None and bench.errors):
        return False
    if any(issue.code == "min_speedup" for issue in results.gate.failures):
        return False
    return True if results.speed and all(row.standing == "faster" for row in results.speed) else None


def _delta_cells(versus: Comparison, metric: str) -> tuple[str, str]:
    error = f"± {versus.delta_stderr[metric]:.4f}, " if metric in versus.delta_stderr else ""
    return f"{versus.delta[metric]:+.4f}", error + ("within noise" if versus.within_noise else "beyond noise")


def _context(results: Results) -> dict[str, Any]:
    recipe = results.recipe
    metrics = list(dict.fromkeys(metric for row in results.stages.values() for metric in row.metrics))
    names = {metric: label(metric) for metric in metrics}
    names |= {name: stage_name(results, name) for name in results.stages}
    embedded = results.model.get("embedded")
    name = "embedded default" if embedded else model_label(str(results.model.get("name", "model")))
    about = [label(str(results.task.get("name", "task"))), str(recipe.get("name", "unnamed recipe"))]
    inputs = [
        *flat(results.model, "model"),
        *flat(results.task, "task"),
        *flat(results.data, "data"),
        ("seed", str(results.seed)),
    ]
    outliers = [row for row in results.quantizers if row.amax_over_rms is not None]
    outliers.sort(key=lambda row: -(row.amax_over_rms or 0.0))
    return {
        "r": results,
        "said": verdict(results),
        "tiles": _tiles(results),
        "name": name,
        "task": about[0],
        "recipe_name": about[1],
        "page": page_of(
            results, "run", name, about, RESULTS_FILE, facts={"Model, task and data": inputs}, recipe=recipe
        ),
        "recipe_yaml": yaml_text(recipe),
        "metrics": metrics,
        "training": section_of(results.training),
        "won_back": f"{qat_clause(results)}." if results.trained else "",
        "stage_labels": {name: stage_label(results, name) for name in results.stages},
        "grid": charts.precision_grid(results),
        "kernels": facts_of(results.engine.layers) if results.engine else None,
        "outliers": outliers[:3],
        "sizes": sizes.rows(results),
        "sizes_note": sizes.missing(results),
        "output_limit": MAX_OUTPUT_ERROR,
        "parity_rows": worst_first(results.parity),
        "accuracy_svg": charts.accuracy_svg(results, LABELS | names),
        "agreements": agreements(results),
        "agreement_names": list(AGREEMENT),
        "agreement_svg": agreement_svg(results, LABELS | names),
        "amax_svg": charts.ranges_svg(results, "amax"),
        "outlier_svg": charts.ranges_svg(results, "amax_over_rms"),
        "parity_svg": parity_svg(results),
        "lengths_svg": charts.lengths_svg(results),
        "total_s": sum(row.wall_s for row in results.timings.values()),
        "inputs": inputs,
        "environment": flat(results.environment),
    }


def printable(results: Results) -> Results:
    """Results without characters that garble a page or a terminal."""
    return Results.model_validate(clean(results.model_dump(mode="json")))
