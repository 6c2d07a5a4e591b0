"""Schema of a trial: a recipe that was tried, what it costs, and how it was found."""

from pathlib import Path
from typing import Any, Literal

from qdqbench.eval.metrics.results import Comparison, Speedup
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.report.document import Report
from qdqbench.quantize.report.render import write_report
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, Unwritable, UserError
from qdqbench.quantize.utils.schema import Strict, field

DRAW = "draw"  # in `Trial.scores`: train rows that do not calibrate
LAYERNORMS, EMBEDDINGS = "LayerNorm input", "embeddings"  # units that no recipe can put into INT8
Origin = Literal["given", "shipped", "unquantized", "calibration", "candidate", "ranking", "tpe", "qat"]
FailureCode = Literal["input", "check", "device", "error"]


class Failure(Strict):
    """Why a recipe could not be tried."""

    code: FailureCode = field("Kind of failure; `input` and `device` are tried again.")
    text: str = field("Message in one line.")

    @property
    def is_retryable(self) -> bool:
        return self.code in {"input", "device"}


def failure_of(error: Exception) -> Failure:
    """Return an exception as data, in one line of at most 500 characters; raise that of a full disk."""
    if isinstance(error, Unwritable):
        raise error
    codes: dict[type[Exception], FailureCode]
    codes = {UserError: "input", CheckFailed: "check", MissingDevice: "device"}
    code = codes.get(type(error), "error")
    text = " ".join(str(error).split())[:500]
    return Failure(code=code, text=text if code != "error" else f"{type(error).__name__}: {text}")


class Scores(Strict):
    """Metrics of FP32 on one split."""

    metrics: dict[str, float] = field("Metrics of the task, the primary one first.")
    stderr: dict[str, float] = field("Standard error of each metric.")
    n: int = field("Number of samples.")


class CalibrationCost(Strict):
    """Cost of a calibration, and the widest activation that it found."""

    seconds: float = field("Time of the passes over the data and of extra steps, in seconds.")
    amax_over_rms: float | None = field("Largest outlier measure (amax / rms) of an activation, or null.")
    amax_over_rms_at: str | None = field("Quantizer of that activation; null if there is none.")
    notes: list[str] = field("Changes of the model by calibration.", default=[])


class Trial(Strict):
    """One recipe that was tried."""

    recipe: Recipe | None = field("Recipe; null for a candidate of a sensitivity.")
    origin: Origin = field(
        "Origin of the recipe: `given` by the user, `shipped`, `unquantized` (nothing in INT8), `qat`. "
        "`calibration`: another calibration section; `candidate`: one group of tensors, of `sensitivity`; "
        "`ranking`: by sensitivity; `tpe`: by the sampler of a search."
    )
    scores: dict[str, Comparison] = field("Comparisons with FP32 by split; `draw`: train rows.", default={})
    calibration: CalibrationCost | None = field("Cost of the calibration, if done here.", default=None)
    speedup: Speedup | None = field("Speed-up over an engine without INT8, or null.", default=None)
    failure: Failure | None = field("Reason why it has no scores; null if it has.", default=None)
    seconds: float = field("Time of the trial in seconds.", default=0.0)
    noise_powers: list[float] = field("Noise power by sample of the draw; in the store only.", default=[])

    @property
    def noise_power(self) -> float:
        """Return the noise power on the draw; of a trial that was scored on it."""
        return self.scores[DRAW].noise_power


class ChoiceRecord(Strict):
    """Fields that results of all four commands share; `trials.store.describe_session` fills it."""

    schema_version: Literal[4] = field("Version of this schema.", default=4)
    created: str = field("Time of the end, ISO 8601, UTC.")
    command: str = field("Command line.")
    metric: str = field("Primary metric of the task.")
    warnings: list[str] = field("Caveats of the figures.")
    notes: list[str] = field("Notes on how the data were read and calibrated.")
    environment: dict[str, Any] = field("Versions, hardware, git hash.")


class DrawRecord(ChoiceRecord):
    """Fields that results on a draw of train rows share; `Trials.describe` fills it."""

    recipe: dict[str, Any] = field("Recipe with every default filled in.")
    model: dict[str, Any] = field("Name and SHA-256 of its files.")
    task: dict[str, Any] = field("Name, columns, metrics, label names.")
    data: dict[str, Any] = field("Source, split, fingerprint, rows, samples, seed; of methods `evaluation`.")
    seed: int = field("Seed of the bootstrap; the draws use the recipe's `calibration.seed`.")
    batch_size: int = field("Batch size of the evaluation in samples.")


def write_result(result: ChoiceRecord, report: Report, folder: Path) -> list[Path]:
    record = folder / report.page.record
    files.write_text(record, result.model_dump_json(indent=2) + "\n")
    return [record, *write_report(report, folder, record.stem)]
