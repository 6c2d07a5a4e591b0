"""What `recipes list` prints: figures of each shipped recipe, which to start with, and what each does."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qdqbench.quantize.cli.terminal import console

if TYPE_CHECKING:
    from qdqbench.quantize.recipe.supported import Shipped


def print_recipes(rows: "Sequence[Shipped]") -> None:
    """The table, which to start with, what the figures are of, and what each recipe does."""
    from rich.table import Table

    from qdqbench.quantize.recipe import figures
    from qdqbench.quantize.recipe.supported import start_with

    to, table = console(), Table(box=None)
    for title in ("recipe", "on", "accuracy, worst", "speed-up"):
        table.add_column(title, no_wrap=True)
    for row in rows:
        if not row.figures:
            table.add_row(row.recipe, "", figures.NOT_MEASURED, figures.NOT_MEASURED, style="dim")
        for number, figure in enumerate(row.figures):
            on = f"{figures.DEVICES[figure.device]}{' *' if figure.device in row.start_on else ''}"
            cells = figures.worst_text(figure), figures.speed_text(figure)
            table.add_row("" if number else row.recipe, on, *cells)
    to.print(table)
    measured = [figure for row in rows for figure in row.figures]
    for line in (f"* {figures.rule(start_with())}", *figures.conditions(measured)):
        to.print(f"\n{line}", highlight=False)
    to.print()
    about: dict[str, str] = {}
    for row in rows:
        about.setdefault(row.name, row.description)
    for name, text in about.items():
        to.print(f"[bold]{name}[/bold]: {text}", highlight=False)
