"""Pictures of a run: the grid of datatypes, and inline SVG charts that look the same on every machine.

Charts are drawn with the object API of matplotlib (no pyplot, no global state) and hold no date, random id or
address. Their text takes the page's font and color, so they are readable on a light and on a dark page.
"""

import html
import io
import re
import textwrap
import warnings
from typing import Any, Literal

# Okabe and Ito 2008, "Color Universal Design": distinct for color-blind readers too.
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
PURPLE, SKY, VERMILLION = "#CC79A7", "#56B4E9", "#D55E00"
INK = "#010203"  # replaced by the page's text color
MUTED = "#7f8790"  # readable on white and on black
WIDTH, TEXT = 4.2, 8.8  # inches, points: 9 pixels or more on a phone, 13 on a wide page


def figure_of(height: float) -> Any:
    """Return an empty figure of the report's column width, `height` inches high."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def axes_of(height: float) -> tuple[Any, Any]:
    figure = figure_of(height)
    return figure, figure.add_subplot()


def svg_of(figure: Any, name: str, description: str) -> str:
    """Return SVG text for a page: no header or metadata, ids of its own, the page's font and color."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.transforms import blended_transform_factory

    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    clear = {"facecolor": "none", "edgecolor": "none"}
    figure.patch.set(**clear)
    for axes in figure.axes:
        axes.patch.set(**clear)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("bottom", "left"):
            axes.spines[side].set_color(MUTED)
        axes.tick_params(color=MUTED, labelcolor=INK, labelsize=TEXT)
        for label in (axes.xaxis.label, axes.title, axes._left_title):
            label.set_text(textwrap.fill(label.get_text(), 50))
        title = axes._left_title  # begins where the figure does: labels of values leave axes little room
        title.set_transform(
            blended_transform_factory(figure.transFigure, axes.transAxes + axes.titleOffsetTrans)
        )
        title.set_x(0.01)
    for text in figure.findobj(mpl.text.Text):
        text.set(parse_math=False, fontsize=TEXT)  # a dollar sign in a name is a dollar sign
        if text.get_color() != MUTED:
            text.set_color(INK)
    stream = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the page's font draws the text
        canvas.print_svg(stream, metadata=nothing)  # `savefig` would draw it twice
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace("xlink:href=", "href=")
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    box = re.search(r'viewBox="[^"]+"', svg)
    assert box is not None
    label = html.escape(description)  # names of models and tasks come from outside
    head = f'<svg {box[0]} xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}">'
    return re.sub(r"<svg\b[^>]*>", lambda _: head, svg, count=1)


LIMIT_LINE: dict[str, Any] = {"color": VERMILLION, "linestyle": (0, (4, 2)), "linewidth": 1.2}  # to hold


def dress(axes: Any, title: str, grid: Literal["x", "y", "both"] | None = "y") -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    if grid:
        axes.grid(axis=grid, linewidth=0.4, color=MUTED, alpha=0.45)


def log_scale(axes: Any, which: Literal["x", "y"] = "y", number: str = "g") -> None:
    """Set a logarithmic scale with plain numbers, where matplotlib writes formulas; at least two of them.

    Call it when all is drawn: where the values span less than two decades, numbers between powers are told.
    """
    from matplotlib.ticker import LogLocator

    getattr(axes, f"set_{which}scale")("log", nonpositive="clip")
    axis = getattr(axes, f"{which}axis")
    low, high = getattr(axes, f"get_{which}lim")()
    spread = high / low if low > 0 else 1e9
    between = (1, 1.5, 2, 3, 4, 5, 7) if spread < 5 else (1, 2, 3, 5) if spread < 20 else (1, 2, 5)
    axis.set_major_locator(LogLocator(subs=between if spread < 200 else (1,)))
    axis.set_major_formatter(lambda value, _: format(value, number))
    axis.set_minor_formatter(lambda *_: "")


def legend(figure: Any, columns: int, length: float = 1.6) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        style = {"frameon": False, "handlelength": length, "columnspacing": 0.8, "handletextpad": 0.5}
        figure.legend(handles, labels, loc="outside lower left", ncols=columns, **style)
