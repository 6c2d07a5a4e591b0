"""What a bench says: on the terminal, in `bench.md`, in `bench.html` and as a section of the run's report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qdqbench.eval.bench.results import (
    BENCH_FILE,
    Bench,
    BenchCell,
    BenchRow,
    cell_label,
    read_bench,
)
from qdqbench.eval.benchreport.charts import latency_svg, speedup_svg, throughput_svg
from qdqbench.eval.benchreport.left_out import without_unmasked
from qdqbench.eval.benchreport.words import (
    Mark,
    cell_text,
    clocks,
    hardware,
    headline_marks,
    headline_title,
    latency_rows,
    method,
    milliseconds,
    ratio_rows,
    slow_lines,
    without_interval,
)
from qdqbench.eval.report.formats import cleaned, count_of, flat, label, model_label, remarks, size
from qdqbench.eval.report.page import page_of
from qdqbench.eval.report.render import write
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError

if TYPE_CHECKING:
    from rich.console import Group


SHAPES = 4  # columns of shapes that a terminal has room for


@dataclass(frozen=True)
class BenchView:
    """A bench in words, ready for templates."""

    title: str
    errors: list[str]
    measured: Bench | None = None  # None: unreadable
    subtitle: str = ""
    slow: Sequence[str] = ()  # where INT8 does not pay, and why
    clocks: str = ""
    headline: str = ""  # what the ratio of `headlines` is
    headlines: Sequence[tuple[str, list[Mark]]] = ()  # by shape: ratio, INT8, what it is over
    columns: Sequence[str] = ()  # shapes, of the table of latencies
    rows: Sequence[tuple[str, list[Mark]]] = ()  # contestants and ratios
    detail_columns: Sequence[str] = ()
    details: Sequence[list[Mark]] = ()
    method: str = ""

    @property
    def verdict(self) -> tuple[str, str]:
        """State and title of its own page."""
        slower = sum(marks[0].bad for _, marks in self.headlines)
        if self.errors or not self.headlines:
            return "failed", "The measurement has errors" if self.errors else "Nothing was measured"
        if slower:
            return "failed", f"INT8 is slower at {slower} of {count_of(len(self.headlines), 'shape')}"
        if unclear := sum("not told apart" in marks[0].text for _, marks in self.headlines):
            shapes = count_of(len(self.headlines), "shape")
            return "cannot tell", f"INT8 is not told apart from what it is held to at {unclear} of {shapes}"
        return ("", "INT8 is as fast") if self.slow else ("passed", "INT8 is faster")

    @property
    def tiles(self) -> list[tuple[str, str, str, bool]]:
        """Speed-ups of the first shapes."""
        return [
            (shape, marks[0].text.partition(" ")[0], f"over {marks[2].text} ms", not marks[0].bad)
            for shape, marks in self.headlines[:5]
            if marks[2].text
        ]

    @property
    def charts(self) -> list[str]:
        """SVG, drawn when a page asks: a terminal shows none."""
        found = self.measured
        drawn = (latency_svg(found), speedup_svg(found), throughput_svg(found)) if found else ()
        return [svg for svg in drawn if svg]


def write_bench_reports(bench: Bench, folder: Path) -> list[Path]:
    """Write `bench.md` and `bench.html`; of a run directory the caller writes the run's own report again.

    Raises:
        UserError: the folder cannot be written.
    """
    shown, bench = bench_view(bench), cleaned(bench)
    about = [str(bench.recipe.get("name", "recipe"))]
    title = f"{model_label(bench.target.name)}{' (random weights)' if bench.target.random_weights else ''}"
    facts = {"Settings": flat(bench.settings.model_dump()), "Model": flat(bench.target.model_dump())}
    page = page_of(bench, "speed", title, about, BENCH_FILE, facts=facts)
    return write("bench", folder, {"bench": shown, "page": page})


def bench_of(folder: Path) -> BenchView | None:
    """The bench of a run directory for its report; None where there is none.

    What is not readable, or of other ONNX files than the ones that are there now, says so in an error line.
    """
    if not (folder / BENCH_FILE).is_file():
        return None
    try:
        bench = without_unmasked(read_bench(folder / BENCH_FILE))
    except UserError as error:
        return BenchView("unreadable", [str(error)])
    if stale := stale_files(bench, folder):
        again = f"{', '.join(stale)} changed after this bench: its figures are of other files, measure again"
        bench = bench.model_copy(update={"errors": [again, *bench.errors]})
    return bench_view(bench)


def stale_files(bench: Bench, folder: Path) -> list[str]:
    """Files of a run directory that are others than those that were measured."""
    return [
        name
        for name, digest in bench.target.files.items()
        if (folder / name).is_file() and files.sha256(folder / name) != digest
    ]


def bench_view(bench: Bench) -> BenchView:
    """Words and figures for people; every one of them is in `bench.json`."""
    bench = cleaned(bench)
    return BenchView(
        title=f"{bench.target.name}{' (random weights)' if bench.target.random_weights else ''}, "
        f"{bench.recipe.get('name', 'recipe')}",
        errors=bench.errors,
        measured=bench,
        subtitle=hardware(bench),
        slow=slow_lines(bench),
        clocks=clocks(bench),
        headline=headline_title(bench),
        headlines=[(cell_text(bench, cell), headline_marks(bench, cell)) for cell in bench.cells],
        columns=[cell_text(bench, cell) for cell in bench.cells],
        rows=[*latency_rows(bench), *ratio_rows(bench)],
        detail_columns=_detail_columns(bench),
        details=[_detail(bench, cell, row) for cell in bench.cells for row in cell.rows],
        method=method(bench),
    )


def bench_summary(bench: Bench) -> "Group":
    """One screen for the terminal, 80 columns wide or more."""
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    bench = cleaned(bench)
    shown = bench_view(bench)
    lines: list[RenderableType] = [Text(shown.title, style="bold"), Text(shown.subtitle)]

    def add_table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Mark]]], widest: int) -> None:
        table = Table(box=None, pad_edge=False)
        for number, name in enumerate(columns):
            table.add_column(Text(name), min_width=0 if number else widest)  # Text: no markup in names
        for name, marks in rows:
            table.add_row(Text(name), *(Text(mark.text, style="red" if mark.bad else "") for mark in marks))
        lines.extend((table, Text()))

    add_table([shown.headline, "", "INT8, ms", "over, ms"], shown.headlines, 0)
    for start in range(0, len(shown.columns), SHAPES):
        of = slice(start, start + SHAPES)
        rows = [(name, [without_interval(mark) for mark in marks[of]]) for name, marks in shown.rows]
        widest = max(len(word) for name, _ in rows for word in name.split())
        add_table(["median, ms", *shown.columns[of]], rows, widest)
    lines.append(Text(shown.clocks))
    lines += [Text(f"✗ {line}", style="bold red") for line in shown.errors]
    lines += [Text(f"✗ {line}", style="red") for line in shown.slow]
    lines += remarks(bench.warnings, bench.notes)
    return Group(*lines)


def _detail_columns(bench: Bench) -> list[str]:
    streams = [f"{count} stream{'s' if count > 1 else ''}, seq/s" for count in bench.settings.streams]
    device = ["MHz", "W", "°C"] if bench.device == "gpu" else ["CPU ms"]
    return [
        "shape", "contestant", "p50 ms", "p90 ms", "p99 ms", "launches", "seq/s", *streams, *device,
        "logit error", "INT8 GEMMs", "engine", "how",
    ]  # fmt: skip


def _detail(bench: Bench, cell: BenchCell, row: BenchRow) -> list[Mark]:
    names = {about.name: about.label for about in bench.contestants}
    first = [Mark(cell_label(cell, label(bench.settings.real_lengths or ""))), Mark(names[row.contestant])]
    if row.status != "done":
        blank = [Mark("")] * (len(_detail_columns(bench)) - 3)
        return [*first, *blank, Mark(f"{row.status}: {row.reason}", row.status == "error")]
    rates = {rate.streams: f"{rate.sequences_per_s:,.0f}" for rate in row.throughput}
    device = [row.clock_mhz, row.power_w, row.temperature_c] if bench.device == "gpu" else [row.cpu_ms]
    digits = 0 if bench.device == "gpu" else 1
    error = "" if row.rel_error is None else f"{row.rel_error:.2g}"
    proof = "" if row.int8_gemms is None else f"{row.int8_gemms}/{row.expected_int8_gemms}"
    return [
        *first,
        *(Mark(milliseconds(value)) for value in (row.p50_ms, row.p90_ms, row.p99_ms)),
        Mark(str(row.launches)),
        Mark(f"{row.sequences_per_s:,.0f}"),
        *(Mark(rates.get(count, "")) for count in bench.settings.streams),
        *(Mark("not read" if value is None else f"{value:.{digits}f}") for value in device),
        Mark("reference" if row.contestant == cell.reference else error),
        Mark(proof, bool(row.not_int8)),
        Mark("" if row.engine_bytes is None else size(row.engine_bytes)),
        Mark(_how(row)),
    ]


def _how(row: BenchRow) -> str:
    """How a contestant ran, with what its kernels prove."""
    if row.kernels is None:
        return row.detail or ""
    found = row.kernels
    return f"{row.detail}; {found.fused_attention} fused attention kernels, {found.fp32_gemms} GEMMs in FP32"
