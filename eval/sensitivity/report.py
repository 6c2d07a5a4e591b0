"""`sensitivity.md`, `sensitivity.html` and the terminal's table, all from one `Sensitivity`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qdqbench.eval.report.formats import DIVERGENCES, cleaned, count_of, label, remarks, seconds, sentence
from qdqbench.eval.report.page import Page, page_of_choice
from qdqbench.eval.report.render import write
from qdqbench.eval.sensitivity.charts import all_but_svg, curve_svg, only_svg
from qdqbench.eval.sensitivity.results import SENSITIVITY_FILE, CandidateRow, Effect, Sensitivity, ranking
from qdqbench.quantize.core import files
from qdqbench.quantize.families.any_family import part_of

if TYPE_CHECKING:
    from rich.console import Group

WORST = 10
WIDEST = 36  # characters of a name in a terminal
REPORT_COLUMNS = (
    "only this in INT8: divergence",
    "drop",
    "differing answers",
    "SQNR",
    "all but this in INT8: divergence",
    "of everything's",
    "drop",
)


@dataclass(frozen=True)
class SensitivityView:
    """A sensitivity report in words, ready for templates."""

    found: Sensitivity  # cleaned
    page: Page
    headline: str
    choice: str
    explanation: list[str]
    linears: list[tuple[str, list[str]]]
    attention: list[tuple[str, list[str]]]
    blocks: list[tuple[str, list[str]]]
    kinds: list[tuple[str, list[str]]]
    curve: list[list[str]]
    notes: list[str]
    charts: list[str]  # SVG
    tiles: list[tuple[str, str, str, bool]]
    columns: tuple[str, ...] = REPORT_COLUMNS


def write_sensitivity(found: Sensitivity, folder: Path) -> list[Path]:
    """Write `sensitivity.json`, `sensitivity.md` and `sensitivity.html` (one file, no external request).

    Raises:
        UserError: the folder cannot be written.
    """
    shown = sensitivity_view(found)
    files.write_text(folder / SENSITIVITY_FILE, found.model_dump_json(indent=2) + "\n")
    return [folder / SENSITIVITY_FILE, *write("sensitivity", folder, {"s": shown, "page": shown.page})]


def sensitivity_view(found: Sensitivity) -> SensitivityView:
    """Words and figures for people; every one of them is in `sensitivity.json`."""
    found, batch = cleaned(found), ("batch size", str(found.batch_size))
    time = ("time of all candidates", seconds(found.timings["candidates_s"]))
    return SensitivityView(
        found=found,
        page=page_of_choice(found, "sensitivity", SENSITIVITY_FILE, batch, time),
        headline=sensitivity_headline(found),
        choice=sentence(
            f"{found.choice.file} keeps {count_of(found.choice.kept, 'linear')} out of INT8: "
            f"{found.choice.reason}"
        ),
        explanation=_explanation(found),
        linears=_table(found, [*ranking(found), *(row for row in _of(found, "linear") if not row.all_but)]),
        attention=_table(found, _of(found, "attention")),
        blocks=_table(found, _of(found, "block")),
        kinds=_table(found, _of(found, "kind")),
        curve=[
            [str(point.kept), _divergence(point.judged), drop_text(point.judged), _answers(point.judged)]
            for point in found.curve
        ],
        notes=[sentence(note) for note in found.notes],
        charts=[svg for svg in (only_svg(found), all_but_svg(found), curve_svg(found)) if svg],
        tiles=_tiles(found),
    )


def sensitivity_headline(found: Sensitivity) -> str:
    """What everything in INT8 costs, and which linear most."""
    metric, full = label(found.metric), found.full
    text = (
        f"Everything in INT8: {metric} {full.metric:.4f} against {found.fp32.metric:.4f} in FP32 on "
        f"{found.data['samples']} training samples, drop {drop_text(full)}, divergence {full.divergence:.2g}."
    )
    worst = ranking(found)
    if worst and worst[0].only:
        alone = f"{worst[0].only.divergence / full.divergence:.0%} of it" if full.divergence else "nothing"
        text += f" The worst linear, {worst[0].name}, alone makes {alone}."
    return text


def _tiles(found: Sensitivity) -> list[tuple[str, str, str, bool]]:
    full, worst = found.full, ranking(found)
    noise = "within noise" if full.within_noise else "beyond noise"
    tiles = [
        (f"drop of {label(found.metric)}", f"{full.drop:+.4f}", f"everything in INT8, {noise}", True),
        ("divergence", f"{full.divergence:.2g}", "everything in INT8", True),
    ]
    if worst and worst[0].only and full.divergence:
        tiles.append(
            ("the worst linear", f"{worst[0].only.divergence / full.divergence:.0%}", worst[0].name, True)
        )
    kept = count_of(found.choice.kept, "linear")
    return [*tiles, ("kept out of INT8", kept, f"by {found.choice.file}", found.choice.reached)]


def drop_text(judged: Effect) -> str:
    """A drop with its standard error, and whether it is noise; positive is a loss."""
    noise = " (noise)" if judged.within_noise else ""
    return f"{judged.drop:+.4f} ± {judged.drop_stderr:.4f}{noise}"


def sensitivity_summary(found: Sensitivity) -> "Group":
    """One screen for the terminal, as a rich renderable."""
    from rich.console import Group, RenderableType
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    shown = sensitivity_view(found)
    colour = "green" if found.choice.reached else "red"
    body = Text(f"{shown.headline}\n{shown.choice}")
    lines: list[RenderableType] = [
        Panel(body, title=Text(shown.page.heading), border_style=colour, title_align="left")
    ]
    for title, rows in (
        (f"the {WORST} worst linears", ranking(found)[:WORST]),
        ("kinds", _of(found, "kind")),
    ):
        table = Table(f"{title}, by divergence", box=None, pad_edge=False)
        for heading in ("only this", "drop", "", "all but"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(cell) for cell in _short_cells(row)))
        lines += [table, Text("")]
    lines += remarks(shown.found.warnings, shown.notes)
    return Group(*lines)


def _short_cells(row: CandidateRow) -> list[str]:
    """A row for a terminal 80 characters wide: divergence, drop, divergence."""
    name = _brief(row.name.removeprefix("encoder."))
    rest = "" if row.all_but is None else f"{row.all_but.divergence:.1e}"
    if row.only is None:
        return [name, "", "", "", rest]
    drop = f"{row.only.drop:+.4f} ± {row.only.drop_stderr:.4f}"
    noise = "noise" if row.only.within_noise else ""
    return [name, f"{row.only.divergence:.1e}", drop, noise, rest]


def _brief(name: str) -> str:
    """A name that is too wide as its layer and its end: `0: attention.query`."""
    found = part_of(name) if len(name) > WIDEST else None
    if found is None:
        return name
    parts = [part for part in found[2].split(".") if not part.isdecimal()]
    return f"{found[0]}: {'.'.join(parts[-2:])}"


def _explanation(found: Sensitivity) -> list[str]:
    return [
        f"Divergence is {DIVERGENCES[found.divergence]}. The ranking goes by it and not by the metric: on "
        f"{found.data['samples']} samples most drops are noise. ± is one standard error, and (noise) marks "
        "drops of at most two, paired with FP32.",
        f"Measured on split {found.data['split']!r}, on other rows than those that calibrate; no evaluation "
        f"split was read. Everything in INT8 means {count_of(len(found.int8), 'module')}.",
    ]


def _of(found: Sensitivity, group: str) -> list[CandidateRow]:
    return [row for row in found.rows if row.group == group]


def _table(found: Sensitivity, rows: list[CandidateRow]) -> list[tuple[str, list[str]]]:
    return [(f"{row.name}{' (diagnostic)' if row.diagnostic else ''}", _cells(found, row)) for row in rows]


def _cells(found: Sensitivity, row: CandidateRow) -> list[str]:
    only, rest = row.only, row.all_but
    first = [_divergence(only), drop_text(only), _answers(only), _sqnr(only)] if only else [""] * 4
    if rest is None:
        return [*first, "not part of everything", "", ""]
    share = f"{rest.divergence / found.full.divergence:.0%}" if found.full.divergence else ""
    return [*first, _divergence(rest), share, drop_text(rest)]


def _divergence(judged: Effect | None) -> str:
    return "" if judged is None else f"{judged.divergence:.2e} ± {judged.divergence_stderr:.0e}"


def _answers(judged: Effect) -> str:
    return "" if judged.disagreements is None else str(judged.disagreements)


def _sqnr(judged: Effect) -> str:
    return "equal" if judged.sqnr_db is None else f"{judged.sqnr_db:.1f} dB"
