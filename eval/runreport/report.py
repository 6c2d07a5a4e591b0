"""The report of a run: page, Markdown and screen, all from one `Results` and the bench beside it."""

from functools import partial
from pathlib import Path

from qdqbench.eval.accuracy.gate import judge
from qdqbench.eval.bench.report import BenchView, bench_blocks, bench_of
from qdqbench.eval.gate.gate import issue_sentence, judge_speed, read_engine_sizes, read_speed
from qdqbench.eval.report import formats
from qdqbench.eval.report.document import (
    PAGE,
    SCREEN,
    TEXT,
    Block,
    Bullets,
    Cell,
    Chart,
    Columns,
    Fold,
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
from qdqbench.eval.report.formats import LABELS, cleaned, flat, label, model_label, seconds, size
from qdqbench.eval.report.render import write_report
from qdqbench.eval.runreport import charts
from qdqbench.eval.runreport.effects import effect_sections, evaluate_fp16_blocks, tradeoff_blocks
from qdqbench.eval.runreport.handoff import refresh, where_to_begin
from qdqbench.eval.runreport.training import training_blocks
from qdqbench.eval.runreport.verdict import (
    delta_text,
    headline,
    last_measured,
    metric_text,
    nearest_text,
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
from qdqbench.quantize.core.comparison import MAX_OUTPUT_ERROR, Comparison, Parity
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.results import (
    RESULTS_FILE,
    EngineResult,
    Results,
    StageResult,
    Verification,
    read_results,
    write_results,
)
from qdqbench.quantize.engine.facts import facts_of
from qdqbench.quantize.kinds.embedding import AGREEMENT

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
OUTPUTS = (
    "The engine on {} against {}, block by block with the reference's own input fed to each. A block fails "
    "over what quantization itself costs in it, or where one offset and factor per channel explain more of "
    "its error than noise can."
)
RANGES = (
    "What calibration saw at each quantizer. A large amax / rms means that a few outliers set the step for "
    "all other values: there clipping, SmoothQuant, an FP16 island or QAT pays first."
)
SOFTMAX = (
    "What INT8 costs each softmax on calibration samples, everything else in FP32: attention that rounds "
    "to zero or is clipped, and the error of the attention's output. Where the values are centred, what a "
    "row loses is given back as their mean."
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
    results = results.model_copy(update={"speed": speed, "twins": sizes, "gate": gate})
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
            _precision_section(results),
            *effect_sections(results, "layers"),
            _parity_section(results),
            *_lengths_section(results),
            _outputs_section(results),
            _ranges_section(results),
            _findings_section(results),
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
        tiles.append(Tile("INT8 linears", f"{count} / {asked}", "in the engine", _bad_unless(holds)))
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


def _bad_unless(holds: bool) -> State:
    return "" if holds else "bad"


def _mark(holds: bool) -> Cell:
    return Cell(state="good" if holds else "bad")


def _delta_tile(title: str, versus: Comparison, metric: str, holds: bool) -> Tile:
    error = f"± {versus.delta_stderr[metric]:.4f}, " if metric in versus.delta_stderr else ""
    remark = error + ("within noise" if versus.within_noise else "beyond noise")
    return Tile(title, f"{versus.delta[metric]:+.4f}", remark, _bad_unless(holds))


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
        others = [f"{row.precision.upper()} {size(row.bytes)}" for row in results.twins]
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
        tiles.append(Tile("layer parity", part_text(worst), remark, _bad_unless(parity.passed)))
    if (verified := results.verification) is not None:
        held = f"{sum(row.holds for row in verified.blocks)} / {len(verified.blocks)}"
        remark = f"follow {label(verified.reference)} on {_device_text(results.engine)}"
        if verified.blocks_not_checked:
            held, remark = "not checked", verified.blocks_not_checked
        state = _bad_unless(all(row.holds for row in verified.blocks))
        tiles.append(Tile("engine blocks", held, remark, state))
    return tiles


def missing_engines(results: Results) -> str:
    """Return which engines there are none of to compare with, and what builds them; empty where none lacks.

    A bench on a CPU compiles the others in memory, so there are no files of them to wait for.
    """
    if results.engine is None or results.engine.on_cpu:
        return ""
    known = {row.precision for row in results.twins}
    lacking = [precision.upper() for precision in ("fp16", "fp32") if precision not in known]
    return f"{' and '.join(lacking)} not built: `qdqbench bench RUN` builds them" if lacking else ""


def _device_text(engine: EngineResult | None) -> str:
    return "this CPU" if engine is not None and engine.on_cpu else "the GPU"


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


# Engine


def _precision_section(results: Results) -> Section:
    grid, engine = charts.precision_grid(results), results.engine
    color = {"INT8", "FP16", "FP32", "BF16"}

    def cell(each: charts.GridCell | None) -> Cell:
        if each is None:
            return Cell()
        look = f"cell {each.datatype if each.datatype in color else 'other'}"
        return Cell(each.datatype, _bad_unless(each.as_asked), look=look, tip=each.note)

    rows = [row(str(layer), *map(cell, cells)) for layer, cells in grid.rows]
    kinds = Table(["layer", *grid.kinds], rows, texts=range(len(grid.kinds) + 1), look="grid")
    legend = [
        row(charts_key(name, name if name in color else "other"), formats.count_of(count, "module"))
        for name, count in grid.datatypes.items()
    ]
    about = "“attention” stands for the products of q, k, v and the softmax."
    if grid.proven:
        about += (
            " ✗ marks what the recipe asks in INT8 and the engine runs in something else. Point at a cell or "
            "tap it to see its kernel."
        )
    outside = [f"`{module}` {each.datatype}{'' if each.as_asked else ' ✗'}" for module, each in grid.outside]
    side: list[Block] = [Table(["", ""], legend, look="legend", on=PAGE), Prose(about, "quiet")]
    if outside:
        side.append(f"Outside the encoder layers: {', '.join(outside)}.")
    blocks: list[Block] = [_precision_text(results, engine)]
    blocks.append(Columns([[kinds] if rows else [], side], look="side"))
    if engine is not None:
        if engine.not_int8:
            blocks.append(Prose("Not in INT8 although the recipe asks for it:", "bad"))
            blocks.append(Bullets([f"`{node}`" for node in engine.not_int8]))
        blocks += _kernel_blocks(engine)
    return Section("precision", "Which layer runs in what", blocks)


def charts_key(name: str, look: str) -> Cell:
    """Return a datatype in its color."""
    return Cell(name, look=f"cell {look}")


def _precision_text(results: Results, engine: EngineResult | None) -> Block:
    if engine is None:
        return Prose(
            "Planned, not proven: no engine was built, so this is what the ONNX file asks for.", "unclear"
        )
    where = f"compute capability {', '.join(engine.compute_capability)}"
    if engine.on_cpu:
        where = str(results.environment.get("cpu", "CPU"))
    ahead = ", built ahead of time" if engine.ahead_of_time else ""
    text = (
        f"Read from the layer table of the {label(engine.backend)} {engine.version} engine, kernel by kernel "
        f"({where}{ahead})."
    )
    if (gpu := results.gpu_engine) is not None:
        text += (
            f" An engine for GPUs was built ahead of time too ({label(gpu.backend)} {gpu.version}, compute "
            f"capability {', '.join(gpu.compute_capability)}): {gpu.int8_gemms} of "
            f"{gpu.expected_int8_gemms} matrix products in INT8."
        )
    if engine.expected_attention_int8:
        text += f" INT8 attention: {engine.attention_int8} of {engine.expected_attention_int8}."
    return f"{text} Attentions that one fused kernel computes: {engine.attention_fused}."


def _kernel_blocks(engine: EngineResult) -> list[Block]:
    facts = facts_of(engine.layers)
    several = facts.profiles > 1
    counts = ", ".join(f"{count} {kind}" for kind, count in facts.kernels.most_common())
    rows = [
        row(
            str(number),
            Cell(each.kind, note=each.kernel or ""),
            *(
                Cell(formats.types(names), look="nowrap")
                for names in (each.inputs, each.constants, each.outputs)
            ),
            Cell(each.name, note="\n".join(each.onnx), code=True),
        )
        for number, each in enumerate(engine.layers, 1)
    ]
    columns = ["#", "type", "inputs", "constants", "outputs", "kernel and the ONNX nodes it covers"]
    title = f"The whole layer table, {len(rows)} rows{f' of {facts.profiles} profiles' if several else ''}"
    return [
        f"{facts.count}{'. Of one profile: ' if several else ': '}{counts}.",
        Fold(title, [Table(columns, rows, texts=range(1, 6), look="sortable")], PAGE),
        Prose("The full table is in `report.html` and `results.json`.", on=TEXT),
    ]


def _parity_section(results: Results) -> Section:
    parity = results.parity
    if parity is None:
        return Section("parity", "Layer parity", [Prose("Not measured.", "quiet")])
    padding = "with" if parity.padded else "without"
    text = (
        "ONNX Runtime against the fake-quant model, layer by layer, with the same inputs fed to both "
        f"({parity.n} samples, {padding} padding). {_limits_text(parity)}; a linear's own output may be off "
        f"by at most {MAX_OUTPUT_ERROR:.2g} (relative). Largest logit difference: "
        f"{parity.logits_max_abs_diff:.3g}."
    )
    if (ends := parity.end_to_end) is not None:
        answers = "" if ends.disagreements is None else f" and in {ends.disagreements} answers"
        text += (
            " End to end on the whole split ONNX Runtime and fake-quant differ by "
            f"{ends.mean_abs_logit_diff:.3g} in the mean logit{answers}: rounding flips add up from layer "
            "to layer, so this judges nothing by itself."
        )
    ordered = worst_first(parity)
    nearest = [
        row(code(each.name), Cell(part_text(each), _bad_unless(each.holds)), nearest_text(each))
        for each in ordered[:6]
    ]
    rows = [
        row(
            code(each.name),
            part_text(each),
            f"{100 * each.share:.3f}%",
            f"{100 * each.limit:.3f}%",
            str(each.max_step),
            str(each.step_limit),
            "" if each.output_rel_error is None else f"{each.output_rel_error:.2g}",
            "" if each.output_rel_error is None else f"{MAX_OUTPUT_ERROR:.2g}",
            f"{each.codes:,}",
            f"{each.differing:,}",
            _mark(each.holds),
        )
        for each in ordered
    ]
    columns = [
        "tensor", "part of its limit", "share that differs", "limit", "largest step", "limit", "output error",
        "limit", "codes", "differing", "",
    ]  # fmt: skip
    few = Table(["nearest to its own limit", "part of it", "which limit"], nearest, "", (0, 2), "", on=PAGE)
    every = Table(columns, rows, texts=(0, -1), look="sortable")
    return Section(
        "parity",
        "Layer parity",
        [
            text,
            Columns([[Chart(partial(charts.parity_svg, results))], [few]]),
            Fold(f"All {len(rows)} tensors, the nearest to its own limit first", [every]),
        ],
        "good" if parity.passed else "bad",
    )


def _limits_text(parity: Parity) -> str:
    """Return the limits of differing codes and steps of all tensors."""
    shares = sorted({each.limit for each in parity.rows} or {parity.limit_fraction})
    steps = sorted({each.step_limit for each in parity.rows} or {parity.limit_step})
    codes = f"{100 * shares[0]:.3g}%"
    if len(shares) > 1:
        own = sum(each.limit > shares[0] for each in parity.rows)
        codes += f" (up to {100 * shares[-1]:.3g}% in {own} tensors where FP16 rounding alone moves more)"
    return f"At most {codes} of the INT8 codes may differ, by at most {' or '.join(map(str, steps))}"


def _lengths_section(results: Results) -> list[Section]:
    if (found := results.lengths) is None:
        return []
    calibrated = results.data.get("calibration")
    seen = f" Calibration saw a median of {calibrated['lengths']['p50']}." if calibrated else ""
    own = " A CPU's kernels take every length, so that each batch is padded to its own longest row."
    text = (
        f"The engine's profiles follow the evaluation data (`shapes: auto`). {found.rows} rows of "
        f"{', '.join(found.splits)}: {found.shortest} to {found.longest} tokens, median {found.median:g}, "
        f"nine of ten at most {found.p90}.{seen} Of the tokens of the engine's batches "
        f"{100 * found.padding:.1f}% are padding; padded to the longest row it would be "
        f"{100 * found.longest_padding:.1f}%.{'' if found.buckets else own}"
    )
    blocks: list[Block] = [text, Chart(partial(charts.lengths_svg, results))]
    if found.buckets:
        rows = [
            row(
                str(each.length),
                str(each.rows),
                str(each.tokens),
                f"{100 - 100 * each.tokens / (each.rows * each.length):.1f}%",
            )
            for each in found.buckets
        ]
        blocks.append(Table(["padded to", "rows", "tokens", "padding"], rows, texts=(), look=""))
    blocks.append(Prose(f"Profiles: {'; '.join(found.profiles)}.", "quiet"))
    return [Section("lengths", "Lengths", blocks)]


def _outputs_section(results: Results) -> Section:
    if (found := results.verification) is None:
        return Section("outputs", "Engine outputs", [Prose("Not verified.", "quiet")])
    share = formats.share_text
    blocks: list[Block] = [OUTPUTS.format(_device_text(results.engine), label(found.reference))]
    if found.blocks_not_checked:
        blocks.append(Prose(f"The blocks were not checked: {found.blocks_not_checked}.", "bad"))
    else:
        rows = [
            row(
                each.name,
                str(each.n),
                share(each.error),
                share(each.limit),
                share(each.quantization_error),
                f"{share(each.position_error)} of {share(each.position_limit)}",
                f"{share(each.systematic_error)} of {share(each.systematic_limit)}",
                str(each.nonfinite),
                _mark(each.holds),
            )
            for each in found.blocks
        ]
        columns = [
            "block", "positions", "error", "limit", "quantization costs", "worst position", "systematic",
            "NaN or infinite", "",
        ]  # fmt: skip
        blocks.append(Table(columns, rows, texts=(0, -1), look=""))
    blocks += _answer_blocks(found)
    rows = [
        row(
            str(each.batch),
            str(each.length),
            each.what,
            formats.number(each.max_abs_logit_diff),
            str(each.nonfinite),
        )
        for each in found.shapes
    ]
    columns = ["batch", "length", "samples", "largest logit difference", "NaN or infinite"]
    shapes = Table(columns, rows, texts=(2,), look="sortable")
    blocks.append(Fold(f"All {formats.count_of(len(rows), 'shape')}", [shapes]))
    return Section("outputs", "Engine outputs", blocks, "good" if found.passed else "bad")


def _answer_blocks(found: Verification) -> list[Block]:
    answers, padding, number = found.answers, found.padding, formats.number
    if answers.nonfinite:
        text = f"On {answers.n} samples (seed {found.seed}) {answers.nonfinite} have NaN or infinite logits."
    else:
        differ = "" if answers.disagreements is None else f", {answers.disagreements} answers differ"
        text = (
            f"On {answers.n} samples (seed {found.seed}): {label(answers.metric)} "
            f"{-(answers.drop or 0):+.4f} against {label(found.reference)}{differ}, mean logit difference "
            f"{number(answers.mean_abs_logit_diff)} (quantization itself costs "
            f"{number(answers.quantization_mean_abs_logit_diff)}), Kolmogorov-Smirnov "
            f"{number(answers.ks_statistic)} (p {number(answers.ks_p)})."
        )
    alone = (
        f"{padding.n} samples alone, padded and in a large batch differ by "
        f"{number(padding.max_abs_logit_diff)} at most (limit {number(padding.max_limit)})."
    )
    return [Prose(text, _bad_unless(answers.holds)), Prose(alone, _bad_unless(padding.holds))]


def _ranges_section(results: Results) -> Section:
    blocks: list[Block] = []
    if results.quantizers:
        outliers = [each for each in results.quantizers if each.amax_over_rms is not None]
        outliers.sort(key=lambda each: -(each.amax_over_rms or 0.0))
        largest = ", ".join(
            f"`{each.module}` ({each.kind}) {each.amax_over_rms:.0f}" for each in outliers[:3]
        )
        text = RANGES
        if results.training and results.training.settings.get("amax") == "learnt":
            text += (
                " With learnt amax, amax is what training made of it, and the root mean square what "
                "calibration saw."
            )
        draws = [partial(charts.ranges_svg, results, measure) for measure in ("amax", "amax_over_rms")]
        blocks = [
            f"{text} Largest: {largest}." if largest else text,
            Columns([[Chart(draw)] for draw in draws]),
            Fold(
                f"All {len(results.quantizers)} quantizers", [_quantizers_table(results, weights=True)], PAGE
            ),
            Fold("Activations", [_quantizers_table(results, weights=False)], TEXT),
        ]
    else:
        blocks.append(Prose("Nothing was calibrated.", "quiet"))
    if results.softmax:
        rows = [
            row(
                code(each.module),
                str(each.length),
                f"{each.amax:.3g}",
                "centred" if each.centered else "",
                *(f"{100 * value:.1f} %" for value in (each.zeroed, each.clipped, each.error)),
            )
            for each in results.softmax
        ]
        columns = ["attention", "to tokens", "amax", "values", "to zero", "clipped", "error of the output"]
        blocks.append(Table(columns, rows, "INT8 softmax", texts=(0, 3), look=""))
        blocks.append(Prose(SOFTMAX, "quiet"))
    return Section("ranges", "Activation ranges", blocks)


def _quantizers_table(results: Results, *, weights: bool) -> Table:
    rows = [
        row(
            code(each.module),
            each.kind,
            "per tensor" if each.axis is None else f"per channel, axis {each.axis}",
            f"{each.amax:.4g}",
            "" if each.axis is None else f"{each.amax_min:.4g}",
            "" if each.amax_over_rms is None else f"{each.amax_over_rms:.1f}",
        )
        for each in results.quantizers
        if weights or each.kind != "weight"
    ]
    columns = ["module", "quantizer", "axis", "amax", "smallest amax", "amax / rms"]
    return Table(columns, rows, texts=(0, 1, 2), look="sortable")


def _findings_section(results: Results) -> Section:
    rows = [
        row(
            Cell(each.code, code=True, look="nowrap"),
            Cell(each.severity, "bad" if each.severity == "error" else "unclear"),
            each.why,
            each.fix,
            code(each.node),
        )
        for each in results.findings
    ]
    if not rows:
        return Section("findings", "Findings of `check`", ["None."], "good")
    columns = ["code", "severity", "why", "fix", "node"]
    return Section(
        "findings",
        "Findings of `check`",
        [Table(columns, rows, texts=range(5), look="full cards sortable")],
    )


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
    full = next((each.bytes for each in results.twins if each.precision == "fp32"), None)
    if (engine := results.engine) is not None:
        rows.append((engine.file, engine.bytes, "engine of this run", engine.bytes / full if full else None))
    for each in results.twins:
        rows.append((each.name, each.bytes, "engine of the bench", each.bytes / full if full else None))
    if (gpu := results.gpu_engine) is not None:
        rows.append((f"gpu/engine/{gpu.file}", gpu.bytes, "engine for GPUs, built ahead of time", None))
    return rows
