"""Schema of a trial: a recipe that was tried, what it costs, and how it was found."""

from typing import Literal

from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.utils.comparison import Comparison
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.schema import Strict
from qdqbench.quantize.utils.speedup import Speedup

DRAW = "draw"  # in `Trial.scores`: train rows that do not calibrate
Origin = Literal[
    "given",  # by the user
    "shipped",
    "unquantized",  # nothing in INT8
    "calibration",  # another calibration section, of `methods`
    "candidate",  # one group of tensors in INT8, or all but it, of `sensitivity`: no recipe
    "ranking",  # by what each tensor costs
    "tpe",  # proposed by the sampler of a search
    "qat",
]
FailureCode = Literal["input", "check", "device", "error"]


class Failure(Strict):
    """Why a recipe could not be tried."""

    code: FailureCode  # "input" and "device" can be fixed, so that the same command tries again
    text: str  # one line

    @property
    def is_retryable(self) -> bool:
        """Return whether the user can remove the cause."""
        return self.code in {"input", "device"}


def failure_of(error: Exception) -> Failure:
    """Return an exception as data; its text is one line of at most 500 characters."""
    codes: dict[type[Exception], FailureCode] = {
        UserError: "input",
        CheckFailed: "check",
        MissingDevice: "device",
    }
    code = codes.get(type(error), "error")
    text = " ".join(str(error).split())[:500]
    return Failure(code=code, text=text if code != "error" else f"{type(error).__name__}: {text}")


class Scores(Strict):
    """Metrics of FP32 on one split."""

    metrics: dict[str, float]  # primary first
    stderr: dict[str, float]  # of each metric
    n: int  # samples


class CalibrationCost(Strict):
    """What a calibration took, and the widest activation that it found."""

    seconds: float  # passes over the data, shared or not, and what the recipe adds
    amax_over_rms: float | None  # largest of an activation; None when no activation is quantized
    amax_over_rms_at: str | None  # its quantizer
    notes: list[str] = []  # what calibration did to the model


class Trial(Strict):
    """One recipe that was tried."""

    recipe: Recipe | None  # None: a candidate of a sensitivity
    origin: Origin  # what proposed it
    scores: dict[str, Comparison] = {}  # against FP32, by split; `DRAW` has a divergence
    calibration: CalibrationCost | None = None  # None: not calibrated here
    speedup: Speedup | None = None  # over an engine without INT8
    failure: Failure | None = None  # why it has no scores
    seconds: float = 0.0  # what it took
    divergences: list[float] = []  # of each sample of the draw; in the store, not in reports

    @property
    def divergence(self) -> float:
        """Return the mean divergence on the draw; of a trial that was scored on it."""
        return self.scores[DRAW].distance
