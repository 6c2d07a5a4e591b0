"""Schema of `methods.json`: calibration methods side by side (documented in docs/methods.md)."""

from typing import Any, Literal

from qdqbench.quantize.core.comparison import Comparison
from qdqbench.quantize.core.strict import Strict
from qdqbench.quantize.kinds.kind import Divergence

METHODS_FILE = "methods.json"
METHODS_RECIPE = "recipe.yaml"


class SplitResult(Strict):
    """A row on one evaluation split."""

    metrics: dict[str, float]  # primary first
    vs_fp32: Comparison


class MethodCost(Strict):
    """What a combination costs."""

    divergence: float  # mean over the train draw, see Methods.divergence
    divergence_stderr: float  # over samples
    above_best: float  # divergence minus that of the best row, paired by sample; 0 for the best row
    above_best_stderr: float
    ties: bool  # above_best is at most 2 of its standard errors; true for the best row
    sqnr_db: float | None  # of the logits of the train draw; None when they are equal
    amax_over_rms: float | None  # largest of an activation; None when no activation is quantized
    amax_over_rms_at: str | None  # its quantizer
    validation: dict[str, SplitResult]  # by evaluation split
    calibration_s: float  # passes over the data, also where rows share them, and what the row adds


class MethodRow(Strict):
    """One combination of the calibration section."""

    method: str
    smooth: float | str
    weights_method: str
    bias_correction: bool
    split_outliers: int = 0  # channels for copies
    recipe: bool  # the recipe as it is
    best: bool  # least divergence on the train draw
    measured: MethodCost | None  # None when it failed
    failure: str | None  # why

    @property
    def name(self) -> str:
        """The combination in words."""
        parts = [self.method]
        parts += [f"smooth {self.smooth}"] if self.smooth != "none" else []
        parts += [f"weights {self.weights_method}"] if self.weights_method != "max" else []
        parts += ["bias correction"] if self.bias_correction else []
        parts += [f"split {self.split_outliers}"] if self.split_outliers else []
        return ", ".join(parts)


class Scores(Strict):
    """FP32 on one evaluation split."""

    metrics: dict[str, float]
    stderr: dict[str, float]
    n: int


class Methods(Strict):
    """Everything that `qdqbench methods` found."""

    schema_version: Literal[1] = 1
    created: str  # ISO 8601, UTC
    command: str
    recipe: dict[str, Any]  # with every default filled in
    model: dict[str, Any]  # name, sha256
    task: dict[str, Any]
    data: dict[str, Any]  # source, split, fingerprint, rows, calibration and judged samples, seed of the draw
    seed: int  # of the bootstrap; the draws have the recipe's calibration.seed
    batch_size: int
    metric: str  # primary metric of the task
    # KL(FP32 || INT8) per sample, nat; MSE / variance of FP32 logits; or 1 - cosine to FP32 embeddings
    divergence: Divergence
    fp32: dict[str, Scores]  # by evaluation split
    rows: list[MethodRow]  # the recipe as it is comes first
    recipe_name: str  # of recipe.yaml
    warnings: list[str] = []  # what needs a look; not in files of earlier versions
    notes: list[str]
    timings: dict[str, float]  # seconds
    environment: dict[str, Any]

    @property
    def best(self) -> MethodRow:
        """The row with the least divergence on the train draw."""
        return next(row for row in self.rows if row.best)

    @property
    def own(self) -> MethodRow:
        """The recipe as it is."""
        return self.rows[0]
