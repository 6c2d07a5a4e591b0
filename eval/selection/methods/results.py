"""Schema of `methods.json`: calibration methods side by side (documented in docs/methods.md)."""

from typing import Any, Literal

from qdqbench.eval.selection.trials.results import Scores, Trial
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.tasks.types.kind import Divergence
from qdqbench.quantize.utils.schema import Strict

METHODS_FILE = "methods.json"
METHODS_RECIPE = "recipe.yaml"


class MethodRow(Strict):
    """One calibration section."""

    trial: Trial  # the recipe with another calibration section
    best: bool = False  # least divergence on the draw
    # divergence minus that of the best row, paired by sample; None: it failed
    above_best: float | None = None
    above_best_stderr: float | None = None  # paired by sample
    ties: bool = False  # above_best is at most 2 of its standard errors; true for the best row

    @property
    def section(self) -> Calibration:
        """Return the calibration section."""
        assert self.trial.recipe is not None
        return self.trial.recipe.calibration

    @property
    def is_given(self) -> bool:
        """Return whether this is the recipe as it is."""
        return self.trial.origin == "given"

    @property
    def name(self) -> str:
        """Return the section in words."""
        section = self.section
        parts = [section.method]
        parts += [f"smooth {section.smoothing}"] if section.smoothing != "none" else []
        parts += [f"weights {section.weights_method}"] if section.weights_method != "max" else []
        parts += ["bias correction"] if section.bias_correction else []
        parts += [f"split {section.outlier_channel_splitting}"] if section.outlier_channel_splitting else []
        return ", ".join(parts)


class Methods(Strict):
    """Everything that `qdqbench compare-calibration` measured."""

    schema_version: Literal[2] = 2
    created: str  # ISO 8601, UTC
    command: str
    recipe: dict[str, Any]  # with every default filled in
    model: dict[str, Any]  # name, sha256
    task: dict[str, Any]
    data: dict[str, Any]  # source, split, fingerprint, rows, calibration and scored samples, seed of the draw
    seed: int  # of the bootstrap; the draws have the recipe's calibration.seed
    batch_size: int
    metric: str  # primary metric of the task
    # KL(FP32 || INT8) per sample, nat; MSE / variance of FP32 logits; or 1 - cosine to FP32 embeddings
    divergence: Divergence
    fp32: dict[str, Scores]  # by evaluation split
    rows: list[MethodRow]  # the recipe as it is comes first
    recipe_name: str  # of recipe.yaml
    warnings: list[str]  # what needs a look
    notes: list[str]  # how data were read, what was calibrated
    timings: dict[str, float]  # seconds
    environment: dict[str, Any]  # versions, hardware, git hash

    @property
    def best(self) -> MethodRow:
        """Return the row with the least divergence on the draw."""
        return next(row for row in self.rows if row.best)

    @property
    def given(self) -> MethodRow:
        """Return the recipe as it is."""
        return self.rows[0]

    def value(self, row: MethodRow, split: str) -> float:
        """Return the primary metric of a row on an evaluation split."""
        return self.fp32[split].metrics[self.metric] + row.trial.scores[split].delta[self.metric]
