"""Schema of what a training leaves behind: `finetune.json`, and `qat/training.json` of a run."""

from typing import Any, Literal

from pydantic import Field

from qdqbench.quantize.utils.schema import Strict


class LogRow(Strict):
    """One look at the loss, or one evaluation on the held-out rows."""

    step: int
    """Optimizer steps done; 0 is before training."""
    epoch: float
    """Passes over the training rows done."""
    loss: float | None = None
    """Training loss, mean over the samples since the previous row; null in an evaluation."""
    learning_rate: float | None = None
    """Learning rate of the next step; null in an evaluation."""
    gradient_norm: float | None = None
    """Norm of the gradient of this step before clipping; null in an evaluation."""
    score: float | None = None
    """Score of an evaluation on the held-out rows, higher is better; it chooses the weights. Else null."""
    values: dict[str, float] = Field(default_factory=dict)
    """Figures of an evaluation on the held-out rows: `loss` against the labels, the metrics, and for QAT
    `distance` from the predictions of the FP32 model (KL divergence in nat, squared error for regression)."""


class TrainingRun(Strict):
    """One training run, of one seed."""

    seed: int
    """Seed of the batches, the dropout, the held-out rows, and of a new classifier."""
    status: Literal["done", "failed"]
    """Status; failed: it diverged or its loss was not a number."""
    reason: str | None = None
    """Reason of the failure; null where it is done."""
    folder: str | None = None
    """Folder of the model, relative to the file; null of a QAT."""
    settings: dict[str, Any]
    """The `qat` section of the recipe, or the settings of `finetune`, with every default filled in."""
    precision: str
    """Precision: `bf16` (autocast), `tf32` or `fp32`."""
    device: str
    """Name of the GPU, or `CPU`."""
    processes: int
    """Processes that trained together, one per GPU."""
    rows: int
    """Training rows, without those held out."""
    held_out: int
    """Rows of the train split that evaluate the training and are never learned from."""
    steps: int = 0
    """Optimizer steps done."""
    planned_steps: int = 0
    """Optimizer steps that the settings ask for."""
    best_step: int = 0
    """Step whose weights are kept, chosen on the held-out rows; 0: the weights before training."""
    stopped: str | None = None
    """Reason for the end before the last step; null where there was none."""
    seconds: float = 0.0
    """Time spent in steps in seconds, without evaluations and checkpoints."""
    samples_per_s: float | None = None
    """Samples per second over `seconds`, of all processes together; null without a step."""
    parameters: int = 0
    """Parameters of the model; 0 where they were not counted."""
    log: list[LogRow] = Field(default_factory=list)
    """Losses and evaluations, by step."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Metrics on the validation split in FP32, the primary one first; of `finetune` only."""
    stderr: dict[str, float] = Field(default_factory=dict)
    """Standard error of each metric over the samples."""
    n: int = 0
    """Samples of the first evaluation split."""
    notes: list[str] = Field(default_factory=list)
    """Events of the training: resumed, a checkpoint that was not whole."""


class Spread(Strict):
    """A metric over seeds."""

    mean: float
    """Mean over the seeds."""
    sd: float | None
    """Sample standard deviation (n - 1); null for one seed."""
    n: int
    """Number of seeds."""


class Finetuning(Strict):
    """`finetune.json`."""

    schema_version: Literal[1] = 1
    """Version of this schema."""
    created: str
    """Time of the end, ISO 8601, UTC."""
    command: str
    """Command line."""
    base: dict[str, Any]
    """Name, sha256 and `revision` (commit, null for a folder) of the encoder at the start."""
    task: dict[str, Any]
    """Name, metrics (the primary one first), label names."""
    data: str
    """Fingerprint of the train split."""
    runs: list[TrainingRun]
    """One training per seed, failed ones too."""
    spread: dict[str, Spread]
    """Metrics of the validation split over the seeds that are done, by metric; empty where none is."""
    best_seed: int | None
    """Seed with the best score on its held-out rows, never on the validation split; null where all failed."""
    warnings: list[str]
    """Caveats of the figures: `--limit`, failed seeds."""
    notes: list[str] = Field(default_factory=list)
    """Notes on how the data were read."""
    environment: dict[str, Any]
    """Versions of the libraries, hardware, git hash."""


def training_line(row: "LogRow", steps: int) -> str:
    """Where a training is."""
    loss = "" if row.loss is None else f", loss {row.loss:.4g}"
    return f"step {row.step} of {steps}{loss}"
