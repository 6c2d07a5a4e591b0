"""The report document: what a command reports, which `render` turns into a page, Markdown or a screen.

State is a field (`Cell.state`, `Verdict.state`), never read back out of a text. Backticks in prose hold code.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from qdqbench.quantize.report.formats import flat, label, model_label, versions_text

# good: holds or wins (green). bad: fails (red, ✗). unclear: cannot be told, or wants a look (amber).
# quiet: small and soft. Empty: as it is.
State = Literal["", "good", "bad", "unclear", "quiet"]
Medium = Literal["page", "text", "screen"]  # HTML, Markdown, terminal
PAGES: tuple[Medium, ...] = ("page", "text")
EVERYWHERE: tuple[Medium, ...] = ("page", "text", "screen")
SCREEN: tuple[Medium, ...] = ("screen",)
PAGE: tuple[Medium, ...] = ("page",)
TEXT: tuple[Medium, ...] = ("text",)

VERSIONS = ("qdqbench", "torch", "transformers", "nvidia-modelopt", "onnxruntime")


@dataclass(frozen=True)
class Cell:
    """A cell of a table. A cell with a state and no text shows the sign of its state."""

    text: str = ""  # lines are kept on a page
    state: State = ""
    note: str = ""  # quiet second line; in Markdown in parentheses
    short: str | None = None  # in place of the text on a terminal
    sort: float | str | None = None  # what a page sorts its column by, where the text does not begin with it
    code: bool = False  # the text is code
    tip: str = ""  # shown by a page when one points at the cell
    bar: float | None = None  # drawn on a page in place of a text, from 0 to 1
    look: str = ""  # CSS classes: text, nowrap, right, wrong-answer, INT8, ...


Value = Cell | str | int | None


@dataclass(frozen=True)
class Row:
    cells: Sequence[Cell]  # the last one of a short row takes the rest of its width
    chosen: bool = False  # highlighted


def row(*cells: Value, chosen: bool = False) -> Row:
    return Row([it if isinstance(it, Cell) else Cell("" if it is None else str(it)) for it in cells], chosen)


def code(text: str) -> Cell:
    return Cell(text, code=True)


def bad_unless(holds: bool) -> State:
    return "" if holds else "bad"


def mark(holds: bool) -> Cell:
    return Cell(state="good" if holds else "bad")


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Row]
    title: str = ""
    texts: Sequence[int] = (0,)  # columns of words, aligned left; -1 is the last one. The others are numbers
    # CSS classes: full (width), cards (a row is one on a phone), names (long first column), sortable, grid
    look: str = "full"
    foot: Sequence[Row] = ()
    filter: str = ""  # what a page can filter, which makes it scroll: "texts and answers"
    anchor: str = ""
    screen: Sequence[int] | None = None  # columns that fit a terminal of 80 columns; None: all
    most: int | None = None  # rows that Markdown lists; None: all
    on: Sequence[Medium] = PAGES


Item = TypeVar("Item")
Column = tuple[str, Callable[[Item], Value]]  # its heading, and what it shows of an item


def table_of(
    items: Iterable[Item],
    *columns: Column[Item],
    chosen: Callable[[Item], bool] = lambda item: False,
    instead: Callable[[Item], Row | None] = lambda item: None,
    **more: Any,
) -> Table:
    """Return a table with a row for each item, or `instead` of a failed one; `more` are fields of `Table`."""
    rows = [instead(item) or row(*(show(item) for _, show in columns), chosen=chosen(item)) for item in items]
    return Table([name for name, _ in columns], rows, **more)


@dataclass(frozen=True)
class Pairs:
    rows: Sequence[tuple[str, str]]
    title: str = ""  # on a terminal, and head of the first column in Markdown
    definitions: bool = False  # values are sentences
    on: Sequence[Medium] = PAGES


@dataclass(frozen=True)
class Chart:
    draw: Callable[[], str]  # an SVG of `svg`, when a page needs it; an empty one is left out
    broad: bool = False
    on: Sequence[Medium] = PAGE


@dataclass(frozen=True)
class Prose:  # a plain `str` is one without a state; quiet ones are small
    text: str
    state: State = ""
    on: Sequence[Medium] = PAGES


@dataclass(frozen=True)
class Bullets:
    lines: Sequence[str]
    state: State = ""
    on: Sequence[Medium] = PAGES
    indent: int = 0  # characters, on a terminal


@dataclass(frozen=True)
class Code:
    text: str
    language: str = ""
    on: Sequence[Medium] = PAGES


@dataclass(frozen=True)
class Fold:  # a page opens it on demand; elsewhere it stands open
    title: str
    blocks: Sequence["Block"]
    on: Sequence[Medium] = PAGES
    state: State = ""


@dataclass(frozen=True)
class Columns:
    parts: Sequence[Sequence["Block"]]  # side by side where a page is wide enough
    look: str = "two"  # side: the first as wide as it is
    on: Sequence[Medium] = EVERYWHERE


Block = str | Prose | Bullets | Table | Pairs | Chart | Code | Fold | Columns


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    blocks: Sequence[Block]
    state: State = ""  # good and bad give the heading a sign
    on: Sequence[Medium] = EVERYWHERE  # its blocks say on what they are shown


Line = tuple[str, str, State]  # of a verdict: what was judged, in words, and how it is


@dataclass(frozen=True)
class Verdict:
    state: State
    title: str
    sentence: str = ""
    failures: Sequence[str] = ()
    notes: Sequence[str] = ()
    lines: Sequence[Line] = ()  # in place of the sentence


@dataclass(frozen=True)
class Tile:
    title: str
    value: str
    remark: str = ""
    state: State = ""


@dataclass(frozen=True)
class Page:
    kind: str  # of page: run, speed, ...
    title: str  # name of the model
    about: Sequence[str]  # task, recipe
    created: str  # ISO 8601, UTC
    command: str
    record: str  # file in the same folder that holds every number
    environment: dict[str, Any]
    facts: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # names and values by heading
    recipe: dict[str, Any] | None = None

    @property
    def heading(self) -> str:
        return " · ".join([self.title, *self.about])

    @property
    def versions(self) -> str:
        return versions_text(self.environment, VERSIONS)

    @property
    def time(self) -> str:
        return self.created.replace("T", " ").replace("+00:00", " UTC")

    @property
    def groups(self) -> dict[str, list[tuple[str, str]]]:
        return self.facts | ({"Environment": flat(self.environment)} if self.environment else {})


@dataclass(frozen=True)
class Report:
    page: Page
    sections: Sequence[Section]
    verdict: Verdict | None = None
    lead: Sequence[Block] = ()  # after the verdict
    tiles: Sequence[Tile] = ()
    warnings: Sequence[str] = ()
    warnings_title: str = ""  # in place of their number
    notes: Sequence[str] = ()


def page_of(result: Any, kind: str, title: str, about: Sequence[str], record: str, **more: Any) -> Page:
    environment = getattr(result, "environment", {})
    return Page(kind, title, about, result.created, result.command, record, environment, **more)


def page_of_choice(result: Any, kind: str, record: str, *more: tuple[str, str]) -> Page:
    """Return the page of a result that chooses a recipe: it has `model`, `task`, `data` and `seed` too."""
    settings = [*flat(result.model, "model"), *flat(result.data, "data"), ("seed", str(result.seed)), *more]
    facts, name = {"Model, data and settings": settings}, model_label(result.model["name"])
    recipe = getattr(result, "recipe", None)
    about = [label(result.task["name"]), *([recipe["name"]] if recipe else [])]
    return page_of(result, kind, name, about, record, facts=facts, recipe=recipe)
