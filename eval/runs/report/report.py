"""The report of a run: page, Markdown and screen, all from one `Results` and the bench beside it."""

from functools import partial
from pathlib import Path

from qdqbench.eval.bench.report import BenchView, bench_blocks, bench_of
from qdqbench.eval.metrics.gate import judge
from qdqbench.eval.reporting.document import (
    SCREEN,
    Block,
    Cell,
    Chart,
    Columns,
    Prose,
    Report,
    Row,
    Section,
    State,
    Table,
    Tile,
    code,
    page_of,
    row,
)
from qdqbench.eval.reporting.formats import LABELS, cleaned, flat, label, model_label, seconds, size
from qdqbench.eval.reporting.render import write_report
from qdqbench.eval.runs.gate.gate import issue_sentence, judge_speed, read_engine_sizes, read_speed
from qdqbench.eval.runs.report import charts
from qdqbench.eval.runs.report.effects import effect_sections, evaluate_fp16_blocks, tradeoff_blocks
from qdqbench.eval.runs.report.handoff import refresh, where_to_begin
from qdqbench.eval.runs.report.proof import (
    bad_unless,
    device_text,
    findings_section,
    lengths_sections,
    outputs_section,
    parity_section,
    precision_section,
    ranges_section,
)
from qdqbench.eval.runs.report.training import training_blocks
from qdqbench.eval.runs.report.verdict import (
    delta_text,
    headline,
    last_measured,
    metric_text,
    noise_text,
    part_text,
    qat_clause,
    quantized_file,
    remark_of,
    run_verdict,
    stage_label,
    stage_name,
    worst_first,
)
from qdqbench.quantize.tasks.types.embedding import AGREEMENT
from qdqbench.quantize.utils.comparison import Comparison
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.results import RESULTS_FILE, Results, StageResult, read_results, write_results

ACCURACY = (
    "± and error bars are one standard error over the evaluation samples. The blue band is FP32 with its "
    "error; the dashed line is the gate's limit (a drop of {} on the first metric), which a stage fails by "
    "more than two paired standard errors. All stages see the same samples, so read a change from the "
    "paired difference in the table and not from overlapping bars: “within noise” means at most two paired "
    "standard errors."
)
EMBEDDINGS = (
    "Each text's embedding against FP32's of the same text: mean and 1st percentile of their cosine, and "
    "how many of its 10 nearest texts (by cosine, among these texts) are still among the 10 nearest. No "
    "label is needed."
)
TOGETHER = (
    "Stages may run side by side, so that a run takes less than they add up to. Peak memory is that of the "
    "whole process while the stage ran."
)


def write_reports(results: Results, folder: Path) -> list[Path]:
    """Write `report.md` and `report.html` (one file, no external request) to `folder`; return their paths.

    Raises:
        UserError: the folder cannot be written.
    """
    return write_report(run_report(results, bench_of(folder), folder), folder, "report")


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
    sizes = read_engine_sizes(folder, results.engine.backend if results.engine else None)
    gate = judge_speed(results.gate, speed)
    results = results.model_copy(update={"speed": speed, "unquantized_engines": sizes, "gate": gate})
    results.warnings[:0] = [line for line in refresh(folder, results) if line not in results.warnings]
    write_results(folder, results)
    return write_reports(results, folder), None


def too_slow(folder: Path) -> list[str]:
    """Return where a finished run is slower than its gate asks, by its last bench."""
    if not (folder / RESULTS_FILE).is_file():
        return []
    failures = read_results(folder).gate.failures
    return [issue_sentence(issue) for issue in failures if issue.code == "min_speedup"]


def run_report(results: Results, bench: BenchView | None = None, folder: Path | None = None) -> Report:
    """Return what a run shows; without a bench and a folder what a terminal shows of it.

    Args:
        folder: of the run, whose folder `deploy` the report leads to.
    """
    results = cleaned(results)
    recipe, begin = results.recipe, where_to_begin(folder) if folder else None
    name = model_label(str(results.model.get("name", "model")))
    inputs = [
        *flat(results.model, "model"),
        *flat(results.task, "task"),
        *flat(results.data, "data"),
        ("seed", str(results.seed)),
    ]
    deploy = f"To deploy it: `{begin.folder}`; {begin.mark}try it with `{begin.command}`" if begin else ""
    speed = _speed_section(results, bench)
    training = [
        Section(
            "training",
            "Quantization-aware training",
            [f"{qat_clause(results)}.", *training_blocks(results.training)],
        )
    ]
    return Report(
        page_of(
            results,
            "run",
            "embedded default" if results.model.get("embedded") else name,
            [label(str(results.task.get("name", "task"))), str(recipe.get("name", "unnamed recipe"))],
            RESULTS_FILE,
            facts={"Model, task and data": inputs},
            recipe=recipe,
        ),
        [
            _accuracy_section(results),
            *effect_sections(results, "answers"),
            *(training if results.training else []),
            precision_section(results),
            *effect_sections(results, "layers"),
            parity_section(results),
            *lengths_sections(results),
            outputs_section(results),
            ranges_section(results),
            findings_section(results),
            *speed,
            _cost_section(results),
        ],
        verdict=run_verdict(results),
        lead=[Prose(deploy, "quiet")] if deploy else [],
        tiles=_tiles(results),
        warnings=results.warnings,
        notes=results.notes,
    )


# Tiles


def _tiles(results: Results) -> list[Tile]:
    engine, planned = results.engine, len(results.quantized_layers)
    tiles = []
    if engine is not None and engine.expected_int8_gemms:
        count, asked = engine.int8_gemms, engine.expected_int8_gemms
        holds = count >= asked and not engine.not_int8
        tiles.append(Tile("INT8 linears", f"{count} / {asked}", "in the engine", bad_unless(holds)))
    elif engine is None and planned:
        tiles.append(Tile("INT8 linears", str(planned), "planned, not proven"))
    last, gain = last_measured(results), results.qat_vs_ptq
    if last is not None and (versus := last[1].vs_fp32) is not None:
        metric = next(iter(last[1].metrics))
        stderr = versus.delta_stderr.get(metric, 0.0)
        holds = judge(-versus.delta[metric], stderr, results.gate.max_drop) != "fails"
        tiles.append(_delta_tile(f"{label(metric)} against FP32", versus, metric, holds))
    if gain is not None:
        metric, delta = next(iter(gain.delta.items()))
        title = f"{label(metric)}, QAT against PTQ"
        tiles.append(_delta_tile(title, gain, metric, gain.within_noise or delta > 0))
    tiles += [_speed_tile(results), *_size_tiles(results), *_proof_tiles(results)]
    if results.timings:
        peak = max(timing.peak_rss_bytes for timing in results.timings.values())
        total = seconds(sum(timing.wall_s for timing in results.timings.values()))
        tiles.append(Tile("stages, added up", total, f"may run side by side; peak memory {size(peak)}"))
    return tiles


def _delta_tile(title: str, versus: Comparison, metric: str, holds: bool) -> Tile:
    error = f"± {versus.delta_stderr[metric]:.4f}, " if metric in versus.delta_stderr else ""
    remark = error + ("within noise" if versus.within_noise else "beyond noise")
    return Tile(title, f"{versus.delta[metric]:+.4f}", remark, bad_unless(holds))


def _speed_tile(results: Results) -> Tile:
    if not results.speed:
        return Tile("speed", "unknown", "`qdqbench bench RUN` measures it")
    least = min(results.speed, key=lambda speed: speed.value)
    asked = results.gate.min_speedup
    holds = least.verdict != "slower" and (asked is None or least.value >= asked)
    unclear = least.verdict == "inconclusive"
    where = f"{least.config}, the least of {len(results.speed)}" if len(results.speed) > 1 else least.config
    than = "not told apart from" if unclear else "over"
    state: State = "bad" if not holds else "unclear" if unclear else ""
    return Tile("speed", f"{least.value:.2f}x", f"{than} {least.baseline} at {where}", state)


def _size_tiles(results: Results) -> list[Tile]:
    """Return the size of what is deployed, with that of the same in FP16 and FP32; and the ONNX file's."""
    tiles = []
    if results.engine is not None:
        others = [f"{row.precision.upper()} {size(row.bytes)}" for row in results.unquantized_engines]
        remark = ", ".join(filter(None, [*others, missing_engines(results)]))
        tiles.append(Tile("engine", size(results.engine.bytes), remark))
    if (smaller := quantized_file(results)) is not None:
        name, ratio, count = smaller
        tiles.append(Tile("ONNX file against FP32", f"{ratio:.2f}", f"{size(count)}, {name}"))
    return tiles


def _proof_tiles(results: Results) -> list[Tile]:
    tiles = []
    if (parity := results.parity) is not None and parity.rows:
        worst = worst_first(parity)[0]
        remark = f"of its own limit: {remark_of(worst)}"
        tiles.append(Tile("layer parity", part_text(worst), remark, bad_unless(parity.passed)))
    if (verified := results.verification) is not None:
        held = f"{sum(row.holds for row in verified.blocks)} / {len(verified.blocks)}"
        remark = f"follow {label(verified.reference)} on {device_text(results.engine)}"
        if verified.blocks_not_checked:
            held, remark = "not checked", verified.blocks_not_checked
        state = bad_unless(all(row.holds for row in verified.blocks))
        tiles.append(Tile("engine blocks", held, remark, state))
    return tiles


def missing_engines(results: Results) -> str:
    """Return which engines there are none of to compare with, and what builds them; empty where none lacks.

    A bench on a CPU compiles the others in memory, so there are no files of them to wait for.
    """
    if results.engine is None or results.engine.on_cpu:
        return ""
    known = {row.precision for row in results.unquantized_engines}
    lacking = [precision.upper() for precision in ("fp16", "fp32") if precision not in known]
    return f"{' and '.join(lacking)} not built: `qdqbench bench RUN` builds them" if lacking else ""


# Accuracy


def _accuracy_section(results: Results) -> Section:
    stages = results.stages
    metrics = [*dict.fromkeys(metric for stage in stages.values() for metric in stage.metrics)]
    names = LABELS | {metric: label(metric) for metric in metrics}
    names |= {name: stage_name(results, name) for name in stages}
    columns = [
        "stage", *map(label, metrics), "against FP32", "", "differing answers", "McNemar p",
        "mean logit difference", "SQNR", "samples",
    ]  # fmt: skip
    table = Table(
        columns,
        [_stage_row(results, name, each, metrics) for name, each in stages.items()],
        look="full cards",
    )
    blocks: list[Block] = [
        table,
        _stages_screen(results),
        Columns(
            [
                [Chart(partial(charts.accuracy_svg, results, names))],
                [Prose(ACCURACY.format(results.gate.max_drop), "quiet")],
            ]
        ),
        *evaluate_fp16_blocks(results),
    ]
    if compared := charts.agreements(results):
        rows = [
            row(
                stage_label(results, name),
                *(f"{each.values[metric]:.4f} ± {each.stderr[metric]:.4f}" for metric in AGREEMENT),
                str(each.n),
            )
            for name, each in compared.items()
        ]
        near = Table(
            ["stage", *map(label, AGREEMENT), "texts"], rows, "Embeddings against those of FP32", look=""
        )
        draw = partial(charts.agreement_svg, results, names)
        blocks.append(Columns([[near, Prose(EMBEDDINGS, "quiet")], [Chart(draw)]]))
    return Section("accuracy", "Accuracy by stage", blocks)


def _stage_row(results: Results, name: str, stage: StageResult, metrics: list[str]) -> Row:
    head = Cell(stage_label(results, name), note=stage.detail or "", look="stage")
    if stage.status == "skipped":
        return row(head, Cell(f"skipped: {stage.reason or 'no reason recorded'}", "quiet"))
    cells = [metric_text(stage, metric) for metric in metrics]
    if (versus := stage.vs_fp32) is None:
        return row(head, *cells, *[""] * 6, str(stage.n))
    deltas = [
        f"{delta:+.4f}" + (f" ± {versus.delta_stderr[metric]:.4f}" if metric in versus.delta_stderr else "")
        for metric, delta in versus.delta.items()
    ]
    return row(
        head,
        *cells,
        Cell("\n".join(deltas), sort=next(iter(versus.delta.values()), None)),
        noise_text(stage),
        "" if versus.disagreements is None else str(versus.disagreements),
        "" if versus.mcnemar_p is None else f"{versus.mcnemar_p:.2g}",
        f"{versus.mean_abs_logit_diff:.3g}",
        "equal" if versus.sqnr_db is None else f"{versus.sqnr_db:.1f} dB",
        str(stage.n),
    )


def _stages_screen(results: Results) -> Table:
    """Return the stages as 80 columns have room for them."""
    rows = []
    for name, stage in results.stages.items():
        versus = stage.vs_fp32
        differ = (
            f"{versus.disagreements} of {versus.n}" if versus and versus.disagreements is not None else ""
        )
        delta = delta_text(stage) if versus else ""
        rows.append(row(stage_name(results, name), headline(stage) or stage.status, delta, differ))
    return Table(["stage", "result", "against FP32", "differ"], rows, on=SCREEN)


# Speed and cost


def _speed_section(results: Results, bench: BenchView | None) -> list[Section]:
    """Return the run's bench: good where every shape is faster, bad where one is slower or too slow."""
    if bench is None:
        return []
    state: State = ""
    failed = any(issue.code == "min_speedup" for issue in results.gate.failures)
    if bench.errors or failed or any(speed.verdict == "slower" for speed in results.speed):
        state = "bad"
    elif results.speed and all(speed.verdict == "faster" for speed in results.speed):
        state = "good"
    blocks = [*bench_blocks(bench), *tradeoff_blocks(results, bench.measured)]
    return [Section("speed", "Speed", blocks, state)]


def _cost_section(results: Results) -> Section:
    files = [
        row(code(name), size(count), "" if ratio is None else f"{ratio:.2f}", what)
        for name, count, what, ratio in size_rows(results)
    ]
    against = "Against FP32: ONNX files by the FP32 file, engines by the FP32 engine of the same backend."
    if missing := missing_engines(results):
        against += f" Engines in {missing}."
    total = sum(timing.wall_s for timing in results.timings.values())
    times = [
        row(
            Cell(label(stage), note="(reused)" if timing.reused else ""),
            seconds(timing.wall_s),
            Cell(bar=timing.wall_s / (total or 1), look="track"),
            size(timing.peak_rss_bytes),
        )
        for stage, timing in results.timings.items()
    ]
    blocks = Columns(
        [
            [
                Table(["file or engine", "size", "against FP32", ""], files, "Files", (0, -1)),
                Prose(against, "quiet"),
            ],
            [
                Table(
                    ["stage", "wall time", "", "peak memory"],
                    times,
                    "Time and memory",
                    foot=[row("added up", seconds(total), "", "")],
                ),
                Prose(TOGETHER, "quiet"),
            ],
        ]
    )
    return Section("cost", "Cost", [blocks])


def size_rows(results: Results) -> list[tuple[str, int, str, float | None]]:
    """Return file or engine, bytes, what it is, and its size by that of the same in FP32, where known."""
    rows = [(each.name, each.bytes, "ONNX", each.fp32_ratio) for each in results.files]
    full = next((each.bytes for each in results.unquantized_engines if each.precision == "fp32"), None)
    if (engine := results.engine) is not None:
        rows.append((engine.file, engine.bytes, "engine of this run", engine.bytes / full if full else None))
    for each in results.unquantized_engines:
        rows.append((each.name, each.bytes, "engine of the bench", each.bytes / full if full else None))
    if (gpu := results.gpu_engine) is not None:
        rows.append((f"gpu/engine/{gpu.file}", gpu.bytes, "engine for GPUs, built ahead of time", None))
    return rows
