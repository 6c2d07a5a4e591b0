"""Schema of `search.json`, which holds every number of a search, and the choice among its trials."""

from pathlib import Path
from typing import Any, Literal

from qdqbench.eval.metrics.gate import limit
from qdqbench.eval.selection.search.options import Objective
from qdqbench.eval.selection.trials.results import DRAW, Scores, Trial
from qdqbench.quantize.recipe.sections import GateSettings
from qdqbench.quantize.utils.comparison import Comparison, GateIssue
from qdqbench.quantize.utils.schema import Strict, read

SEARCH_FILE = "search.json"
EQUAL = 1.01  # engines within 1% of each other count as equally fast: rounds differ by as much


class SearchTrial(Trial):
    """One point of the search space; its scores are those on the draw."""

    number: int  # in the study
    params: dict[str, Any] = {}
    shipped: str = ""  # the shipped recipe that was moved into the space
    int8_linears: int = 0
    int8_attention: int = 0
    int8_share: float = 0.0  # of the multiply-adds of the encoder, from 0 to 1
    duplicate_of: int | None = None  # an earlier trial with the same recipe, whose values it has
    holds: bool = False  # satisfies the gate; a drop that exceeds `max_drop` within noise does
    on_front: bool = False  # no other trial is better in one objective and as good in the other

    @property
    def is_scored(self) -> bool:
        """Return whether it has values and no earlier trial has the same."""
        return self.failure is None and DRAW in self.scores and self.duplicate_of is None

    @property
    def gain(self) -> float:
        """Return the second objective, larger is better: the speed-up, or else the INT8 share."""
        return self.speedup.value if self.speedup else self.int8_share

    def loss(self, objective: Objective) -> float:
        """Return the first objective."""
        return self.divergence if objective == "divergence" else self.scores[DRAW].drop

    def violation(self, gate: GateSettings) -> float:
        """Return how far it is from satisfying the gate; 0 where it does.

        `min_speedup` decides where it is set, else `max_drop`.
        """
        if gate.min_speedup is not None:
            return max(0.0, gate.min_speedup - (self.speedup.value if self.speedup else 0.0))
        score = self.scores[DRAW]
        return max(0.0, score.drop - limit(score.drop_stderr, gate.max_drop))


class ConfirmedRecipe(Trial):
    """A recipe on evaluation data, which no trial has seen; its scores are those of fake-quant by split."""

    name: str
    int8_share: float = 0.0
    engine: dict[str, Comparison] = {}  # of the chosen recipe, by split; empty where no engine ran
    # a shipped recipe that is at least as accurate and as fast as the chosen one, one of both strictly more
    dominates: bool = False

    @property
    def gain(self) -> float:
        """Return the second objective, as of a trial."""
        return self.speedup.value if self.speedup else self.int8_share

    @property
    def score(self) -> Comparison | None:
        """Return the scores of the first split; None: it failed."""
        return next(iter(self.scores.values()), None)


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
    twin: str = "FP16"  # datatype of the baseline, and of what an engine has not in INT8
    backend: str = ""
    version: str = ""
    batch: int
    length: int

    @property
    def label(self) -> str:
        """Return a clause for reports."""
        if self.mode == "int8-share":
            return "not measured: the INT8 share of multiply-adds is compared"
        return f"measured on {self.gpu or self.cpu}, {self.backend} {self.version}"


class Ranking(Strict):
    """The order in which units and attentions leave INT8, the worst in INT8 first."""

    units: list[tuple[int, str]]  # layer and kind
    attention: list[int]  # layers
    file: str | None = None  # sensitivity that it is from
    samples: int | None = None  # train rows of a sensitivity of its own


class SearchOutcome(Strict):
    """The trial that the gate asks for, and whether it holds on evaluation data."""

    passed: bool = False
    chosen: int | None = None  # number of the trial; None: none holds the gate
    best: int | None = None  # where none does, the one that comes nearest
    holding: int = 0  # trials that hold the gate
    equal: int = 1  # of them as fast as the fastest, within 1%; the most accurate was taken
    issues: list[GateIssue] = []


class Search(Strict):
    """Every number of one search."""

    schema_version: Literal[2] = 2
    created: str  # ISO 8601, UTC
    command: str
    recipe: dict[str, Any]  # the given one, resolved
    model: str
    task: str
    metric: str
    settings: dict[str, Any]  # what all workers of the study share
    study: str
    objective: Objective
    ranking: Ranking
    source: Source
    fp32: dict[str, Scores]  # by evaluation split
    trials: list[SearchTrial]
    outcome: SearchOutcome
    confirmed: list[ConfirmedRecipe]  # the chosen recipe first, then the given and the shipped ones
    agreement: DropAgreement | None
    warnings: list[str]
    notes: list[str]  # how data were read
    environment: dict[str, Any]

    @property
    def chosen(self) -> SearchTrial | None:
        """Return the chosen trial."""
        return next((trial for trial in self.trials if trial.number == self.outcome.chosen), None)


def read_search(path: Path) -> Search:
    """Read `search.json`.

    Raises:
        UserError: missing, or of another version.
    """
    return read(path, Search, "search", "search again")


def mark_trials(trials: list[SearchTrial], gate: GateSettings, objective: Objective) -> None:
    """Set `holds` and `on_front` of every trial with values."""
    points = {trial.number: (trial.loss(objective), -trial.gain) for trial in trials if trial.is_scored}
    for trial in trials:
        trial.holds = trial.failure is None and DRAW in trial.scores and not trial.violation(gate)
        own = points.get(trial.number)
        trial.on_front = own is not None and not any(
            o[0] <= own[0] and o[1] <= own[1] and o != own for o in points.values()
        )


def choose_trial(trials: list[SearchTrial], gate: GateSettings) -> SearchOutcome:
    """Return the trial that the gate asks for, or the one that comes nearest to it."""
    done = [trial for trial in trials if trial.is_scored]
    held = [trial for trial in done if trial.holds]
    if not held:
        fast = gate.min_speedup is not None
        key = lambda trial: -trial.gain if fast else trial.scores[DRAW].drop  # noqa: E731
        nearest = min(done, key=key, default=None)
        return SearchOutcome(best=None if nearest is None else nearest.number)
    fastest = max(trial.gain for trial in held)
    equal = held if gate.min_speedup else [trial for trial in held if trial.gain >= fastest / EQUAL]
    chosen = min(equal, key=lambda trial: (trial.divergence, -trial.gain))
    return SearchOutcome(chosen=chosen.number, holding=len(held), equal=len(equal))


def dominates(row: ConfirmedRecipe, chosen: ConfirmedRecipe) -> bool:
    """Return whether a row is as accurate and as fast as the chosen recipe, and better in one of both.

    Speed-ups, or INT8 shares, within 1% of each other are equal.
    """
    if row.score is None or chosen.score is None:
        return False
    better = chosen.score.drop - row.score.drop
    as_good = better >= 0 and row.gain >= chosen.gain / EQUAL
    return as_good and (better > 0 or row.gain > EQUAL * chosen.gain)
