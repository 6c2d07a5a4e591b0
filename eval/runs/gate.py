"""The gate of a run: what fails, what was not judged, and what so few samples cannot tell; its speed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from qdqbench.eval.bench.report import stale_files
from qdqbench.eval.bench.results import BENCH_FILE, OURS, Bench, list_speed, read_bench, row_of
from qdqbench.eval.metrics.gate import (
    drop_issue,
    judge,
    judge_shapes,
    samples_to_tell,
    slow_issues,
    sqnr_issues,
)
from qdqbench.eval.metrics.logits import read_logits
from qdqbench.eval.metrics.results import Gate, GateCode, GateIssue, IssueState, Speedup, StageResult
from qdqbench.eval.runs.results import BEFORE_TRAINING, EngineSize, Results
from qdqbench.eval.verification.checks import SAME_SHARE, group_equal
from qdqbench.quantize.engine.build import require_int8
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.engine.target import choose_target
from qdqbench.quantize.pipeline.outcomes import Skipped, read_built
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils.arrays import Array, Floats
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.limits import INT8_RESIDUALS
from qdqbench.quantize.utils.names import SECOND


def judge_gate(session: Session, results: Results) -> Gate:
    asked = session.recipe.gate
    issues = [*_judge_parts(session, results), *_judge_drops(session, results)]
    if session.recipe.quantizes and asked.require_int8 is not False:
        issues += _judge_engine(results.engine or read_built(session.folder))
        issues += _judge_engine(results.gpu_engine) if results.gpu_engine else []
    row = results.stages.get("engine")
    if results.engine is not None and row is not None and row.status != "done":
        why = row.reason or ""
        issues.append(GateIssue(code="engine", state="not_evaluated", stage="engine", detail=why))
    gate = Gate(passed=True, max_drop=asked.max_drop, min_speedup=asked.min_speedup, issues=issues)
    return judge_speed(gate, results.speed)


def judge_stages(session: Session, results: Results) -> Gate:
    """Return the gate of a run without a report: its failures but for accuracy and speed.

    INT8 layers are required by the recipe, or by the command that builds the engine.
    """
    gate = session.recipe.gate
    issues = [issue for issue in _judge_parts(session, results) if issue.state == "failed"]
    if gate.require_int8 or results.until in ("build", "verify"):
        for engine in filter(None, (results.engine, results.gpu_engine)):
            issues += _judge_engine(engine)
    return Gate(passed=not issues, max_drop=gate.max_drop, issues=issues)


def _judge_parts(session: Session, results: Results) -> Iterator[GateIssue]:
    for row in results.findings:
        if row.severity == "error":
            yield GateIssue(code="check", state="failed", names=[row.code, row.node], detail=row.why)
    if results.parity is not None and not results.parity.passed:
        names = [row.name for row in results.parity.compared if not row.holds]
        yield GateIssue(code="parity", state="failed", stage="onnxruntime", names=names)
    if results.verification is not None:
        for line in results.verification.failures:
            yield GateIssue(code="verification", state="failed", stage="engine", detail=line)
    fp32 = results.stages.get("fp32")
    if fp32 is not None and (issue := judge_baseline(session, fp32)) is not None:
        yield issue


def judge_speed(gate: Gate, speed: list[Speedup]) -> Gate:
    """Return the gate with `min_speedup` judged by a bench that is not quick: each config must hold."""
    issues = [issue for issue in gate.issues if issue.code != "min_speedup"]
    if (least := gate.min_speedup) is not None:
        judged = judge_shapes([row for row in speed if not row.quick])
        issues += [issue for row in judged for issue in slow_issues(row, least)]
        if not judged:
            issues.append(GateIssue(code="min_speedup", state="not_evaluated", limit=least))
    passed = not any(issue.state == "failed" for issue in issues)
    return gate.model_copy(update={"passed": passed, "issues": issues})


def _judge_drops(session: Session, results: Results) -> Iterator[GateIssue]:
    primary, most = session.config.task.metrics[0], session.recipe.gate.max_drop
    last = next((name for name in reversed(results.stages) if results.stages[name].vs_fp32), None)
    for name, stage in results.stages.items():
        if name in BEFORE_TRAINING or (versus := stage.vs_fp32) is None:  # not what is deployed
            continue
        yield from sqnr_issues(versus, session.recipe.gate.min_sqnr_db, stage=name)
        for metric, delta in versus.delta.items():
            if metric.removesuffix(SECOND) != primary:
                continue
            error, counted = versus.delta_stderr[metric], versus.disagreements is not None
            judged = judge(-delta, error, most)
            needed = samples_to_tell(-delta, error, most, versus.n, counted=counted)
            states: list[IssueState] = [judged] if judged else []
            if judged != "failed" and needed is not None and name == last:
                states.append("inconclusive")  # of what is deployed; others answered the same samples
            where = {"stage": name, "metric": metric, "value": -delta, "stderr": error, "needed": needed}
            yield from (drop_issue(versus, most, state=state, **where) for state in states)


def _judge_engine(engine: EngineResult | Skipped) -> Iterator[GateIssue]:
    if isinstance(engine, Skipped):
        detail = f"INT8 is not proven, no engine was built: {engine.skipped}"
        yield GateIssue(code="require_int8", state="failed", detail=detail)
        return
    try:
        require_int8(engine)
    except CheckFailed as error:
        names = [*engine.not_int8, *engine.not_int8_residuals]
        yield GateIssue(code="require_int8", state="failed", names=names, detail=str(error))


def issue_sentence(issue: GateIssue) -> str:
    text = SENTENCES[issue.code](issue)
    if issue.state == "within_noise":
        return f"{text}; it holds within noise (two standard errors)"
    if issue.state == "failed":
        return text
    needs = NEEDS.get(issue.code) or f"it takes about {issue.needed or 0:,} samples, there are {issue.n}"
    return f"{issue.state.capitalize().replace('_', ' ')}: {text}; {needs}."


def _accuracy_sentence(issue: GateIssue) -> str:
    if issue.state == "inconclusive":
        return f"whether {issue.stage} loses more than {issue.limit:g} of {issue.metric}"
    split = f" on {issue.split}" if issue.split else ""
    return (
        f"{issue.stage}: {issue.metric} is {issue.value:.4f} below FP32{split} "
        f"(paired standard error {issue.stderr:.4f}), the gate allows {issue.limit:g}"
    )


def _baseline_sentence(issue: GateIssue) -> str:
    constant = f"always class {issue.names[0]}" if issue.names else "any constant"
    text = f"FP32 {issue.metric} {issue.value:.4f} against {issue.limit:.4f} of {constant}"
    if issue.state == "failed":
        return f"{text}: {issue.detail}"
    return f"whether the model reads its input: {text}"


def _sqnr_sentence(issue: GateIssue) -> str:
    split = f" on {issue.split}" if issue.split else ""
    return (
        f"{issue.stage}: SQNR is {issue.value:.1f} dB{split} (standard error {issue.stderr:.1f}), the gate "
        f"asks for {issue.limit:g}"
    )


def _speed_sentence(issue: GateIssue) -> str:
    text = f"min_speedup {issue.limit:g}"
    if issue.state == "not_evaluated":
        return text
    if issue.value is None:
        return f"{text} is asked, and no speed-up is known"
    where = f" at {issue.config}" if issue.config else ""
    return f"{text} is asked, INT8 is {issue.value:.2f}x as fast as {issue.baseline or 'its baseline'}{where}"


SENTENCES: dict[GateCode, Callable[[GateIssue], str]] = {
    "accuracy": _accuracy_sentence,
    "baseline": _baseline_sentence,
    "check": lambda issue: f"check: {' at '.join(issue.names)}: {issue.detail}",
    "engine": lambda issue: f"the engine did not run ({issue.detail})",
    "require_int8": lambda issue: issue.detail,
    "min_speedup": _speed_sentence,
    "min_sqnr_db": _sqnr_sentence,
    "parity": lambda issue: f"ONNX Runtime does not follow the fake-quant model in {', '.join(issue.names)}",
    "recipe": lambda issue: f"the chosen recipe failed: {issue.detail}",
    "verification": lambda issue: issue.detail,
}
NEEDS: dict[GateCode, str] = {  # of what is open
    "baseline": "it takes more samples, or a model that was trained on this task",
    "engine": "to judge it, copy the run to where its engine can run, and run `qdqbench report RUN` there",
    "min_speedup": "run `qdqbench bench RUN` where the engine will run",
}


def cannot_hold(recipe: Recipe) -> str:
    """Explain why the gate of a run fails here in any case; empty where it may hold."""
    backend = choose_target(recipe).backend
    if recipe.gate.require_int8 is False or not recipe.int8_residual or backend in INT8_RESIDUALS:
        return ""
    return (
        f"the gate cannot hold here: {recipe.name} wants INT8 residuals, which no kernel of {backend} reads; "
        f"give --backend {INT8_RESIDUALS[-1]} for an engine for GPUs, take a recipe without residual: int8, "
        "or set gate.require_int8: false to judge accuracy alone"
    )


def read_speed(folder: Path) -> list[Speedup]:
    """Return the fastest INT8 engine over the fastest in FP16 by config of each bench, the latest first."""
    found = _read_fresh_bench(folder)
    return [*list_speed(found, OURS)] if found else []


def read_engine_sizes(folder: Path, engine: EngineResult | None) -> list[EngineSize]:
    """Return sizes of the engines without INT8 that the bench built for the backend of the run's engine."""
    if engine is None or (bench := _read_fresh_bench(folder)) is None:
        return []
    sizes = []
    for system in bench.systems:
        same = system.backend.partition(" ")[0] == engine.backend and not system.name.endswith("-exact")
        if same and system.precision != "int8" and system.precision != "fp8":  # noqa: PLR1714  (types)
            rows = (row_of(config, system.name) for config in bench.configs)
            count = next((row.engine_bytes for row in rows if row and row.engine_bytes is not None), None)
            if count is not None:
                sizes.append(EngineSize(name=system.label, precision=system.precision, bytes=count))
    return sizes


def _read_fresh_bench(folder: Path) -> Bench | None:
    if not (folder / BENCH_FILE).is_file():
        return None
    try:
        bench = read_bench(folder / BENCH_FILE)
    except UserError:  # the report says so
        return None
    return None if stale_files(bench, folder) else bench


FEW_TEXTS = 5  # one model in 32 that guesses among two classes has all of them wrong


def judge_baseline(session: Session, row: StageResult) -> GateIssue | None:
    """Compare FP32 with a constant prediction: INT8 cannot lose what FP32 does not know.

    It is only below one where a score of that many distinct texts may not be above it: equal ones, and the
    few of a short split, have a standard error of 0 where all are wrong.
    Returns None where FP32 is above it, or the kind of task has no such prediction.
    """
    task, metric = session.config.task, session.config.task.metrics[0]
    if metric not in row.metrics:
        return None
    logits = read_logits(session.folder / "logits" / "fp32.npz")
    split = next(iter(logits))
    gold = metrics.select_reference(task, session.gold[split], logits[split])
    if (baseline := metrics.find_baseline(task, logits[split], gold)) is None:
        return None
    value, stderr = row.metrics[metric], row.stderr.get(metric, 0.0)
    if (above := metrics.reads_its_input(value, stderr, baseline)) is True:
        return None
    distinct = len(np.unique(group_equal(logits[split], SAME_SHARE * float(logits[split].std()))))
    if distinct < FEW_TEXTS or metrics.reads_its_input(value, 0.5 / np.sqrt(distinct), baseline) is None:
        above = None
    untrained = "the model was not trained on this task, or its answers are to be read the other way round"
    order = "" if above is None else find_label_order(task, logits[split], gold, baseline, stderr)
    return GateIssue(
        code="baseline",
        state="inconclusive" if above is None else "failed",
        stage="fp32",
        metric=metric,
        value=value,
        stderr=stderr,
        limit=baseline.value,
        n=row.n,
        names=[] if baseline.answer is None else [str(baseline.answer)],
        reorder=bool(order),
        detail="" if above is None else order or untrained,
    )


def find_label_order(
    task: Task, answers: Floats, gold: metrics.Gold, baseline: metrics.Baseline, stderr: float
) -> str:
    """Explain which class of the model is which of the data, where that makes its predictions right.

    The order is the assignment with the most right predictions (Kuhn 1955); empty where it does not help.
    """
    from scipy.optimize import linear_sum_assignment

    predicted = metrics.predict(task, answers, gold)
    if task.num_labels < 2 or not isinstance(gold, np.ndarray) or gold.shape != predicted.shape:
        return ""
    counts: Array = np.zeros((task.num_labels, task.num_labels), dtype=np.int64)
    np.add.at(counts, (predicted, gold), 1)
    _, order = linear_sum_assignment(counts, maximize=True)
    metric = task.metrics[0]
    reordered = float(task.kind.metrics[metric].value(task.kind.table(order[predicted], gold)))
    if not metrics.reads_its_input(reordered, stderr, baseline):
        return ""
    moved = [(ours, int(theirs)) for ours, theirs in enumerate(order) if ours != theirs]
    shown = ", ".join(f"{ours} is the data's {theirs}" for ours, theirs in moved)
    wrong = f"the labels are in another order: the model's {shown}, which makes {metric} {reordered:.4f}"
    if task.values and not all(value.isdigit() for value in task.values):
        names = json.dumps({str(ours): task.values[theirs] for ours, theirs in enumerate(order)})
        return f"{wrong}; write `id2label`: {names} into the model's config.json"
    return f"{wrong}; number column {task.label_column!r} of the data as the model does"
