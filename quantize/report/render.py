"""The three renderers of a report: HTML, Markdown, and a terminal."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report import formats
from qdqbench.quantize.utils.files import LOOK, write_text

if TYPE_CHECKING:
    from jinja2 import Template
    from rich.console import Group, RenderableType
    from rich.text import Text

TEMPLATES = Path(__file__).parent / "templates"
# a fold without its blocks
Leaf = doc.Prose | doc.Bullets | doc.Table | doc.Pairs | doc.Chart | doc.Code | doc.Fold
MOST_REMARKS, MOST_FAILURES = 3, 5  # of each kind, on a terminal
SIGNS: dict[doc.State, str] = {"good": "✓", "bad": "✗", "unclear": "?"}
STYLES: dict[doc.State, str] = {"good": "green", "bad": "red", "unclear": "yellow", "quiet": "dim"}


def write_report(report: doc.Report, folder: Path, name: str) -> list[Path]:
    """Write `NAME.md` and `NAME.html` (no external request); neither where one cannot be rendered."""
    texts = {folder / f"{name}.md": render_markdown(report), folder / f"{name}.html": render_html(report)}
    for path, content in texts.items():
        write_text(path, content)
    return list(texts)


def render_html(report: doc.Report) -> str:
    return _page_template().render(report=report, page=report.page)


# Markdown


def render_markdown(report: doc.Report) -> str:
    page = report.page
    parts = [f"# {_line(page.heading)}"]
    if (verdict := report.verdict) is not None:
        sign = _sign(verdict.state)
        lines = [f"- **{name}**: {_sign(state)}{prose(text)}." for name, text, state in verdict.lines]
        failures = [f"- ✗ **{prose(line)}**" for line in verdict.failures]
        parts += [
            f"**{sign}{prose(verdict.title)}.** {prose(verdict.sentence)}".strip(),
            "\n".join([*lines, *failures, *(f"- {prose(line)}" for line in verdict.notes)]),
        ]
    parts += _markdown(report.lead)
    if report.warnings:
        title = report.warnings_title or "Warnings"
        parts += [f"## {_line(title)}", _bullets(report.warnings)]
    if report.notes:
        parts += ["## Notes", _bullets(report.notes)]
    for section in report.sections:
        if "text" in section.on:
            sign = f" {SIGNS[section.state]}" if section.state in ("good", "bad") else ""
            parts.append(f"## {prose(section.title)}{sign}")
            parts += _markdown(section.blocks)
    if page.command:
        parts += ["## Run it again", f"Made {_line(page.created)} by", formats.fenced(page.command)]
    if page.recipe:
        parts += ["Recipe:", formats.fenced(formats.yaml_text(page.recipe), "yaml")]
    parts += [_pairs(title, rows) for title, rows in page.groups.items() if rows]
    return "\n\n".join(filter(None, parts)) + "\n"


def _sign(state: doc.State) -> str:
    return f"{SIGNS[state]} " if state in SIGNS else ""


def _leaves(blocks: Sequence[doc.Block], medium: doc.Medium) -> Iterator[Leaf]:
    """Yield the blocks that a medium shows, one below the other; of a fold its title and what is in it."""
    for block in blocks:
        if isinstance(block, str):
            if medium != "screen":
                yield doc.Prose(block)
        elif medium not in block.on:
            continue
        elif isinstance(block, doc.Columns):
            for part in block.parts:
                yield from _leaves(part, medium)
        elif isinstance(block, doc.Fold):
            yield doc.Fold(block.title, (), state=block.state)
            yield from _leaves(block.blocks, medium)
        else:
            yield block


def _markdown(blocks: Sequence[doc.Block]) -> Iterator[str]:
    for block in _leaves(blocks, "text"):
        if isinstance(block, doc.Prose):
            yield f"**{prose(block.text)}**" if block.state in ("bad", "unclear") else prose(block.text)
        elif isinstance(block, doc.Bullets):
            yield _bullets(block.lines, SIGNS["bad"] + " " if block.state == "bad" else "")
        elif isinstance(block, doc.Table | doc.Fold):
            if block.title:
                yield f"### {prose(block.title)}"
            if isinstance(block, doc.Table):
                yield _table_markdown(block)
        elif isinstance(block, doc.Pairs) and block.definitions:
            yield "\n".join(f"- {prose(name)}: {prose(value)}" for name, value in block.rows)
        elif isinstance(block, doc.Pairs):
            yield _pairs(block.title, block.rows)
        elif isinstance(block, doc.Code):
            yield formats.fenced(block.text, block.language)


def _bullets(lines: Sequence[str], sign: str = "") -> str:
    return "\n".join(f"- {sign}{prose(line)}" for line in lines)


def _pairs(title: str, rows: Sequence[tuple[str, str]]) -> str:
    head = [f"| {_line(title)} | |", "|---|---|"]
    return "\n".join(head + [f"| {_line(name)} | {_line(value)} |" for name, value in rows])


def _table_markdown(table: doc.Table) -> str:
    texts = text_columns(table)
    shown = table.rows if table.most is None else table.rows[: table.most]
    lines = [
        _joined([_line(name) for name in table.columns]),
        _joined(["---" if at in texts else "--:" for at in range(len(table.columns))], gap=""),
    ]
    for each in [*shown, *table.foot]:
        cells = [_cell_markdown(cell) for cell in each.cells]
        if each.chosen:
            cells[0] += " (chosen)"
        lines.append(_joined(cells + [""] * (len(table.columns) - len(cells))))
    return "\n".join(lines)


def _joined(cells: Sequence[str], gap: str = " ") -> str:
    return "|" + "|".join(f"{gap}{cell}{gap}" if cell else gap for cell in cells) + "|"


def _cell_markdown(cell: doc.Cell) -> str:
    text = formats.code(cell.text) if cell.code else formats.inline(cell.text.replace("\n", ", "))
    if cell.state == "bad":
        text = f"**{text} ✗**" if text else "✗"
    elif not text and cell.state in SIGNS:
        text = SIGNS[cell.state]
    return f"{text} ({formats.inline(cell.note)})" if cell.note else text


def prose(text: str) -> str:
    """Return text as one line of Markdown, in which what lies between backticks is code."""
    parts = re.split("`([^`]+)`", " ".join(text.split()))
    return "".join(formats.code(part) if at % 2 else _line(part, part) for at, part in enumerate(parts))


def _line(text: str, like: str = "") -> str:
    """Return text that stays text in Markdown, with the blanks around it that `like` has."""
    before, after = (" " * (part != part.strip()) for part in (like[:1], like[-1:])) if like else ("", "")
    found = formats.text(text)
    return f"{before}{found}{after}" if found else before


def text_columns(table: doc.Table) -> set[int]:
    return {at % len(table.columns) for at in table.texts} if table.columns else set()


# Terminal


def render_screen(report: doc.Report) -> "Group":
    """Return what a terminal of 80 columns shows: the verdict, blocks for a screen, the first remarks."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text  # names are never read as markup

    parts: list[RenderableType] = []
    if (verdict := report.verdict) is not None:
        body = Text(verdict.sentence)
        for name, text, state in verdict.lines:
            body.append(f"\n{name}: " if body else f"{name}: ", style="bold")
            body.append(f"{_sign(state)}{text}", style=STYLES.get(state, ""))
        for line in formats.first(verdict.failures, MOST_FAILURES, "the report"):
            body.append(f"\n✗ {line}", style="red")
        for line in formats.first(verdict.notes, MOST_REMARKS, "the report"):
            body.append(f"\n{line}", style="yellow")
        parts.append(Text(report.page.heading, style="bold"))
        border = STYLES.get(verdict.state, "none")
        parts.append(Panel(body, title=Text(verdict.title), border_style=border, title_align="left"))
    parts += _screen([*report.lead, *(block for section in report.sections for block in section.blocks)])
    for lines, name, style in ((report.warnings, "warning", "yellow"), (report.notes, "note", "dim")):
        parts += [
            Text(f"{name}: {line}", style=style) for line in formats.first(lines, MOST_REMARKS, "the report")
        ]
    return Group(*parts)


def _screen(blocks: Sequence[doc.Block]) -> "Iterator[RenderableType]":
    from rich.padding import Padding
    from rich.table import Table as Grid

    for block in _leaves(blocks, "screen"):
        if isinstance(block, doc.Fold):
            yield _text(f"\n{block.title}", style=STYLES.get(block.state, "bold"))
        elif isinstance(block, doc.Table | doc.Pairs) and block.title:
            yield _text(block.title, style="bold")
        if isinstance(block, doc.Prose):
            yield _text(block.text, style=STYLES.get(block.state, ""))
        elif isinstance(block, doc.Code):
            yield _text(block.text)
        elif isinstance(block, doc.Bullets):
            sign, style = "✗ " if block.state == "bad" else "", STYLES.get(block.state, "")
            texts = (_text(f"{sign}{line}", style) for line in block.lines)
            yield from (Padding(text, (0, 0, 0, block.indent), expand=False) for text in texts)
        elif isinstance(block, doc.Pairs):
            grid = Grid(box=None, pad_edge=False, show_header=False, padding=(0, 1))
            for name, value in block.rows:
                grid.add_row(_text(f"  {name}"), _text(value))
            yield grid
        elif isinstance(block, doc.Table):
            kept = range(len(block.columns)) if block.screen is None else block.screen
            grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
            for at in kept:
                grid.add_column(_text(block.columns[at]), overflow="fold")
            for each in [*block.rows, *block.foot]:
                cells = [each.cells[at] if at < len(each.cells) else doc.Cell() for at in kept]
                grid.add_row(*map(_cell_screen, cells), style="bold" if each.chosen else "")
            yield grid


def _text(text: str, style: str = "") -> "Text":
    from rich.text import Text  # names are never read as markup

    return Text(formats.clean(text), style=style)


def _cell_screen(cell: doc.Cell) -> Any:

    text = (cell.text if cell.short is None else cell.short).replace("\n", ", ")
    if cell.state == "bad" or (not text and cell.state in SIGNS):
        text = f"{text} {SIGNS[cell.state]}".strip()
    return _text(text, style=STYLES.get(cell.state, ""))


# HTML


@cache
def _page_template() -> "Template":
    """Return the compiled template of all pages, which takes longer to compile than to render."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([TEMPLATES, LOOK.parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"ticked": formats.ticked, "yaml_text": formats.yaml_text}
    environment.filters |= {"text_columns": text_columns, "kind": lambda block: type(block).__name__}
    environment.globals["signs"] = SIGNS
    return environment.get_template("page.html.j2")
