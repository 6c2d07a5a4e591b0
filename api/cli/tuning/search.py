"""The command `search`; registered in cli.py. Everything heavy is imported inside."""

from contextlib import ExitStack
from pathlib import Path

from qdqbench._options import SearchCommandOptions
from qdqbench.cli import progress
from qdqbench.cli.options import RecipeName, command, note
from qdqbench.cli.terminal import Json, command_line, show
from qdqbench.quantize.utils.names import DEFAULT_RECIPE

WORK = "work"
EMBEDDED_MODEL = Path("embedded", "model", "config.json")


@command
def search(recipe: RecipeName = DEFAULT_RECIPE, *, options: SearchCommandOptions, json: Json = False) -> None:
    """Find the recipe for your model, data and machine: accuracy against latency, confirmed on validation."""
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.runs.gate import issue_sentence
    from qdqbench.eval.selection.search.confirm import finish_search
    from qdqbench.eval.selection.search.report import describe_choice, search_report
    from qdqbench.eval.selection.search.results import SEARCH_FILE, read_search
    from qdqbench.eval.selection.search.study import open_worker, run_trials
    from qdqbench.eval.selection.sensitivity.results import read_sensitivity
    from qdqbench.eval.stages import stages
    from qdqbench.quantize.pipeline.ownership import identity_of, owned_folder, run_folder
    from qdqbench.quantize.pipeline.session import Session
    from qdqbench.quantize.utils.errors import CheckFailed, UserError

    config = options.config(options.find_recipe(recipe).ptq, command_line())
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
        owned_folder(folder, identity, overwrite=options.overwrite, ready=ready, say=note),
        ExitStack() as stack,
    ):
        session.folder.mkdir(exist_ok=True)
        shown = stack.enter_context(progress.trials(options.trials))
        if config.model is None and not (session.folder / EMBEDDED_MODEL).is_file():
            shown.say("training the embedded default")
            stages.embedded(session)
        worker = open_worker(session, options, stack, shown.say)
        run_trials(worker, shown.trial)
        found = finish_search(worker, folder)
    show(found, json, lambda each: render_screen(search_report(each)), f"report: {folder / 'search.html'}")
    if not found.outcome.passed:
        failed = [issue_sentence(issue) for issue in found.outcome.issues if issue.state == "failed"]
        raise CheckFailed(f"the gate does not hold: {'; '.join(failed) or describe_choice(found)}")
