"""A run directory: the whole path, the stages up to one, and answers of its engine."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from qdqbench._options import QatOptions, RecipeOptions, RunOptions
from qdqbench._progress import StageProgress, displayed
from qdqbench.eval.bench.quick import time_backends
from qdqbench.eval.runs.results import Results
from qdqbench.eval.runs.run import require_inputs, run_stages, run_until
from qdqbench.eval.runs.tracked import tracking
from qdqbench.quantize.deployment.options import PredictOptions
from qdqbench.quantize.deployment.predict import Predicted, predict_files
from qdqbench.quantize.engine.backend import choose_backend, preferred_backend
from qdqbench.quantize.engine.build import list_targets
from qdqbench.quantize.lint.machines import describe_gain, explain_kernels
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.load import load_config
from qdqbench.quantize.pipeline.ownership import identity_of, open_session, owned_folder, run_folder
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.schema import Recipe, adapt_recipe, find_recipe, require_qat
from qdqbench.quantize.recipe.schema import load_recipe as load_named
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.names import DEFAULT_QAT
from qdqbench.quantize.utils.options import path_of, take_options
from qdqbench.quantize.utils.progress import reporter
from qdqbench.quantize.utils.system.cpu import find_cpu
from qdqbench.quantize.utils.system.gpu import find_gpu
from qdqbench.quantize.utils.system.process import is_main_process
from qdqbench.quantize.utils.trackers import require_tracker

Progress = Callable[[StageProgress], object] | bool | None


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
    recipe: str | Path | Recipe | None = None,
    options: RunOptions = RunOptions(),  # noqa: B008  (frozen)
    *,
    progress: Progress = None,
) -> Results:
    """Take a recipe and a model to an engine and a report. A gate that fails is in the results.

    Args:
        recipe: shipped name, YAML file, or what `load_recipe` gave; None: the one to start with here.
        progress: True for bars (default in notebooks), or a function that is called as stages start and
            continue.

    Raises:
        UserError: input that cannot be used.
        CheckFailed: a stage gives what no report can hold, such as NaN.
    """
    with displayed(progress, "stage"):
        return start_run(recipe, options)[0]


@take_options
def qat(
    recipe: str | Path | Recipe = DEFAULT_QAT,
    options: QatOptions = QatOptions(),  # noqa: B008  (frozen)
    *,
    progress: Progress = None,
) -> Results:
    """Train with quantization, then continue to engine and report. A gate that fails is in the results.

    Args:
        recipe: shipped name or YAML file with a `qat` section, or what `load_recipe` gave.
        progress: True for bars (default in notebooks), or a function that is called as stages start and
            continue.

    Raises:
        UserError: input that cannot be used, or a recipe without `qat`.
        CheckFailed: a stage gives what no report can hold, such as NaN.
    """
    with displayed(progress, "stage"):
        return start_run(recipe, options)[0]


def start_run(recipe: str | Path | Recipe | None, options: QatOptions) -> tuple[Results, Path]:
    """Open a run directory for what was asked, and take it up to a stage as `resume` does.

    Of `qat` all processes of a launcher train, and the others than the main one end here.

    Raises:
        UserError: the folder holds something else.
        MissingDevice: the recipe names a CPU runtime that is not installed; nothing was begun.
    """
    config, until = options.config(choose_recipe(options, recipe)), getattr(options, "until", None)
    if config.recipe.engine.backend in CPU_BACKENDS:
        choose_backend(config.recipe.engine.backend)
    list_targets(preferred_backend(config.recipe.engine.backend), config.recipe.engine.compute_capability)
    folder = run_folder("run", config, options.out)
    session = Session(config, folder)
    if trains := not isinstance(options, RunOptions):
        require_qat(session.recipe)  # before anything is written
    require_tracker(options.report_to)
    identity, ready = identity_of("run", session), partial(require_inputs, session, until)
    known = {"recipe": config.recipe.name, "model": session.model_name, "task": config.task.name}
    known |= {"data": session.data_source, "seed": str(config.seed)}
    with (
        owned_folder(folder, identity, overwrite=options.overwrite, ready=ready),
        tracking(options.report_to, folder, known) as tracked,
    ):
        if config.recipe.quantizes and until is None:
            reporter().log(describe_gain(None if session.target.on_cpu else find_gpu(), find_cpu()))
        if trains:
            from qdqbench.quantize.training.qat import train_on_all

            train_on_all(session, partial(run_stages, session, leads=True))
            if not is_main_process():
                raise SystemExit(0)
        results = run_until(session, until)
        tracked.finish(results)
    return results, folder


def choose_recipe(options: RecipeOptions, recipe: str | Path | Recipe | None) -> Recipe:
    """Return the recipe of a run; backend `auto` of it is `cuda` where that is known or timed as fastest."""
    if isinstance(recipe, Recipe):
        chosen = options.adapt(recipe)
    else:
        chosen = options.find_recipe(None if recipe is None else str(recipe))
    if options.model is None or chosen.engine.backend != "auto" or find_gpu() is None:
        return chosen
    config = load_config(options.model, options.revision)
    why = explain_kernels(chosen, family_of(config).name, config)
    takes, said = time_backends(chosen, config) if why is None else (bool(why), why)
    if said:
        reporter().log(said)
    return adapt_recipe(chosen, backend="cuda") if takes else chosen


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
    with open_session(path_of(folder, "folder")) as session, displayed(progress, "stage"):
        return run_until(session, until)


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
    with open_session(path_of(folder, "folder")) as session, displayed(progress, "stage"):
        here = find_gpu() or session.target.on_cpu
        return run_until(session, "verify" if here else "build")


@take_options
def predict(options: PredictOptions, *, progress: Progress = None) -> Predicted:
    """Answer the rows of files with a run's engine, and write them in order; a killed call resumes.

    With several processes, a script calls it under `if __name__ == "__main__"`.

    Args:
        progress: True for a bar (default in notebooks), or a function that is called with what is being done.

    Raises:
        UserError: input that cannot be used; parts that are finished stay.
        MissingDevice: no engine, or no device for it.
    """
    with displayed(progress):
        return predict_files(options)
