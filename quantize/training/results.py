"""Records of a training, and the schema of `finetune.json`."""

from typing import Any, Literal

from qdqbench.quantize.utils.schema import Shown, Strict, field
from qdqbench.quantize.utils.trackers import LogRow

RESULT = "finetune.json"


class Tried(Strict):
    """A short training at one learning rate, from the weights before training."""

    learning_rate: float = field("Learning rate, after warm-up.")
    gain_db: float = field("SQNR won on the held-out rows, in dB: the mean that chooses the rate.")
    sqnr_db: float = field("SQNR of the answers to the held-out rows afterwards, in dB.")


class TrainingRun(Strict):
    """One training run, of one seed."""

    seed: int = field("Seed of the batches, the dropout, the held-out rows, and of a new classifier.")
    status: Literal["done", "failed"] = field("Status; failed: it diverged or its loss was not a number.")
    reason: str | None = field("Reason of the failure; null where it is done.", default=None)
    folder: str | None = field("Folder of the model, relative to the file; null of a QAT.", default=None)
    settings: dict[str, Any] = field(
        "The `qat` section of the recipe, or the settings of `finetune`, with every default filled in."
    )
    precision: str = field("Precision: `bf16` (autocast), `tf32` or `fp32`.")
    device: str = field("Name of the GPU, or `CPU`.")
    processes: int = field("Processes that trained together, one per GPU.")
    rows: int = field("Training rows, without those held out.")
    held_out: int = field("Rows of the train split that evaluate the training and are never learned from.")
    steps: int = field("Optimizer steps done.", default=0)
    planned_steps: int = field("Optimizer steps that the settings ask for.", default=0)
    best_step: int = field(
        "Step whose weights are kept, chosen on the held-out rows; 0: the weights before training.", default=0
    )
    stopped: str | None = field(
        "Reason for the end before the last step; null where there was none.", default=None
    )
    seconds: float = field(
        "Time spent in steps in seconds, without evaluations and checkpoints.", default=0.0
    )
    samples_per_s: float | None = field(
        "Samples per second over `seconds`, of all processes together; null without a step.", default=None
    )
    parameters: int = field("Parameters of the model; 0 where they were not counted.", default=0)
    learning_rate: float = field(
        "Learning rate of the training; 0 where `auto` found none that wins anything.", default=0.0
    )
    tried: list[Tried] = field("Learning rates that `auto` tried; empty where one was given.", default=[])
    log: list[LogRow] = field("Losses and evaluations, by step.", default=[])
    metrics: dict[str, float] = field(
        "Metrics on the validation split in FP32, the primary one first; of `finetune` only.", default={}
    )
    stderr: dict[str, float] = field("Standard error of each metric over the samples.", default={})
    n: int = field("Samples of the first evaluation split.", default=0)
    notes: list[str] = field("Events of the training: resumed, a checkpoint that was not whole.", default=[])

    @property
    def gained(self) -> bool:
        """Say whether other weights than those before training are kept."""
        return self.best_step > 0


class LayerRow(Strict):
    """One layer of a reconstruction."""

    layer: str = field("Path of the layer.")
    before_db: float = field("SQNR of its output on the held-out rows, with its weights before, in dB.")
    after_db: float | None = field("The same after its training, in dB; null where that gave NaN.")
    kept: bool = field("Whether it came nearer to FP32, so that its new weights were kept.")
    seconds: float = field("Time of its training in seconds.")


class ReconstructionRun(Strict):
    """A reconstruction: layer by layer, and answers of the whole model."""

    settings: dict[str, Any] = field(
        "The `reconstruction` section of the recipe, with every default filled in."
    )
    precision: str = field("Precision: `tf32` or `fp32`.")
    device: str = field("Name of the GPU, or `CPU`.")
    rows: int = field("Calibration rows that were learned from.")
    held_out: int = field("Calibration rows that evaluate the reconstruction and are never learned from.")
    layers: list[LayerRow] = field("Layers in the order in which they were trained.")
    before_db: float = field("SQNR of the answers to the held-out rows before, in dB.")
    after_db: float = field("The same with all trained layers, in dB; where it is no more, none is kept.")
    seconds: float = field("Time of the whole reconstruction in seconds.")
    notes: list[str] = field("Events: resumed, nothing was kept.", default=[])

    @property
    def gained(self) -> bool:
        return self.after_db > self.before_db

    @property
    def kept(self) -> int:
        """Layers whose weights are not those of PTQ."""
        return sum(row.kept for row in self.layers) * self.gained


def describe_tries(tried: list[Tried], chosen: float) -> str:
    """Say what `auto` expects to win, from the short training at each learning rate."""
    won = ", ".join(f"{each.gain_db:+.1f} dB at {each.learning_rate:g}" for each in tried) or "NaN"
    gain = max((each.gain_db for each in tried if each.learning_rate == chosen), default=0.0)
    found = f"expect about {gain:.1f} dB at learning rate {chosen:g}" if chosen else "there is nothing to win"
    return f"Short trainings changed the SQNR on held-out rows by {won}; {found}"


class Spread(Strict):
    """A metric over seeds."""

    mean: float = field("Mean over the seeds.")
    sd: float | None = field("Sample standard deviation (n - 1); null for one seed.")
    n: int = field("Number of seeds.")


class Finetuning(Shown, Strict):
    """`finetune.json`."""

    schema_version: Literal[1] = field("Version of this schema.", default=1)
    created: str = field("Time of the end, ISO 8601, UTC.")
    command: str = field("Command line.")
    base: dict[str, Any] = field(
        "Name, sha256 and `revision` (commit, null for a folder) of the encoder at the start."
    )
    task: dict[str, Any] = field("Name, metrics (the primary one first), label names.")
    data: str = field("Fingerprint of the train split.")
    runs: list[TrainingRun] = field("One training per seed, failed ones too.")
    spread: dict[str, Spread] = field(
        "Metrics of the validation split over the seeds that are done, by metric; empty where none is."
    )
    best_seed: int | None = field(
        "Seed with the best score on its held-out rows, never on the validation split; null where all failed."
    )
    warnings: list[str] = field("Caveats of the figures: `--limit`, failed seeds.")
    notes: list[str] = field("Notes on how the data were read.", default=[])
    environment: dict[str, Any] = field("Versions of the libraries, hardware, git hash.")

    def facts(self) -> dict[str, Any]:
        """Return what a notebook shows of it."""
        means = {name: f"{each.mean:.4f}" for name, each in self.spread.items()}
        return {"seeds": len(self.runs), **means, "best seed": self.best_seed}
