"""Schema of `methods.json`: calibration methods side by side (documented in docs/methods.md)."""

from typing import Any

from qdqbench.eval.selection.trials.results import DrawRecord, Scores, Trial
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.utils.schema import Strict

METHODS_FILE = "methods.json"


class MethodRow(Strict):
    """One calibration section."""

    trial: Trial
    """Recipe with another calibration section."""
    best: bool = False
    """True for the lowest divergence on the draw."""
    above_best: float | None = None
    """Divergence minus that of the best row, paired by sample; null if it failed."""
    above_best_stderr: float | None = None
    """Standard error of `above_best`, paired by sample; null if it failed."""
    ties: bool = False
    """True if `above_best` is at most two of its standard errors; true for the best row."""

    @property
    def section(self) -> Calibration:
        assert self.trial.recipe is not None
        return self.trial.recipe.calibration

    @property
    def is_given(self) -> bool:
        return self.trial.origin == "given"

    @property
    def name(self) -> str:
        section = self.section
        parts = [section.method]
        parts += [f"smooth {section.smoothing}"] if section.smoothing != "none" else []
        parts += [f"weights {section.weights_method}"] if section.weights_method != "max" else []
        parts += ["bias correction"] if section.bias_correction else []
        parts += [f"split {section.outlier_channel_splitting}"] if section.outlier_channel_splitting else []
        return ", ".join(parts)


class Methods(DrawRecord):
    """Everything that `qdqbench compare-calibration` measured."""

    fp32: dict[str, Scores]
    """Metrics of FP32 by evaluation split."""
    rows: list[MethodRow]
    """Calibration sections, the recipe's own first."""
    warnings: list[str]
    """Caveats of the figures."""
    notes: list[str]
    """Notes on how the data were read and calibrated."""
    timings: dict[str, float]
    """`total_s`: time of the whole comparison in seconds."""
    environment: dict[str, Any]
    """Versions, hardware, git hash."""

    @property
    def best(self) -> MethodRow:
        return next(row for row in self.rows if row.best)

    @property
    def given(self) -> MethodRow:
        return self.rows[0]

    def value(self, row: MethodRow, split: str) -> float:
        return self.fp32[split].metrics[self.metric] + row.trial.scores[split].delta[self.metric]
