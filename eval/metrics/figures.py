"""How what is measured is put into words: once for tiles, cells, sentences and lines of a stage."""

from collections.abc import Mapping
from typing import Protocol

from qdqbench.eval.metrics.results import Comparison, Speedup, SpeedVerdict
from qdqbench.quantize.report.document import Cell, State
from qdqbench.quantize.report.formats import in_points, label, with_error

SPEED_STATES: dict[SpeedVerdict, State] = {"faster": "", "slower": "bad", "inconclusive": "unclear"}


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


def change(versus: Comparison, name: str = "", *, in_percent: bool = False, loss: bool = False) -> Cell:
    """Return the difference from FP32 in a metric, the primary one unless named, with its paired error.

    Args:
        in_percent: in points, 100 times the difference.
        loss: with the other sign, as a drop.
    """
    name = name or next(iter(versus.delta))
    value, error = versus.delta[name], versus.delta_stderr.get(name)
    value = (-value if loss else value) + 0.0  # no negative zero
    text = in_points(value, error, "+") if in_percent else with_error(value, error, "+.4f")
    quiet = versus.within_noise
    return Cell(text, note="within noise" if quiet else "", short=f"{text} ~" if quiet else None, sort=value)


def change_text(versus: Comparison, *, in_percent: bool = False) -> str:
    return f"{change(versus, in_percent=in_percent).text}, {noise(versus)}"


def differing(versus: Comparison) -> str:
    """Return how many predictions differ, empty without classes: 5 of 872."""
    return "" if versus.disagreements is None else f"{versus.disagreements:,} of {versus.n:,}"


def sqnr(versus: Comparison) -> str:
    return "equal" if versus.sqnr_db is None else f"{versus.sqnr_db:.1f} dB"


def divergence(versus: Comparison) -> Cell:
    value = versus.distance
    return Cell(f"{value:.2e} ± {versus.divergence_stderr:.0e}", short=f"{value:.2e}", sort=value)


def speed(ratio: Speedup | None) -> Cell:
    """Return a speed-up with its interval, and the verdict unless it is faster: 0.90x [0.85, 0.95] slower."""
    if ratio is None:
        return Cell()
    value = f"{ratio.value:.2f}x"
    verdict = "" if ratio.verdict == "faster" else ratio.verdict
    text = " ".join(filter(None, (value, ratio.interval, verdict)))
    return Cell(text, SPEED_STATES[ratio.verdict], short=value, sort=ratio.value)


def speed_text(ratio: Speedup | None) -> str:
    return f"{ratio.value:.2f}x" if ratio else ""


def speed_clause(ratio: Speedup) -> str:
    """Return a speed-up in a sentence on INT8: 1.40x as fast as FP16 engine at b32 s128."""
    slower, unclear = ratio.verdict == "slower", ratio.verdict == "inconclusive"
    about = [speed_text(ratio)] if slower else []
    about += ["quick bench"] if ratio.quick else []
    about += [f"95% CI {ratio.interval}"] if ratio.interval and (ratio.quick or unclear) else []
    about += ["inconclusive"] if unclear else []
    text = "SLOWER than" if slower else f"{speed_text(ratio)} as fast as"
    remark = f" ({', '.join(about)})" if about else ""
    return f"{text} {ratio.baseline} at {ratio.config}{remark}"


def latency(measured: Speedup | float | None) -> str:
    """Return milliseconds, of a speed-up those of its system: four significant digits, no exponent."""
    value = measured.system_ms if isinstance(measured, Speedup) else measured
    return "" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
