"""The commands that choose what becomes INT8, and how."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from qdqbench import _options
from qdqbench._auto import start_auto
from qdqbench.cli.answer import Answer
from qdqbench.eval.runs.gate import issue_sentence
from qdqbench.eval.selection import calibration_comparison as compared
from qdqbench.eval.selection.auto.report import auto_report, unmet_lines
from qdqbench.eval.selection.search.confirm import finish_search
from qdqbench.eval.selection.search.report import describe_choice, search_report
from qdqbench.eval.selection.search.results import SEARCH_FILE, read_search
from qdqbench.eval.selection.search.worker import open_worker
from qdqbench.eval.selection.sensitivity.measure import Measurement
from qdqbench.eval.selection.sensitivity.report import choice_text, sensitivity_report
from qdqbench.eval.selection.sensitivity.results import read_sensitivity
from qdqbench.eval.selection.trials.results import write_result
from qdqbench.eval.selection.trials.store import RECIPE_FILE
from qdqbench.eval.stages import stages
from qdqbench.quantize.pipeline.ownership import identity_of, owned_folder, run_folder
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.report.document import Report
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.progress import reporter

WORK = "work"
EMBEDDED_MODEL = Path("embedded", "model", "config.json")


def auto(options: _options.AutoOptions) -> Answer:
    result, folder = start_auto(options)
    failure = CheckFailed(f"no recipe holds: {'; '.join(unmet_lines(result))}")
    lines = [f"report: {folder / 'auto.html'}"]
    return Answer(result, auto_report(result), lines, None if result.choice.passed else failure)


def search(recipe: str | None, options: _options.SearchCommandOptions) -> Answer:
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
    with _held("search", session, folder, options), ExitStack() as stack:
        reporter().begin("preparing")
        worker = open_worker(session, options, stack)
        worker.run()
        found = finish_search(worker, folder)
    error = None
    if not found.outcome.passed:
        failed = [issue_sentence(issue) for issue in found.outcome.issues if issue.state == "failed"]
        error = CheckFailed(f"the gate does not hold: {'; '.join(failed) or describe_choice(found)}")
    return Answer(found, search_report(found), [f"report: {folder / 'search.html'}"], error)


def sensitivity(recipe: str | None, options: _options.SensitivityOptions) -> Answer:
    config = options.config(options.find_recipe(recipe).ptq)
    answer = _measure("sensitivity", config, options, Measurement, sensitivity_report)
    if not answer.found.choice.reached:
        answer.error = CheckFailed(choice_text(answer.found))
    return answer


def compare_calibration(recipe: str | None, options: _options.CalibrationOptions) -> Answer:
    config = options.config(options.find_recipe(recipe).ptq)
    named, smooths = options.method or (), options.smoothing or ()
    # a wrong name fails before anything is loaded
    compared.list_sections(config.recipe.calibration, named, smooths)
    compared.require_quantized(config.recipe)
    measured = partial(compared.CalibrationMeasurement, methods=named, smooths=smooths)
    return _measure("methods", config, options, measured, compared.calibration_report)


def _measure(
    kind: str,
    config: RunConfig,
    options: _options.SensitivityOptions | _options.CalibrationOptions,
    measured: Any,
    report: Callable[[Any], Report],
) -> Answer:
    """Return what `measured`, made of a session, finds."""
    folder = run_folder(kind, config, options.out)
    session = Session(config, folder)
    with _held(kind, session, folder, options):
        measurement = measured(session, options.samples)
        if measurement.trials.store.resume_note:
            reporter().log(measurement.trials.store.resume_note)
        found = measurement.run()
        shown = report(found)
        write_result(found, shown, folder)
    return Answer(found, shown, [f"recipe: {folder / RECIPE_FILE}", f"report: {folder / f'{kind}.html'}"])


@contextmanager
def _held(kind: str, session: Session, folder: Path, options: _options.RecipeOptions) -> Iterator[None]:
    """Hold the folder of a command, with the built-in BERT where no model is named."""
    identity = identity_of(kind, session)
    ready = partial(session.require_inputs, evaluates=kind != "sensitivity")
    with owned_folder(folder, identity, overwrite=options.overwrite, ready=ready):
        session.folder.mkdir(exist_ok=True)
        if session.config.model is None and not (session.folder / EMBEDDED_MODEL).is_file():
            reporter().begin("training the built-in BERT")
            stages.embedded(session)
        yield
