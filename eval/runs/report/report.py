"""The report of a run, from its `Results` and its bench, and the folder `deploy`."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from qdqbench.eval.bench.report import bench_blocks, bench_of, speed_table
from qdqbench.eval.bench.results import Bench
from qdqbench.eval.metrics import figures
from qdqbench.eval.metrics.gate import judge_shapes
from qdqbench.eval.metrics.results import Comparison, Parity, StageResult
from qdqbench.eval.runs.gate import issue_sentence, judge_speed, read_engine_sizes, read_speed
from qdqbench.eval.runs.report import charts, sections, verdict
from qdqbench.eval.runs.report.training import reconstruction_blocks, training_blocks
from qdqbench.eval.runs.results import RESULTS_FILE, FileRow, Results, read_results, write_results
from qdqbench.eval.verification.results import Verification
from qdqbench.quantize.calibration.record import describe_spread
from qdqbench.quantize.deployment.write import DEPLOY, TOLD, RunVerdict, write_deploy
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.lint.findings import FindingRow
from qdqbench.quantize.pipeline.ownership import locked_folder, locked_for_reading
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report.coverage import coverage, share
from qdqbench.quantize.report.formats import (
    LABELS,
    cleaned,
    first,
    flat,
    known,
    label,
    model_label,
    seconds,
    size,
    task_label,
    with_error,
)
from qdqbench.quantize.report.render import write_report
from qdqbench.quantize.tasks.kinds.embedding import AGREEMENT
from qdqbench.quantize.training.results import ReconstructionRun, TrainingRun
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import count_of

ACCURACY = (
    "± and error bars are one standard error over the evaluation samples. The blue band is FP32 with its "
    "error. The dashed line is the gate's limit (a drop of {} on the first metric), which a stage fails by "
    "more than two paired standard errors. All stages see the same samples, so read a change from the "
    "paired difference in the table and not from overlapping bars: “within noise” means at most two paired "
    "standard errors."
)
EMBEDDINGS = (
    "Each text's embedding against FP32's of the same text: mean and 1st percentile of their cosine, and "
    "how many of its 10 nearest texts (by cosine, among these) are still among the 10 nearest. No "
    "label is needed."
)
TOGETHER = "Stages run one after the other. Peak memory is that of the whole process while the stage ran."
MOST_FILES = 6  # that a terminal lists


def write_reports(results: Results, folder: Path) -> list[Path]:
    return write_report(run_report(results, bench_of(folder), folder), folder, "report")


def refresh_reports(folder: Path) -> tuple[list[Path], str | None]:
    """Judge the speed of a finished run again by its bench, and write its reports.

    Returns the paths, and why they could not be written.
    """
    if not (folder / RESULTS_FILE).is_file():
        return [], None
    try:
        results = read_results(folder)
    except UserError:  # what was measured must not be lost to it
        why = f"{RESULTS_FILE} is not of this version"
        return [], f"{why}: run `qdqbench report` for a report with this bench"
    speed = read_speed(folder)
    sizes = read_engine_sizes(folder, results.engine)
    judged = {"speed": speed, "unquantized_engines": sizes, "gate": judge_speed(results.gate, speed)}
    results = results.model_copy(update=judged)
    results.warnings[:0] = [line for line in refresh(folder, results) if line not in results.warnings]
    write_results(folder, results)
    return write_reports(results, folder), None


def too_slow(folder: Path) -> list[str]:
    if not (folder / RESULTS_FILE).is_file():
        return []
    failures = read_results(folder).gate.failures
    return [issue_sentence(issue) for issue in failures if issue.code == "min_speedup"]


def run_report(results: Results, bench: Bench | str | None = None, folder: Path | None = None) -> doc.Report:
    """Return the report of a run; without a bench and a folder, what a terminal shows of it."""
    results = cleaned(results)
    recipe, form = results.recipe, "To deploy it: `{}`; {}try it with `{}`"
    deploy = where_to_begin(folder / DEPLOY, Path(DEPLOY), form) if folder else ""
    name = model_label(str(results.model.get("name", "model")))
    inputs = [
        *flat(results.model, "model"),
        *flat(results.task, "task"),
        *flat(results.data, "data"),
        ("seed", str(results.seed)),
    ]
    trained: list[doc.Block] = [f"{verdict.training_clause(results)}."]
    trained += [*reconstruction_blocks(results.reconstruction), *training_blocks(results.training)]
    return doc.Report(
        doc.page_of(
            results,
            "run",
            "built-in BERT" if results.model.get("embedded") else name,
            [task_label(str(results.task.get("name", "task"))), str(recipe.get("name", "unnamed recipe"))],
            RESULTS_FILE,
            facts={"Model, task and data": inputs},
            recipe=recipe,
        ),
        [
            _accuracy_section(results),
            *sections.answer_sections(results),
            *([doc.Section("training", "Training with quantization", trained)] if results.trained else []),
            sections.precision_section(results),
            *sections.layer_sections(results),
            sections.parity_section(results),
            *sections.lengths_sections(results),
            sections.outputs_section(results),
            sections.ranges_section(results),
            sections.findings_section(results),
            *_speed_section(results, bench),
            _cost_section(results),
        ],
        verdict=verdict.run_verdict(results),
        lead=[doc.Prose(deploy, "quiet")] if deploy else [],
        tiles=[*_tiles(results)],
        warnings=results.warnings,
        notes=results.notes,
    )


def _tiles(results: Results) -> Iterator[doc.Tile]:
    engine, planned = results.engine, len(results.quantized_layers)
    if engine is not None and engine.expected_int8_gemms:
        proven = share(*verdict.count_linears(results, engine))
        yield doc.Tile("INT8 linears", proven, "in the engine", doc.bad_unless(not engine.not_int8))
    elif engine is None and planned:
        yield doc.Tile("INT8 linears", str(planned), "planned, not proven")
    last, gain = verdict.last_measured(results), results.qat_vs_ptq
    if last is not None and (versus := last[1].vs_fp32) is not None:
        metric = next(iter(last[1].metrics))
        holds = not charts.drop_fails(last[1], metric, results.gate.max_drop)
        yield _change_tile(f"{label(metric)} against FP32", versus, holds)
    if gain is not None:
        metric, delta = next(iter(gain.delta.items()))
        training = "QAT" if results.training else "reconstruction"
        yield _change_tile(f"{label(metric)}, {training} against PTQ", gain, gain.within_noise or delta > 0)
    yield _speed_tile(results)
    if engine is not None:
        others = [f"{row.precision.upper()} {size(row.bytes)}" for row in results.unquantized_engines]
        remark = ", ".join(filter(None, [*others, missing_engines(results)]))
        yield doc.Tile("engine", size(engine.bytes), remark)
    if (smaller := verdict.quantized_file(results)) is not None:
        name, ratio, count = smaller
        yield doc.Tile("ONNX file against FP32", f"{ratio:.2f}", f"{size(count)}, {name}")
    yield from _proof_tiles(results)
    if results.timings:
        peak = max(timing.peak_rss_bytes for timing in results.timings.values())
        total = seconds(sum(timing.wall_s for timing in results.timings.values()))
        yield doc.Tile("total stage time", total, f"peak memory {size(peak)}")


def _change_tile(title: str, versus: Comparison, holds: bool) -> doc.Tile:
    value, _, error = figures.change(versus).text.partition(" ")
    remark = ", ".join(filter(None, (error, figures.noise(versus))))
    return doc.Tile(title, value, remark, doc.bad_unless(holds))


def _speed_tile(results: Results) -> doc.Tile:
    if not (shapes := judge_shapes(results.speed)):
        return doc.Tile("speed", "not measured", "`qdqbench bench RUN` measures it")
    least, asked = shapes[0], results.gate.min_speedup
    figure = figures.speed(least)
    state = "bad" if asked is not None and least.leading.value < asked else figure.state
    remark = f"{least.leading.interval} over {least.baseline} at {least.config}".strip()
    remark += f", the worst of {len(shapes)}" if len(shapes) > 1 else ""
    remark += ", by CPU time" if least.by_cpu_time else ""
    if least.leading.verdict == "inconclusive":
        why = "the 95% CI contains 1" if least.leading.interval else "too few rounds for a 95% CI"
        remark += f"; inconclusive: {why}"
    return doc.Tile("speed", figures.speed_text(least), remark, state)


def _proof_tiles(results: Results) -> Iterator[doc.Tile]:
    if (parity := results.parity) is not None and parity.rows:
        worst = verdict.worst_first(parity)[0]
        remark = f"of the limit, at the worst tensor: {verdict.remark_of(worst)}"
        yield doc.Tile("layer parity", verdict.part_text(worst), remark, doc.bad_unless(parity.passed))
    if (verified := results.verification) is not None:
        held = share(sum(row.holds for row in verified.blocks), len(verified.blocks))
        remark = f"follow {label(verified.reference)} on {sections.device_text(results.engine)}"
        if verified.blocks_not_checked:
            held, remark = "not checked", verified.blocks_not_checked
        state = doc.bad_unless(all(row.holds for row in verified.blocks))
        yield doc.Tile("engine blocks", held, remark, state)


def missing_engines(results: Results) -> str:
    """Name the unquantized engines that a bench would still build.

    A bench on a CPU compiles them in memory, so it leaves no files to wait for.
    """
    if results.engine is None or results.engine.on_cpu:
        return ""
    built = {row.precision for row in results.unquantized_engines}
    lacking = [precision.upper() for precision in ("fp16", "fp32") if precision not in built]
    return f"{' and '.join(lacking)} not built: `qdqbench bench RUN` builds them" if lacking else ""


def _accuracy_section(results: Results) -> doc.Section:
    stages = results.stages
    metrics = [*dict.fromkeys(metric for stage in stages.values() for metric in stage.metrics)]
    names = LABELS | {metric: label(metric) for metric in metrics}
    names |= {name: verdict.stage_name(results, name) for name in stages}
    legend = doc.Prose(ACCURACY.format(results.gate.max_drop), "quiet")
    ran = [
        f"{verdict.stage_label(results, name)}: {row.detail}." for name, row in stages.items() if row.detail
    ]
    blocks: list[doc.Block] = [
        _stages_table(results, metrics),
        doc.Prose(" ".join(ran), "quiet"),
        doc.table_of(
            stages.items(),
            ("stage", lambda pair: verdict.stage_name(results, pair[0])),
            ("result", lambda pair: figures.metrics(pair[1]) or pair[1].status),
            ("against FP32", _against(figures.change_text)),
            ("differ", _against(figures.differing)),
            on=doc.SCREEN,
        ),
        doc.Columns([[doc.Chart(partial(charts.accuracy_svg, results, names))], [legend]]),
        *sections.evaluate_fp16_blocks(results),
    ]
    if compared := charts.agreements(results):
        near = doc.table_of(
            compared.items(),
            ("stage", lambda pair: verdict.stage_label(results, pair[0])),
            *(
                (label(name), lambda pair, name=name: with_error(pair[1].values[name], pair[1].stderr[name]))
                for name in AGREEMENT
            ),
            ("texts", lambda pair: pair[1].n),
            title="Embeddings against those of FP32",
            look="",
        )
        draw = partial(charts.agreement_svg, compared, names)
        blocks.append(doc.Columns([[near, doc.Prose(EMBEDDINGS, "quiet")], [doc.Chart(draw)]]))
    return doc.Section("accuracy", "Accuracy by stage", blocks)


def _against(show: Callable[[Comparison], doc.Value]) -> Callable[[tuple[str, StageResult]], doc.Value]:
    return lambda pair: show(pair[1].vs_fp32) if pair[1].vs_fp32 else None


def _stages_table(results: Results, metrics: list[str]) -> doc.Table:
    def head(pair: tuple[str, StageResult]) -> doc.Cell:
        return doc.Cell(verdict.stage_label(results, pair[0]), look="stage")

    def skipped(pair: tuple[str, StageResult]) -> doc.Row | None:
        if pair[1].status != "skipped":
            return None
        return doc.row(head(pair), doc.Cell(f"skipped: {pair[1].reason or 'no reason recorded'}", "quiet"))

    def deltas(versus: Comparison) -> doc.Cell:
        lines = "\n".join(figures.change(versus, metric).text for metric in versus.delta)
        return doc.Cell(lines, sort=next(iter(versus.delta.values()), None))

    return doc.table_of(
        results.stages.items(),
        ("stage", head),
        *((label(metric), lambda pair, metric=metric: figures.metric(pair[1], metric)) for metric in metrics),
        ("against FP32", _against(deltas)),
        ("", _against(figures.noise)),
        ("differing answers", _against(lambda versus: versus.disagreements)),
        ("McNemar p", _against(lambda versus: known(versus.mcnemar_p, ".2g"))),
        ("mean logit difference", _against(lambda versus: f"{versus.mean_abs_logit_diff:.3g}")),
        ("SQNR", _against(figures.sqnr)),
        ("samples", lambda pair: pair[1].n),
        instead=skipped,
        look="full cards",
    )


def _speed_section(results: Results, bench: Bench | str | None) -> list[doc.Section]:
    if bench is None and not results.speed:
        return []
    shapes = judge_shapes(results.speed)
    state: doc.State = figures.speed_verdict(shapes)[1]
    measured = None if isinstance(bench, str) else bench
    broken = bench is not None and (measured is None or bool(measured.errors))
    if broken or any(issue.code == "min_speedup" for issue in results.gate.failures):
        state = "bad"
    blocks: list[doc.Block] = [speed_table(results.speed)] if results.speed else []
    if bench is not None:
        blocks += [*bench_blocks(bench), *sections.tradeoff_blocks(results, measured)]
    return [doc.Section("speed", "Speed", blocks, state)]


def _cost_section(results: Results) -> doc.Section:
    against = "Against FP32: ONNX files by the FP32 file, engines by the FP32 engine of the same backend."
    if missing := missing_engines(results):
        against += f" Engines in {missing}."
    files = [(file.name, file.bytes, "ONNX", file.fp32_ratio) for file in results.files]
    full = next((twin.bytes for twin in results.unquantized_engines if twin.precision == "fp32"), None)
    engines = [(twin.name, twin.bytes, "engine of the bench") for twin in results.unquantized_engines]
    if (engine := results.engine) is not None:
        engines.insert(0, (engine.file, engine.bytes, "engine of this run"))
    files += [(name, count, what, count / full if full else None) for name, count, what in engines]
    if (gpu := results.gpu_engine) is not None:
        files.append((f"gpu/engine/{gpu.file}", gpu.bytes, "engine for GPUs, built ahead of time", None))
    sizes = doc.table_of(
        files,
        ("file or engine", lambda file: doc.code(file[0])),
        ("size", lambda file: size(file[1])),
        ("against FP32", lambda file: known(file[3], ".2f")),
        ("", lambda file: file[2]),
        title="Files",
        texts=(0, -1),
    )
    total = sum(timing.wall_s for timing in results.timings.values())
    times = doc.table_of(
        results.timings.items(),
        ("stage", lambda pair: doc.Cell(label(pair[0]), note="(reused)" if pair[1].reused else "")),
        ("wall time", lambda pair: seconds(pair[1].wall_s)),
        ("", lambda pair: doc.Cell(bar=pair[1].wall_s / (total or 1), look="track")),
        ("peak memory", lambda pair: size(pair[1].peak_rss_bytes)),
        title="Time and memory",
        foot=[doc.row("added up", seconds(total), "", "")],
    )
    parts = doc.Columns([[sizes, doc.Prose(against, "quiet")], [times, doc.Prose(TOGETHER, "quiet")]])
    return doc.Section("cost", "Cost", [parts])


def hand_off(session: Session, results: Results) -> list[str]:
    """Write the deploy folder of a finished run; return why that failed, as warnings."""
    try:
        _write_deploy(session, results, None)
    except UserError as error:  # the run is done, whatever lies in this folder
        return [str(error)]
    return []


def refresh(folder: Path, results: Results) -> list[str]:
    """Write the deploy folder again after a bench changed the verdict, if the run has one."""
    if not (folder / DEPLOY / TOLD).is_file():
        return []
    return hand_off(Session(read_config(folder), folder), results)


def deploy(folder: Path, out: Path | None = None, *, fp32: bool = False) -> Path:
    """Write the deploy folder of a finished run again, or a copy elsewhere; return its path.

    With `fp32` it has the FP32 twin too.

    Raises:
        UserError: no finished run, or as `write_deploy`.
    """
    session = Session(read_config(folder), folder)
    if not (folder / RESULTS_FILE).is_file():
        raise UserError(f"{folder} is not finished; run `qdqbench report {folder}`, which makes it")
    with locked_folder(folder) if out is None else locked_for_reading(folder):
        _write_deploy(session, read_results(folder), out, fp32=fp32)
    return out or folder / DEPLOY


def _write_deploy(session: Session, results: Results, out: Path | None, *, fp32: bool = False) -> None:
    results = cleaned(results)
    # a command has paths of this machine, which say nothing elsewhere
    said = verdict.run_verdict(results.model_copy(update={"command": ""}))
    failed = "; ".join(said.failures) if said.state == "bad" else ""
    lines = [*said.notes] if failed else [*said.failures, *said.notes]
    about = RunVerdict(said.title, said.lines, failed, lines)
    write_deploy(session, results, about, out, fp32=fp32)


def where_to_begin(place: Path, called: Path, form: str = "{}; {}try it: {}", python: str = "python") -> str:
    """Return how to begin with a folder `deploy`, called so for its reader; empty where there is none.

    Args:
        form: takes the folder, what to know before its use, and the command to try it.
    """
    if not (place / TOLD).is_file():
        return ""
    about = files.read_json(place / TOLD)
    warning = "" if about["ran"] else "the engine never ran; "
    warning = "NOT FOR USE, the run failed; " if about["failed"] else warning
    command = f"{python} {shlex.quote(str(called / about['script']))} {about['example']}"
    return form.format(called, warning, command)


def stages_report(results: Results, folder: Path) -> doc.Report:
    """Report a run without a page on a terminal: its stages, its files, and what does not hold."""
    table = doc.table_of(
        results.timings.items(),
        ("stage", lambda pair: pair[0]),
        ("result", lambda pair: stage_cell(results, pair[0])),
        ("time", lambda pair: "unchanged" if pair[1].reused else seconds(pair[1].wall_s)),
        on=doc.SCREEN,
    )
    largest = sorted(results.files, key=lambda file: -file.bytes)
    names = first([f"{file.name} {size(file.bytes)}" for file in largest], MOST_FILES, "there")
    listed = f"{count_of(len(largest), 'file')} in {folder}: {', '.join(names)}"
    failures = first([*map(issue_sentence, results.gate.failures)], 5, "the report")
    failed = doc.Bullets(failures, "bad", doc.SCREEN)
    blocks: list[doc.Block] = [table, doc.Prose(listed, on=doc.SCREEN), failed]
    title = model_label(str(results.model.get("name", "model")))
    return doc.Report(
        doc.page_of(results, "stages", title, [], RESULTS_FILE),
        [doc.Section("stages", "Stages", blocks, on=doc.SCREEN)],
        warnings=results.warnings,
        notes=results.notes,
    )


def stage_cell(results: Results, name: str) -> doc.Cell:
    scored = "fp32" if name == "baseline" else name
    if reason := results.skipped.get(scored):
        return doc.Cell(f"skipped: {reason}", "unclear")
    if (row := results.stages.get(scored)) is None:
        part, text = STAGE_TEXTS.get(name, ("", lambda _: ""))
        return doc.Cell(text(getattr(results, part) if part else results))
    words = [f"{figures.metrics(row)}, n = {row.n:,}"]
    if (versus := row.vs_fp32) is not None:
        words.append(f"against FP32 {figures.change_text(versus)}")
        if differing := figures.differing(versus):
            words.append(f"{differing} answers differ")
    return doc.Cell("; ".join(words))


def _calibration_text(results: Results) -> str:
    int8, calibration = len(results.quantized_layers), results.data["calibration"]
    text = coverage(int8, int8 + len(results.high_precision_layers), "linears")
    others = {"attention": results.quantized_attention, "residual": results.quantized_residual}
    for what, modules in others.items():
        text += f", {count_of(len(modules), what)}" if modules else ""
    source = f"{count_of(calibration['samples'], 'sample')} of {calibration['split']}"
    text += f"; scales by {calibration['method']} of {source}"
    spread = describe_spread(results.quantizers)
    return f"{text}; amax spread: {spread}" if spread else text


def _reconstruction_text(run: ReconstructionRun) -> str:
    kept = (
        f"{sum(row.kept for row in run.layers)} of {count_of(len(run.layers), 'layer')} came nearer to FP32"
    )
    held_out = f"held-out answers {run.before_db:.1f} to {run.after_db:.1f} dB"
    return f"{kept} in {seconds(run.seconds)}; {held_out}" + ", so PTQ is kept" * (not run.gained)


def _training_text(training: TrainingRun) -> str:
    text = f"{training.steps} of {training.planned_steps} steps in {seconds(training.seconds)}"
    if training.best_step == 0:
        return f"{text}; the weights before training are the best"
    return f"{text}; step {training.best_step} is the best"


def _export_text(exported: list[FileRow]) -> str:
    graphs = [row for row in exported if row.fp32_ratio is not None]
    sizes = ", ".join(f"{row.name} {row.fp32_ratio:.2f}" for row in graphs if row.fp32_ratio != 1)
    return f"{count_of(len(graphs), 'ONNX file')}; of the size of FP32: {sizes}"


def _check_text(findings: list[FindingRow]) -> str:
    counts = Counter((row.severity, row.code) for row in findings)
    listed = ", ".join(f"{n} of {code} ({severity})" for (severity, code), n in counts.items())
    return f"{count_of(len(findings), 'finding')}{': ' if listed else ''}{listed}"


def _parity_text(parity: Parity) -> str:
    if not parity.rows:
        return "no tensor is quantized"
    worst = verdict.worst_first(parity)[0]
    agreeing = f"{sum(row.holds for row in parity.compared)} of {count_of(len(parity.compared), 'tensor')}"
    return (
        f"{agreeing} agree with ONNX Runtime; nearest to its limit, at {verdict.part_text(worst)}: "
        f"{verdict.remark_of(worst)}; n = {parity.n}"
    )


def _engine_text(which: str, results: Results) -> str:
    engine: EngineResult = getattr(results, which)
    text = f"{engine.file} {size(engine.bytes)}, {label(engine.backend)} {engine.version}"
    if engine.expected_int8_gemms:
        text += f"; {verdict.linears_text(results, engine)}"
    words = [text, *verdict.parts_covered(engine), *["ahead of time, not run"] * engine.ahead_of_time]
    return "; ".join(words)


def _verification_text(verified: Verification) -> str:
    passing = f"{sum(row.holds for row in verified.blocks)} of {count_of(len(verified.blocks), 'block')}"
    blocks = verified.blocks_not_checked or f"{passing} follow {label(verified.reference)}"
    parts = (("padding", verified.padding), ("answers", verified.predictions))
    bad = [name for name, part in parts if not part.holds]
    rest = f"{' and '.join(bad)} do not hold" if bad else "padding and answers hold"
    return f"{blocks}; {rest}; {count_of(len(verified.shapes), 'shape')}, n = {verified.predictions.n}"


STAGE_TEXTS: dict[str, tuple[str, Callable[[Any], str]]] = {  # field of `Results`, or all of it
    "embedded": ("", lambda _: "a small BERT and its data"),
    "quantize": ("", _calibration_text),
    "reconstruction": ("reconstruction", _reconstruction_text),
    "qat": ("training", _training_text),
    "export": ("files", _export_text),
    "check": ("findings", _check_text),
    "parity": ("parity", _parity_text),
    "build": ("", partial(_engine_text, "engine")),
    "gpu_build": ("", partial(_engine_text, "gpu_engine")),
    "verify": ("verification", _verification_text),
}
