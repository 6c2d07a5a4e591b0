"""The end of a search: choose a trial, confirm it on evaluation data, write every file."""

import math
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from qdqbench.eval.bench.measure import build_planned, write_engine_graph
from qdqbench.eval.metrics.gate import drop_issue, judge, slow_issues, sqnr_issues
from qdqbench.eval.metrics.results import GateIssue, Speedup
from qdqbench.eval.metrics.runners import predict
from qdqbench.eval.selection.search.report import search_report
from qdqbench.eval.selection.search.results import (
    ConfirmedRecipe,
    DropAgreement,
    Search,
    SearchTrial,
    choose_trial,
    dominates,
)
from qdqbench.eval.selection.search.worker import Worker
from qdqbench.eval.selection.search.workspace import Workspace, engine_key
from qdqbench.eval.selection.trials.results import DRAW, Origin, Trial, failure_of, write_result
from qdqbench.eval.selection.trials.store import RECIPE_FILE, describe_session, named_by, write_recipe
from qdqbench.quantize.engine.build import require_int8
from qdqbench.quantize.engine.runtime.runners import open_runner
from qdqbench.quantize.engine.target import choose_target
from qdqbench.quantize.pipeline.data_profiles import engine_profiles
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import Recipe, load_recipe, shipped_recipes
from qdqbench.quantize.recipe.sections import GateSettings
from qdqbench.quantize.tasks.metrics import NOISE
from qdqbench.quantize.utils.arrays import Float32
from qdqbench.quantize.utils.limits import INT8_RESIDUALS
from qdqbench.quantize.utils.progress import report_phase, reporter
from qdqbench.quantize.utils.system.environment import versions


def finish_search(worker: Worker, folder: Path) -> Search:
    """Choose and confirm; write `search.json`, the reports and the recipe into `folder`."""
    trials, search = worker.list_trials(), worker.search
    outcome = choose_trial(trials, search.gate)
    session, evaluated = worker.work.session, worker.work.confirmations
    about = describe_session(session)
    about["environment"] |= {"optuna": metadata.version("optuna"), **versions()}
    found = Search(
        **about,
        recipe=session.recipe.model_dump(mode="json"),
        model=session.model_name,
        task=session.config.task.name,
        settings=search.settings,
        study=search.study.study_name,
        objective=search.options.objective,
        ranking=search.ranking,
        source=worker.source,
        fp32={},
        trials=trials,
        outcome=outcome,
        confirmed=[],
        agreement=None,
    )
    (folder / RECIPE_FILE).unlink(missing_ok=True)
    if (chosen := found.chosen) is not None and chosen.recipe is not None:
        reporter().begin("validating the choice")  # the trials are done, the search is not
        report_phase("validating FP32")
        found.fp32 = {split: evaluated.fp32_scores(split) for split in evaluated.encoded}
        found.confirmed = confirm_recipes(worker, chosen, chosen.recipe)
        searched = worker.work.score(chosen.recipe, chosen.origin, worker.work.trials)
        found.agreement = compare_drops(searched, found.confirmed[0])
        outcome.issues = judge_confirmed(found.confirmed[0], search.gate, found.metric)
        outcome.passed = not any(issue.state == "failed" for issue in outcome.issues)
        name = named_by(chosen.recipe.name, "searched")
        write_recipe(chosen.recipe.model_copy(update={"name": name, "qat": None}), folder)
    found.warnings = [*dict.fromkeys([*session.warnings, *_warn(worker, found)])]
    found.notes = session.notes
    write_result(found, search_report(found), folder)
    return found


def confirm_recipes(worker: Worker, chosen: SearchTrial, best: Recipe) -> list[ConfirmedRecipe]:
    """Score the chosen recipe, then the given one and the shipped ones, on the whole evaluation splits.

    Every recipe is calibrated alone, as `qdqbench run` does it. Shipped recipes take the lengths and the
    engine shapes of the given one, so that all are compared on the same tokens.
    """
    base = worker.work.session.recipe
    rivals = rivals_of(base)
    listed: list[tuple[Recipe, Origin]] = [(best, chosen.origin)]
    if base not in (*rivals, best):
        listed.append((base, "given"))
    for rival in rivals:
        export = rival.export.model_copy(update={"max_length": base.export.max_length})
        listed.append((rival.model_copy(update={"export": export, "engine": base.engine}), "shipped"))
    rows: list[ConfirmedRecipe] = []
    known: dict[str, Speedup | None] = {}
    for recipe, origin in listed:
        report_phase(f"validating {recipe.name}")
        row = ConfirmedRecipe(name=recipe.name, recipe=recipe, origin=origin)
        try:
            _confirm(worker, row, recipe, known, is_chosen=not rows)
        except Exception as error:  # hours of trials must not end without their report
            row.failure = failure_of(error)
        rows.append(row)
    for row in rows[1:]:
        row.dominates = row.origin == "shipped" and dominates(row, rows[0])
    return rows


def _confirm(
    worker: Worker, row: ConfirmedRecipe, recipe: Recipe, known: dict[str, Speedup | None], *, is_chosen: bool
) -> None:
    work = worker.work
    plan = work.plan(recipe)
    scored = work.score(recipe, row.origin, work.confirmations)
    row.calibration, row.failure, row.seconds = scored.calibration, scored.failure, scored.seconds
    if row.failure is not None:
        return
    row.int8_share = work.int8_share(plan, worker.search.options.length)
    key = engine_key(recipe, plan)
    if key not in known:
        known[key] = worker.measure(recipe, plan)
    row.scores, row.speedup = scored.scores, known[key]
    if is_chosen and worker.source.mode == "latency":
        report_phase("validating the engine")
        row.engine = work.confirmations.compare(_answer_with_engine(work, recipe, plan))


def rivals_of(base: Recipe) -> list[Recipe]:
    """Return shipped recipes of a family without training, for a CPU those without INT8 residuals."""
    shipped = (load_recipe(name) for name in shipped_recipes())
    return [
        recipe
        for recipe in shipped
        if not recipe.trainings
        and recipe.model.family == base.model.family
        and (choose_target(base).backend in INT8_RESIDUALS or not recipe.int8_residual)
    ]


def compare_drops(searched: Trial, row: ConfirmedRecipe) -> DropAgreement | None:
    if searched.failure is not None or row.score is None:
        return None
    before, after = searched.scores[DRAW], row.score
    noise = NOISE * math.hypot(before.drop_stderr, after.drop_stderr)
    return DropAgreement(
        searched=before.drop,
        searched_stderr=before.drop_stderr,
        confirmed=after.drop,
        confirmed_stderr=after.drop_stderr,
        within_noise=abs(before.drop - after.drop) <= noise,
    )


def judge_confirmed(row: ConfirmedRecipe, gate: GateSettings, metric: str) -> list[GateIssue]:
    if row.failure is not None:
        return [GateIssue(code="recipe", state="failed", detail=row.failure.text)]
    issues = []
    for stage, splits in (("fake_quant", row.scores), ("engine", row.engine)):
        for split, score in splits.items():
            if (state := judge(score.drop, score.drop_stderr, gate.max_drop)) is not None:
                where = {"stage": stage, "split": split, "metric": metric, "state": state}
                issues.append(drop_issue(score, gate.max_drop, **where))
            issues += sqnr_issues(score, gate.min_sqnr_db, stage=stage, split=split)
    return issues + slow_issues(row.speedup, gate.min_speedup)


def _warn(worker: Worker, found: Search) -> Iterable[str]:
    if worker.source.mode == "int8-share":
        yield f"latency is {worker.source.label}"
    recipe = worker.work.session.recipe
    if recipe.calibration.bias_correction:
        yield "trials are scored before biases are corrected; the chosen recipe is confirmed with it"
    if recipe.reconstruction:
        yield "trials are scored before reconstruction; the chosen recipe is confirmed with it"
    done, options = sum(trial.duplicate_of is None for trial in found.trials), worker.search.options
    if done < options.trials and options.budget is not None:
        yield f"{done} of {options.trials} trials fitted into {options.budget:g} s; the same command resumes"
    if failed := [trial for trial in found.trials if trial.failure]:
        yield f"{len(failed)} of {len(found.trials)} trials failed; their reasons are in the table"
    if found.chosen is not None and not found.chosen.int8_linears:
        yield explain_no_int8(found)
    if found.agreement is not None and not found.agreement.within_noise:
        yield (
            f"the searched drop ({100 * found.agreement.searched:.2f} points) and the confirmed one "
            f"({100 * found.agreement.confirmed:.2f}) differ by more than noise"
        )
    for row in found.confirmed:
        best = found.confirmed[0].score
        if row.dominates and row.score is not None and best is not None:
            noise = NOISE * math.hypot(row.score.drop_stderr, best.drop_stderr)
            remark = ", in accuracy by no more than noise" if best.drop - row.score.drop <= noise else ""
            yield f"{row.name} dominates the chosen recipe on validation{remark}"


def explain_no_int8(found: Search) -> str:
    text = "the chosen recipe has nothing in INT8: "
    tried = [trial for trial in found.trials if trial.int8_linears and trial.is_scored]
    speeds = [row.speedup.value for row in (*tried, *found.confirmed) if row.speedup]
    if not tried:
        return f"{text}no recipe with INT8 was tried to its end, ask for more trials"
    if speeds and max(speeds) <= 1:
        return f"{text}here no recipe with INT8 is faster than {found.source.baseline_precision}"
    faster = ", though some are faster" if speeds else ""
    return f"{text}none of the {len(tried)} tried with INT8 satisfies the gate better{faster}"


def _answer_with_engine(work: Workspace, recipe: Recipe, plan: Plan) -> dict[str, Float32]:
    """Return the answers [answers, width] of a recipe's engine by split."""
    session = work.session
    folder, outputs = session.folder / "confirmed", session.config.task.kind.outputs
    model, path = work.model(recipe, plan, in_full=True), folder / "model.int8.engine"
    graph = write_engine_graph(session, model, recipe, plan, folder / "model.int8.onnx")
    profiles, compute = engine_profiles(session), session.target.compute
    require_int8(build_planned(graph, plan, path, session.recipe.engine.backend, profiles, compute))
    cache = folder / "runtime.cache"
    with open_runner(path, graph, pad_id=session.pad_id, runtime_cache=cache, outputs=outputs) as runner:
        size = min(session.config.batch_size, runner.max_batch)
        return {
            name: predict(runner, encoded, pad_id=session.pad_id, batch_size=size, stage="engine")
            for name, encoded in work.confirmations.encoded.items()
        }
