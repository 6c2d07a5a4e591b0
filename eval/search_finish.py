"""The end of a search: choose, confirm, and write search.json, the reports and the recipe."""

import math
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from qdqbench.eval import search_confirm
from qdqbench.eval.collect import environment
from qdqbench.eval.search import Worker, trials_of
from qdqbench.eval.search_results import FILE, Accuracy, Confirmed, Outcome, Search, Trial, choose
from qdqbench.quantize import files
from qdqbench.quantize.pipeline import versions
from qdqbench.quantize.recipe import parse_recipe

RECIPE = "recipe.yaml"


def finish(worker: Worker, folder: Path, progress: Callable[[str], None] = lambda text: None) -> Search:
    """Choose and confirm; writes every file of the outcome into `folder`.

    Raises:
        UserError, CheckFailed: the chosen recipe cannot be calibrated, built or evaluated.
    """
    from qdqbench.eval.search_report import write_reports

    session = worker.work.session
    trials = trials_of(worker)
    chosen, why = choose(trials, worker.gate)
    rows: list[Confirmed] = []
    fp32: dict[str, float] = {}
    agreement = None
    failures: list[str] = [] if chosen else [why]
    warnings = _warnings(worker, trials)
    if chosen is not None:
        rows, fp32 = search_confirm.confirm(worker, chosen, progress)
        if rows[0].status == "done":
            agreement = search_confirm.agreement(_whole(worker, chosen), rows[0])
        metric = session.config.task.metrics[0]
        failures, noted = search_confirm.failures(rows[0], worker.gate, metric)
        warnings += noted
        if not chosen.int8_linears:
            warnings.append(
                "the chosen recipe has nothing in INT8: here no recipe with INT8 is faster than FP16"
            )
        if agreement is not None and not agreement.within_noise:
            warnings.append(
                f"the searched drop ({100 * agreement.searched:.2f} points) and the confirmed one "
                f"({100 * agreement.confirmed:.2f}) differ by more than noise"
            )
        warnings += [
            f"{row.name} dominates the chosen recipe on validation{_by_noise(row, rows[0], metric)}"
            for row in rows
            if row.dominates
        ]
    found = Search(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=session.config.command,
        recipe=session.recipe.model_dump(mode="json"),
        model=session.model_name,
        task=session.config.task.name,
        metric=session.config.task.metrics[0],
        settings=worker.study.user_attrs["settings"],
        study=worker.study.study_name,
        objective=worker.options.objective,
        ranking=worker.work.space.ranking,
        ranking_source=worker.ranking_source,
        source=worker.source,
        fp32=fp32,
        trials=trials,
        outcome=Outcome(
            passed=not failures,
            rule=rule(worker.gate) + (", by modelled latency" if worker.source.mode == "model" else ""),
            chosen=chosen.number if chosen else None,
            why=why,
            failures=failures,
        ),
        confirmed=rows,
        agreement=agreement,
        warnings=warnings,
        environment=_environment(),
    )
    if chosen is not None and chosen.recipe is not None:
        files.write_text(folder / RECIPE, _chosen_yaml(chosen))
    else:
        (folder / RECIPE).unlink(missing_ok=True)
    files.write_text(folder / FILE, found.model_dump_json(indent=2) + "\n")
    write_reports(found, folder)
    return found


def _by_noise(row: Confirmed, chosen: Confirmed, metric: str) -> str:
    """What to add where a difference of the metric is no larger than its error."""
    errors = [next(iter(each.fake_quant.values())).delta_stderr[metric] for each in (row, chosen)]
    noise = row.metrics[metric] - chosen.metrics[metric] <= 2 * math.hypot(*errors)
    return ", in accuracy by no more than noise" if noise else ""


def _whole(worker: Worker, chosen: Trial) -> Accuracy:
    """The chosen recipe on the search rows, calibrated in full."""
    recipe = parse_recipe(chosen.recipe or "", "the chosen recipe")
    return worker.work.accuracy(recipe, worker.work.plan(recipe), whole=True)


def rule(gate: Any) -> str:
    """What is asked, in words."""
    if gate.min_speedup is not None:
        return f"at least {gate.min_speedup:g}x as fast as the FP16 twin, most accurate"
    return f"at most {100 * gate.max_drop:g} points lost, fastest"


def _chosen_yaml(chosen: Trial) -> str:
    """The recipe with the name of a found one; the given recipe itself keeps its text otherwise."""
    from qdqbench.eval.search_space import searched_name, short_yaml

    recipe = parse_recipe(chosen.recipe or "", "the chosen recipe")
    return short_yaml(recipe.model_copy(update={"name": searched_name(recipe.name)}))


def _warnings(worker: Worker, trials: list[Trial]) -> list[str]:
    found = list(worker.work.session.notes)
    source = worker.source
    if source.mode == "model":
        found.insert(0, f"latency is {source.label}")
        found += [f"outside of what the cost model was fitted to: {text}" for text in source.outside]
    if worker.ranking_source.startswith("model order"):
        found.append(f"units are ranked in {worker.ranking_source}")
    if worker.work.session.recipe.calibration.bias_correction:
        found.append("trials are judged before biases are corrected; the chosen recipe is confirmed with it")
    done, wanted = sum(t.duplicate_of is None for t in trials), worker.options.trials
    if done < wanted and worker.options.budget_s is not None:
        found.append(
            f"{done} of {wanted} trials fitted into {worker.options.budget_s:g} s; the same command goes on"
        )
    if failed := [t for t in trials if t.state == "failed"]:
        found.append(f"{len(failed)} of {len(trials)} trials failed; their reasons are in the table")
    return list(dict.fromkeys(found))


def _environment() -> dict[str, Any]:
    from importlib import metadata

    return environment() | {"optuna": metadata.version("optuna"), **versions()}
