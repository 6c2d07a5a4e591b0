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
    code,
    row,
)
from qdqbench.eval.reporting.formats import label
from qdqbench.eval.runs.report import charts
from qdqbench.eval.runs.report.verdict import nearest_text, part_text, worst_first
from qdqbench.quantize.engine.facts import collect_facts
from qdqbench.quantize.utils.comparison import MAX_OUTPUT_ERROR, Parity
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


def bad_unless(holds: bool) -> State:
    """Return the state of what must hold."""
    return "" if holds else "bad"


def _mark(holds: bool) -> Cell:
    return Cell(state="good" if holds else "bad")


def device_text(engine: EngineResult | None) -> str:
    """Return what an engine runs on."""
    return "this CPU" if engine is not None and engine.on_cpu else "the GPU"


def precision_section(results: Results) -> Section:
    """Return which layer runs in what, from the engine or, without one, as planned."""
    grid, engine = charts.precision_grid(results), results.engine
    color = {"INT8", "FP16", "FP32", "BF16"}

    def cell(each: charts.GridCell | None) -> Cell:
        if each is None:
            return Cell()
        look = f"cell {each.datatype if each.datatype in color else 'other'}"
        return Cell(each.datatype, bad_unless(each.as_asked), look=look, tip=each.note)

    rows = [row(str(layer), *map(cell, cells)) for layer, cells in grid.rows]
    kinds = Table(["layer", *grid.kinds], rows, texts=range(len(grid.kinds) + 1), look="grid")
    legend = [
        row(Cell(name, look=f"cell {name if name in color else 'other'}"), formats.count_of(count, "module"))
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


def parity_section(results: Results) -> Section:
    """Return ONNX Runtime against the fake-quant model, tensor by tensor."""
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
        row(code(each.name), Cell(part_text(each), bad_unless(each.holds)), nearest_text(each))
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
    steps = " or ".join(map(str, sorted({each.step_limit for each in parity.rows} or {parity.limit_step})))
    limit = f"{100 * parity.limit_fraction:.3g}%"
    return f"At most {limit} of the INT8 codes may differ beyond rounding, by at most {steps}"


def lengths_sections(results: Results) -> list[Section]:
    """Return the lengths that the engine profiles follow, for `shapes: auto`."""
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


def outputs_section(results: Results) -> Section:
    """Return the engine's outputs against those of its reference."""
    if (verification := results.verification) is None:
        return Section("outputs", "Engine outputs", [Prose("Not verified.", "quiet")])
    share = formats.share_text
    blocks: list[Block] = [OUTPUTS.format(device_text(results.engine), label(verification.reference))]
    if verification.blocks_not_checked:
        blocks.append(Prose(f"The blocks were not checked: {verification.blocks_not_checked}.", "bad"))
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
            for each in verification.blocks
        ]
        columns = [
            "block", "positions", "error", "limit", "quantization costs", "worst position", "systematic",
            "NaN or infinite", "",
        ]  # fmt: skip
        blocks.append(Table(columns, rows, texts=(0, -1), look=""))
    blocks += _answer_blocks(verification)
    rows = [
        row(
            str(each.batch),
            str(each.length),
            each.what,
            formats.number(each.max_abs_logit_diff),
            str(each.nonfinite),
        )
        for each in verification.shapes
    ]
    columns = ["batch", "length", "samples", "largest logit difference", "NaN or infinite"]
    shapes = Table(columns, rows, texts=(2,), look="sortable")
    blocks.append(Fold(f"All {formats.count_of(len(rows), 'shape')}", [shapes]))
    return Section("outputs", "Engine outputs", blocks, "good" if verification.passed else "bad")


def _answer_blocks(verification: Verification) -> list[Block]:
    answers, padding, number = verification.answers, verification.padding, formats.number
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
    """Return what calibration saw at each quantizer, and what INT8 costs each softmax."""
    blocks: list[Block] = []
    if results.quantizers:
        outliers = [each for each in results.quantizers if each.amax_over_rms is not None]
        outliers.sort(key=lambda each: -(each.amax_over_rms or 0.0))
        largest = ", ".join(
            f"`{each.module}` ({each.kind}) {each.amax_over_rms:.0f}" for each in outliers[:3]
        )
        text = RANGES
        if results.training and results.training.settings.get("amax") == "learned":
            text += (
                " With learned amax, amax is what training made of it, and the root mean square what "
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


def findings_section(results: Results) -> Section:
    """Return the findings of `check`."""
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
        "findings", "Findings of `check`", [Table(columns, rows, texts=range(5), look="full cards sortable")]
    )
