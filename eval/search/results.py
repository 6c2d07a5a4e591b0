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
    int8_share: float = 0.0  # of the multiply-adds of the encoder, from 0 to 1
    accuracy: Accuracy | None = None
    latency: Speedup | None = None  # where engines are timed
    duplicate_of: int | None = None  # an earlier trial with the same recipe, whose values it has
    holds: bool = False  # satisfies the gate; a drop that exceeds `max_drop` within noise does
    on_front: bool = False  # no other trial is better in one objective and as good in the other
    seconds: float | None = None

    @property
    def gain(self) -> float:
        """The second objective, larger is better: the speed-up, or the INT8 share of multiply-adds."""
        return self.latency.value if self.latency else self.int8_share


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
    int8_share: float = 0.0
    latency: Speedup | None = None  # where engines are timed
    # a shipped recipe that is at least as accurate and as fast as the chosen one, one of both strictly more
    dominates: bool = False

    @property
    def gain(self) -> float:
        """The second objective, as of a trial."""
        return self.latency.value if self.latency else self.int8_share


class DropAgreement(Strict):
    """The chosen recipe's drop where it was searched, and where it was confirmed."""

    searched: float
    searched_stderr: float
    confirmed: float
    confirmed_stderr: float
    within_noise: bool  # they differ by at most 2 sqrt(sum of squared standard errors)


class Source(Strict):
    """The second objective of a search, and the device that engines are timed on."""

    mode: Literal["latency", "int8-share"]  # measured here, or the INT8 share of multiply-adds
    gpu: str | None = None
    cpu: str | None = None  # where engines run on it
    twin: str = "FP16"  # datatype of the twin, and of what an engine has not in INT8
    backend: str = ""
    version: str = ""
    batch: int
    length: int

    @property
    def label(self) -> str:
        """A clause for reports."""
        if self.mode == "int8-share":
            return "not measured: the INT8 share of multiply-adds is compared"
        return f"measured on {self.gpu or self.cpu}, {self.backend} {self.version}"


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
    """Set `on_front` of every complete trial."""
    points = {t.number: (_loss(t.accuracy, objective), -t.gain) for t in trials if t.accuracy}
    for trial in trials:
        own = points.get(trial.number)
        trial.on_front = (
            own is not None
            and trial.duplicate_of is None
            and not any(o[0] <= own[0] and o[1] <= own[1] and o != own for o in points.values())
        )


def trial_holds(accuracy: Accuracy, latency: Speedup | None, gate: Any) -> bool:
    """Return whether a trial satisfies the gate: `min_speedup` where it is set, else `max_drop`."""
    if gate.min_speedup is not None:
        return latency is not None and latency.value >= gate.min_speedup
    return judge(accuracy.drop, accuracy.drop_stderr, gate.max_drop) != "fails"


def choose_trial(trials: list[Trial], gate: Any) -> tuple[Trial | None, str]:
    """Return the trial that the gate asks for, and why; None when none holds it (then what was best)."""
    done = [(t, t.accuracy) for t in trials if t.accuracy is not None and t.duplicate_of is None]
    held = [each for each in done if each[0].holds]
    if gate.min_speedup is not None:
        if not held:
            best = max(done, key=lambda each: each[0].gain, default=None)
            return None, _none(best, f"none is {gate.min_speedup:g}x as fast as its twin")
        chosen, _ = min(held, key=lambda each: (each[1].divergence, -each[0].gain))
        return (
            chosen,
            f"the most accurate of {len(held)} recipes that are at least {gate.min_speedup:g}x as fast",
        )
    if not held:
        best = min(done, key=lambda each: each[1].drop, default=None)
        return None, _none(best, f"none loses at most {points(gate.max_drop)}")
    most = max(trial.gain for trial, _ in held)
    near = [each for each in held if each[0].gain >= most / EQUAL_LATENCY]
    chosen, accuracy = min(near, key=lambda each: each[1].divergence)
    first = "fastest" if chosen.latency else "one with the largest INT8 share"
    why = f"the {first} of {len(held)} recipes that lose at most {points(gate.max_drop)}"
    if accuracy.drop > gate.max_drop:
        why += f" (it lost {100 * accuracy.drop:.2f}, which is within noise of that)"
    if len(near) > 1:
        why += f", and the most accurate of the {len(near)} within 1% of that"
    return chosen, why


def dominates(row: Confirmed, chosen: Confirmed, metric: str) -> bool:
    """Return whether a row is as accurate and as fast as the chosen recipe, and better in one of both.

    Speed-ups, or INT8 shares, within 1% of each other are equal.
    """
    if row.status == "failed" or chosen.status == "failed":
        return False
    better = row.metrics[metric] - chosen.metrics[metric]
    as_good = better >= 0 and row.gain >= chosen.gain / EQUAL_LATENCY
    return as_good and (better > 0 or row.gain > EQUAL_LATENCY * chosen.gain)


def objectives(
    accuracy: Accuracy, latency: Speedup | None, share: float, objective: str
) -> tuple[float, float]:
    """Return what a search minimizes: the loss, and the latency over that of the twin timed with it.

    Milliseconds of other hours and cards do not compare. Without a latency it is the share of the
    multiply-adds that is not in INT8.
    """
    return _loss(accuracy, objective), 1 / latency.value if latency else 1 - share


def _loss(accuracy: Accuracy, objective: str) -> float:
    return accuracy.divergence if objective == "divergence" else accuracy.drop


def _none(best: tuple[Trial, Accuracy] | None, what: str) -> str:
    if best is None:
        return f"{what}: no trial came to an end"
    trial, accuracy = best
    speed = f"{trial.gain:.2f}x" if trial.latency else f"{trial.gain:.0%} of the multiply-adds in INT8"
    drop = f"a drop of {100 * accuracy.drop:.2f} points"
    return f"{what}; the best was trial {trial.number} with {drop} and {speed}"
