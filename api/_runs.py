"""A run directory: the whole path, or the stages up to one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from qdqbench._options import RecipeOptions, RunOptions
from qdqbench._progress import draw_stages, shown
from qdqbench.eval.runs.results import Results
from qdqbench.eval.runs.run import StageProgress, follow, require_inputs, run_until
from qdqbench.eval.runs.tracked import track_run
from qdqbench.quantize.engine.backend import choose_backend
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.pipeline.ownership import identity_of, open_session, owned_folder, run_folder
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.recipe.schema import Recipe, find_recipe
from qdqbench.quantize.recipe.schema import load_recipe as load_named
from qdqbench.quantize.utils.errors import MissingDevice
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.names import DEFAULT_RECIPE
from qdqbench.quantize.utils.options import path_of, take_options
from qdqbench.quantize.utils.progress import silent
from qdqbench.quantize.utils.system.gpu import find_gpu
from qdqbench.quantize.utils.trackers import TrackerName, require_tracker

Progress = Callable[[StageProgress], None] | bool | None


def load_recipe(recipe: str | Path | Recipe, model: Any = None) -> Recipe:
    """Return a recipe by its shipped name, for the family of a model, or from a YAML file, or as it is given.

    Args:
        recipe: shipped name, YAML file, or a recipe.
        model: folder, hub id or model; its family completes a name such as int8-linears.

    Raises:
        UserError: no such recipe or file, or it does not validate.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if hasattr(model, "config"):
        return load_named(str(recipe), lambda: family_of(model.config))
    return load_named(str(recipe)) if model is None else find_recipe(str(recipe), str(model))


@take_options
def run(
    recipe: str | Path | Recipe = DEFAULT_RECIPE,
    options: RunOptions = RunOptions(),  # noqa: B008  (frozen)
    *,
    progress: Progress = None,
) -> Results:
    """Take a recipe and a model to an engine and a report. A gate that fails is in the results.

    Args:
        recipe: shipped name, YAML file, or what `load_recipe` gave.
        progress: True for bars (default in notebooks), or a function that is called as stages start and
            continue.

    Raises:
        UserError: input that cannot be used.
        CheckFailed: a stage gives what no report can hold, such as NaN.
    """
    config = options.config(choose_recipe(options, recipe), "qdqbench.run")
    folder = run_folder("run", config, options.out)
    report_to = options.report_to
    with shown(progress, draw_stages) as show:
        return start(config, folder, options.until, show, overwrite=options.overwrite, report_to=report_to)


def choose_recipe(options: RecipeOptions, recipe: str | Path | Recipe) -> Recipe:
    return options.adapt(recipe) if isinstance(recipe, Recipe) else options.find_recipe(str(recipe))


def start(  # noqa: PLR0913
    config: RunConfig,
    folder: Path,
    until: str | None = None,
    progress: Callable[[StageProgress], None] = silent,
    *,
    overwrite: bool = False,
    say: Callable[[str], None] = silent,
    report_to: TrackerName | None = None,
) -> Results:
    """Open a run directory for what was asked, and take it up to a stage as `resume` does.

    Raises:
        UserError: the folder holds something else.
        MissingDevice: the recipe names a CPU runtime that is not installed; nothing was begun.
    """
    if config.recipe.engine.backend in CPU_BACKENDS:
        choose_backend(config.recipe.engine.backend)
    require_tracker(report_to)
    session = Session(config, folder)
    identity, ready = identity_of("run", session), partial(require_inputs, session, until)
    with (
        owned_folder(folder, identity, overwrite=overwrite, ready=ready, say=say),
        track_run(report_to, session) as tracked,
    ):
        results = _run(session, until, tracked.follow(progress))
        tracked.finish(results)
    return results


def resume(folder: str | Path, until: str | None = None, progress: Progress = None) -> Results:
    """Take a run directory up to a stage; what has not changed is reused.

    Args:
        folder: of a run that was started.
        until: a stage, "evaluate" for all evaluations; None or "report": everything and the report.
        progress: True for bars (default in notebooks), or a function that is called as stages start and
            continue.

    Raises:
        UserError: no run directory, or no such stage.
        MissingDevice: it ended with the engine, and nothing here can build it.
    """
    with open_session(path_of(folder, "folder")) as session, shown(progress, draw_stages) as show:
        return _run(session, until, show)


def evaluate(folder: str | Path, progress: Progress = None) -> Results:
    """Measure the accuracy of every stage of a run directory: `stages` of the results.

    Args:
        folder: run directory.
        progress: True for bars (default in notebooks), or a function that is called as stages start and
            continue.
    """
    return resume(folder, "evaluate", progress)


def build(folder: str | Path, progress: Progress = None) -> Results:
    """Build the engine of a run directory, prove its INT8 layers, and verify its outputs if it runs here.

    An engine that is not proven, or is wrong, is in the results: `engine`, `verification` and `gate`.

    Args:
        folder: run directory.
        progress: True for bars (default in notebooks), or a function that is called as stages start and
            continue.

    Raises:
        MissingDevice: nothing here can build it.
    """
    with open_session(path_of(folder, "folder")) as session, shown(progress, draw_stages) as show:
        here = find_gpu() or session.target.on_cpu
        return _run(session, "verify" if here else "build", show)


def _run(session: Session, until: str | None, progress: Callable[[StageProgress], None]) -> Results:
    results = run_until(session, until, follow(session, progress, until))
    if until in ("build", "verify") and results.engine is None:
        raise MissingDevice(results.skipped["build"])
    return results
