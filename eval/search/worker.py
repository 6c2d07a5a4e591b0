"""What one worker of a search is given, and what it measures with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qdqbench.eval.search.results import Source
from qdqbench.eval.search.trial import Workspace
from qdqbench.quantize.core.speedup import Speedup
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import Recipe

if TYPE_CHECKING:
    import optuna

Measure = Callable[[Recipe, Plan], Speedup]


@dataclass(frozen=True)
class SearchOptions:
    """What the user asked for."""

    trials: int = 40
    budget_s: float | None = None  # after which no trial is started
    samples: int = 1024
    batch: int = 32
    length: int = 128
    latency: Literal["auto", "engine", "model"] = "auto"
    objective: Literal["divergence", "drop"] = "divergence"
    storage: str | None = None
    study: str | None = None
    sensitivity: Path | None = None
    cost_model: Path | None = None


@dataclass
class Worker:
    """One process of a search: everything that a trial needs."""

    work: Workspace
    options: SearchOptions
    source: Source
    measure: Measure
    study: "optuna.Study"
    ranking_source: str

    @property
    def gate(self) -> Any:
        """The recipe's gate."""
        return self.work.session.recipe.gate
