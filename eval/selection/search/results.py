"""Schema of `search.json`, which holds every number of a search, and the choice among its trials."""

from pathlib import Path
from typing import Any, Literal

from qdqbench.eval.metrics.gate import limit, missing_db
from qdqbench.eval.metrics.results import Comparison, GateIssue
from qdqbench.eval.selection.search.options import Objective
from qdqbench.eval.selection.trials.results import DRAW, ChoiceRecord, Scores, Trial
from qdqbench.quantize.recipe.sections import GateSettings
from qdqbench.quantize.utils.schema import Strict, field, read

SEARCH_FILE = "search.json"
EQUAL = 1.01  # engines within 1% of each other count as equally fast: rounds differ by as much


class PlacedTrial(Trial):
    """A recipe with both objectives of a search."""

    int8_share: float = field("INT8 share of the encoder's multiply-adds, 0 to 1.", default=0.0)

    @property
    def gain(self) -> float:
        """Return the second objective, larger is better: the speed-up, or else the INT8 share."""
        return self.speedup.value if self.speedup else self.int8_share


class SearchTrial(PlacedTrial):
    """One point of the search space; its scores are those on the draw."""

    number: int = field("Number in the study.")
    params: dict[str, Any] = field("Parameters in the search space.", default={})
    shipped: str = field("Shipped recipe that it is derived from, or empty.", default="")
    int8_linears: int = field("Linear layers in INT8.", default=0)
    int8_attention: int = field("Attention layers in INT8.", default=0)
    key: str = field("Hash, the same for trials that make the same model; empty without.", default="")
    duplicate_of: int | None = field("Number of an earlier trial with this recipe; else null.", default=None)
    holds: bool = field("True if it satisfies the gate, also within noise.", default=False)
    on_front: bool = field("True if it is on the Pareto front.", default=False)

    @property
    def is_scored(self) -> bool:
        return self.failure is None and DRAW in self.scores and self.duplicate_of is None

    def objectives(self, objective: Objective) -> tuple[float, float]:
        """Return what a search minimizes; ratios of engines timed in turns compare, milliseconds do not."""
        loss = self.noise_power if objective == "sqnr" else self.scores[DRAW].drop
        return loss, 1 / self.speedup.value if self.speedup else 1 - self.int8_share

    def violation(self, gate: GateSettings) -> float:
        """Return how far it is from `min_speedup`, else `max_drop`, and from `min_sqnr_db`; 0: it holds."""
        score = self.scores[DRAW]
        if gate.min_speedup is None:
            far = score.drop - limit(score.drop_stderr, gate.max_drop)
        else:
            far = gate.min_speedup - (self.speedup.value if self.speedup else 0.0)
        return max(0.0, far) + missing_db(score, gate.min_sqnr_db)


class ConfirmedRecipe(PlacedTrial):
    """A recipe on evaluation data, which no trial has seen; its scores are those of fake-quant by split."""

    name: str = field("Name of the recipe.")
    engine: dict[str, Comparison] = field("The chosen recipe's engine and FP32, by split.", default={})
    dominates: bool = field("True if shipped, as good as the chosen one, better in one.", default=False)

    @property
    def score(self) -> Comparison | None:
        return next(iter(self.scores.values()), None)


class DropAgreement(Strict):
    """The chosen recipe's drop where it was searched, and where it was confirmed."""

    searched: float = field("Drop of the chosen recipe on the search rows.")
    searched_stderr: float = field("Paired standard error of `searched`.")
    confirmed: float = field("Drop of the chosen recipe on the evaluation split.")
    confirmed_stderr: float = field("Paired standard error of `confirmed`.")
    within_noise: bool = field("True if they differ by at most two standard errors.")


class Source(Strict):
    """The second objective of a search, and the device that engines are timed on."""

    mode: Literal["latency", "int8-share"] = field("Second objective: latency, or INT8 share of the work.")
    gpu: str | None = field("Name of the GPU; null without one.", default=None)
    cpu: str | None = field("Name of the CPU if engines run on it; else null.", default=None)
    baseline_precision: str = field("Precision of the baseline: `FP16`, `BF16`, `FP32`.", default="FP16")
    backend: str = field("Backend of the engines.", default="")
    version: str = field("Version of the backend.", default="")
    batch: int = field("Batch size in sequences.")
    length: int = field("Sequence length in tokens.")

    @property
    def label(self) -> str:
        if self.mode == "int8-share":
            return "not measured: the INT8 share of multiply-adds is compared"
        return f"measured on {self.gpu or self.cpu}, {self.backend} {self.version}"


class Ranking(Strict):
    """The order in which units and attentions leave INT8, the worst in INT8 first."""

    units: list[tuple[int, str]] = field("Layer and kind in the order of leaving INT8, the costliest first.")
    attention: list[int] = field("Attention layers by number, the most costly in INT8 first.")
    file: str | None = field("File of the sensitivity; null for one of its own.", default=None)
    samples: int | None = field("Train rows of its own sensitivity; else null.", default=None)


class SearchOutcome(Strict):
    """The trial that the gate asks for, and whether it holds on evaluation data."""

    passed: bool = field("True if the chosen trial passes on evaluation data.", default=False)
    chosen: int | None = field("Number of the chosen trial; null if none holds.", default=None)
    best: int | None = field("Trial nearest to the gate if none holds; else null.", default=None)
    holding: int = field("Number of trials that satisfy the gate.", default=0)
    equal: int = field("Number of these that are within 1% of the fastest.", default=1)
    issues: list[GateIssue] = field("Issues of the gate on evaluation data.", default=[])


class Search(ChoiceRecord):
    """Every number of one search."""

    recipe: dict[str, Any] = field("Base recipe with every default filled in.")
    model: str = field("Folder or hub id.")
    task: str = field("Name of the task.")
    settings: dict[str, Any] = field("Settings that all workers of the study share.")
    study: str = field("Name of the study.")
    objective: Objective = field("First objective.")
    ranking: Ranking = field("Order in which units and attention layers leave INT8.")
    source: Source = field("Second objective and its device.")
    fp32: dict[str, Scores] = field("Metrics of FP32 by evaluation split.")
    trials: list[SearchTrial] = field("Finished trials.")
    outcome: SearchOutcome = field("Chosen trial, and whether it passes.")
    confirmed: list[ConfirmedRecipe] = field("On evaluation data: the chosen, the given, shipped recipes.")
    agreement: DropAgreement | None = field("Both drops of the chosen recipe; null without one.")

    @property
    def chosen(self) -> SearchTrial | None:
        return next((trial for trial in self.trials if trial.number == self.outcome.chosen), None)


def read_search(path: Path) -> Search:
    return read(path, Search, "search", "search again")


def mark_trials(trials: list[SearchTrial], gate: GateSettings, objective: Objective) -> list[SearchTrial]:
    points = {trial.number: trial.objectives(objective) for trial in trials if trial.is_scored}
    for trial in trials:
        trial.holds = trial.failure is None and DRAW in trial.scores and not trial.violation(gate)
        own = points.get(trial.number)
        trial.on_front = own is not None and not any(
            o[0] <= own[0] and o[1] <= own[1] and o != own for o in points.values()
        )
    return trials


def choose_trial(trials: list[SearchTrial], gate: GateSettings) -> SearchOutcome:
    """Return the trial that the gate asks for, or the one that comes nearest to it."""
    done = [trial for trial in trials if trial.is_scored]
    held = [trial for trial in done if trial.holds]
    if not held:
        nearest = min(done, key=lambda trial: trial.violation(gate), default=None)
        return SearchOutcome(best=None if nearest is None else nearest.number)
    fastest = max(trial.gain for trial in held)
    equal = held if gate.min_speedup else [trial for trial in held if trial.gain >= fastest / EQUAL]
    chosen = min(equal, key=lambda trial: (trial.noise_power, -trial.gain))
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
