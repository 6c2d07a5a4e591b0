"""The end of a search: choose, confirm, and write search.json, the reports and the recipe."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from qdqbench.eval.accuracy.gate import NOISE
from qdqbench.eval.placement.space import searched_name
from qdqbench.eval.report.formats import points
from qdqbench.eval.search import confirm
from qdqbench.eval.search.report import write_search_reports
from qdqbench.eval.search.results import (
    SEARCH_FILE,
    Accuracy,
    Answer,
    Confirmed,
    DropAgreement,
    Search,
    Source,
    Trial,
    choose_trial,
)
from qdqbench.eval.search.trial import explained
from qdqbench.eval.search.trials import trials_of
from qdqbench.eval.search.worker import Worker
from qdqbench.quantize.core import files
from qdqbench.quantize.machine.environment import environment, now, versions
from qdqbench.quantize.recipe.schema import parse_recipe, short_yaml

SEARCH_RECIPE = "recipe.yaml"


@dataclass
class Confirmation:
    """What validation says of the chosen recipe."""

    rows: list[Confirmed] = field(default_factory=list)
    fp32: dict[str, float] = field(default_factory=dict)
    agreement: DropAgreement | None = None
    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def finish(worker: Worker, folder: Path, progress: Callable[[str], None] = lambda text: None) -> Search:
    """Choose and confirm; writes every file of the outcome into `folder`.

    Raises:
        UserError: a file cannot be written.
    """
    trials = trials_of(worker)
    chosen, why = choose_trial(trials, worker.gate)
    judged = Confirmation(failures=[why]) if chosen is None else _judge(worker, trials, chosen, progress)
    found = _search(worker, trials, chosen, why, judged)
    if chosen is not None and chosen.recipe is not None:
        recipe = parse_recipe(chosen.recipe, "the chosen recipe")
        named = recipe.model_copy(update={"name": searched_name(recipe.name)})
        files.write_text(folder / SEARCH_RECIPE, short_yaml(named))
    else:
        (folder / SEARCH_RECIPE).unlink(missing_ok=True)
    files.write_text(folder / SEARCH_FILE, found.model_dump_json(indent=2) + "\n")
    write_search_reports(found, folder)
    return found


def _judge(
    worker: Worker, trials: list[Trial], chosen: Trial, progress: Callable[[str], None]
) -> Confirmation:
    """Confirm the chosen recipe beside the given and the shipped ones."""
    metric = worker.work.session.config.task.metrics[0]
    judged = Confirmation()
    judged.rows, judged.fp32 = confirm.confirm(worker, chosen, progress)
    best = judged.rows[0]
    judged.failures, judged.warnings = confirm.gate_failures(best, worker.gate, metric)
    if best.status == "done":
        try:
            judged.agreement = confirm.agreement(_whole(worker, chosen), best)
        except Exception as error:  # hours of trials must not end without their report
            judged.warnings.append(f"whether search and confirmation agree is not known: {explained(error)}")
    if not chosen.int8_linears:
        judged.warnings.append(_without_int8(trials, judged.rows, worker.source.twin))
    if judged.agreement is not None and not judged.agreement.within_noise:
        judged.warnings.append(
            f"the searched drop ({100 * judged.agreement.searched:.2f} points) and the confirmed one "
            f"({100 * judged.agreement.confirmed:.2f}) differ by more than noise"
        )
    judged.warnings += [
        f"{row.name} dominates the chosen recipe on validation{_by_noise(row, best, metric)}"
        for row in judged.rows
        if row.dominates
    ]
    return judged


def _search(
    worker: Worker, trials: list[Trial], chosen: Trial | None, why: str, judged: Confirmation
) -> Search:
    session = worker.work.session
    return Search(
        created=now(),
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
        fp32=judged.fp32,
        trials=trials,
        outcome=Answer(
            passed=not judged.failures,
            rule=rule(worker.gate, worker.source),
            chosen=chosen.number if chosen else None,
            why=why,
            failures=judged.failures,
        ),
        confirmed=judged.rows,
        agreement=judged.agreement,
        warnings=_warnings(worker, trials) + judged.warnings,
        notes=session.notes,
        environment=environment() | {"optuna": metadata.version("optuna"), **versions()},
    )


def _without_int8(trials: list[Trial], rows: list[Confirmed], twin: str) -> str:
    """Why nothing in INT8 was chosen, as far as trials and confirmation know."""
    said = "the chosen recipe has nothing in INT8: "
    tried = [trial for trial in trials if trial.int8_linears and trial.latency is not None]
    latencies = [*(trial.latency for trial in tried), *(row.latency for row in rows)]
    speedups = [latency.speedup for latency in latencies if latency]
    if not tried:
        return f"{said}no recipe with INT8 was tried to its end, ask for more trials"
    if max(speedups, default=0.0) <= 1:
        return f"{said}here no recipe with INT8 is faster than {twin}"
    return f"{said}none of the {len(tried)} tried with INT8 satisfies the gate better, though some are faster"


def _by_noise(row: Confirmed, chosen: Confirmed, metric: str) -> str:
    """What to add where a difference of the metric is no larger than its error."""
    errors = [next(iter(each.fake_quant.values())).delta_stderr[metric] for each in (row, chosen)]
    noise = row.metrics[metric] - chosen.metrics[metric] <= NOISE * math.hypot(*errors)
    return ", in accuracy by no more than noise" if noise else ""


def _whole(worker: Worker, chosen: Trial) -> Accuracy:
    """The chosen recipe on the search rows, calibrated in full."""
    recipe = parse_recipe(chosen.recipe or "", "the chosen recipe")
    return worker.work.accuracy(recipe, worker.work.plan(recipe), whole=True)


def rule(gate: Any, source: Source) -> str:
    """What is asked, in words."""
    modelled = ", by modelled latency" if source.mode == "model" else ""
    if gate.min_speedup is not None:
        return f"at least {gate.min_speedup:g}x as fast as the {source.twin} twin, most accurate{modelled}"
    return f"at most {points(gate.max_drop)} lost, fastest{modelled}"


def _warnings(worker: Worker, trials: list[Trial]) -> list[str]:
    found = list(worker.work.session.warnings)
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
