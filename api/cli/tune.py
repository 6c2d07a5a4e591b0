"""The commands that choose what becomes INT8, and how. Everything heavy is imported inside."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench._options import AutoOptions, CalibrationOptions, SearchCommandOptions, SensitivityOptions
from qdqbench._progress import displayed
from qdqbench.cli.options import RecipeName, command
from qdqbench.cli.terminal import Json, show_report
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.names import DEFAULT_RECIPE
from qdqbench.quantize.utils.progress import reporter

if TYPE_CHECKING:
    from qdqbench.quantize.pipeline.session import RunConfig
    from qdqbench.quantize.report.document import Report

WORK = "work"
EMBEDDED_MODEL = Path("embedded", "model", "config.json")


@command
def auto(*, options: AutoOptions, json: Json = False) -> None:
    """Find a recipe that meets your limits: try shipped ones, calibration, FP16 fallbacks, search, QAT."""
    from qdqbench._auto import start_auto
    from qdqbench.eval.selection.auto.report import auto_report, unmet_lines

    with displayed():
        result, folder = start_auto(options)
    show_report(result, json, auto_report, f"report: {folder / 'auto.html'}")
    if not result.choice.passed:
        raise CheckFailed(f"no recipe holds: {'; '.join(unmet_lines(result))}")


@command
def search(recipe: RecipeName = DEFAULT_RECIPE, *, options: SearchCommandOptions, json: Json = False) -> None:
    """Find the recipe for your model, data and machine: accuracy against latency, confirmed on validation."""
    from qdqbench.eval.runs.gate import issue_sentence
    from qdqbench.eval.selection.search.confirm import finish_search
    from qdqbench.eval.selection.search.report import describe_choice, search_report
    from qdqbench.eval.selection.search.results import SEARCH_FILE, read_search
    from qdqbench.eval.selection.search.worker import open_worker
    from qdqbench.eval.selection.sensitivity.results import read_sensitivity
    from qdqbench.eval.stages import stages
    from qdqbench.quantize.pipeline.ownership import identity_of, owned_folder, run_folder
    from qdqbench.quantize.pipeline.session import Session

    config = options.config(options.find_recipe(recipe).ptq)
    folder, study = run_folder("search", config, options.out), options.study_name
    study = study or f"{config.recipe.name}-{config.task.name}"
    if options.sensitivity is not None:  # before anything is trained or loaded
        read_sensitivity(options.sensitivity)
    if not options.overwrite and (folder / SEARCH_FILE).is_file():
        known = read_search(folder / SEARCH_FILE).study
        if known != study:
            raise UserError(
                f"{folder} holds the finished search {known!r}, and this is {study!r}; give another --out, "
                "or --overwrite to start from scratch"
            )
    session = Session(config, folder / WORK)
    identity, ready = identity_of("search", session), session.require_inputs
    with (
        displayed(),
        owned_folder(folder, identity, overwrite=options.overwrite, ready=ready),
        ExitStack() as stack,
    ):
        session.folder.mkdir(exist_ok=True)
        if config.model is None and not (session.folder / EMBEDDED_MODEL).is_file():
            reporter().begin("training the embedded default")
            stages.embedded(session)
        reporter().begin("preparing")
        worker = open_worker(session, options, stack)
        worker.run()
        found = finish_search(worker, folder)
    show_report(found, json, search_report, f"report: {folder / 'search.html'}")
    if not found.outcome.passed:
        failed = [issue_sentence(issue) for issue in found.outcome.issues if issue.state == "failed"]
        raise CheckFailed(f"the gate does not hold: {'; '.join(failed) or describe_choice(found)}")


@command
def sensitivity(
    recipe: RecipeName = DEFAULT_RECIPE, *, options: SensitivityOptions, json: Json = False
) -> None:
    """Find the layer that costs the accuracy: each alone in INT8, then all but it; write a recipe."""
    from qdqbench.eval.selection.sensitivity.measure import Measurement
    from qdqbench.eval.selection.sensitivity.report import choice_text, sensitivity_report

    config = options.config(options.find_recipe(recipe).ptq)
    found, written = _measure("sensitivity", config, options, Measurement, sensitivity_report)
    show_report(found, json, sensitivity_report, *written)
    if not found.choice.reached:
        raise CheckFailed(choice_text(found))


@command
def compare_calibration(
    recipe: RecipeName = DEFAULT_RECIPE, *, options: CalibrationOptions, json: Json = False
) -> None:
    """Compare calibration methods in one table; write the recipe with the best one."""
    from qdqbench.eval.selection import calibration_comparison as compared

    config = options.config(options.find_recipe(recipe).ptq)
    named, smooths = options.method or (), options.smoothing or ()
    # a wrong name fails before anything is loaded
    compared.list_sections(config.recipe.calibration, named, smooths)
    compared.require_quantized(config.recipe)
    measured = partial(compared.CalibrationMeasurement, methods=named, smooths=smooths)
    found, written = _measure("methods", config, options, measured, compared.calibration_report)
    show_report(found, json, compared.calibration_report, *written)


def _measure(
    kind: str,
    config: "RunConfig",
    options: SensitivityOptions | CalibrationOptions,
    measured: Any,
    report: "Callable[[Any], Report]",
) -> tuple[Any, list[str]]:
    """Return what `measured`, made of a session, finds, and where its recipe and report are."""
    from qdqbench.eval.selection.trials.results import write_result
    from qdqbench.eval.selection.trials.store import RECIPE_FILE
    from qdqbench.eval.stages import stages
    from qdqbench.quantize.pipeline.ownership import identity_of, owned_folder, run_folder
    from qdqbench.quantize.pipeline.session import Session

    folder = run_folder(kind, config, options.out)
    session = Session(config, folder)
    identity = identity_of(kind, session)
    ready = partial(session.require_inputs, evaluates=kind == "methods")
    with displayed(), owned_folder(folder, identity, overwrite=options.overwrite, ready=ready):
        if config.model is None:
            reporter().begin("training the embedded default")
            stages.embedded(session)
        measurement = measured(session, options.samples)
        if measurement.trials.store.resume_note:
            reporter().log(measurement.trials.store.resume_note)
        found = measurement.run()
        write_result(found, report(found), folder)
    return found, [f"recipe: {folder / RECIPE_FILE}", f"report: {folder / f'{kind}.html'}"]
