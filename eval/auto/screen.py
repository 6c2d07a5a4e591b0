"""What a ladder says on the terminal."""

from typing import TYPE_CHECKING

from qdqbench.eval.auto.report import AutoView, auto_view
from qdqbench.eval.auto.results import Auto
from qdqbench.eval.report.formats import remarks, seconds

if TYPE_CHECKING:
    from rich.console import Group


def auto_summary(found: Auto) -> "Group":
    """One screen for the terminal, as a rich renderable."""
    from rich.console import Group, RenderableType
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    shown = auto_view(found)
    body = Text("\n".join([shown.headline, *shown.story]))
    colour = "green" if found.choice.passed else "red"
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("", "step", *_screen(shown.columns), "time"):
        table.add_column(name, no_wrap=True)
    for line in shown.lines:
        style = "green" if line.step.holds else "" if line.cells else "dim"
        cells = _screen(line.cells) or [line.step.status, "", "", ""]
        took = seconds(line.step.seconds) if line.step.status != "skipped" else ""
        table.add_row(*(Text(cell) for cell in (line.mark, line.step.name, *cells, took)), style=style)
    lines: list[RenderableType] = [
        Panel(body, title=Text(shown.page.heading), border_style=colour, title_align="left"),
        Text(shown.asked),
        table,
        *(Text(f"{names}: {text}", style="dim") for names, text in _said(shown)),
        *(Text(f"{name}: {value}") for name, value in shown.deploy),
    ]
    return Group(*lines, *remarks(shown.found.warnings, shown.notes))


def _screen(cells: list[str]) -> list[str]:
    """What fits 80 columns: all but the milliseconds, of one evaluation split."""
    names = {"against the step before": "before it"}
    kept = [cells[at] for at in (0, 1, 2, 4)] if cells else []
    return [names.get(cell, cell).split(" / ")[0] for cell in kept]


def _said(shown: AutoView) -> list[tuple[str, str]]:
    """What steps lack, or why they were skipped, told once for those that it is the same of."""
    said: dict[str, list[str]] = {}
    for line in shown.lines:
        if not line.chosen and not line.step.holds and line.told:
            said.setdefault(line.told[-1], []).append(line.step.name)
    return [(", ".join(names), text) for text, names in said.items()]
