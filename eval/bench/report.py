"""What a bench says: on the terminal, in `bench.md`, in `bench.html` and as a section of the run's report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qdqbench.eval.bench.charts import latency_svg, speedup_svg, throughput_svg
from qdqbench.eval.bench.results import (
    BENCH_FILE,
    Bench,
    BenchCell,
    BenchRow,
    BenchSpeedup,
    cell_label,
    fastest_float,
    read_bench,
    row_of,
    speedup_of,
    without_unmasked,
)
from qdqbench.eval.report.formats import cleaned, label, size
from qdqbench.eval.report.render import write
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Mark:
    """Text of a table's cell; bad is shown in red and with a sign."""

    text: str
    bad: bool = False


@dataclass(frozen=True)
class BenchView:
    """A bench in words, ready for templates."""

    title: str
    errors: list[str]
    measured: Bench | None = None  # None: unreadable
    subtitle: str = ""
    slow: Sequence[str] = ()  # where INT8 does not pay, and why
    clocks: str = ""
    columns: Sequence[str] = ()  # of the first table, after the shape
    rows: Sequence[tuple[str, list[Mark]]] = ()
    detail_columns: Sequence[str] = ()
    details: Sequence[list[Mark]] = ()
    method: str = ""

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
    return write("bench", folder, {"bench": bench_view(bench)})


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
    stale = [
        name
        for name, digest in bench.target.files.items()
        if (folder / name).is_file() and files.sha256(folder / name) != digest
    ]
    if stale:
        again = f"{', '.join(stale)} changed after this bench: its figures are of other files, measure again"
        bench = bench.model_copy(update={"errors": [again, *bench.errors]})
    return bench_view(bench)


def bench_view(bench: Bench) -> BenchView:
    """Words and figures for people; every one of them is in `bench.json`."""
    bench = cleaned(bench)
    labels = {about.name: about.label for about in bench.contestants}
    return BenchView(
        title=f"{bench.target.name}{' (random weights)' if bench.target.random_weights else ''}, "
        f"{bench.recipe.get('name', 'recipe')}",
        errors=bench.errors,
        measured=bench,
        subtitle=hardware(bench),
        slow=slow_lines(bench),
        clocks=clocks(bench),
        columns=[*labels.values(), *ratio_columns(bench)],
        rows=[
            (
                cell_text(bench, cell),
                [latency_mark(cell, name) for name in labels] + ratio_marks(bench, cell),
            )
            for cell in bench.cells
        ],
        detail_columns=_detail_columns(bench),
        details=[_detail(bench, cell, row) for cell in bench.cells for row in cell.rows],
        method=method(bench),
    )


def bench_summary(bench: Bench) -> "Group":
    """One screen for the terminal."""
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    bench = cleaned(bench)
    shown = bench_view(bench)
    # shapes across: a terminal is too narrow for the contestants' names side by side
    table = Table("median, ms", box=None, pad_edge=False)
    for name, _ in shown.rows:
        table.add_column(Text(name))
    for place, name in enumerate(shown.columns):
        marks = [row[place] for _, row in shown.rows]
        table.add_row(Text(name), *(Text(mark.text, style="red" if mark.bad else "") for mark in marks))
    lines: list[RenderableType] = [
        Text(shown.title, style="bold"),
        Text(shown.subtitle),
        table,
        Text(shown.clocks),
    ]
    lines += [Text(f"note: {line}", style="yellow") for line in bench.notes]
    lines += [Text(f"✗ {line}", style="red") for line in shown.slow]
    lines += [Text(f"warning: {line}", style="yellow") for line in bench.warnings]
    lines += [Text(f"✗ {line}", style="bold red") for line in shown.errors]
    return Group(*lines)


def hardware(bench: Bench) -> str:
    """GPU or CPU, driver and the versions that made the numbers."""
    found = bench.environment
    if bench.device == "cpu":
        cpu = bench.cpu
        told = f"; {', '.join(cpu.features) or 'instruction sets unknown'}" if cpu else ""
        where = f"CPU: {found.get('cpu', 'unknown')} ({found.get('cores', '?')} cores{told})"
        where += f", {count} thread{'s' if count > 1 else ''}" if (count := bench.settings.threads) else ""
    else:
        where = (
            f"{found.get('gpu', 'GPU')} (compute capability {bench.compute_capability}), "
            f"driver {found.get('driver') or 'unknown'}"
        )
    used = dict.fromkeys(about.backend.partition(" ") for about in bench.contestants)
    return ", ".join([where, *(f"{label(name)} {version}".strip() for name, _, version in used)])


def clocks(bench: Bench) -> str:
    """What the GPU's clock, power and temperature were, or that nothing read them; the load of a CPU."""
    if bench.device == "cpu":
        loads = (bench.cpu.load_before, bench.cpu.load_after) if bench.cpu else (None, None)
        if None in loads:
            return "clock and power: not read on a CPU"
        return f"load average {loads[0]:g} before, {loads[1]:g} after; clock and power: not read on a CPU"
    rows = [row for cell in bench.cells for row in cell.rows if row.status == "done"]
    parts = []
    for name, unit in (("clock_mhz", "MHz"), ("power_w", "W"), ("temperature_c", "°C")):
        values = [value for row in rows if (value := getattr(row, name)) is not None]
        if values:
            parts.append(f"{min(values):.0f} to {max(values):.0f} {unit}")
    return f"clock and power while measured: {', '.join(parts) or 'not read'}"


def slow_lines(bench: Bench) -> list[str]:
    """Where INT8 is slower than something else, and why where the layers say it."""
    names = {about.name: about.label for about in bench.contestants}
    ours, lines = names["int8"] if bench.device == "cpu" and "int8" in names else "INT8", []
    for cell in bench.cells:
        for found in cell.speedups:
            if found.slower and found.contestant == "int8":
                sure = "" if found.high is None or found.high < 1 else " (within the spread of the rounds)"
                why = f": {'; '.join(found.reasons)}" if found.reasons else ""
                lines.append(
                    f"{cell_text(bench, cell)}: {ours} is slower than {names[found.over]}, "
                    f"{found.value:.2f}x{sure}{why}"
                )
    return lines


def method(bench: Bench) -> str:
    """How it was measured, in two sentences."""
    chosen = bench.settings
    effort = f"{chosen.repeats} launches" if chosen.repeats else f"{chosen.seconds:g} s per contestant"
    timed = "wall time of each call and CPU time of all threads, behind a rest and calls that are not timed"
    engines = f"threads: {chosen.threads} for all streams of a contestant, engines for any shape; "
    if bench.device == "gpu":
        timed, engines = "CUDA events around each launch", f"engines with the {chosen.profile} profile; "
    return (
        f"{chosen.rounds} interleaved rounds in one process ({effort}), order balanced, {timed}; "
        f"{chosen.input_sets} random input sets, seed {chosen.seed}; {engines}INT8 scales from "
        f"{bench.target.calibration}. A speed-up is the ratio of the medians over rounds with its 95% "
        "bootstrap interval over rounds; logits of every contestant were checked before and after."
    )


def cell_text(bench: Bench, cell: BenchCell) -> str:
    """The shape; for real lengths with the split's size and padding."""
    task = label(bench.settings.real_lengths or "")
    name = cell_label(cell, task)
    if cell.kind == "fixed":
        return name
    padding = 1 - cell.real_tokens / cell.padded_tokens
    return f"{name} ({cell.sequences} sequences, {padding:.0%} padding)"


def ratio_mark(ratio: BenchSpeedup | None) -> Mark:
    """A speed-up with its interval; below 1 is bad."""
    if ratio is None:
        return Mark("")
    interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.low is not None else ""
    return Mark(f"{ratio.value:.2f}x{interval}{' ✗ slower' if ratio.slower else ''}", ratio.slower)


def milliseconds(value: float | None) -> str:
    """Four significant digits, without an exponent."""
    return "" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def latency_mark(cell: BenchCell, name: str) -> Mark:
    """The median of a contestant, or why there is none."""
    row = row_of(cell, name)
    if row is not None:
        return Mark(milliseconds(row.median_ms))
    status = next((row.status for row in cell.rows if row.contestant == name), "skipped")
    return Mark("✗ error" if status == "error" else "not measured", status == "error")


def ratio_columns(bench: Bench) -> list[str]:
    """What INT8 is held against in the first table; on a CPU first the fastest that is not INT8 itself."""
    labels = {about.name: about.label for about in bench.contestants}
    first = ["INT8 over the fastest FP32 or BF16"] if bench.device == "cpu" else []
    return first + [f"INT8 over {labels[name]}" for name in _compared(bench)]


def ratio_marks(bench: Bench, cell: BenchCell) -> list[Mark]:
    """The speed-ups of `ratio_columns` in one shape."""
    labels, first = {about.name: about.label for about in bench.contestants}, []
    if bench.device == "cpu":
        best = fastest_float(bench, cell)
        mark = ratio_mark(best)
        first = [Mark(f"{mark.text} ({labels[best.over]})" if best else "", mark.bad)]
    return first + [ratio_mark(speedup_of(cell, "int8", over)) for over in _compared(bench)]


def _compared(bench: Bench) -> list[str]:
    shown = {s.over for cell in bench.cells for s in cell.speedups if s.contestant == "int8"}
    return [name for name in ("fp16", "compile-fp16", "nncf-openvino") if name in shown]


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
        Mark(row.detail or ""),
    ]
