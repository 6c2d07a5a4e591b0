"""A whole ladder: taken up where an interrupted call stopped, climbed, and told."""

import time
from collections.abc import Sequence
from typing import Any

from qdqbench.eval.auto.climb import chosen, climb
from qdqbench.eval.auto.measure import Ladder
from qdqbench.eval.auto.report import write_auto
from qdqbench.eval.auto.results import AUTO_FILE, BEST_RECIPE, Auto, Choice, Step
from qdqbench.eval.auto.steps import Steps
from qdqbench.eval.search.results import Source
from qdqbench.eval.search.trial import hash_of
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.results import read_results
from qdqbench.quantize.core.strict import Strict, read
from qdqbench.quantize.machine.environment import environment, made_with, now
from qdqbench.quantize.recipe.schema import Recipe, dump_recipe, load_recipe
from qdqbench.quantize.rundir.ownership import locked_folder
from qdqbench.quantize.tasks.sources import source_fingerprint

LEDGER = "steps.json"  # finished steps, to go on from


class Finished(Strict):
    """Steps of an interrupted call, and what they depend on."""

    schema_version: int = 1
    subject: list[str]  # model and task: a folder holds one ladder
    identity: str  # of everything else too
    source: Source | None
    latency_s: float
    steps: list[Step]


def run_ladder(ladder: Ladder, recipes: Sequence[Recipe], budget_s: float, command: str) -> Auto:
    """Climb until a recipe holds, and write `auto.json`, the reports and `best.yaml`.

    Args:
        ladder: its folder is made.
        recipes: to begin with, with the ladder's gate.
        budget_s: seconds of all steps, those of interrupted calls included.
        command: what repeats the recipe that is chosen, as a shell takes it.

    Raises:
        UserError: bad input, or a folder of another model or task.
        MissingDevice: nothing here can build what the recipes ask for.
    """
    with locked_folder(ladder.folder):
        known = _taken_up(ladder, recipes)
        _save(ladder, known, known.steps)
        steps = climb(
            Steps(ladder, recipes).rungs(),
            budget_s,
            {step.name: step for step in known.steps if step.status != "skipped" and not step.again},
            time.perf_counter,
            lambda steps: _save(ladder, known, steps),
        )
        found = _told(ladder, steps, budget_s, command)
        files.write_text(ladder.folder / AUTO_FILE, found.model_dump_json(indent=2) + "\n")
        write_auto(found, ladder.folder)
    return found


def _taken_up(ladder: Ladder, recipes: Sequence[Recipe]) -> Finished:
    session, config = ladder.session, ladder.config
    task = config.task
    splits = {*(recipe.calibration.split for recipe in recipes), task.train_split, *task.eval_splits}
    subject = [session.model_sha256, task.name]
    depends = [
        made_with(),
        subject,
        task.model_dump(mode="json"),
        {split: source_fingerprint(task, session.data_source, split) for split in sorted(splits)},
        [recipe.model_dump(mode="json") for recipe in recipes],
        config.model_dump(mode="json", exclude={"command", "recipe", "model"}),
        ladder.wanted.model_dump(),
        [ladder.samples, ladder.trials, ladder.options.batch, ladder.options.length],
    ]
    fresh = Finished(
        subject=subject,
        identity=hash_of(depends),
        source=None,
        latency_s=0.0,
        steps=[],
    )
    ladder.identity, path = fresh.identity, ladder.folder / LEDGER
    if not path.is_file():
        return fresh
    before = read(path, Finished, "list of steps", "give another --out")
    if before.subject != fresh.subject:
        raise UserError(f"{ladder.folder} holds a ladder of another model or task; give another --out")
    if before.identity != fresh.identity:
        return fresh
    ladder.source, ladder.latency_s = before.source, before.latency_s
    ladder.going_on(before.steps)
    return before


def _save(ladder: Ladder, known: Finished, steps: Sequence[Step]) -> None:
    kept = known.model_copy(
        update={"steps": [*steps], "source": ladder.source, "latency_s": ladder.latency_s}
    )
    files.write_text(ladder.folder / LEDGER, kept.model_dump_json(indent=2) + "\n")


def _told(ladder: Ladder, steps: list[Step], budget_s: float, command: str) -> Auto:
    session, config = ladder.session, ladder.config
    metric = config.task.metrics[0]
    best = chosen(steps, metric)
    fp32 = {}
    if best is not None and best.measured is not None:
        results = read_results(ladder.folder / best.measured.run)
        fp32 = results.stages["fp32"].metrics
    return Auto(
        created=now(),
        command=config.command,
        folder=str(ladder.folder),
        model={"name": session.model_name, "sha256": session.model_sha256},
        task=config.task.model_dump(mode="json"),
        data={
            "source": session.data_source,
            "evaluation": {name: len(gold) for name, gold in session.gold.items()},
            "proposals": ladder.samples,
            "limit": config.limit,
        },
        seed=config.seed,
        gate=ladder.wanted,
        metric=metric,
        fp32=fp32,
        budget_s=budget_s,
        spent_s=sum(step.seconds for step in steps),
        steps=steps,
        choice=_choice(ladder, steps, best, command),
        source=ladder.source,
        warnings=session.warnings,
        notes=session.notes,
        environment=environment(),
    )


def _choice(ladder: Ladder, steps: Sequence[Step], best: Step | None, command: str) -> Choice:
    """What to deploy; writes its recipe."""
    if best is None or best.measured is None:
        (ladder.folder / BEST_RECIPE).unlink(missing_ok=True)
        reasons = dict.fromkeys(step.reason for step in steps if step.reason)
        named = {
            reason: ", ".join(step.name for step in steps if step.reason == reason) for reason in reasons
        }
        told = "; ".join(f"{names}: {reason}" for reason, names in named.items())
        why = f"no step came to an end: {told}"
        nothing = dict[str, Any].fromkeys(("step", "recipe", "engine", "run", "command"))
        return Choice(passed=False, why=why, lacks=[why], **nothing)
    found, folder = best.measured, ladder.folder
    recipe = load_recipe(str(folder / found.recipe_file))
    files.write_text(folder / BEST_RECIPE, dump_recipe(recipe))
    done = sum(step.measured is not None for step in steps)
    if best.holds:
        why = (
            f"{best.name} is the first that holds, of {done} that were tried"
            if done > 1
            else f"{best.name} holds"
        )
    else:
        why = f"none of the {done} that were tried holds; {best.name} is the nearest to FP32"
    return Choice(
        passed=best.holds,
        step=best.name,
        why=why,
        lacks=found.missing.all,
        recipe=str(folder / BEST_RECIPE),
        engine=str(folder / found.engine) if found.engine else None,
        run=str(folder / found.run),
        command=command,
    )
