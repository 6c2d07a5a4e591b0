"""`auto`: shipped recipes, calibration, islands, search and QAT, until one holds."""

import contextlib
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qdqbench._runs import silent
from qdqbench.eval.selection.auto.results import BEST_RECIPE, Auto, Criteria
from qdqbench.eval.selection.auto.run import AutoRun, run_auto
from qdqbench.eval.selection.auto.steps import Steps
from qdqbench.eval.selection.search.results import SearchOptions
from qdqbench.quantize.engine.backend import choose_backend
from qdqbench.quantize.pipeline.config import adapt_recipe, find_recipe, make_run_config
from qdqbench.quantize.pipeline.ownership import default_folder, identity_of, owned_folder
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.tasks.embedded import write_embedded
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.names import DEFAULT_RECIPE
from qdqbench.quantize.utils.system.gpu import find_gpu

FIRST_RECIPES = ("int8-attention", DEFAULT_RECIPE)  # where a family has them
FASTER = "int8-residual-fused"  # on a GPU; tried second where a speed is asked
MAX_DROP = 0.005
BUDGET = "30m"
LENGTH = 128
UNITS = {"s": 1, "m": 60, "h": 3600}


def auto(  # noqa: PLR0913
    model: str | Path | None = None,
    task: str | None = None,
    data: str | Path = "hub",
    *,
    out: str | Path | None = None,
    replace: bool = False,
    recipe: Sequence[str] = (),
    budget: str | float = BUDGET,
    max_drop: float = MAX_DROP,
    min_speedup: float | None = None,
    samples: int = 512,
    trials: int = 24,
    batch: int = 32,
    length: int | None = None,
    revision: str | None = None,
    text_column: Sequence[str] | None = None,
    label_column: str | None = None,
    num_labels: int | None = None,
    metric: Sequence[str] | None = None,
    max_length: int | None = None,
    backend: str | None = None,
    pooling: str | None = None,
    normalize: bool = False,
    batch_size: int = 32,
    seed: int = 0,
    limit: int | None = None,
    progress: Callable[[str], None] = silent,
    note: Callable[[str], None] = silent,
    command: str = "qdqbench.auto",
) -> Auto:
    """Find a recipe that holds; that none does is in the result.

    Args:
        model: folder or hub id; None with `task` None: the embedded default.
        task: as in `run`, like `data`, `revision`, the columns, `metric`, `pooling` and `normalize`.
        data: see `task`.
        out: folder; None: runs/auto-MODEL-TASK. Finished steps of an earlier call are reused.
        replace: what an earlier call left there is removed, whatever it was of; else another model or task is
            refused.
        recipe: shipped names or YAML files to start with; none: int8-attention, then int8-linears, and
            between them int8-residual-fused where a speed-up is asked of a GPU.
        budget: seconds, or a text such as "90s", "30m" or "2h"; no step starts that exceeds it.
        max_drop: of the primary metric, a fraction; the gate of every recipe.
        min_speedup: over the engine without INT8 of the same backend; None: not asked.
        samples: train rows that proposals are chosen on, at most.
        trials: of the search, at most.
        batch: of the latency.
        length: tokens of the latency; None: 128, or as many as the recipe takes.
        revision: see `task`.
        text_column: see `task`.
        label_column: see `task`.
        num_labels: see `task`.
        metric: see `task`.
        max_length: tokens of a sample; None: as the recipes say.
        backend: of the engine; None: as the recipes say.
        pooling: see `task`.
        normalize: see `task`.
        batch_size: of evaluations.
        seed: of bootstrap, search and folds.
        limit: evaluate on this many samples.
        progress: called with what is being done.
        note: called with what was removed.
        command: recorded in the result.

    Raises:
        UserError: input that cannot be used, or a folder of another model or task.
        MissingDevice: the runtime that the recipes name is not there.
    """
    budget_s = parse_duration(budget)
    if not 0 <= max_drop <= 1:
        raise UserError(f"--max-drop {max_drop:g} is no fraction from 0 to 1: half a point is 0.005")
    if min_speedup is not None and not min_speedup > 0:
        raise UserError(f"--min-speedup {min_speedup:g} is no positive factor, such as 1.5")
    name = None if model is None else str(model)
    criteria = Criteria(max_drop=max_drop, min_speedup=min_speedup)
    recipes = [
        adapt_recipe(_set_gate(each, criteria), max_length=max_length, backend=backend)
        for each in _first_recipes(
            recipe, name, revision, fast=min_speedup is not None and backend not in CPU_BACKENDS
        )
    ]
    asked: dict[str, Any] = {
        "revision": revision,
        "task": task,
        "data": str(data),
        "text_column": text_column,
        "label_column": label_column,
        "num_labels": num_labels,
        "metric": metric,
        "pooling": pooling,
        "normalize": normalize,
        "batch_size": batch_size,
        "seed": seed,
        "limit": limit,
    }
    config = make_run_config(recipes[0], model=name, command=command, **asked)
    for each in recipes:
        if each.engine.backend in CPU_BACKENDS:
            choose_backend(each.engine.backend)
    folder = Path(out) if out is not None else default_folder("auto", name, config.task.name)
    session = Session(config, folder)
    identity = identity_of("auto", session)
    with owned_folder(folder, identity, replace=replace, ready=session.require_inputs, say=note):
        if config.model is None:
            progress("training the embedded default")
            made = write_embedded(folder / "embedded", seed=seed)
            config = config.model_copy(update={"model": str(made.model_dir), "data": str(made.data_dir)})
        recipes, notes = _limit_calibration(config, folder, recipes)
        longest = min(each.export.max_length for each in recipes)
        state = AutoRun(
            config=config.model_copy(update={"recipe": recipes[0]}),
            folder=folder,
            criteria=criteria,
            options=SearchOptions(
                trials=trials, samples=samples, batch=batch, length=length or min(LENGTH, longest)
            ),
            say=progress,
        )
        state.session.notes += notes
        given: dict[str, Any] = asked if name else {"seed": seed, "batch_size": batch_size, "limit": limit}
        words = ["qdqbench", "run", str(folder / BEST_RECIPE), *_option_words({"model": name} | given)]
        return run_auto(state, Steps(state, recipes).proposers(), recipes, budget_s, shlex.join(words))


def parse_duration(text: str | float) -> float:
    """Return seconds: a number, or one followed by s, m or h.

    Raises:
        UserError: neither, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(text).strip())
    if match is None or not float(match[1]) > 0:
        raise UserError(f"--budget {text} is no time; give one such as 90s, 30m or 2h")
    return float(match[1]) * UNITS[match[2] or "s"]


def _first_recipes(
    names: Sequence[str], model: str | None, revision: str | None, *, fast: bool = False
) -> list[Recipe]:
    """Return the recipes that are named, without their training; else those of the family.

    Args:
        fast: also the faster one, where there is a GPU.

    Raises:
        UserError: one cannot be used, or two have the same name.
    """
    if not names:
        careful, shipped = find_recipe(DEFAULT_RECIPE, model, revision), []
        for shipped_name in (*FIRST_RECIPES[:-1], *([FASTER] if fast and find_gpu() else [])):
            with contextlib.suppress(UserError):  # the family has none
                shipped.append(find_recipe(shipped_name, model, revision))
        return [*shipped, careful]
    recipes = [find_recipe(name, model, revision).ptq for name in names]
    taken = {"methods", "islands", "search", "qat", "embedded"}
    for each in recipes:
        if each.name in taken:
            raise UserError(
                f"two steps would be called {each.name!r}: give recipes names of their own, other than "
                "methods, islands, search, qat and embedded"
            )
        taken.add(each.name)
        if not each.quantizes:
            raise UserError(f"recipe {each.name} puts nothing into INT8; start with another")
    return recipes


def _set_gate(recipe: Recipe, criteria: Criteria) -> Recipe:
    return recipe.model_copy(update={"gate": recipe.gate.model_copy(update=criteria.model_dump())})


def _limit_calibration(
    config: RunConfig, folder: Path, recipes: list[Recipe]
) -> tuple[list[Recipe], list[str]]:
    """Return recipes that leave half of a small train split to choose proposals on, and notes."""
    rows, notes, limited = {}, [], []
    for recipe in recipes:
        section = recipe.calibration
        if section.split not in rows:
            session = Session(config, folder)
            rows[section.split] = session.split(section.split, limit=None, labelled=False).rows
        most = max(rows[section.split] // 2, 1)
        if section.samples > most:
            notes.append(
                f"split {section.split!r} has {rows[section.split]} rows: {most} calibrate, not "
                f"{section.samples}, and the others choose what is proposed"
            )
            section = section.model_copy(update={"samples": most})
        limited.append(recipe.model_copy(update={"calibration": section}))
    return limited, list(dict.fromkeys(notes))


def _option_words(values: dict[str, Any]) -> list[str]:
    """Return options of the command line, those that differ from its defaults."""
    defaults = {"data": "hub", "batch_size": 32, "seed": 0, "normalize": False}
    words: list[str] = []
    for name, value in values.items():
        if value is None or value == defaults.get(name) or value == ():
            continue
        option = f"--{name.replace('_', '-')}"
        each = value if isinstance(value, (list, tuple)) else [value]
        words += [option] if value is True else [word for one in each for word in (option, str(one))]
    return words
