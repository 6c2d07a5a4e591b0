"""The verdict of a run, and its figures in words that every page and screen shares."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from qdqbench.eval.metrics import figures
from qdqbench.eval.metrics.gate import judge_shapes
from qdqbench.eval.metrics.results import GateState, Parity, ParityRow, Speedup, StageResult
from qdqbench.eval.runs.gate import issue_sentence
from qdqbench.eval.runs.report.charts import place
from qdqbench.eval.runs.results import Results
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.models.families.known import RUN
from qdqbench.quantize.report.coverage import coverage
from qdqbench.quantize.report.document import Line, State, Verdict
from qdqbench.quantize.report.formats import label, sentence, task_label, with_error
from qdqbench.quantize.tasks.kinds.embedding import AGREEMENT
from qdqbench.quantize.utils.names import count_of, name_list

GATE_STATES: dict[GateState, State] = {"passed": "good", "failed": "bad"}  # others are unclear
# under it a verdict is amber; int8-linears keeps 0.933 to 0.951 (docs/how-to/embeddings.md)
LEAST_NEIGHBORS = 0.93
MEASURES = {"codes": "codes that differ", "step": "largest step", "output": "error of the output"}


def run_verdict(results: Results) -> Verdict:
    """Return the verdict: good where all that the gate asks was judged and holds, bad where a check fails."""
    gate = results.gate
    checks = [*_failed_checks(results)]
    lines: list[Line] = [("INT8", "; ".join(_int8(results)), ""), ("Accuracy", accuracy_clause(results), "")]
    shapes, last, kept = judge_shapes(results.speed), last_measured(results), 1.0
    if last is not None and last[1].vs_fp32 is not None and (near := last[1].vs_fp32.agreement):
        kept, error = near.values["neighbors"], near.stderr["neighbors"]
        stay = f"{with_error(kept, error)} of the 10 nearest texts of FP32 stay"
        lines.append(("Neighbors", stay, "unclear" if kept < LEAST_NEIGHBORS else ""))
    if results.trained:
        lines.append(("Training", training_clause(results), ""))
    if (smaller := quantized_file(results)) is not None:
        lines.append(("Size", f"ONNX file {smaller[1]:.2f} of FP32", ""))
    lines.append(("Speed", *figures.speed_verdict(shapes)))
    failures = [*map(issue_sentence, gate.failures), *checks]
    if not failures and not gate.passed:
        failures = ["the gate gives no reason"]
    doubts = _list_doubts(figures.speed_doubt(shapes), kept)
    issues = [*gate.having("inconclusive", "not_evaluated"), *gate.having("within_noise")]
    state = "bad" if checks else GATE_STATES.get(gate.state, "unclear")
    return Verdict(
        state="unclear" if doubts and state == "good" else state,  # amber though the gate passes
        title=", ".join([_outcome(results, checks), *doubts]),
        lines=lines,
        failures=failures,
        notes=[
            *_without_int8(results, shapes),
            *map(issue_sentence, issues),
            *_not_done(results),
            *_to_decide(results),
        ],
    )


def _without_int8(results: Results, shapes: Sequence[Speedup]) -> Iterator[str]:
    """Yield where a CPU is as fast without INT8, the command for that, and what INT8 saves there."""
    behind = [row for row in shapes if row.leading.verdict in ("slower", "as fast")]
    if results.engine is None or not results.engine.on_cpu or not behind:
        return
    where, file = name_list(dict.fromkeys(row.config for row in behind)), quantized_file(results)
    yield (
        f"Take {behind[0].baseline} for batches of {where}, where it is as fast or faster: "
        f"`qdqbench run fp16 --backend {results.engine.backend}`"
        + (f"; INT8 saves memory there, with a file {file[1]:.2f} of FP32's" if file else "")
    )


def _list_doubts(speed: str, kept: float) -> list[str]:
    """Return what makes a verdict amber though the gate passes."""
    few = f"{1 - kept:.1%} of the nearest texts change" if kept < LEAST_NEIGHBORS else ""
    return [f"{'and' if number else 'but'} {text}" for number, text in enumerate(filter(None, (speed, few)))]


def _outcome(results: Results, checks: list[str]) -> str:
    gate, row = results.gate, results.stages.get("engine")
    if gate.state == "failed":
        return "Gate failed"
    if checks:
        return "A check does not hold"
    if gate.state == "inconclusive":
        return "Nothing fails, but these samples cannot tell"
    if gate.state == "passed":
        return "Gate passed"
    if results.engine is not None and row is not None and row.status != "done":
        return "Graph passed, engine not run"
    return "Nothing fails, but not all was judged"


def _int8(results: Results) -> list[str]:
    engine, planned = results.engine, len(results.quantized_layers)
    if engine is None:
        if not planned:
            return ["nothing is quantized, as the recipe asks, and no engine was built"]
        return [f"{planned} linears of the ONNX file in INT8, not proven: no engine was built"]
    asked = engine.expected_int8_gemms
    runs = {match[0] for row in engine.layers for node in row.onnx if (match := RUN.search(node))}
    shared = f" (weights shared by {len(runs)} layers)" if runs and asked else ""
    proof = "according to" if engine.not_int8 else "proven from"
    clauses = [f"{linears_text(results, engine)}{shared}, {proof} the engine's layer table"]
    if not asked:
        done = engine.int8_gemms
        clauses = [
            f"{done} GEMMs in INT8, none asked" if done else "nothing runs in INT8, as the recipe asks"
        ]
    if (gpu := results.gpu_engine) is not None:
        built = f"{label(gpu.backend)} engine for GPUs, built ahead of time and never run"
        clauses.append(f"{coverage(*count_linears(results, gpu), 'linears')} in the {built}")
    return clauses + parts_covered(engine)


def parts_covered(engine: EngineResult) -> list[str]:
    """Return how much is in INT8 besides linears, where the recipe asks for it."""
    attentions = (engine.attention_int8, engine.expected_attention_int8, "attentions")
    residuals = (engine.int8_residuals, engine.expected_int8_residuals, "residuals")
    return [coverage(*part) for part in (attentions, residuals) if part[1]]


def count_linears(results: Results, engine: EngineResult) -> tuple[int, int]:
    return engine.count_linears(results.quantized_layers, results.high_precision_layers)


def linears_text(results: Results, engine: EngineResult) -> str:
    done, all_linears = count_linears(results, engine)
    asked = len(results.quantized_layers)
    held = f"the recipe asks {asked}" if done < asked else "as the recipe asks"
    return coverage(done, all_linears, "linears") + (f", {held}" if done < all_linears else "")


def last_measured(results: Results) -> tuple[str, StageResult] | None:
    done = [(name, row) for name, row in results.stages.items() if row.status == "done" and row.metrics]
    return done[-1] if done else None


def accuracy_clause(results: Results) -> str:
    task = task_label(str(results.task.get("name", "task")))
    if (last := last_measured(results)) is None:
        return f"{task} was not scored in any stage"
    name, row = last
    metric = next(iter(row.metrics))
    text = f"{task} {label(metric)} {figures.metric(row, metric)} in {stage_label(results, name)}"
    base = results.stages.get("fp32")
    if name == "fp32":
        return f"{text} ({row.n} samples), no other stage was scored"
    if metric in AGREEMENT:  # with FP32, which agrees with itself
        return f"{text} ({row.n} samples)"
    if base is None or row.vs_fp32 is None or metric not in base.metrics:
        return f"{text} ({row.n} samples), not compared with FP32"
    change = figures.change_text(row.vs_fp32)
    return f"{text} against {base.metrics[metric]:.4f} in FP32 ({change}, {row.n} samples)"


def training_clause(results: Results) -> str:
    """Return what training won, with the SQNR of PTQ and of each model after it."""
    stages, gain, last = results.stages, results.qat_vs_ptq, "QAT" if results.training else "Reconstruction"
    named = {"ptq": "PTQ", "reconstructed": "reconstruction", "fake_quant": last}
    found = {named[name]: stages[name].vs_fp32 for name in named if name in stages}
    scored = [
        f"{name} {figures.change_text(versus)}, SQNR {figures.sqnr(versus).text}"
        for name, versus in found.items()
        if versus is not None
    ]
    if not found.get("PTQ") or not found.get(last):
        return f"PTQ and {last} were not both scored, so what training won back is not known"
    both, qat = f"(against FP32: {'; '.join(scored)})", stages["fake_quant"]
    runs = [each for each in (results.reconstruction, results.training) if each is not None]
    if not any(run.gained for run in runs):
        return f"{last} gained nothing: the weights before were the best on the held-out rows {both}"
    if gain is None:
        return f"{last} and PTQ were not compared with each other {both}"
    metric = next(iter(qat.metrics))
    if gain.within_noise:
        return f"{last} changed {label(metric)} by {figures.change_text(gain)} {both}"
    verb = "won back" if gain.delta[metric] > 0 else "made it WORSE by"
    gained = with_error(abs(gain.delta[metric]), gain.delta_stderr.get(metric))
    return f"{last} {verb} {gained} of {label(metric)} {both}"


def _to_decide(results: Results) -> Iterator[str]:
    """Yield the command and the rows that decide what these samples cannot tell."""
    open_issues = results.gate.having("inconclusive")
    needed = max((issue.needed or 0 for issue in open_issues), default=0)
    if needed and results.command:
        command = re.sub(r" --limit[ =]\S+", "", results.command)
        yield f"To decide it: `{command}` with at least {needed:,} evaluation rows"


def _not_done(results: Results) -> Iterator[str]:
    absent = {name: StageResult(status="skipped") for name in results.expected_stages}
    for name, row in (absent | results.stages).items():
        why = sentence(row.reason or "no reason was recorded")
        if row.status == "done":
            continue
        if name != "engine":
            yield f"{stage_name(results, name)} was skipped: {why}"
        elif results.engine is None:
            yield f"No engine was built: {why}"
        else:
            how = "ahead of time, without running it" if results.engine.ahead_of_time else "but not run"
            yield f"The engine was built {how}; its outputs are not verified: {why}"
    if results.verification is not None and (reason := results.verification.blocks_not_checked):
        yield f"The engine's blocks are not verified, only its answers: {sentence(reason)}"


def _failed_checks(results: Results) -> Iterator[str]:
    """Return checks that fail, whatever the gate asks."""
    errors = [row for row in results.findings if row.severity == "error"]
    if errors:
        codes = ", ".join(f"{code} ({n})" for code, n in Counter(row.code for row in errors).items())
        yield f"check of the ONNX file: {count_of(len(errors), 'error')}: {codes}"
    if results.parity is not None and not results.parity.passed:
        bad = sum(not row.holds for row in results.parity.compared)
        yield f"layer parity: {bad} of {len(results.parity.compared)} tensors are over their own limit"
    if (engine := results.engine) is not None and results.gate.passed and engine.not_int8:
        yield f"not in INT8 in the engine: {', '.join(engine.not_int8)}"
    if engine is not None and results.gate.passed and engine.not_int8_residuals:
        yield f"residuals not in INT8 in the engine: {', '.join(engine.not_int8_residuals)}"


def quantized_file(results: Results) -> tuple[str, float, int] | None:
    """Return name, size ratio and bytes of the INT8 file, or of its FP16 twin where there is none."""
    ratios = [(row.name, row.fp32_ratio, row.bytes) for row in results.files if row.fp32_ratio is not None]
    others = [row for row in ratios if "int8" in row[0]] or [row for row in ratios if "fp32" not in row[0]]
    return next(iter(others), None)


def stage_name(results: Results, name: str) -> str:
    if name != "fake_quant" or not results.trained:
        return label(name)
    return "QAT fake-quant" if results.training else label("reconstructed")


def stage_label(results: Results, name: str) -> str:
    backend = f" ({label(results.engine.backend)})" if name == "engine" and results.engine else ""
    return stage_name(results, name) + backend


def worst_first(parity: Parity | None) -> list[ParityRow]:
    return sorted(parity.compared if parity else [], key=lambda row: -row.nearest[0])


def part_text(row: ParityRow) -> str:
    return f"{row.nearest[0]:.0%}"


def nearest_text(row: ParityRow) -> str:
    """Return the figure and the limit that a tensor is nearest to: `codes that differ: 0.229% of 0.500%`."""
    measure = row.nearest[1]
    values = {
        "codes": f"{row.share:.3%} of {row.limit:.3%}",
        "step": f"{row.max_step} of {row.step_limit}",
        "output": f"{row.output_rel_error or 0.0:.2g} of {row.output_limit:g}",
    }
    return f"{MEASURES[measure]}: {values[measure]}"


def remark_of(row: ParityRow) -> str:
    layer, kind = place(row.name)
    return f"{kind if layer is None else f'layer {layer} {kind}'}, {nearest_text(row)}"
