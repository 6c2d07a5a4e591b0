"""The command `search`; registered in cli.py. Everything heavy is imported inside."""

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from qdqbench.cli import options as given
from qdqbench.cli import progress
from qdqbench.cli.options import grouped
from qdqbench.cli.terminal import Json, show
from qdqbench.quantize.utils.names import DEFAULT_RECIPE

WORK = "work"
EMBEDDED_MODEL = Path("embedded", "model", "config.json")


@dataclass(frozen=True)
class SearchSettings:
    """What is searched, and how."""

    trials: Annotated[int, typer.Option(min=1, help="Recipes to try, over all workers.")] = 40
    budget_s: Annotated[
        float | None, typer.Option("--budget", min=0, help="Seconds after which no further trial is started.")
    ] = None
    sensitivity: Annotated[
        Path | None,
        typer.Option(
            help="File of `qdqbench sensitivity`; its worst layers leave INT8 first. [default: measured]"
        ),
    ] = None
    storage: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL shared by all workers. [default: OUT/study.db]")
    ] = None
    study: Annotated[
        str | None, typer.Option("--study-name", help="Name of the study. [default: RECIPE-TASK]")
    ] = None
    samples: Annotated[
        int,
        typer.Option(min=1, help="Train rows that trials are scored on, apart from those that calibrate."),
    ] = 1024
    batch: Annotated[int, typer.Option(min=1, help="Batch size of the latency.")] = 32
    length: Annotated[int, typer.Option(min=1, help="Tokens per sequence of the latency.")] = 128
    objective: Annotated[
        Literal["divergence", "drop"],
        typer.Option(help="First objective: divergence from FP32's logits, or drop of the metric."),
    ] = "divergence"
    speed: Annotated[
        Literal["auto", "latency", "int8-share"],
        typer.Option(
            help="Second objective: measured latency, or INT8 share of multiply-adds; auto: latency where "
            "the engine runs here."
        ),
    ] = "auto"


@grouped
def search(  # noqa: PLR0913  (a command's options)
    recipe: given.RecipeName = DEFAULT_RECIPE,
    *,
    subject: given.Subject,
    out: Annotated[Path | None, typer.Option(help="Folder; none: runs/search-MODEL-RECIPE-TASK.")] = None,
    replace: given.Replace = False,
    settings: SearchSettings,
    max_length: given.MaxLength = None,
    backend: given.Backend = None,
    batch_size: given.BatchSize = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampler, bootstrap and inputs.")] = 0,
    json: Json = False,
) -> None:
    """Find the recipe for your model, data and machine: accuracy against latency, confirmed on validation."""
    from qdqbench.eval.reporting.render import render_screen
    from qdqbench.eval.runs.gate import issue_sentence
    from qdqbench.eval.selection.search.confirm import finish_search
    from qdqbench.eval.selection.search.report import describe_choice, search_report
    from qdqbench.eval.selection.search.results import SEARCH_FILE, SearchOptions, read_search
    from qdqbench.eval.selection.search.study import open_worker, run_trials
    from qdqbench.eval.selection.sensitivity.results import read_sensitivity
    from qdqbench.eval.stages import stages
    from qdqbench.quantize.pipeline.ownership import identity_of, owned_folder, run_folder
    from qdqbench.quantize.pipeline.session import Session
    from qdqbench.quantize.utils.errors import CheckFailed, UserError

    config = subject.config(subject.recipe(recipe, max_length, backend).ptq, batch_size=batch_size, seed=seed)
    folder, study = run_folder("search", config, out), settings.study
    study = study or f"{config.recipe.name}-{config.task.name}"
    if settings.sensitivity is not None:  # before anything is trained or loaded
        read_sensitivity(settings.sensitivity)
    if not replace and (folder / SEARCH_FILE).is_file():
        known = read_search(folder / SEARCH_FILE).study
        if known != study:
            raise UserError(
                f"{folder} holds the finished search {known!r}, and this is {study!r}; give another --out, "
                "or --replace to remove it and start from scratch"
            )
    session = Session(config, folder / WORK)
    options = SearchOptions(**asdict(settings))
    purpose = identity_of("search", session)
    with (
        owned_folder(folder, purpose, replace=replace, ready=session.require_inputs, say=given.note),
        ExitStack() as stack,
    ):
        session.folder.mkdir(exist_ok=True)
        shown = stack.enter_context(progress.trials(options.trials))
        if config.model is None and not (session.folder / EMBEDDED_MODEL).is_file():
            shown.say("training the embedded default")
            stages.embedded(session)
        worker = open_worker(session, options, stack, shown.say)
        run_trials(worker, shown.trial)
        found = finish_search(worker, folder, shown.say)
    show(found, json, lambda each: render_screen(search_report(each)), f"report: {folder / 'search.html'}")
    if not found.outcome.passed:
        failed = [issue_sentence(issue) for issue in found.outcome.issues if issue.state == "failed"]
        raise CheckFailed(f"the gate does not hold: {'; '.join(failed) or describe_choice(found)}")
