"""The commands `cost measure` and `cost fit`; registered in cli.py. Everything heavy is imported inside."""

from pathlib import Path
from typing import Annotated

import typer

from qdqbench.quantize.cli_tools import console

cost_app = typer.Typer(no_args_is_help=True, help="Make the cost model that `search` uses without a GPU.")


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
) -> None:
    """Build engines with INT8 in different places and time them against their FP16 twin, on a GPU."""
    from qdqbench.eval.cost_measure import measure_costs
    from qdqbench.quantize.errors import UserError

    if budget is not None and not budget > 0:
        raise UserError(f"--budget is {budget}; give a positive number of seconds")
    shapes = [
        (b, n) for n in dict.fromkeys(length or (32, 128)) for b in dict.fromkeys(batch or (1, 8, 32, 128))
    ]
    done = measure_costs(
        model,
        shapes,
        out,
        placements=placements,
        seed=seed,
        budget_s=budget,
        say=lambda text: console().print(text, highlight=False, soft_wrap=True),
    )
    console().print(f"{out}: {done.rows} new rows of {done.engines} engines; {done.ended}", highlight=False)


@cost_app.command("fit")
def fit(
    rows: Annotated[list[Path], typer.Argument(help="Files of `cost measure`, or fitted cost models.")],
    out: Annotated[Path, typer.Option(help="Cost model to write.")],
) -> None:
    """Fit the cost model and print its error on engines that were left out."""
    from rich.table import Table

    from qdqbench.quantize import files
    from qdqbench.quantize.cost_model import TERMS
    from qdqbench.quantize.cost_rows import fit as fit_rows
    from qdqbench.quantize.cost_rows import read_rows

    found = {row.model_dump_json(): row for path in rows for row in read_rows(path)}  # a row counts once
    model = fit_rows([*found.values()])
    files.write_text(out, model.model_dump_json() + "\n")
    table = Table("term", "coefficient, ns", "one unit of it", box=None)
    for name, what in TERMS.items():
        table.add_row(name, f"{1e6 * model.coefficients[name]:.4g}", what)
    console().print(table)
    error = model.leave_one_out
    made = f"{model.n} rows, {model.engines} engines, {model.gpu}, {model.backend} {model.version}"
    console().print(
        f"{out}: {made}. Error on engines left out: latency {error.ms_median:.1%} (median), "
        f"{error.ms_p90:.1%} (90th percentile); speed-up {error.speedup_median:.1%}, {error.speedup_p90:.1%}",
        highlight=False,
    )
