"""`auto`: shipped recipes, calibration, islands, search and QAT, until one holds."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from qdqbench._options import AutoOptions, PoolingOptions, TaskOptions
from qdqbench._progress import displayed
from qdqbench._runs import Progress
from qdqbench.eval.selection.auto.results import BEST_RECIPE, Auto, Criteria
from qdqbench.eval.selection.auto.run import AutoRun, run_auto
from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.quantize.engine.backend import choose_backend
from qdqbench.quantize.pipeline.ownership import default_folder, identity_of, owned_folder
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.schema import Recipe, find_recipe
from qdqbench.quantize.tasks.embedded import write_embedded
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.names import DEFAULT_RECIPE
from qdqbench.quantize.utils.options import take_options
from qdqbench.quantize.utils.progress import reporter

LENGTH = 128


@take_options
def auto(
    options: AutoOptions = AutoOptions(),  # noqa: B008  (frozen)
    *,
    progress: Progress = None,
) -> Auto:
    """Find a recipe that meets the limits, and reuse finished steps; the result says if none does.

    Args:
        progress: True for a bar (default in notebooks), or a function that is called with what is being done.

    Raises:
        UserError: input that cannot be used, or a folder of another model or task.
        MissingDevice: the runtime that the recipes name is not installed.
    """
    with displayed(progress):
        return start_auto(options)[0]


def start_auto(options: AutoOptions) -> tuple[Auto, Path]:
    """Find a recipe; return the result and the folder of its reports."""
    name, criteria = options.model, Criteria(max_drop=options.max_drop, min_speedup=options.min_speedup)
    first = _first_recipes(options.recipe or (), name, options)
    gate = criteria.model_dump()
    gated = [recipe.model_copy(update={"gate": recipe.gate.model_copy(update=gate)}) for recipe in first]
    recipes = [options.adapt(recipe) for recipe in gated]
    config = options.config(recipes[0])
    for recipe in recipes:
        if recipe.engine.backend in CPU_BACKENDS:
            choose_backend(recipe.engine.backend)
    folder = options.out or default_folder("auto", name, config.task.name)
    session = Session(config, folder)
    identity, ready = identity_of("auto", session), session.require_inputs
    with owned_folder(folder, identity, overwrite=options.overwrite, ready=ready):
        if config.model is None:
            reporter().begin("training the built-in BERT")
            embedded = write_embedded(folder / "embedded", seed=options.seed)
            written = {"model": str(embedded.model_dir), "data": str(embedded.data_dir)}
            config = config.model_copy(update=written)
        recipes, notes = _limit_calibration(config, folder, recipes)
        longest = min(recipe.export.max_length for recipe in recipes)
        values = options.model_dump(include={"trials", "samples", "batch"})
        state = AutoRun(
            config=config.model_copy(update={"recipe": recipes[0]}),
            recipes=recipes,
            folder=folder,
            criteria=criteria,
            options=SearchOptions(**values, length=options.length or min(LENGTH, longest)),
        )
        state.session.notes += notes
        words = ["qdqbench", "run", str(folder / BEST_RECIPE), *_option_words(options)]
        return run_auto(state, options.budget, shlex.join(words)), folder


def _first_recipes(names: Sequence[str], model: str | None, options: AutoOptions) -> list[Recipe]:
    """Return the recipes that are named, without their training; else the family's for the backend."""
    revision = options.revision
    names = names or [*dict.fromkeys((options.find_start(), DEFAULT_RECIPE))]
    recipes = [find_recipe(name, model, revision).ptq for name in names]
    taken = ["methods", "islands", "search", "qat", "unquantized", "embedded"]
    for each in recipes:
        if each.name in taken:
            raise UserError(
                f"two steps would be called {each.name!r}: name recipes unlike {', '.join(taken)}"
            )
        taken.append(each.name)
        if not each.quantizes:
            raise UserError(f"recipe {each.name} puts nothing into INT8; start with another")
    return recipes


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


def _option_words(options: AutoOptions) -> list[str]:
    """Return the options of the `run` that repeats the chosen recipe, those that differ from the defaults."""
    names = {*TaskOptions.model_fields, *PoolingOptions.model_fields} if options.model else set()
    words: list[str] = []
    for name, value in options.model_dump(include=names | {"prompt", "seed", "batch_size", "limit"}).items():
        if value in (AutoOptions.model_fields[name].default, []):
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(each)])]
    return words
