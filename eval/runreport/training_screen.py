"""What a fine-tuning says on the terminal."""

from typing import TYPE_CHECKING

from qdqbench.eval.report.formats import first
from qdqbench.eval.runreport.training_report import finetuning_view
from qdqbench.quantize.core.training_results import Finetuning

if TYPE_CHECKING:
    from rich.console import Group


def finetune_lines(result: Finetuning) -> "Group":
    """One screen for the end of the command, as a rich renderable: verdict, seeds, the first warnings."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    shown = finetuning_view(result)
    colour = {"passed": "green", "partly": "yellow", "failed": "red"}[shown.status]
    kept = ["steps", "best step", "samples/s", "time"]  # what fits beside two metrics
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("seed", *shown.metrics, *kept):
        table.add_column(Text(name), no_wrap=name in shown.metrics)  # Text: names are never read as markup
    for line in shown.lines:
        cells = dict(zip(shown.columns, line.cells, strict=False))
        values = [*line.metrics, *(cells.get(name, "") for name in kept)]
        if line.failure:
            values = ["failed", *[""] * (len(shown.metrics) + len(kept) - 1)]  # the headline says why
        table.add_row(*(Text(cell) for cell in (line.seed + (" *" if line.best else ""), *values)))
    if shown.spread:
        table.add_row(*map(Text, ["mean", *shown.spread, *[""] * len(kept)]))
    warned = [Text(f"warning: {line}", style="yellow") for line in first(shown.warnings, 3, "finetune.md")]
    panel = Panel(Text(shown.headline), title=Text(shown.title), border_style=colour, title_align="left")
    return Group(panel, table, *warned)
