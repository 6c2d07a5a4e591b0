"""The commands `sensitivity` and `methods`; registered in cli.py. Everything heavy is imported inside."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdqbench.cli import options
from qdqbench.cli.options import grouped
from qdqbench.cli.progress import time_left
from qdqbench.cli.terminal import Json, show
from qdqbench.quantize.utils.names import DEFAULT_RECIPE

if TYPE_CHECKING:
    from qdqbench.eval.selection.trials.store import Store
    from qdqbench.quantize.pipeline.session import RunConfig, Session
    from qdqbench.quantize.utils.progress import Progress


@grouped
def sensitivity(  # noqa: PLR0913  (a command's options)
    recipe: options.RecipeName = DEFAULT_RECIPE,
    *,
    subject: options.Subject,
    out: Annotated[
        Path | None, typer.Option(help="Folder; none: one in runs/ for model, recipe and task.")
    ] = None,
    replace: options.Replace = False,
    samples: Annotated[int, typer.Option(min=2, help="Training samples to measure on.")] = 512,
    max_length: options.MaxLength = None,
    backend: options.Backend = None,
    batch_size: options.BatchSize = 32,
    seed: options.MeasureSeed = 0,
    json: Json = False,
) -> None:
    """Which layer costs the accuracy: each alone in INT8, and everything but it; writes a recipe."""
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.selection.sensitivity.measure import Measurement
    from qdqbench.eval.selection.sensitivity.report import choice_text, sensitivity_report, write_sensitivity
    from qdqbench.quantize.pipeline.ownership import run_folder
    from qdqbench.quantize.utils.errors import CheckFailed

    config = subject.config(subject.recipe(recipe, max_length, backend).ptq, batch_size=batch_size, seed=seed)
    folder = run_folder("sensitivity", config, out)
    with _open_session("sensitivity", config, folder, replace) as (session, show_progress):
        measurement = Measurement(session, samples, show_progress)
        _note_resume(measurement.trials.store)
        found = measurement.run()
        write_sensitivity(found, folder)
    written = f"recipe: {folder / found.choice.file}", f"report: {folder / 'sensitivity.html'}"
    show(found, json, lambda result: render_screen(sensitivity_report(result)), *written)
    if not found.choice.reached:
        raise CheckFailed(choice_text(found))


def _note_resume(store: "Store[Any]") -> None:
    if store.resume_note:
        options.note(store.resume_note)


@contextmanager
def _open_session(
    kind: str, config: "RunConfig", folder: Path, replace: bool
) -> "Iterator[tuple[Session, Progress]]":
    """Yield a session that nobody else uses, with the embedded default where no model is given."""
    from qdqbench.eval.stages import stages
    from qdqbench.quantize.pipeline.ownership import identity_of, owned_folder
    from qdqbench.quantize.pipeline.session import Session

    session = Session(config, folder)
    identity = identity_of(kind, session)
    ready = partial(session.require_inputs, evaluates=kind == "methods")
    with (
        owned_folder(folder, identity, replace=replace, ready=ready, say=options.note),
        time_left() as show_progress,
    ):
        session.progress = lambda done, total: show_progress(done, total, "embedded default")
        if config.model is None:
            stages.embedded(session)
        yield session, show_progress


MethodOption = Annotated[
    list[str] | None, typer.Option(help="max, percentile/P, mse or entropy; several. None: all of them.")
]

SmoothOption = Annotated[
    list[str] | None, typer.Option(help="none, gain or an alpha; several. None: none and 0.65.")
]


@grouped
def methods(  # noqa: PLR0913  (a command's options)
    recipe: options.RecipeName = DEFAULT_RECIPE,
    *,
    subject: options.Subject,
    out: Annotated[Path | None, typer.Option(help="Folder; none: runs/methods-MODEL-RECIPE-TASK.")] = None,
    replace: options.Replace = False,
    method: MethodOption = None,
    smoothing: SmoothOption = None,
    samples: Annotated[int, typer.Option(min=2, help="Training samples to compare on.")] = 1024,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Validate on this many samples; the report warns.")
    ] = None,
    max_length: options.MaxLength = None,
    backend: options.Backend = None,
    batch_size: options.BatchSize = 32,
    seed: options.MeasureSeed = 0,
    json: Json = False,
) -> None:
    """Compare calibration methods in one table; writes the recipe with the best one."""
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.selection.methods.measure import MethodComparison, list_sections, require_quantized
    from qdqbench.eval.selection.methods.report import methods_report, write_methods
    from qdqbench.eval.selection.trials.store import RECIPE_FILE
    from qdqbench.quantize.pipeline.ownership import run_folder

    config = subject.config(
        subject.recipe(recipe, max_length, backend).ptq, batch_size=batch_size, seed=seed, limit=limit
    )
    folder = run_folder("methods", config, out)
    # a wrong name fails before anything is loaded
    list_sections(config.recipe.calibration, method or (), smoothing or ())
    require_quantized(config.recipe)
    with _open_session("methods", config, folder, replace) as (session, show_progress):
        comparison = MethodComparison(session, samples, method or (), smoothing or (), show_progress)
        _note_resume(comparison.trials.store)
        found = comparison.run()
        write_methods(found, folder)
    written = f"recipe: {folder / RECIPE_FILE}", f"report: {folder / 'methods.html'}"
    show(found, json, lambda methods: render_screen(methods_report(methods)), *written)
