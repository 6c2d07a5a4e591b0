"""Schema of what a training leaves behind: `finetune.json`, and `qat/training.json` of a run."""

from typing import Any, Literal

from pydantic import Field

from qdqbench.quantize.core.strict import Strict


class LogRow(Strict):
    """One look at the loss, or one evaluation on the held-out rows."""

    step: int
    epoch: float
    loss: float | None = None  # mean over the training samples since the look before
    learning_rate: float | None = None
    gradient_norm: float | None = None
    score: float | None = None  # of an evaluation: higher is better
    values: dict[str, float] = Field(default_factory=dict)  # of an evaluation: held-out loss and metrics


class TrainingRun(Strict):
    """One training run, of one seed."""

    seed: int
    status: Literal["done", "failed"]
    reason: str | None = None  # why it failed
    folder: str | None = None  # of the model, relative to the file
    settings: dict[str, Any]  # of training_settings.Training or Qat
    precision: str  # bf16, tf32 or fp32
    device: str
    processes: int
    rows: int  # training rows, without those held out
    held_out: int
    steps: int = 0  # done
    planned_steps: int = 0
    best_step: int = 0  # whose weights are kept; 0: those before training
    stopped: str | None = None  # why before the last step
    seconds: float = 0.0  # in steps, without evaluations and checkpoints
    samples_per_s: float | None = None
    parameters: int = 0
    log: list[LogRow] = Field(default_factory=list)
    metrics: dict[str, float] = Field(default_factory=dict)  # on the validation split, FP32; finetune only
    stderr: dict[str, float] = Field(default_factory=dict)
    n: int = 0
    notes: list[str] = Field(default_factory=list)


class Spread(Strict):
    """A metric over seeds."""

    mean: float
    sd: float | None  # of the sample (n - 1); None for one seed
    n: int


class Finetuning(Strict):
    """`finetune.json`."""

    schema_version: Literal[1] = 1
    created: str
    command: str
    base: dict[str, Any]  # name, sha256, and the commit of a hub model as revision
    task: dict[str, Any]
    data: str
    runs: list[TrainingRun]
    spread: dict[str, Spread]  # by metric, over the runs that are done
    best_seed: int | None  # by the primary metric on the held-out rows
    warnings: list[str]
    notes: list[str] = Field(default_factory=list)  # how data were read
    environment: dict[str, Any]


def training_line(row: "LogRow", steps: int) -> str:
    """Where a training is."""
    loss = "" if row.loss is None else f", loss {row.loss:.4g}"
    return f"step {row.step} of {steps}{loss}"
