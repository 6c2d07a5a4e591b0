"""How what is measured is put into words: once for tiles, cells, sentences and lines of a stage."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from qdqbench.eval.metrics.results import Comparison, Ratio, Speedup, SpeedVerdict
from qdqbench.quantize.report.document import Cell, State
from qdqbench.quantize.report.formats import in_points, label, with_error

SPEED_STATES: dict[SpeedVerdict, State] = {"slower": "bad", "inconclusive": "unclear"}
SPEED_WORDS: dict[SpeedVerdict, str] = {"slower": "SLOWER", "inconclusive": "cannot be told"}


class Scored(Protocol):
    """A stage or a training, which has metrics with their errors."""

    metrics: dict[str, float]
    stderr: dict[str, float]


def metric(scored: Scored, name: str) -> str:
    """Return a metric with its standard error, empty where it was not measured: 0.8956 ± 0.0103."""
    return with_error(scored.metrics[name], scored.stderr.get(name)) if name in scored.metrics else ""


def metrics(scored: Scored) -> str:
    return ", ".join(f"{label(name)} {metric(scored, name)}" for name in scored.metrics)


def points(values: Mapping[str, float], errors: Mapping[str, float], sign: str = "") -> Cell:
    """Return metrics, or their differences, in points, one a line: accuracy 89.56 ± 1.03."""
    lines = [f"{label(name)} {in_points(value, errors.get(name), sign)}" for name, value in values.items()]
    return Cell("\n".join(lines), sort=next(iter(values.values()), None))


def noise(versus: Comparison) -> str:
    return "within noise" if versus.within_noise else "beyond noise"


def change(versus: Comparison, name: str = "", *, in_percent: bool = False) -> Cell:
    """Return the difference from FP32 in a metric, the primary one unless named: plus is a gain.

    Args:
        in_percent: in points, 100 times the difference.
    """
    name = name or next(iter(versus.delta))
    value, error = versus.delta[name], versus.delta_stderr.get(name)
    value += 0.0  # no negative zero
    text = in_points(value, error, "+") if in_percent else with_error(value, error, "+.4f")
    quiet = versus.within_noise
    return Cell(text, note="within noise" if quiet else "", short=f"{text} ~" if quiet else None, sort=value)


def change_text(versus: Comparison, *, in_percent: bool = False) -> str:
    return f"{change(versus, in_percent=in_percent).text}, {noise(versus)}"


def differing(versus: Comparison) -> str:
    """Return how many predictions differ, empty without classes: 5 of 872."""
    return "" if versus.disagreements is None else f"{versus.disagreements:,} of {versus.n:,}"


def sqnr(versus: Comparison) -> Cell:
    """Return SQNR with its standard error: 28.1 ± 0.3 dB."""
    if versus.sqnr_db is None:
        return Cell("equal", sort=999.0)  # above all others
    error = "" if versus.sqnr_db_stderr is None else f" ± {versus.sqnr_db_stderr:.1f}"
    return Cell(f"{versus.sqnr_db:.1f}{error} dB{f' ({versus.sqnr_output})' if versus.sqnr_output else ''}")


def noise_share(versus: Comparison, whole: Comparison) -> str:
    """Return the noise power over that of another model, empty where that has none: 40%."""
    return f"{versus.noise_power / whole.noise_power:.0%}" if whole.noise_power else ""


def speed(ratio: Speedup | None) -> Cell:
    """Return a speed-up with its interval, and the verdict unless it is faster: 0.90x [0.85, 0.95] slower.

    Where other processes took the cores, it is that of CPU times, and that of wall times is the note.
    """
    if ratio is None:
        return Cell()
    leads = ratio.leading
    verdict = "" if leads.verdict == "faster" else leads.verdict
    by = "by CPU time" if ratio.by_cpu_time else ""
    text = " ".join(filter(None, (speed_text(ratio), leads.interval, by, verdict)))
    note = f"by wall time {_bare(ratio)}" if ratio.by_cpu_time else ""
    return Cell(text, SPEED_STATES.get(leads.verdict, ""), note=note, sort=leads.value)


def speed_text(ratio: Speedup | None) -> str:
    return f"{ratio.leading.value:.2f}x" if ratio else ""


def _bare(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}x {ratio.interval}".strip()


def cpu_speed(ratio: Speedup) -> str:
    """Return the speed-up by CPU time, empty where it was not read or leads already."""
    return "" if ratio.cpu is None or ratio.by_cpu_time else _bare(ratio.cpu)


def speed_place(ratio: Speedup) -> str:
    """Return a speed-up and where it was measured: 1.40x [1.38, 1.42] over FP16 engine at 32 x 128."""
    by = " by CPU time" if ratio.by_cpu_time else ""
    return f"{_bare(ratio.leading)}{by} over {ratio.baseline} at {ratio.config}"


def speed_doubt(shapes: Sequence[Speedup]) -> str:
    """Return what speaks against INT8 at shapes with the worst first: it is slower, or nowhere faster."""
    verdicts = [row.leading.verdict for row in shapes]
    if "slower" in verdicts:
        return f"INT8 is slower {places(shapes)}"
    return "INT8 is no faster" if "as fast" in verdicts and "faster" not in verdicts else ""


def places(shapes: Sequence[Speedup]) -> str:
    """Return where the worst verdict was, of shapes with the worst first: at 1 of 3 shapes."""
    same = sum(row.leading.verdict == shapes[0].leading.verdict for row in shapes)
    return f"at {shapes[0].config}" if len(shapes) == 1 else f"at {same} of {len(shapes)} shapes"


def speed_verdict(shapes: Sequence[Speedup]) -> tuple[str, State]:
    """Return the verdict on speed at shapes that have the worst first: slower at 1 of 3 shapes: ..."""
    if not shapes:
        return "not measured until `qdqbench bench RUN`", ""
    worst, best = shapes[0], shapes[-1]
    verdict = worst.leading.verdict
    text = f"{SPEED_WORDS.get(verdict, verdict)} {places(shapes)}: {speed_place(worst)}"
    text += f"; best {speed_place(best)}" if worst is not best else ""
    return text, "good" if verdict == "faster" else SPEED_STATES.get(verdict, "")


def latency(measured: Speedup | float | None) -> str:
    """Return milliseconds, of a speed-up those of its system: four significant digits, no exponent."""
    value = measured.system_ms if isinstance(measured, Speedup) else measured
    return "" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
