"""The command `search`; registered in cli.py. Everything heavy is imported inside."""

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench.quantize.cli import options as given
from qdqbench.quantize.cli import progress
from qdqbench.quantize.cli.options import grouped
from qdqbench.quantize.cli.terminal import Json, console, print_json, show, show_json
from qdqbench.quantize.core.names import DEFAULT_RECIPE

if TYPE_CHECKING:
    from qdqbench.eval.search.results import Search
    from qdqbench.eval.search.worker import SearchOptions
    from qdqbench.quantize.rundir.session import Session

WORK = "work"
EMBEDDED_MODEL = Path("embedded", "model", "config.json")


@dataclass(frozen=True)
class Wanted:
    """What is searched, and how."""

    trials: Annotated[int, typer.Option(min=1, help="Recipes to try, over all workers.")] = 40
    budget_s: Annotated[
        float | None, typer.Option("--budget", min=0, help="Seconds after which no further trial is started.")
    ] = None
    sensitivity: Annotated[
        Path | None, typer.Option(help="File of `qdqbench sensitivity`: what to keep out of INT8 first.")
    ] = None
    storage: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL shared by all workers; none: OUT/study.db.")
    ] = None
    study: Annotated[str | None, typer.Option("--study-name", help="None: RECIPE-TASK.")] = None
    samples: Annotated[
        int, typer.Option(min=1, help="Train rows that judge a trial; none of them calibrates.")
    ] = 1024
    batch: Annotated[int, typer.Option(min=1, help="Batch size of the latency.")] = 32
    length: Annotated[int, typer.Option(min=1, help="Tokens per sequence of the latency.")] = 128
    latency: Annotated[
        str, typer.Option(help="engine: measured here; model: modelled; auto: engine where it runs here.")
    ] = "auto"
    cost_model: Annotated[
        Path | None, typer.Option(help="File of `qdqbench cost fit`; none: the shipped one.")
    ] = None
    objective: Annotated[
        str,
        typer.Option(
            "--accuracy", help="First objective: divergence from FP32's logits, or drop of the metric."
        ),
    ] = "divergence"


@grouped
def search(  # noqa: PLR0913  (a command's options)
    recipe: given.RecipeName = DEFAULT_RECIPE,
    *,
    subject: given.Subject,
    out: Annotated[Path | None, typer.Option(help="Folder; none: runs/search-MODEL-RECIPE-TASK.")] = None,
    replace: given.Replace = False,
    wanted: Wanted,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what it would take; try nothing.", show_default=False)
    ] = False,
    max_length: given.MaxLength = None,
    backend: given.Backend = None,
    batch_size: given.BatchSize = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampler, bootstrap and inputs.")] = 0,
    json: Json = False,
) -> None:
    """Find the recipe for your model, data and machine: accuracy against latency, confirmed on validation."""
    from qdqbench.eval.search.report import search_summary
    from qdqbench.eval.search.worker import SearchOptions
    from qdqbench.quantize.core.errors import CheckFailed, UserError
    from qdqbench.quantize.rundir.ownership import identity_of, owned_folder, run_folder
    from qdqbench.quantize.rundir.session import Session

    if wanted.latency not in ("auto", "engine", "model"):
        raise UserError(f"--latency {wanted.latency!r} is unknown; use auto, engine or model")
    if wanted.objective not in ("divergence", "drop"):
        raise UserError(f"--accuracy {wanted.objective!r} is unknown; use divergence or drop")
    config = subject.config(subject.recipe(recipe, max_length, backend).ptq, batch_size=batch_size, seed=seed)
    folder = run_folder("search", config, out)
    _require_inputs(wanted.sensitivity, wanted.cost_model)
    if not replace:
        _require_own(folder, wanted.study or f"{config.recipe.name}-{config.task.name}")
    session = Session(config, folder / WORK)
    options = SearchOptions(**asdict(wanted))
    identity, anew = identity_of("search", session), replace and not plan  # which removes nothing
    with owned_folder(folder, identity, replace=anew, ready=session.require_inputs, say=given.note):
        if plan:
            _plan(session, options, folder, json=json)
            return
        session.folder.mkdir(exist_ok=True)
        found = _search(session, options, folder, json=json)
    if found is None:  # other workers go on
        return
    show(found, json, search_summary, f"report: {folder / 'search.html'}")
    if not found.outcome.passed:
        raise CheckFailed(f"the gate does not hold: {'; '.join(found.outcome.failures)}")


def _plan(session: "Session", options: "SearchOptions", folder: Path, *, json: bool) -> None:
    from qdqbench.eval.search.plan import plan_lines, plan_search
    from qdqbench.eval.stages import stages

    with progress.status() as say:
        if session.config.model is None and not (session.folder / EMBEDDED_MODEL).is_file():
            say("training the embedded default")
            stages.embedded(session)
        say("timing a few rows")
        found = plan_search(session, options, folder)
    show(found, json, plan_lines)


def _require_inputs(sensitivity: Path | None, cost_model: Path | None) -> None:
    """Files that are named can be read; told before anything is trained or loaded."""
    from qdqbench.eval.placement.cost_model import load_cost_model
    from qdqbench.eval.sensitivity.results import read_sensitivity

    if sensitivity is not None:
        read_sensitivity(sensitivity)
    if cost_model is not None:
        load_cost_model(cost_model)


def _require_own(out: Path, study: str) -> None:
    """The folder holds no finished search of another study, which this one would replace.

    Raises:
        UserError: it does.
    """
    from qdqbench.eval.search.results import SEARCH_FILE, read_search
    from qdqbench.quantize.core.errors import UserError

    if (out / SEARCH_FILE).is_file() and (known := read_search(out / SEARCH_FILE).study) != study:
        raise UserError(
            f"{out} holds the finished search {known!r}, and this is {study!r}; give another --out, or "
            "--replace to move it to a folder next to it and start over"
        )


def _search(session: "Session", options: "SearchOptions", folder: Path, *, json: bool) -> "Search | None":
    from qdqbench.eval.search.finish import finish
    from qdqbench.eval.search.trials import open_worker, run_trials
    from qdqbench.eval.stages import stages

    with ExitStack() as stack:
        shown = stack.enter_context(progress.trials(options.trials))
        if session.config.model is None and not (session.folder / EMBEDDED_MODEL).is_file():
            shown.say("training the embedded default")
            stages.embedded(session)
        worker = open_worker(session, options, stack, shown.say)
        if not run_trials(worker, shown.trial):
            if json:
                print_json({"study": worker.study.study_name, "finished": False})
            else:
                console().print(
                    "other workers run the last trials, and the last of them writes the report; "
                    "if none does, run this command again"
                )
            return None
        return finish(worker, folder, shown.say)


cost_app = typer.Typer(no_args_is_help=True, help="Make the cost model that `search --latency model` uses.")


@cost_app.command("measure")
def measure(  # noqa: PLR0913, PLR0917  (a command's options)
    out: Annotated[Path, typer.Option(help="File of rows, one JSON object a line; rows are added to it.")],
    model: Annotated[
        str, typer.Option(help="minilm, bert-base or bert-large with random weights, or a model folder.")
    ] = "bert-base",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size; repeatable. None: 1, 8, 32, 128.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens per sequence; repeatable. None: 32, 128.")
    ] = None,
    placements: Annotated[int, typer.Option(min=1, help="Engines: fixed placements, then random ones.")] = 24,
    budget: Annotated[
        float | None, typer.Option(help="Seconds after which no further engine is started.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, inputs and placements.")] = 0,
    json: Json = False,
) -> None:
    """Build engines with INT8 in different places and time them against their FP16 twin, on a GPU."""
    from qdqbench.eval.placement.measure import measure_costs
    from qdqbench.quantize.cli.schemas import CostRows
    from qdqbench.quantize.core.errors import UserError

    if budget is not None and not budget > 0:
        raise UserError(f"--budget is {budget}; give a positive number of seconds")
    shapes = [
        (b, n) for n in dict.fromkeys(length or (32, 128)) for b in dict.fromkeys(batch or (1, 8, 32, 128))
    ]
    with progress.status() as shown:
        done = measure_costs(
            model,
            shapes,
            out,
            placements=placements,
            seed=seed,
            budget_s=budget,
            say=shown,
        )
    if json:
        show_json(CostRows(file=str(out), rows=done.rows, engines=done.engines, ended=done.ended))
        return
    console().print(f"{out}: {done.rows} new rows of {done.engines} engines; {done.ended}", highlight=False)


@cost_app.command("fit")
def fit(
    rows: Annotated[list[Path], typer.Argument(help="Files of `cost measure`, or fitted cost models.")],
    out: Annotated[Path, typer.Option(help="Cost model to write.")],
    json: Json = False,
) -> None:
    """Fit the cost model and print its error on engines that were left out."""
    from rich.table import Table

    from qdqbench.eval.placement.cost_fit import fit_costs as fit_rows
    from qdqbench.eval.placement.cost_fit import read_rows
    from qdqbench.eval.placement.cost_model import TERMS
    from qdqbench.quantize.cli.schemas import CostFit
    from qdqbench.quantize.core import files

    found = {row.model_dump_json(): row for path in rows for row in read_rows(path)}  # a row counts once
    model = fit_rows([*found.values()])
    files.write_text(out, model.model_dump_json() + "\n")
    error = model.leave_one_out
    if json:
        fitted = {name: getattr(model, name) for name in ("engines", "gpu", "backend", "version")}
        show_json(CostFit(file=str(out), rows=model.n, leave_one_out=error.model_dump(), **fitted))
        return
    table = Table("term", "coefficient, ns", "one unit of it", box=None)
    for name, what in TERMS.items():
        table.add_row(name, f"{1e6 * model.coefficients[name]:.4g}", what)
    console().print(table)
    made = f"{model.n} rows, {model.engines} engines, {model.gpu}, {model.backend} {model.version}"
    console().print(
        f"{out}: {made}. Error on engines left out: latency {error.ms_median:.1%} (median), "
        f"{error.ms_p90:.1%} (90th percentile); speed-up {error.speedup_median:.1%}, {error.speedup_p90:.1%}",
        highlight=False,
    )
