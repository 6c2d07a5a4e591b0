"""Figures of a bench as words and as the cells of tables, which all pages and tables share."""

from dataclasses import dataclass

from qdqbench.eval.bench.results import (
    OURS,
    PEERS,
    Bench,
    BenchCell,
    cell_label,
    headline_of,
    over_fastest,
    peer_doubt,
    row_of,
    speedup_of,
)
from qdqbench.eval.report.formats import label
from qdqbench.quantize.core.speedup import Speedup

COMPARED = (
    ("int8", "fp16"),
    ("int8-exact", "fp16-exact"),
    ("int8", "compile-fp16"),
    ("int8", "nncf-openvino"),
)

PROFILES = {
    "both": "engines for the recipe's shapes and for each shape alone",
    "static": "engines for each shape alone",
    "recipe": "engines for the recipe's shapes",
}


@dataclass(frozen=True)
class Mark:
    """Text of a table's cell; bad is shown in red and with a sign."""

    text: str
    bad: bool = False


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
    """Where INT8 is slower than the fastest other contestant or than its twin, and why by the layers."""
    names = {about.name: about.label for about in bench.contestants}
    lines = []
    for cell in bench.cells:
        first, twin = headline_of(bench.contestants, cell), speedup_of(cell, "int8", "fp16")
        pairs = [first, twin if twin != first else None]
        if bench.device == "cpu":
            pairs = [found for found in cell.speedups if found.system == "int8"]
        for found in pairs:
            if found is not None and found.verdict == "slower":
                why = f": {'; '.join(cell.slow_reasons)}" if found == twin and cell.slow_reasons else ""
                what = f"{names[found.system]} is slower than {names[found.baseline]}"
                lines.append(f"{cell_text(bench, cell)}: {what}, {found.value:.2f}x{why}")
    return lines


def method(bench: Bench) -> str:
    """How it was measured, in two sentences."""
    chosen = bench.settings
    if chosen.how is not None:
        return chosen.how
    effort = f"{chosen.repeats} launches" if chosen.repeats else f"{chosen.seconds:g} s per contestant"
    fixed = any(cell.kind == "fixed" for cell in bench.cells)
    inputs = f"{chosen.input_sets} random input sets" if fixed else "the rows of the split"
    timed = "wall time of each call and CPU time of all threads, behind a rest and calls that are not timed"
    engines = f"threads: {chosen.threads} for all streams of a contestant, engines for any shape; "
    if bench.device == "gpu":
        timed, engines = "CUDA events around each launch", f"{PROFILES[chosen.profile]}; "
    return (
        f"{chosen.rounds} interleaved rounds in one process ({effort}), order balanced, {timed}; "
        f"{inputs}, seed {chosen.seed}; {engines}INT8 scales from "
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


def ratio_mark(ratio: Speedup | None) -> Mark:
    """A speed-up with its interval; bad where both are below 1."""
    if ratio is None:
        return Mark("")
    interval = f" [{ratio.ci95_low:.2f}, {ratio.ci95_high:.2f}]" if ratio.ci95_low is not None else ""
    found = ratio.verdict
    said = {"slower": " ✗ slower", "inconclusive": " not told apart"}.get(found, "")
    return Mark(f"{ratio.value:.2f}x{interval}{said}", found == "slower")


def milliseconds(value: float | None) -> str:
    """Four significant digits, without an exponent."""
    return "" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def without_interval(mark: Mark) -> Mark:
    """The cell for a narrow table: 0.90x ✗ for 0.90x [0.88, 0.92] ✗ slower."""
    value, interval, _ = mark.text.partition(" [")
    return Mark(f"{value}{' ✗' if mark.bad else ''}", mark.bad) if interval else mark


def latency_mark(bench: Bench, cell: BenchCell, name: str) -> Mark:
    """The median of a contestant, marked where it is a peer not in its best form, or why there is none."""
    row = row_of(cell, name)
    if row is not None:
        doubt = peer_doubt(row, next(about.precision for about in bench.contestants if about.name == name))
        sign = "unfused" if row.kernels and not row.kernels.fused_attention else "FP32"
        return Mark(f"{milliseconds(row.median_ms)}{f' ✗ {sign}' if doubt else ''}", bool(doubt))
    status = next((row.status for row in cell.rows if row.contestant == name), "skipped")
    return Mark("✗ error" if status == "error" else "not measured", status == "error")


def latency_rows(bench: Bench) -> list[tuple[str, list[Mark]]]:
    """Medians of every contestant, by shape."""
    return [
        (about.label, [latency_mark(bench, cell, about.name) for cell in bench.cells])
        for about in bench.contestants
    ]


def headline_title(bench: Bench) -> str:
    """What INT8 is held against before all else."""
    if bench.device == "cpu":
        return "INT8 over the fastest FP32 or BF16"
    peers = any(about.name.startswith(PEERS) for about in bench.contestants)
    return f"INT8 over the fastest FP16{'' if peers else ' engine'}"


def headline_marks(bench: Bench, cell: BenchCell) -> list[Mark]:
    """The speed-up of INT8 over the fastest contestant that is not, and what both are, with their medians."""
    names = {about.name: about.label for about in bench.contestants}
    if (best := headline_of(bench.contestants, cell)) is None:
        return [Mark("not measured"), Mark(""), Mark("")]
    sides = (
        Mark(f"{names[name]} {latency_mark(bench, cell, name).text}") for name in (best.system, best.baseline)
    )
    return [ratio_mark(best), *sides]


def ratio_rows(bench: Bench) -> list[tuple[str, list[Mark]]]:
    """Other ratios that tables show, by shape: of twins, of other recipes, over other quantizers."""
    names = {about.name: about.label for about in bench.contestants}
    measured = {(s.system, s.baseline) for cell in bench.cells for s in cell.speedups}
    others = [name for name in names if name.startswith("int8-") and name not in OURS]
    rows = [
        (f"{names[a]} over {names[b]}", [ratio_mark(speedup_of(cell, a, b)) for cell in bench.cells])
        for a, b in COMPARED
        if (a, b) in measured
    ]
    title = headline_title(bench).removeprefix("INT8 ")
    return rows + [
        (
            f"{names[name]} {title}",
            [ratio_mark(over_fastest(bench.contestants, cell, name)) for cell in bench.cells],
        )
        for name in others
        if bench.device == "gpu"
    ]
