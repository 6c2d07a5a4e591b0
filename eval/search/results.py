"""Schema of `search.json`, which holds every number of a search (documented in docs/search.md)."""

from pathlib import Path
from typing import Any, Literal

from qdqbench.eval.accuracy.gate import judge
from qdqbench.eval.report.formats import points
from qdqbench.quantize.core.comparison import Comparison
from qdqbench.quantize.core.speedup import Speedup
from qdqbench.quantize.core.strict import Strict, read

SEARCH_FILE = "search.json"
EQUAL_LATENCY = 1.01  # engines within 1% of each other count as equally fast: rounds differ by as much


class Accuracy(Strict):
    """A fake-quant model, or an engine, against FP32 on the same samples."""

    divergence: float  # mean KL(FP32 || INT8) in nats, or mean squared difference / variance of a regression
    metric: str
    value: float  # of the recipe
    drop: float  # FP32 minus the recipe
    drop_stderr: float  # paired
    within_noise: bool  # |drop| is at most two of its standard errors
    disagreements: int | None  # None for regression
    n: int


class Trial(Strict):
    """One recipe that was tried."""

    number: int
    state: Literal["complete", "failed"]
    origin: str  # "given recipe", "shipped NAME", "nothing in INT8", "ranking", "TPE"
    reason: str | None = None  # why it failed
    params: dict[str, Any]
    recipe: str | None = None  # YAML
    int8_linears: int = 0
    int8_attention: int = 0
    accuracy: Accuracy | None = None
    latency: Speedup | None = None
    duplicate_of: int | None = None  # an earlier trial with the same recipe, whose values it has
    holds: bool = False  # satisfies the gate; a drop that exceeds `max_drop` within noise does
    on_front: bool = False  # no other trial is better in one objective and as good in the other
    seconds: float | None = None


class Confirmed(Strict):
    """A recipe on data that the search did not see."""

    name: str
    shipped: bool
    status: Literal["done", "failed"]
    reason: str | None = None
    recipe: dict[str, Any] | None = None  # resolved
    fake_quant: dict[str, Comparison] = {}  # by split, against FP32
    metrics: dict[str, float] = {}  # of fake-quant; `_mm` is MNLI's mismatched split
    engine: dict[str, Comparison] = {}  # empty where no engine ran
    engine_metrics: dict[str, float] = {}
    latency: Speedup | None = None
    # a shipped recipe that is at least as accurate and as fast as the chosen one, one of both strictly more
    dominates: bool = False


class DropAgreement(Strict):
    """The chosen recipe's drop where it was searched, and where it was confirmed."""

    searched: float
    searched_stderr: float
    confirmed: float
    confirmed_stderr: float
    within_noise: bool  # they differ by at most 2 sqrt(sum of squared standard errors)


class Source(Strict):
    """Where latencies come from."""

    mode: Literal["engine", "model"]
    label: str  # shown beside every latency
    gpu: str | None = None
    cpu: str | None = None  # where engines run on it
    twin: str = "FP16"  # datatype of the twin, and of what an engine has not in INT8
    backend: str
    version: str
    batch: int
    length: int
    outside: list[str] = []  # sizes and placements outside of what the cost model was fitted to
    error: dict[str, float] | None = None  # of the cost model, leave one engine out


class Answer(Strict):
    """The answer, and whether it holds."""

    passed: bool
    rule: str  # what was asked
    chosen: int | None  # number of the trial
    why: str
    failures: list[str]


class Search(Strict):
    """Every number of one search."""

    schema_version: Literal[1] = 1
    created: str  # ISO 8601, UTC
    command: str
    recipe: dict[str, Any]  # the given one, resolved
    model: str
    task: str
    metric: str
    settings: dict[str, Any]  # what all workers of the study share
    study: str
    objective: Literal["divergence", "drop"]
    ranking: dict[str, list[Any]]  # units and attentions, the worst in INT8 first
    ranking_source: str
    source: Source
    fp32: dict[str, float]  # metrics on validation
    trials: list[Trial]
    outcome: Answer
    confirmed: list[Confirmed]  # the chosen recipe first, then the shipped ones
    agreement: DropAgreement | None
    warnings: list[str]
    notes: list[str] = []  # how data were read
    environment: dict[str, Any]


def read_search(path: Path) -> Search:
    """Read `search.json`.

    Raises:
        UserError: missing, or of another version.
    """
    return read(path, Search, "search", "search again")


def mark_front(trials: list[Trial], objective: str) -> None:
    """Set `on_front` of every complete trial (both objectives are minimized)."""
    points = {
        t.number: objectives(t.accuracy, t.latency, objective) for t in trials if t.accuracy and t.latency
    }
    for trial in trials:
        own = points.get(trial.number)
        trial.on_front = (
            own is not None
            and trial.duplicate_of is None
            and not any(
                o[0] <= own[0] and o[1] <= own[1] and (o[0] < own[0] or o[1] < own[1])
                for o in points.values()
            )
        )


def trial_holds(accuracy: Accuracy, latency: Speedup, gate: Any) -> bool:
    """Whether a trial satisfies the gate: `min_speedup` where it is set, else `max_drop`."""
    if gate.min_speedup is not None:
        return bool(latency.value >= gate.min_speedup)
    return judge(accuracy.drop, accuracy.drop_stderr, gate.max_drop) != "fails"


def choose_trial(trials: list[Trial], gate: Any) -> tuple[Trial | None, str]:
    """The trial that the gate asks for, and why; None when none holds it (then what was best)."""
    done = [t for t in trials if t.accuracy is not None and t.latency is not None and t.duplicate_of is None]
    held = [t for t in done if t.holds]
    if gate.min_speedup is not None:
        if not held:
            best = max(done, key=lambda t: t.latency.value if t.latency else 0, default=None)
            return None, _none(best, f"none is {gate.min_speedup:g}x as fast as its twin")
        chosen = min(held, key=lambda t: (t.accuracy.divergence if t.accuracy else 0, _relative(t)))
        return (
            chosen,
            f"the most accurate of {len(held)} recipes that are at least {gate.min_speedup:g}x as fast",
        )
    if not held:
        best = min(done, key=lambda t: t.accuracy.drop if t.accuracy else 0, default=None)
        return None, _none(best, f"none loses at most {points(gate.max_drop)}")
    fastest = min(map(_relative, held))
    near = [t for t in held if _relative(t) <= EQUAL_LATENCY * fastest]
    chosen = min(near, key=lambda t: t.accuracy.divergence if t.accuracy else 0)
    why = f"the fastest of {len(held)} recipes that lose at most {points(gate.max_drop)}"
    if chosen.accuracy and chosen.accuracy.drop > gate.max_drop:
        why += f" (it lost {100 * chosen.accuracy.drop:.2f}, which is within noise of that)"
    if len(near) > 1:
        why += f", and the most accurate of the {len(near)} within 1% of that latency"
    return chosen, why


def dominates(row: Confirmed, chosen: Confirmed, metric: str) -> bool:
    """Whether a row is at least as accurate and as fast as the chosen recipe, and one of both strictly.

    Speed-ups within 1% of each other are equal.
    """
    if row.latency is None or chosen.latency is None or metric not in row.metrics:
        return False
    faster = row.latency.value / chosen.latency.value
    better = row.metrics[metric] - chosen.metrics[metric]
    as_good = better >= 0 and faster >= 1 / EQUAL_LATENCY
    return as_good and (better > 0 or faster > EQUAL_LATENCY)


def objectives(accuracy: Accuracy, latency: Speedup, objective: str) -> tuple[float, float]:
    """What a search minimizes: the loss, and latency over that of the twin timed beside it.

    Milliseconds of other hours and cards do not compare.
    """
    return accuracy.divergence if objective == "divergence" else accuracy.drop, 1 / latency.value


def _relative(trial: Trial) -> float:
    return 1 / trial.latency.value if trial.latency else float("inf")


def _none(best: Trial | None, what: str) -> str:
    if best is None or best.accuracy is None or best.latency is None:
        return f"{what}: no trial came to an end"
    return (
        f"{what}; the best was trial {best.number} with a drop of {100 * best.accuracy.drop:.2f} points "
        f"and {best.latency.value:.2f}x"
    )
