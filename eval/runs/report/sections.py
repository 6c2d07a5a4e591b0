"""Sections of a run's report: what was proven, and what quantization changed."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from qdqbench.eval.bench.results import Bench, BenchConfig, BenchRow, config_label
from qdqbench.eval.metrics import figures
from qdqbench.eval.metrics.gate import judge_shapes
from qdqbench.eval.metrics.results import (
    MAX_OUTPUT_ERROR,
    Change,
    ChangedPrediction,
    ChangedPredictions,
    Classes,
    ClassRow,
    LayerError,
    LayerErrors,
    StageResult,
)
from qdqbench.eval.runs.report import charts, verdict
from qdqbench.eval.runs.results import Results
from qdqbench.eval.verification.results import Verification
from qdqbench.quantize.calibration.record import summarize_spread
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.lint.inspection import inspect_layers
from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report import svg
from qdqbench.quantize.report.coverage import coverage
from qdqbench.quantize.report.formats import finite, known, label, types, with_error
from qdqbench.quantize.utils.names import count_of

OUTPUTS = (
    "The engine on {} against {}, block by block with the reference's own input fed to each. A block fails "
    "over what quantization costs in it, or where one offset and factor per channel explain more of "
    "its error than noise can."
)
RANGES = (
    "What calibration saw at each quantizer. A large amax / rms means that a few outliers set the step for "
    "all other values: there clipping, SmoothQuant, an FP16 island or QAT pays first."
)
SOFTMAX = (
    "What INT8 costs each softmax on calibration samples, everything else in FP32: attention that rounds "
    "to zero or is clipped, and the error of the attention's output. Where the values are centered, what a "
    "row loses is given back as their mean."
)
COLORED = {"INT8", "FP16", "FP32", "BF16"}
WIDEST = 12  # classes whose confusion is shown as tables
MANY_CLASSES = 20  # rows above which a table scrolls
FEW_ANSWERS = 10  # that Markdown lists
RIGHT_BEFORE: tuple[Change, ...] = ("regressed", "still_right")
RIGHT_NOW: tuple[Change, ...] = ("fixed", "still_right")
EVALUATE_FP16 = "qdqbench report RUN --fp16"
MARGIN = (
    "Margin: probability of the class less that of the next; near 0 the answer was near to being another one."
)
STYLES = {"int8": (svg.GREEN, "^"), "fp16": (svg.ORANGE, "s"), "fp32": (svg.BLUE, "o")}


def device_text(engine: EngineResult | None) -> str:
    return "this CPU" if engine is not None and engine.on_cpu else "the GPU"


def precision_section(results: Results) -> doc.Section:
    grid, engine = charts.precision_grid(results), results.engine

    def datatype_cell(name: str, state: doc.State = "", tip: str = "") -> doc.Cell:
        return doc.Cell(name, state, look=f"cell {name if name in COLORED else 'other'}", tip=tip)

    def cell(module: charts.GridCell | None) -> doc.Cell:
        if module is None:
            return doc.Cell()
        return datatype_cell(module.datatype, doc.bad_unless(module.as_asked), module.note)

    rows = [doc.row(layer, *map(cell, cells)) for layer, cells in grid.rows]
    kinds = doc.Table(["layer", *grid.kinds], rows, texts=range(len(grid.kinds) + 1), look="grid")
    legend = doc.table_of(
        grid.datatypes.items(),
        ("", lambda pair: datatype_cell(pair[0])),
        ("", lambda pair: count_of(pair[1], "module")),
        look="legend",
        on=doc.PAGE,
    )
    about = "“attention” stands for the products of q, k, v and the softmax."
    if engine is not None:
        about += (
            " ✗ marks what the recipe asks in INT8 and the engine runs in something else. Point at a cell or "
            "tap it to see its kernel."
        )
    side: list[doc.Block] = [legend, doc.Prose(about, "quiet")]
    if grid.outside:
        names = [f"`{name}` {it.datatype}{'' if it.as_asked else ' ✗'}" for name, it in grid.outside]
        side.append(f"Outside the encoder layers: {', '.join(names)}.")
    columns = doc.Columns([[kinds] if rows else [], side], look="side")
    planned = "Planned, not proven: no engine was built, so this is what the ONNX file asks for."
    blocks: list[doc.Block] = [doc.Prose(planned, "unclear"), columns]
    if engine is not None:
        blocks = [_proof_text(results, engine), columns]
        if engine.not_int8:
            blocks.append(doc.Prose("Not in INT8 although the recipe asks for it:", "bad"))
            blocks.append(doc.Bullets([f"`{node}`" for node in engine.not_int8]))
        blocks += _kernel_blocks(engine)
    return doc.Section("precision", "Which layer runs in what", blocks)


def _proof_text(results: Results, engine: EngineResult) -> str:
    where = f"compute capability {', '.join(engine.compute_capability)}"
    if engine.on_cpu:
        where = str(results.environment.get("cpu", "CPU"))
    ahead = ", built ahead of time" if engine.ahead_of_time else ""
    text = (
        f"Read from the layer table of the {label(engine.backend)} {engine.version} engine, kernel by kernel "
        f"({where}{ahead})."
    )
    if (gpu := results.gpu_engine) is not None:
        share = verdict.linears_text(results, gpu)
        text += (
            f" An engine for GPUs was built ahead of time too ({label(gpu.backend)} {gpu.version}, compute "
            f"capability {', '.join(gpu.compute_capability)}): {share}."
        )
    if engine.expected_attention_int8:
        text += f" {coverage(engine.attention_int8, engine.expected_attention_int8, 'attentions')}."
    return f"{text} Attentions that one fused kernel computes: {engine.attention_fused}."


def _kernel_blocks(engine: EngineResult) -> list[doc.Block]:
    found = inspect_layers(engine.layers)
    counts = ", ".join(f"{count} {kind}" for kind, count in found.kernel_counts.items())
    several = found.profiles > 1
    table = doc.table_of(
        enumerate(engine.layers, 1),
        ("#", lambda pair: pair[0]),
        ("type", lambda pair: doc.Cell(pair[1].kind, note=pair[1].kernel or "")),
        ("inputs", lambda pair: doc.Cell(types(pair[1].inputs), look="nowrap")),
        ("constants", lambda pair: doc.Cell(types(pair[1].constants), look="nowrap")),
        ("outputs", lambda pair: doc.Cell(types(pair[1].outputs), look="nowrap")),
        (
            "kernel and the ONNX nodes it covers",
            lambda pair: doc.Cell(pair[1].name, note="\n".join(pair[1].onnx), code=True),
        ),
        texts=range(1, 6),
        look="sortable",
    )
    of = f" of {found.profiles} profiles" if several else ""
    return [
        f"{found.count}{'. Of one profile: ' if several else ': '}{counts}.",
        doc.Fold(f"The whole layer table, {len(table.rows)} rows{of}", [table], doc.PAGE),
        doc.Prose("The full table is in `report.html` and `results.json`.", on=doc.TEXT),
    ]


def parity_section(results: Results) -> doc.Section:
    if (parity := results.parity) is None:
        return doc.Section("parity", "Layer parity", [doc.Prose("Not measured.", "quiet")])
    steps = " or ".join(map(str, sorted({row.step_limit for row in parity.rows} or {parity.limit_step})))
    text = (
        "ONNX Runtime against the fake-quant model, layer by layer, with the same inputs fed to both "
        f"({parity.n} samples, {'with' if parity.padded else 'without'} padding). At most "
        f"{100 * parity.limit_fraction:.3g}% of the INT8 codes may differ beyond rounding, by at most "
        f"{steps}. A linear's own output may be off by at most {MAX_OUTPUT_ERROR:.2g} (relative). An output "
        "of the graph has a limit for its worst sample. "
        f"Largest logit difference: {parity.logits_max_abs_diff:.3g}."
    )
    if (ends := parity.end_to_end) is not None:
        answers = "" if ends.disagreements is None else f" and in {ends.disagreements} answers"
        text += (
            " End to end on the whole split ONNX Runtime and fake-quant differ by "
            f"{ends.mean_abs_logit_diff:.3g} in the mean logit{answers}: rounding flips add up from layer "
            "to layer, so this judges nothing by itself."
        )
    ordered = verdict.worst_first(parity)
    nearest = doc.table_of(
        ordered[:6],
        ("nearest to its own limit", lambda tensor: doc.code(tensor.name)),
        ("part of it", lambda tensor: doc.Cell(verdict.part_text(tensor), doc.bad_unless(tensor.holds))),
        ("which limit", verdict.nearest_text),
        texts=(0, 2),
        look="",
        on=doc.PAGE,
    )
    every = doc.table_of(
        ordered,
        ("tensor", lambda tensor: doc.code(tensor.name)),
        ("part of its limit", verdict.part_text),
        ("share that differs", lambda tensor: f"{tensor.share:.3%}"),
        ("limit", lambda tensor: f"{tensor.limit:.3%}"),
        ("largest step", lambda tensor: tensor.max_step),
        ("limit", lambda tensor: tensor.step_limit),
        ("output error", lambda tensor: known(tensor.output_rel_error, ".2g")),
        ("limit", lambda tensor: "" if tensor.output_rel_error is None else f"{tensor.output_limit:.2g}"),
        ("codes", lambda tensor: f"{tensor.int8_values:,}"),
        ("differing", lambda tensor: f"{tensor.differing:,}"),
        ("", lambda tensor: doc.mark(tensor.holds)),
        texts=(0, -1),
        look="sortable",
    )
    blocks: list[doc.Block] = [
        text,
        doc.Columns([[doc.Chart(partial(charts.parity_svg, parity))], [nearest]]),
        doc.Fold(f"All {len(ordered)} tensors, the nearest to its own limit first", [every]),
    ]
    return doc.Section("parity", "Layer parity", blocks, "good" if parity.passed else "bad")


def lengths_sections(results: Results) -> list[doc.Section]:
    if (lengths := results.lengths) is None:
        return []
    calibrated = results.data.get("calibration")
    seen = f" Calibration saw a median of {calibrated['lengths']['p50']}." if calibrated else ""
    own = " A CPU's kernels take every length, so that each batch is padded to its own longest row."
    text = (
        f"The engine's profiles follow the evaluation data (`shapes: auto`). {lengths.rows} rows of "
        f"{', '.join(lengths.splits)}: {lengths.shortest} to {lengths.longest} tokens, median "
        f"{lengths.median:g}, nine of ten at most {lengths.p90}.{seen} Of the tokens of the engine's batches "
        f"{100 * lengths.padding:.1f}% are padding. Padded to the longest row it would be "
        f"{100 * lengths.longest_padding:.1f}%.{'' if lengths.buckets else own}"
    )
    buckets = doc.table_of(
        lengths.buckets,
        ("padded to", lambda bucket: bucket.length),
        ("rows", lambda bucket: bucket.rows),
        ("tokens", lambda bucket: bucket.tokens),
        ("padding", lambda bucket: f"{1 - bucket.tokens / (bucket.rows * bucket.length):.1%}"),
        texts=(),
        look="",
    )
    blocks: list[doc.Block] = [
        text,
        doc.Chart(partial(charts.lengths_svg, lengths)),
        *([buckets] if lengths.buckets else []),
        doc.Prose(f"Profiles: {'; '.join(lengths.profiles)}.", "quiet"),
    ]
    return [doc.Section("lengths", "Lengths", blocks)]


def outputs_section(results: Results) -> doc.Section:
    if (verification := results.verification) is None:
        return doc.Section("outputs", "Engine outputs", [doc.Prose("Not verified.", "quiet")])

    def of_limit(error: float | None, limit: float) -> str:
        return f"{finite(error, '.2%')} of {limit:.2%}"

    blocks: list[doc.Block] = [OUTPUTS.format(device_text(results.engine), label(verification.reference))]
    if verification.blocks_not_checked:
        blocks.append(doc.Prose(f"The blocks were not checked: {verification.blocks_not_checked}.", "bad"))
    else:
        table = doc.table_of(
            verification.blocks,
            ("block", lambda block: block.name),
            ("positions", lambda block: block.n),
            ("error", lambda block: finite(block.error, ".2%")),
            ("limit", lambda block: f"{block.limit:.2%}"),
            ("quantization costs", lambda block: f"{block.quantization_error:.2%}"),
            ("worst position", lambda block: of_limit(block.position_error, block.position_limit)),
            ("systematic", lambda block: of_limit(block.systematic_error, block.systematic_limit)),
            ("NaN or infinite", lambda block: block.nonfinite),
            ("", lambda block: doc.mark(block.holds)),
            texts=(0, -1),
            look="",
        )
        blocks.append(table)
    shapes = doc.table_of(
        verification.shapes,
        ("batch", lambda shape: shape.batch),
        ("length", lambda shape: shape.length),
        ("samples", lambda shape: shape.what),
        ("largest logit difference", lambda shape: finite(shape.max_abs_logit_diff)),
        ("NaN or infinite", lambda shape: shape.nonfinite),
        texts=(2,),
        look="sortable",
    )
    blocks += _answer_blocks(verification)
    blocks.append(doc.Fold(f"All {count_of(len(verification.shapes), 'shape')}", [shapes]))
    return doc.Section("outputs", "Engine outputs", blocks, "good" if verification.passed else "bad")


def _answer_blocks(verification: Verification) -> list[doc.Block]:
    answers, padding = verification.predictions, verification.padding
    text = f"On {answers.n} samples (seed {verification.seed})"
    if answers.nonfinite:
        text += f" {answers.nonfinite} have NaN or infinite logits."
    else:
        differ = "" if answers.disagreements is None else f", {answers.disagreements} answers differ"
        score = "" if answers.drop is None else f"{label(answers.metric)} {-answers.drop:+.4f}"
        text += (
            f": {score or 'not enough to score'} against {label(verification.reference)}{differ}, "
            f"mean logit difference {finite(answers.mean_abs_logit_diff)} (quantization itself costs "
            f"{finite(answers.quantization_mean_abs_logit_diff)}), Kolmogorov-Smirnov "
            f"{finite(answers.ks_statistic)} (p {finite(answers.ks_p)})."
        )
    alone = (
        f"{padding.n} samples alone, padded and in a large batch differ by "
        f"{finite(padding.max_abs_logit_diff)} at most (limit {finite(padding.max_limit)})."
    )
    return [doc.Prose(text, doc.bad_unless(answers.holds)), doc.Prose(alone, doc.bad_unless(padding.holds))]


def ranges_section(results: Results) -> doc.Section:
    blocks: list[doc.Block] = [doc.Prose("Nothing was calibrated.", "quiet")]
    if results.quantizers:
        draws = [partial(charts.ranges_svg, results, measure) for measure in charts.RANGE_TITLES]
        every, activations = (_quantizers_table(results, weights=weights) for weights in (True, False))
        blocks = [
            _ranges_text(results),
            doc.Columns([[doc.Chart(draw)] for draw in draws]),
            doc.Fold(f"All {len(results.quantizers)} quantizers", [every], doc.PAGE),
            doc.Fold("Activations", [activations], doc.TEXT),
        ]
    if results.softmax:
        softmax = doc.table_of(
            results.softmax,
            ("attention", lambda row: doc.code(row.module)),
            ("to tokens", lambda row: row.length),
            ("amax", lambda row: "of each row" if row.row_max else f"{row.amax:.3g}"),
            ("values", lambda row: "centered" if row.centered else None),
            ("to zero", lambda row: f"{100 * row.zeroed:.1f} %"),
            ("clipped", lambda row: f"{100 * row.clipped:.1f} %"),
            ("error of the output", lambda row: f"{100 * row.error:.1f} %"),
            title="INT8 softmax",
            texts=(0, 3),
            look="",
        )
        blocks += [softmax, doc.Prose(SOFTMAX, "quiet")]
    return doc.Section("ranges", "Activation ranges", blocks)


def _ranges_text(results: Results) -> str:
    text = RANGES
    if results.training and results.training.settings.get("amax") == "learned":
        text += (
            " With learned amax, amax is what training made of it, and the root mean square what "
            "calibration saw."
        )
    outliers = [(row.amax_over_rms, row) for row in results.quantizers if row.amax_over_rms is not None]
    outliers.sort(key=lambda pair: -pair[0])
    largest = ", ".join(f"`{row.module}` ({row.kind}) {ratio:.0f}" for ratio, row in outliers[:3])
    text += f" Largest: {largest}." if largest else ""
    if (spread := summarize_spread(results.quantizers)) is not None:
        median, widest = spread
        text += (
            f" The amax spread between parts of the calibration rows is {median:.1%} in the median, and "
            f"{widest.amax_spread:.1%} at most (`{widest.module}`, {widest.kind})."
        )
    return text


def _quantizers_table(results: Results, *, weights: bool) -> doc.Table:
    return doc.table_of(
        [row for row in results.quantizers if weights or row.kind != "weight"],
        ("module", lambda row: doc.code(row.module)),
        ("quantizer", lambda row: row.kind),
        ("axis", lambda row: "per tensor" if row.axis is None else f"per channel, axis {row.axis}"),
        ("amax", lambda row: f"{row.amax:.4g}"),
        ("smallest amax", lambda row: "" if row.axis is None else f"{row.amax_min:.4g}"),
        ("amax / rms", lambda row: known(row.amax_over_rms, ".1f")),
        ("amax spread", lambda row: known(row.amax_spread, ".1%")),
        texts=(0, 1, 2),
        look="sortable",
    )


def findings_section(results: Results) -> doc.Section:
    if not results.findings:
        return doc.Section("findings", "Findings of `check`", ["None."], "good")
    table = doc.table_of(
        results.findings,
        ("code", lambda row: doc.Cell(row.code, code=True, look="nowrap")),
        ("severity", lambda row: doc.Cell(row.severity, "bad" if row.severity == "error" else "unclear")),
        ("why", lambda row: row.why),
        ("fix", lambda row: row.fix),
        ("node", lambda row: doc.code(row.node)),
        texts=range(5),
        look="full cards sortable",
    )
    return doc.Section("findings", "Findings of `check`", [table])


def answer_sections(results: Results) -> Iterator[doc.Section]:
    if (changed := results.changed_predictions) is not None:
        yield doc.Section("changed", "Answers that changed", _changed_blocks(results, changed))
    if (classes := results.classes) is not None:
        blocks = _class_blocks(classes, verdict.stage_label(results, classes.stage))
        yield doc.Section("classes", "Class by class", blocks)


def layer_sections(results: Results) -> Iterator[doc.Section]:
    if results.model_changes:
        rows = [(change.what, change.description) for change in results.model_changes]
        pairs = doc.Pairs(rows, definitions=True)
        yield doc.Section("besides", "What the recipe changed besides Q/DQ", [pairs])
    if (errors := results.layer_errors) is not None:
        yield doc.Section("errors", "Error of INT8, layer by layer", _error_blocks(errors))


def _changed_blocks(results: Results, changed: ChangedPredictions) -> list[doc.Block]:
    text = changed_text(results, changed)
    if not changed.rows:
        return [text]
    scores = "moved" in changed.counts
    labels = any(row.label is not None for row in changed.rows)
    margins = any(row.margin is not None for row in changed.rows)
    stage, kind = verdict.stage_name(results, changed.stage), changed.prediction_type

    def answer_cell(answer: str, change: Change, right: tuple[Change, ...]) -> doc.Cell:
        return doc.Cell(answer, look="" if scores else "right" if change in right else "wrong-answer")

    columns: list[doc.Column[ChangedPrediction]] = [
        ("sample", lambda row: row.sample),
        ("text", lambda row: doc.Cell("not found" if row.text is None else row.text, look="text")),
        *([("label", lambda row: row.label)] if labels else []),
        (f"{kind}, FP32", lambda row: answer_cell(row.fp32, row.change, RIGHT_BEFORE)),
        (f"{kind}, {stage}", lambda row: answer_cell(row.prediction, row.change, RIGHT_NOW)),
        *([] if scores else [("change", lambda row: row.change)]),
        *([("margin, FP32", lambda row: known(row.fp32_margin, ".3f"))] if margins else []),
        *([(f"margin, {stage}", lambda row: known(row.margin, ".3f"))] if margins else []),
        ("distance", lambda row: f"{row.distance:.3g}"),
    ]
    table = doc.table_of(
        changed.rows,
        *columns,
        texts=range(len(columns)),
        look="full cards sortable",
        filter="texts and answers",
        anchor="changed-answers",
        most=FEW_ANSWERS,
    )
    about = "Distance: squared difference of the logits over the mean power of FP32's, whatever is right."
    note = f"{MARGIN} {about}" if margins else about
    blocks: list[doc.Block] = [text, table, doc.Prose(note, "quiet", doc.PAGE)]
    if changed.count > FEW_ANSWERS:
        blocks.append(doc.Prose(f"The others are in `{changed.file}`.", on=doc.TEXT))
    return blocks


def changed_text(results: Results, changed: ChangedPredictions) -> str:
    stage = verdict.stage_label(results, changed.stage)
    samples = f"Of {count_of(changed.n, 'sample')} of {changed.split}"
    if not changed.count:
        return f"{samples} each has the answer of FP32 in {stage}."
    scores = "moved" in changed.counts
    share = f"{changed.count} ({changed.count / changed.n:.1%})"
    what = f"moved in {stage}, against FP32" if scores else f"have another answer in {stage} than in FP32"
    text = f"{samples} {share} {what}"
    if not scores:
        text += ": " + ", ".join(f"{count} {change}" for change, count in changed.counts.items())
    if (kept := len(changed.rows)) < changed.count:
        which = "farthest" if scores else "first"
        text += f". The {which} {kept} of {changed.count} are listed, all are in {changed.file}"
    return f"{text}."


def _class_blocks(classes: Classes, stage: str) -> list[doc.Block]:
    def change(row: ClassRow) -> str:
        return "" if row.delta is None else with_error(row.delta, row.delta_stderr, "+.4f")

    table = doc.table_of(
        classes.rows,
        ("class", lambda row: row.name),
        ("change", change),
        ("recall, FP32", lambda row: known(row.fp32, ".4f")),
        (f"recall, {stage}", lambda row: known(row.recall, ".4f")),
        ("regressed", lambda row: row.regressed),
        ("fixed", lambda row: row.fixed),
        (classes.unit, lambda row: row.n),
        look="sortable",
        filter="classes" if len(classes.rows) > MANY_CLASSES else "",
        anchor="recall",
    )
    about = (
        f"Recall: of the {classes.unit} with this label, the share that is answered so. ± is one paired "
        f"standard error. Regressed and fixed: right in FP32 alone, and in {stage} alone."
    )
    blocks: list[doc.Block] = [table, doc.Prose(about, "quiet", doc.PAGE)]
    if len(classes.rows) <= WIDEST:
        pairs = (("FP32", classes.fp32), (stage, classes.confusion))
        blocks.append(doc.Columns([[_confusion_table(classes, *pair)] for pair in pairs], on=doc.PAGE))
    return blocks


def _confusion_table(classes: Classes, title: str, counts: Sequence[Sequence[int]]) -> doc.Table:
    """Return counts [label][prediction], each with its difference from FP32's."""
    names = [row.name for row in classes.rows]
    rows = []
    for at, (line, base) in enumerate(zip(counts, classes.fp32, strict=True)):
        cells = []
        for answer, (count, before) in enumerate(zip(line, base, strict=True)):
            note = f"({count - before:+d})" if count != before else ""
            cells.append(doc.Cell(str(count), note=note, look="diagonal" if at == answer else ""))
        rows.append(doc.row(names[at], *cells))
    return doc.Table(["label \\ answer", *names], rows, title, look="confusion", on=doc.PAGE)


def _error_blocks(errors: LayerErrors) -> list[doc.Block]:
    linears = sorted((it for it in errors.rows if it.what == "linear"), key=lambda it: -it.isolated)
    worst = ", ".join(f"`{it.name}` {it.isolated:.1%}" for it in linears[:3])
    text = (
        f"The fake-quant model against FP32 on {errors.n} samples, relative to the norm of FP32's output. "
        "Isolated: both get the same input. Cumulative: each goes its own way from the tokens on."
    )
    columns: list[doc.Column[LayerError]] = [
        ("linear or block", lambda layer: doc.code(layer.name)),
        ("isolated, %", lambda layer: f"{100 * layer.isolated:.2f}"),
        ("isolated, dB", lambda layer: f"{-20 * math.log10(layer.isolated):.1f}" if layer.isolated else ""),
        ("cumulative, %", lambda layer: known(layer.cumulative and 100 * layer.cumulative, ".2f")),
    ]
    table = doc.table_of(errors.rows, *columns, look="sortable", anchor="layer-errors")
    return [
        f"{text} Largest alone: {worst}." if worst else text,
        doc.Columns([[doc.Chart(partial(errors_svg, errors, what))] for what in ("linear", "block")]),
        doc.Fold(f"All {len(errors.rows)} linears and blocks", [table], doc.PAGE),
        doc.table_of([layer for layer in errors.rows if layer.what == "block"], *columns, on=doc.TEXT),
    ]


def errors_svg(errors: LayerErrors, what: str) -> str:
    points: charts.Points = defaultdict(dict)
    for it in errors.rows:
        if it.what != what:
            continue
        if what == "linear":
            layer, kind = charts.place(it.name)
            if layer is not None:
                points[kind][layer] = 100 * it.isolated
        elif it.cumulative is not None and it.name.startswith("layer."):
            layer = int(it.name.rpartition(".")[2])
            points["alone"][layer] = 100 * it.isolated
            points["accumulated"][layer] = 100 * it.cumulative
    which = "linear's output alone" if what == "linear" else "layer's output"
    return charts.layer_chart(points, f"error of each {which}, %", f"{what}-errors")


def evaluate_fp16_blocks(results: Results) -> list[doc.Block]:
    """Show FP16 against FP32, and the stage nearest to deployment against both; or the command for it."""
    last, half, versus = verdict.last_measured(results), results.fp16, results.vs_fp16
    if last is None or half is None or versus is None or half.vs_fp32 is None:
        if not results.quantized_layers:
            return []
        text = f"INT8 against FP16: not evaluated; `{EVALUATE_FP16}` evaluates the FP16 twin."
        return [doc.Prose(text, "quiet", doc.PAGE)]
    stage_title = verdict.stage_label(results, last[0])
    metric = next(iter(half.metrics))
    rows = [
        ("FP16 against FP32", half, half.vs_fp32),
        (f"{stage_title} against FP16", last[1], versus),
        (f"{stage_title} against FP32", last[1], last[1].vs_fp32),
    ]
    table = doc.table_of(
        [(title, stage, against) for title, stage, against in rows if against is not None],
        ("", lambda row: row[0]),
        (label(metric), lambda row: figures.metric(row[1], metric)),
        ("difference", lambda row: figures.change_text(row[2])),
        ("differing answers", lambda row: figures.differing(row[2])),
        ("McNemar p", lambda row: known(row[2].mcnemar_p, ".2g")),
        title="Against FP16 as well",
        look="cards",
    )
    return [table, doc.Prose(f"{half.detail}. Pairs of the same samples.", "quiet", doc.PAGE)]


def tradeoff_blocks(results: Results, bench: Bench | None) -> list[doc.Block]:
    """Show latency against accuracy of the fastest of each precision, at the shape where INT8 gains least."""
    base, last = results.stages.get("fp32"), verdict.last_measured(results)
    if bench is None or not results.speed or base is None or last is None or not base.metrics:
        return []
    least = judge_shapes(results.speed)[0].config
    cell = next((it for it in bench.configs if config_label(it, bench.settings.dataset) == least), None)
    metric = next(iter(base.metrics))
    points: list[tuple[str, float, StageResult]] = []
    missing = ""
    for precision, scored in {"int8": last[1], "fp16": results.fp16, "fp32": base}.items():
        timed = _fastest(bench, cell, precision) if cell else None
        if timed is None or timed.median_ms is None:
            continue
        if scored is None:
            time = f"{precision.upper()} ({figures.latency(timed.median_ms)} ms)"
            missing = f" {time} is not shown: `{EVALUATE_FP16}` evaluates it."
        else:
            points.append((precision, timed.median_ms, scored))
    if len(points) < 2:
        return []
    about = f"At the shape where INT8 gains least. Error bars are paired, against FP32.{missing}"
    table = doc.table_of(
        points,
        ("fastest in", lambda point: point[0].upper()),
        ("ms", lambda point: figures.latency(point[1])),
        (label(metric), lambda point: figures.metric(point[2], metric)),
        title="Latency against accuracy",
        look="",
    )
    draw = partial(_scatter_svg, points, metric, least)
    return [doc.Columns([[table, doc.Prose(about, "quiet")], [doc.Chart(draw)]], on=doc.PAGE)]


def _fastest(bench: Bench, cell: BenchConfig, precision: str) -> BenchRow | None:
    names = {about.name for about in bench.systems if about.precision == precision}
    if precision == "int8":
        names &= {"int8", "int8-exact"}  # of this run's own engines
    rows = [row for row in cell.rows if row.system in names and row.status == "done" and row.median_ms]
    return min(rows, key=lambda row: row.median_ms or 0.0, default=None)


def _scatter_svg(points: list[tuple[str, float, StageResult]], metric: str, cell: str) -> str:
    figure, axes = svg.axes_of(2.6)
    for name, time, stage in points:
        error = stage.vs_fp32.delta_stderr.get(metric, 0.0) if stage.vs_fp32 else 0.0
        color, marker = STYLES[name]
        at = (time, stage.metrics[metric])
        axes.errorbar(*at, yerr=error, color=color, marker=marker, capsize=3)
        axes.annotate(name.upper(), at, xytext=(7, 4), textcoords="offset points")
    times = [time for _, time, _ in points]
    if max(times) > 5 * min(times):
        svg.log_scale(axes, "x")
        axes.set_xlim(min(times) / 1.5, max(times) * 2)
    else:
        axes.set_xlim(0, max(times) * 1.2)
    axes.margins(y=0.25)
    axes.set_xlabel(f"milliseconds at {cell}")
    svg.dress(axes, label(metric), grid="both")
    return svg.svg_of(figure, "tradeoff", f"Latency at {cell} against {label(metric)}")
