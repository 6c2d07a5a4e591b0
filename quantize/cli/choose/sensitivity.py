"""The command `sensitivity`; registered in cli.py. Everything heavy is imported inside."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench.quantize.cli import options
from qdqbench.quantize.cli.options import grouped
from qdqbench.quantize.cli.progress import time_left
from qdqbench.quantize.cli.terminal import Json, show
from qdqbench.quantize.core.names import DEFAULT_RECIPE

if TYPE_CHECKING:
    from qdqbench.eval.methods.results import Methods
    from qdqbench.eval.sensitivity.results import Sensitivity
    from qdqbench.quantize.core.progress import Progress
    from qdqbench.quantize.rundir.session import RunConfig, Session


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
    from qdqbench.eval.sensitivity.report import sensitivity_summary
    from qdqbench.quantize.core.errors import CheckFailed
    from qdqbench.quantize.rundir.ownership import run_folder

    config = subject.config(subject.recipe(recipe, max_length, backend).ptq, batch_size=batch_size, seed=seed)
    folder = run_folder("sensitivity", config, out)
    found = _measure(config, folder, samples, replace=replace)
    written = f"recipe: {folder / found.choice.file}", f"report: {folder / 'sensitivity.html'}"
    show(found, json, sensitivity_summary, *written)
    if not found.choice.reached:
        raise CheckFailed(found.choice.reason)


@contextmanager
def _opened(
    kind: str, config: "RunConfig", folder: Path, replace: bool
) -> "Iterator[tuple[Session, Progress]]":
    """A session that nobody else is at, with the embedded default where no model is given."""
    from qdqbench.eval.stages import stages
    from qdqbench.quantize.rundir.ownership import identity_of, owned_folder
    from qdqbench.quantize.rundir.session import Session

    session = Session(config, folder)
    identity = identity_of(kind, session)
    ready = partial(session.require_inputs, evaluates=kind == "methods")
    with (
        owned_folder(folder, identity, replace=replace, ready=ready, say=options.note),
        time_left() as told,
    ):
        session.progress = lambda done, total: told(done, total, "embedded default")
        if config.model is None:
            stages.embedded(session)
        yield session, told


def _measure(config: "RunConfig", folder: Path, samples: int, *, replace: bool) -> "Sensitivity":
    from qdqbench.eval.sensitivity.measure import Measurement
    from qdqbench.eval.sensitivity.report import write_sensitivity

    with _opened("sensitivity", config, folder, replace) as (session, told):
        measurement = Measurement(session, samples, told)
        if said := measurement.ledger.told():
            options.note(said)
        found = measurement.run()
        write_sensitivity(found, folder)
    return found


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
    smooth: SmoothOption = None,
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
    from qdqbench.eval.methods.report import methods_summary
    from qdqbench.eval.methods.results import METHODS_RECIPE
    from qdqbench.quantize.rundir.ownership import run_folder

    config = subject.config(
        subject.recipe(recipe, max_length, backend).ptq, batch_size=batch_size, seed=seed, limit=limit
    )
    folder = run_folder("methods", config, out)
    found = _compare(config, folder, samples, method or [], smooth or [], replace=replace)
    written = f"recipe: {folder / METHODS_RECIPE}", f"report: {folder / 'methods.html'}"
    show(found, json, methods_summary, *written)


def _compare(  # noqa: PLR0913
    config: "RunConfig",
    folder: Path,
    samples: int,
    methods: list[str],
    smooths: list[str],
    *,
    replace: bool,
) -> "Methods":
    from qdqbench.eval.methods.cases import require_quantized
    from qdqbench.eval.methods.measure import Comparing
    from qdqbench.eval.methods.report import write_methods
    from qdqbench.eval.methods.sections import sections

    sections(config.recipe.calibration, methods, smooths)  # a wrong name is told before anything is loaded
    require_quantized(config.recipe)
    with _opened("methods", config, folder, replace) as (session, told):
        comparing = Comparing(session, samples, methods, smooths, told)
        if said := comparing.ledger.told():
            options.note(said)
        found = comparing.run()
        write_methods(found, folder)
    return found
