"""The command `qat`; registered in cli.py. Everything heavy is imported inside."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdqbench.quantize.cli import options as given
from qdqbench.quantize.cli import progress
from qdqbench.quantize.cli.groups import grouped
from qdqbench.quantize.cli.run import judge
from qdqbench.quantize.cli.terminal import Json, console

if TYPE_CHECKING:
    from qdqbench.quantize.rundir.session import Session

DEFAULT_QAT = "bert-int8-attention-qat"


@grouped
def qat(  # noqa: PLR0913  (a command's options)
    recipe: given.RecipeName = DEFAULT_QAT,
    *,
    subject: given.Subject,
    out: Annotated[Path | None, typer.Option(help="Run directory; none: runs/RECIPE-TASK.")] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what would be trained, and at what cost; train nothing.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate on this many samples; the report warns.")
    ] = None,
    batch_size: given.BatchSize = 32,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of bootstrap, parity draw and embedded default.")
    ] = 0,
    json: Json = False,
) -> None:
    """Quantization-aware training, then on to engine and report; on one GPU or many."""
    from qdqbench.eval.api.runs import run_folder
    from qdqbench.eval.runs.run import follow, run_until
    from qdqbench.quantize.qat.stage import settings_of, train_on_all
    from qdqbench.quantize.recipe.schema import load_recipe
    from qdqbench.quantize.rundir.pipeline import open_run
    from qdqbench.quantize.rundir.session import Session
    from qdqbench.quantize.train.processes import leads

    config = subject.config(load_recipe(recipe), batch_size=batch_size, seed=seed, limit=limit)
    folder = run_folder(config, out)
    session = Session(config, folder)
    settings_of(session)  # before anything is written
    if leads():
        session = open_run(config, folder)
    if plan:
        _plan(session, json)
        return
    with progress.stages(quiet=json) as show:
        start = follow(session, show)
        train_on_all(session, lambda stage: run_until(session, stage, start))
    if leads():
        with progress.stages(quiet=json) as show:
            results = run_until(session, None, follow(session, show))
        assert results is not None
        judge(results, folder, json=json)


def _plan(session: "Session", json: bool) -> None:
    from qdqbench.eval.runs.qat_plan import make_plan, plan_lines

    found = make_plan(session)
    if found is None:  # not the main process
        return
    if json:
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    else:
        console().print(plan_lines(found))
