"""Sections of a run's report on what was proven: precision, parity, engine outputs, ranges, findings."""

from functools import partial

from qdqbench.eval.reporting import formats
from qdqbench.eval.reporting.document import (
    PAGE,
    TEXT,
    Block,
    Bullets,
    Cell,
    Chart,
    Columns,
    Fold,
    Prose,
    Section,
    State,
    Table,
    bad_unless,
    code,
    mark,
    row,
    table_of,
)
from qdqbench.eval.reporting.formats import known, label
from qdqbench.eval.runs.report import charts
from qdqbench.eval.runs.report.verdict import nearest_text, part_text, worst_first
from qdqbench.quantize.engine.facts import collect_facts
from qdqbench.quantize.utils.comparison import MAX_OUTPUT_ERROR
from qdqbench.quantize.utils.results import EngineResult, Results, Verification

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
COLORED = {"INT8", "FP16", "FP32", "BF16"}


def device_text(engine: EngineResult | None) -> str:
    return "this CPU" if engine is not None and engine.on_cpu else "the GPU"


def precision_section(results: Results) -> Section:
    grid, engine = charts.precision_grid(results), results.engine

    def datatype_cell(name: str, state: State = "", tip: str = "") -> Cell:
        return Cell(name, state, look=f"cell {name if name in COLORED else 'other'}", tip=tip)

    def cell(module: charts.GridCell | None) -> Cell:
        return datatype_cell(module.datatype, bad_unless(module.as_asked), module.note) if module else Cell()

    rows = [row(layer, *map(cell, cells)) for layer, cells in grid.rows]
    kinds = Table(["layer", *grid.kinds], rows, texts=range(len(grid.kinds) + 1), look="grid")
    legend = table_of(
        grid.datatypes.items(),
        ("", lambda pair: datatype_cell(pair[0])),
        ("", lambda pair: formats.count_of(pair[1], "module")),
        look="legend",
        on=PAGE,
    )
    about = "“attention” stands for the products of q, k, v and the softmax."
    if grid.proven:
        about += (
            " ✗ marks what the recipe asks in INT8 and the engine runs in something else. Point at a cell or "
            "tap it to see its kernel."
        )
    side: list[Block] = [legend, Prose(about, "quiet")]
    if grid.outside:
        names = [f"`{name}` {it.datatype}{'' if it.as_asked else ' ✗'}" for name, it in grid.outside]
        side.append(f"Outside the encoder layers: {', '.join(names)}.")
    blocks: list[Block] = [_precision_text(results, engine)]
    blocks.append(Columns([[kinds] if rows else [], side], look="side"))
    if engine is not None:
        if engine.not_int8:
            blocks.append(Prose("Not in INT8 although the recipe asks for it:", "bad"))
            blocks.append(Bullets([f"`{node}`" for node in engine.not_int8]))
        blocks += _kernel_blocks(engine)
    return Section("precision", "Which layer runs in what", blocks)


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
    facts = collect_facts(engine.layers)
    several = facts.profiles > 1
    counts = ", ".join(f"{count} {kind}" for kind, count in facts.kernels.most_common())
    table = table_of(
        enumerate(engine.layers, 1),
        ("#", lambda pair: pair[0]),
        ("type", lambda pair: Cell(pair[1].kind, note=pair[1].kernel or "")),
        ("inputs", lambda pair: Cell(formats.types(pair[1].inputs), look="nowrap")),
        ("constants", lambda pair: Cell(formats.types(pair[1].constants), look="nowrap")),
        ("outputs", lambda pair: Cell(formats.types(pair[1].outputs), look="nowrap")),
        (
            "kernel and the ONNX nodes it covers",
            lambda pair: Cell(pair[1].name, note="\n".join(pair[1].onnx), code=True),
        ),
        texts=range(1, 6),
        look="sortable",
    )
    of = f" of {facts.profiles} profiles" if several else ""
    return [
        f"{facts.count}{'. Of one profile: ' if several else ': '}{counts}.",
        Fold(f"The whole layer table, {len(table.rows)} rows{of}", [table], PAGE),
        Prose("The full table is in `report.html` and `results.json`.", on=TEXT),
    ]


def parity_section(results: Results) -> Section:
    if (parity := results.parity) is None:
        return Section("parity", "Layer parity", [Prose("Not measured.", "quiet")])
    steps = " or ".join(map(str, sorted({row.step_limit for row in parity.rows} or {parity.limit_step})))
    text = (
        "ONNX Runtime against the fake-quant model, layer by layer, with the same inputs fed to both "
        f"({parity.n} samples, {'with' if parity.padded else 'without'} padding). At most "
        f"{100 * parity.limit_fraction:.3g}% of the INT8 codes may differ beyond rounding, by at most "
        f"{steps}; a linear's own output may be off by at most {MAX_OUTPUT_ERROR:.2g} (relative). Largest "
        f"logit difference: {parity.logits_max_abs_diff:.3g}."
    )
    if (ends := parity.end_to_end) is not None:
        answers = "" if ends.disagreements is None else f" and in {ends.disagreements} answers"
        text += (
            " End to end on the whole split ONNX Runtime and fake-quant differ by "
            f"{ends.mean_abs_logit_diff:.3g} in the mean logit{answers}: rounding flips add up from layer "
            "to layer, so this judges nothing by itself."
        )
    ordered = worst_first(parity)
    nearest = table_of(
        ordered[:6],
        ("nearest to its own limit", lambda tensor: code(tensor.name)),
        ("part of it", lambda tensor: Cell(part_text(tensor), bad_unless(tensor.holds))),
        ("which limit", nearest_text),
        texts=(0, 2),
        look="",
        on=PAGE,
    )
    every = table_of(
        ordered,
        ("tensor", lambda tensor: code(tensor.name)),
        ("part of its limit", part_text),
        ("share that differs", lambda tensor: f"{tensor.share:.3%}"),
        ("limit", lambda tensor: f"{tensor.limit:.3%}"),
        ("largest step", lambda tensor: tensor.max_step),
        ("limit", lambda tensor: tensor.step_limit),
        ("output error", lambda tensor: known(tensor.output_rel_error, ".2g")),
        ("limit", lambda tensor: "" if tensor.output_rel_error is None else f"{MAX_OUTPUT_ERROR:.2g}"),
        ("codes", lambda tensor: f"{tensor.int8_values:,}"),
        ("differing", lambda tensor: f"{tensor.differing:,}"),
        ("", lambda tensor: mark(tensor.holds)),
        texts=(0, -1),
        look="sortable",
    )
    blocks: list[Block] = [
        text,
        Columns([[Chart(partial(charts.parity_svg, results))], [nearest]]),
        Fold(f"All {len(ordered)} tensors, the nearest to its own limit first", [every]),
    ]
    return Section("parity", "Layer parity", blocks, "good" if parity.passed else "bad")


def lengths_sections(results: Results) -> list[Section]:
    if (lengths := results.lengths) is None:
        return []
    calibrated = results.data.get("calibration")
    seen = f" Calibration saw a median of {calibrated['lengths']['p50']}." if calibrated else ""
    own = " A CPU's kernels take every length, so that each batch is padded to its own longest row."
    text = (
        f"The engine's profiles follow the evaluation data (`shapes: auto`). {lengths.rows} rows of "
        f"{', '.join(lengths.splits)}: {lengths.shortest} to {lengths.longest} tokens, median "
        f"{lengths.median:g}, nine of ten at most {lengths.p90}.{seen} Of the tokens of the engine's batches "
        f"{100 * lengths.padding:.1f}% are padding; padded to the longest row it would be "
        f"{100 * lengths.longest_padding:.1f}%.{'' if lengths.buckets else own}"
    )
    blocks: list[Block] = [text, Chart(partial(charts.lengths_svg, results))]
    if lengths.buckets:
        buckets = table_of(
            lengths.buckets,
            ("padded to", lambda bucket: bucket.length),
            ("rows", lambda bucket: bucket.rows),
            ("tokens", lambda bucket: bucket.tokens),
            ("padding", lambda bucket: f"{1 - bucket.tokens / (bucket.rows * bucket.length):.1%}"),
            texts=(),
            look="",
        )
        blocks.append(buckets)
    blocks.append(Prose(f"Profiles: {'; '.join(lengths.profiles)}.", "quiet"))
    return [Section("lengths", "Lengths", blocks)]


def outputs_section(results: Results) -> Section:
    if (verification := results.verification) is None:
        return Section("outputs", "Engine outputs", [Prose("Not verified.", "quiet")])
    share = formats.share_text
    blocks: list[Block] = [OUTPUTS.format(device_text(results.engine), label(verification.reference))]
    if verification.blocks_not_checked:
        blocks.append(Prose(f"The blocks were not checked: {verification.blocks_not_checked}.", "bad"))
    else:
        table = table_of(
            verification.blocks,
            ("block", lambda block: block.name),
            ("positions", lambda block: block.n),
            ("error", lambda block: share(block.error)),
            ("limit", lambda block: share(block.limit)),
            ("quantization costs", lambda block: share(block.quantization_error)),
            (
                "worst position",
                lambda block: f"{share(block.position_error)} of {share(block.position_limit)}",
            ),
            (
                "systematic",
                lambda block: f"{share(block.systematic_error)} of {share(block.systematic_limit)}",
            ),
            ("NaN or infinite", lambda block: block.nonfinite),
            ("", lambda block: mark(block.holds)),
            texts=(0, -1),
            look="",
        )
        blocks.append(table)
    shapes = table_of(
        verification.shapes,
        ("batch", lambda shape: shape.batch),
        ("length", lambda shape: shape.length),
        ("samples", lambda shape: shape.what),
        ("largest logit difference", lambda shape: formats.number(shape.max_abs_logit_diff)),
        ("NaN or infinite", lambda shape: shape.nonfinite),
        texts=(2,),
        look="sortable",
    )
    blocks += _answer_blocks(verification)
    blocks.append(Fold(f"All {formats.count_of(len(verification.shapes), 'shape')}", [shapes]))
    return Section("outputs", "Engine outputs", blocks, "good" if verification.passed else "bad")


def _answer_blocks(verification: Verification) -> list[Block]:
    answers, padding, number = verification.predictions, verification.padding, formats.number
    drawn = f"On {answers.n} samples (seed {verification.seed})"
    if answers.nonfinite:
        text = f"{drawn} {answers.nonfinite} have NaN or infinite logits."
    else:
        differ = "" if answers.disagreements is None else f", {answers.disagreements} answers differ"
        text = (
            f"{drawn}: {label(answers.metric)} "
            f"{-(answers.drop or 0):+.4f} against {label(verification.reference)}{differ}, mean logit "
            f"difference {number(answers.mean_abs_logit_diff)} (quantization itself costs "
            f"{number(answers.quantization_mean_abs_logit_diff)}), Kolmogorov-Smirnov "
            f"{number(answers.ks_statistic)} (p {number(answers.ks_p)})."
        )
    alone = (
        f"{padding.n} samples alone, padded and in a large batch differ by "
        f"{number(padding.max_abs_logit_diff)} at most (limit {number(padding.max_limit)})."
    )
    return [Prose(text, bad_unless(answers.holds)), Prose(alone, bad_unless(padding.holds))]


def ranges_section(results: Results) -> Section:
    blocks: list[Block] = [_ranges_text(results)]
    if results.quantizers:
        draws = [partial(charts.ranges_svg, results, measure) for measure in ("amax", "amax_over_rms")]
        every, activations = (_quantizers_table(results, weights=weights) for weights in (True, False))
        blocks += [
            Columns([[Chart(draw)] for draw in draws]),
            Fold(f"All {len(results.quantizers)} quantizers", [every], PAGE),
            Fold("Activations", [activations], TEXT),
        ]
    if results.softmax:
        softmax = table_of(
            results.softmax,
            ("attention", lambda row: code(row.module)),
            ("to tokens", lambda row: row.length),
            ("amax", lambda row: f"{row.amax:.3g}"),
            ("values", lambda row: "centred" if row.centered else None),
            ("to zero", lambda row: f"{100 * row.zeroed:.1f} %"),
            ("clipped", lambda row: f"{100 * row.clipped:.1f} %"),
            ("error of the output", lambda row: f"{100 * row.error:.1f} %"),
            title="INT8 softmax",
            texts=(0, 3),
            look="",
        )
        blocks += [softmax, Prose(SOFTMAX, "quiet")]
    return Section("ranges", "Activation ranges", blocks)


def _ranges_text(results: Results) -> Block:
    if not results.quantizers:
        return Prose("Nothing was calibrated.", "quiet")
    text = RANGES
    if results.training and results.training.settings.get("amax") == "learned":
        text += (
            " With learned amax, amax is what training made of it, and the root mean square what "
            "calibration saw."
        )
    outliers = [(row.amax_over_rms, row) for row in results.quantizers if row.amax_over_rms is not None]
    outliers.sort(key=lambda pair: -pair[0])
    largest = ", ".join(f"`{row.module}` ({row.kind}) {ratio:.0f}" for ratio, row in outliers[:3])
    return f"{text} Largest: {largest}." if largest else text


def _quantizers_table(results: Results, *, weights: bool) -> Table:
    return table_of(
        [row for row in results.quantizers if weights or row.kind != "weight"],
        ("module", lambda row: code(row.module)),
        ("quantizer", lambda row: row.kind),
        ("axis", lambda row: "per tensor" if row.axis is None else f"per channel, axis {row.axis}"),
        ("amax", lambda row: f"{row.amax:.4g}"),
        ("smallest amax", lambda row: "" if row.axis is None else f"{row.amax_min:.4g}"),
        ("amax / rms", lambda row: known(row.amax_over_rms, ".1f")),
        texts=(0, 1, 2),
        look="sortable",
    )


def findings_section(results: Results) -> Section:
    title = "Findings of `check`"
    if not results.findings:
        return Section("findings", title, ["None."], "good")
    table = table_of(
        results.findings,
        ("code", lambda row: Cell(row.code, code=True, look="nowrap")),
        ("severity", lambda row: Cell(row.severity, "bad" if row.severity == "error" else "unclear")),
        ("why", lambda row: row.why),
        ("fix", lambda row: row.fix),
        ("node", lambda row: code(row.node)),
        texts=range(5),
        look="full cards sortable",
    )
    return Section("findings", title, [table])
