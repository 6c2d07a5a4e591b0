"""The chosen recipe, the given one and the shipped ones on validation data, which no trial has seen."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.eval.accuracy.compare import compare
from qdqbench.eval.accuracy.gate import NOISE, judge
from qdqbench.eval.accuracy.logits import Logits
from qdqbench.eval.accuracy.runners import predict
from qdqbench.eval.bench.engines import Latency, build_and_prove, write_engine_graph
from qdqbench.eval.search.results import Accuracy, Confirmed, DropAgreement, Trial, dominates
from qdqbench.eval.search.trial import Workspace, explained, hash_of, plan_key
from qdqbench.quantize.core import files
from qdqbench.quantize.core.comparison import Comparison
from qdqbench.quantize.core.limits import INT8_RESIDUALS
from qdqbench.quantize.machine.environment import made_with
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import Recipe, load_recipe, parse_recipe, shipped_recipes
from qdqbench.quantize.rundir.artifacts import backend_of
from qdqbench.quantize.runtime.opened import open_runner
from qdqbench.quantize.tasks.metrics import against, compute
from qdqbench.quantize.tasks.sources import source_fingerprint
from qdqbench.quantize.tasks.task import by_split

if TYPE_CHECKING:
    from qdqbench.eval.search.worker import Measure, Worker


def confirm(
    worker: "Worker", chosen: Trial, progress: Callable[[str], None] = lambda text: None
) -> tuple[list[Confirmed], dict[str, float]]:
    """Judge the chosen recipe and all that it competes with on the whole evaluation splits.

    Every recipe is calibrated on its own, as `qdqbench run` does it. Shipped recipes take the lengths and the
    engine shapes of the given one, so that all are compared on the same tokens.

    A recipe that fails is a row with its reason, the chosen one too.

    Returns:
        The chosen recipe first, then the given one and the shipped ones; and FP32's metrics.
    """
    work, base = worker.work, worker.work.session.recipe
    assert chosen.recipe is not None
    best = parse_recipe(chosen.recipe, "the chosen recipe")
    listed: list[tuple[Recipe, bool]] = [(best, False)]
    rivals = rivals_of(base)
    if base not in (*rivals, best):
        listed.append((base, False))
    listed += [(_adapted(rival, base), True) for rival in rivals]
    progress("validating FP32")
    fp32 = _kept(work, "fp32", lambda: _predict(work, work.session.fp32_model))
    rows: list[Confirmed] = []
    known: dict[str, Latency] = {}
    for number, (recipe, is_shipped) in enumerate(listed):
        progress(f"validating {recipe.name}")
        given = {"name": recipe.name, "shipped": is_shipped, "recipe": recipe.model_dump(mode="json")}
        row = Confirmed.model_validate(given | {"status": "done"})
        try:
            plan = work.plan(recipe)
            logits = _fake_quant(work, recipe, plan, fp32)
            row.fake_quant, row.metrics = _judge(work, fp32, logits)
            row.latency = _latency(worker.measure, recipe, plan, known)
            if number == 0 and worker.source.mode == "engine":
                progress("validating the engine")
                row.engine, row.engine_metrics = _judge(work, fp32, _engine(work, recipe, plan))
        except Exception as error:
            failed = {"status": "failed", "reason": explained(error)}
            row = Confirmed.model_validate(given | failed)
        rows.append(row)
    metric = work.session.config.task.metrics[0]
    for row in rows[1:]:
        row.dominates = row.shipped and dominates(row, rows[0], metric)
    return rows, _judge(work, fp32, fp32)[1]


def rivals_of(base: Recipe) -> list[Recipe]:
    """Shipped recipes of a recipe's family without training, for a CPU those without INT8 residuals."""
    shipped = (load_recipe(name) for name in shipped_recipes())
    reads_residuals = backend_of(base) in INT8_RESIDUALS
    return [
        recipe
        for recipe in shipped
        if recipe.qat is None
        and recipe.model.family == base.model.family
        and (reads_residuals or not recipe.int8_residual)
    ]


def agreement(searched_as: Accuracy, row: Confirmed) -> DropAgreement:
    """Whether the drop on the search rows and the drop that was confirmed differ by more than noise.

    Args:
        searched_as: the chosen recipe, calibrated in full, on the search rows.
        row: the same on validation.
    """
    metric = searched_as.metric
    found = next(iter(row.fake_quant.values()))
    searched, confirmed = searched_as.drop, -found.delta[metric] + 0.0
    errors = searched_as.drop_stderr, found.delta_stderr[metric]
    return DropAgreement(
        searched=searched,
        searched_stderr=errors[0],
        confirmed=confirmed,
        confirmed_stderr=errors[1],
        within_noise=abs(searched - confirmed) <= NOISE * math.hypot(*errors),
    )


def gate_failures(row: Confirmed, gate: Any, metric: str) -> tuple[list[str], list[str]]:
    """What keeps the gate from holding on validation, and what holds only because it is within noise."""
    bad: list[str] = []
    noted: list[str] = []
    if row.status == "failed":
        return [f"the chosen recipe failed: {row.reason}"], noted
    for stage, splits in (("fake-quant", row.fake_quant), ("the engine", row.engine)):
        for split, found in splits.items():
            drop, error = -found.delta[metric], found.delta_stderr[metric]
            judged = judge(drop, error, gate.max_drop)
            said = (
                f"{stage} loses {100 * drop:.2f} points of {metric} on {split} (paired standard error "
                f"{100 * error:.2f}), the gate allows {100 * gate.max_drop:g}"
            )
            if judged == "fails":
                bad.append(said)
            elif judged == "holds within noise":
                noted.append(f"{said}; it holds within noise (two standard errors)")
    if gate.min_speedup is not None and (row.latency is None or row.latency.speedup < gate.min_speedup):
        speedup = row.latency.speedup if row.latency else math.nan
        bad.append(f"the speed-up is {speedup:.2f}x, the gate asks for {gate.min_speedup:g}x")
    return bad, noted


def _adapted(recipe: Recipe, base: Recipe) -> Recipe:
    export = recipe.export.model_copy(update={"max_length": base.export.max_length})
    return recipe.model_copy(update={"export": export, "engine": base.engine})


def _fake_quant(work: Workspace, recipe: Recipe, plan: Plan, fp32: Logits) -> Logits:
    if not plan.int8:
        return fp32
    return _kept(work, plan_key(recipe, plan)[:24], lambda: _predict(work, work.recalibrated(recipe, plan)))


def _kept(work: Workspace, name: str, make: Callable[[], Logits]) -> Logits:
    """Logits of an interrupted confirmation are used again."""
    session = work.session
    task = session.config.task
    data = [source_fingerprint(task, session.data_source, split) for split in task.eval_splits]
    asked = [data, session.config.limit, session.recipe.export.max_length]
    key = hash_of([work.identity, *asked, made_with()])[:12]
    path = session.folder / "validated" / f"{name}-{key}.npz"
    if path.is_file():
        with np.load(path) as stored:
            return {split: stored[split] for split in stored.files}
    found = make()
    with files.atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **found)  # type: ignore[arg-type]
    return found


def _predict(work: Workspace, model: Any) -> Logits:
    return {name: work.predict(model, encoded) for name, (_, encoded) in work.session.eval_splits.items()}


def _judge(work: Workspace, fp32: Logits, logits: Logits) -> tuple[dict[str, Comparison], dict[str, float]]:
    """Comparison by split, and metrics of all splits."""
    task, seed = work.session.config.task, work.session.config.seed
    gold = {name: against(task, each, fp32[name]) for name, each in work.session.gold.items()}
    versus = {name: compare(task, fp32[name], logits[name], gold[name], seed=seed) for name in gold}
    return versus, by_split(compute(task, logits[name], gold[name]) for name in gold)


def _latency(measure: "Measure", recipe: Recipe, plan: Plan, known: dict[str, Latency]) -> Latency:
    """Recipes that differ in their scales alone make the same engine: noise must not tell them apart."""
    smooth = sorted((name, plan.scaling_of(name).smooth != "none") for name in plan.int8)
    export = recipe.export.model_dump() if plan.int8 else None
    parts = [sorted(plan.int8.items()), sorted(plan.attention), sorted(plan.fp32), smooth, export]
    key = hash_of(parts)
    if key not in known:
        known[key] = measure(recipe, plan)
    return known[key]


def _engine(work: Workspace, recipe: Recipe, plan: Plan) -> Logits:
    """Logits of the chosen recipe's engine."""
    session = work.session
    folder: Path = session.folder / "confirmed"
    graph = write_engine_graph(
        session, work.recalibrated(recipe, plan), recipe, plan, folder / "model.int8.onnx"
    )
    path = build_and_prove(session, graph, folder / "model.int8.engine")
    found = {}
    cache, outputs = folder / "runtime.cache", session.config.task.kind.outputs
    with open_runner(path, graph.path, pad_id=session.pad_id, runtime_cache=cache, outputs=outputs) as runner:
        size = min(session.config.batch_size, runner.max_batch)
        for name, (_, encoded) in session.eval_splits.items():
            found[name] = predict(runner, encoded, pad_id=session.pad_id, batch_size=size, stage="engine")
    return found
