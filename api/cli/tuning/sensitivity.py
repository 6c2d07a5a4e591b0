"""The commands `sensitivity` and `compare-calibration`. Everything heavy is imported inside."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench._options import CalibrationOptions, RecipeOptions, SensitivityOptions
from qdqbench.cli.options import RecipeName, command, note
from qdqbench.cli.progress import time_left
from qdqbench.cli.terminal import Json, command_line, show
from qdqbench.quantize.utils.names import DEFAULT_RECIPE

if TYPE_CHECKING:
    from qdqbench.eval.selection.trials.store import Store
    from qdqbench.quantize.pipeline.session import RunConfig, Session
    from qdqbench.quantize.utils.progress import Progress


@command
def sensitivity(
    recipe: RecipeName = DEFAULT_RECIPE, *, options: SensitivityOptions, json: Json = False
) -> None:
    """Measure which layer costs the accuracy: each alone in INT8, and everything but it; write a recipe."""
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.selection.sensitivity.measure import Measurement
    from qdqbench.eval.selection.sensitivity.report import choice_text, sensitivity_report
    from qdqbench.eval.selection.trials.report import write_result
    from qdqbench.quantize.pipeline.ownership import run_folder
    from qdqbench.quantize.utils.errors import CheckFailed

    config = options.config(options.find_recipe(recipe).ptq, command_line())
    folder = run_folder("sensitivity", config, options.out)
    with _open_session("sensitivity", config, folder, options) as (session, show_progress):
        measurement = Measurement(session, options.samples, show_progress)
        _note_resume(measurement.trials.store)
        found = measurement.run()
        write_result(found, sensitivity_report(found), folder)
    written = f"recipe: {folder / found.choice.file}", f"report: {folder / 'sensitivity.html'}"
    show(found, json, lambda result: render_screen(sensitivity_report(result)), *written)
    if not found.choice.reached:
        raise CheckFailed(choice_text(found))


def _note_resume(store: "Store[Any]") -> None:
    if store.resume_note:
        note(store.resume_note)


@contextmanager
def _open_session(
    kind: str, config: "RunConfig", folder: Path, options: RecipeOptions
) -> "Iterator[tuple[Session, Progress]]":
    """Yield a session that nobody else uses, with the embedded default where no model is given."""
    from qdqbench.eval.stages import stages
    from qdqbench.quantize.pipeline.ownership import identity_of, owned_folder
    from qdqbench.quantize.pipeline.session import Session

    session = Session(config, folder)
    identity = identity_of(kind, session)
    ready = partial(session.require_inputs, evaluates=kind == "methods")
    with (
        owned_folder(folder, identity, overwrite=options.overwrite, ready=ready, say=note),
        time_left() as show_progress,
    ):
        session.progress = lambda done, total: show_progress(done, total, "embedded default")
        if config.model is None:
            stages.embedded(session)
        yield session, show_progress


@command
def compare_calibration(
    recipe: RecipeName = DEFAULT_RECIPE, *, options: CalibrationOptions, json: Json = False
) -> None:
    """Compare calibration methods in one table; write the recipe with the best one."""
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.selection.methods import (
        MethodComparison,
        list_sections,
        methods_report,
        require_quantized,
    )
    from qdqbench.eval.selection.trials.report import write_result
    from qdqbench.eval.selection.trials.store import RECIPE_FILE
    from qdqbench.quantize.pipeline.ownership import run_folder

    config = options.config(options.find_recipe(recipe).ptq, command_line())
    folder = run_folder("methods", config, options.out)
    methods, smoothing = options.method or (), options.smoothing or ()
    # a wrong name fails before anything is loaded
    list_sections(config.recipe.calibration, methods, smoothing)
    require_quantized(config.recipe)
    with _open_session("methods", config, folder, options) as (session, show_progress):
        comparison = MethodComparison(session, options.samples, methods, smoothing, show_progress)
        _note_resume(comparison.trials.store)
        found = comparison.run()
        write_result(found, methods_report(found), folder)
    written = f"recipe: {folder / RECIPE_FILE}", f"report: {folder / 'methods.html'}"
    show(found, json, lambda table: render_screen(methods_report(table)), *written)
