"""Schema of `auto.json`: what was tried, what each step bought, and what to deploy (docs/auto.md)."""

from collections.abc import Iterator
from typing import Any, Literal

from qdqbench.eval.search.results import Source
from qdqbench.quantize.core.comparison import Comparison
from qdqbench.quantize.core.frames import Tabular
from qdqbench.quantize.core.speedup import Speedup
from qdqbench.quantize.core.strict import Strict

AUTO_FILE = "auto.json"
BEST_RECIPE = "best.yaml"
Kind = Literal["shipped", "methods", "islands", "search", "qat"]


class Lacks(Strict):
    """What keeps a recipe from holding, in sentences; all empty where it holds."""

    accuracy: list[str] = []
    speed: list[str] = []
    other: list[str] = []  # INT8 that is not proven, findings, parity, verification

    @property
    def all(self) -> list[str]:
        """Every sentence."""
        return [*self.accuracy, *self.speed, *self.other]


class Final(Strict):
    """A recipe that holds, each sample judged by the choice that is made without it."""

    folds: int
    vs_fp32: dict[str, Comparison]  # by evaluation split
    others: float  # share of the samples whose answers are of another step than the chosen one
    lacks: list[str]  # of accuracy; empty where it holds


class Measured(Strict):
    """A recipe through a whole run."""

    recipe: str  # its name
    recipe_file: str  # in the folder
    run: str  # run directory, in the folder
    engine: str | None  # in the folder; None where none was built
    int8_linears: int
    int8_attention: int
    stage: str  # the last one that was measured, which the figures are of
    metrics: dict[str, float]  # primary first; `_mm` is MNLI's mismatched split
    vs_fp32: dict[str, Comparison]  # by evaluation split
    before: str | None  # the step that it is compared with: the last one before it that was measured
    vs_before: dict[str, Comparison]  # by evaluation split; empty for the first
    latency: Speedup | None
    latency_note: str  # where it comes from, or why there is none
    lacks: Lacks
    # where it lacks nothing and others were tried before it: None: nothing was chosen by evaluation data
    final: Final | None = None

    @property
    def missing(self) -> Lacks:
        """All that keeps it from holding."""
        unseen = self.final.lacks if self.final else []
        return self.lacks.model_copy(update={"accuracy": [*self.lacks.accuracy, *unseen]})


class Step(Strict):
    """One rung of the ladder."""

    name: str
    kind: Kind
    status: Literal["done", "skipped", "failed"]
    reason: str = ""  # why it was skipped, or what failed
    again: bool = False  # it failed of something that can be mended: the same command tries it again
    proposal: list[str] = []  # how its recipe was found, in sentences
    estimate_s: float | None = None  # before
    seconds: float = 0.0  # after
    measured: Measured | None = None  # None unless done

    @property
    def holds(self) -> bool:
        """Whether its recipe holds the gate."""
        return self.measured is not None and not self.measured.missing.all


class Choice(Strict):
    """What to deploy, and whether it holds."""

    passed: bool
    step: str | None  # None: no step came to an end
    why: str
    lacks: list[str]
    recipe: str | None  # files to deploy, with the folder
    engine: str | None
    run: str | None
    command: str | None  # that repeats it


class Wanted(Strict):
    """The gate: what was asked for."""

    max_drop: float  # of the primary metric, a fraction
    min_speedup: float | None = None


class Auto(Tabular):
    """Everything that `qdqbench auto` found."""

    schema_version: Literal[1] = 1
    created: str  # ISO 8601, UTC
    command: str
    folder: str
    model: dict[str, Any]  # name, sha256
    task: dict[str, Any]
    data: dict[str, Any]  # source, evaluated samples by split, rows that proposals are chosen on
    seed: int
    gate: Wanted
    metric: str  # primary metric of the task
    fp32: dict[str, float]  # metrics of FP32
    budget_s: float
    spent_s: float  # of finished steps, those of interrupted calls included
    steps: list[Step]
    choice: Choice
    source: Source | None  # of latencies; None: there are none
    warnings: list[str] = []  # what needs a look; not in files of earlier versions
    notes: list[str]
    environment: dict[str, Any]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One a step; `delta` is the paired difference from FP32 on the first evaluation split."""
        for step in self.steps:
            yield {"step": step.name, "status": step.status, "holds": step.holds, "reason": step.reason} | (
                _cells(step.measured, self.metric) if step.measured else {}
            )


def _cells(found: Measured, metric: str) -> dict[str, Any]:
    versus = next(iter(found.vs_fp32.values()))
    return {
        "recipe": found.recipe,
        "value": found.metrics[metric],
        "delta": versus.delta[metric],
        "delta_stderr": versus.delta_stderr[metric],
        "speedup": found.latency.value if found.latency else None,
    }
