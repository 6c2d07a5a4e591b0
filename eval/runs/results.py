"""Schema of `results.json`: every number of a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from qdqbench.eval.metrics.results import (
    ChangedPredictions,
    Classes,
    Comparison,
    Gate,
    LayerErrors,
    Parity,
    Speedup,
    StageResult,
)
from qdqbench.eval.verification.results import Verification
from qdqbench.quantize.calibration.record import QuantizerRow
from qdqbench.quantize.calibration.techniques.softmax_scale import SoftmaxRow
from qdqbench.quantize.engine.profiles import Lengths
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.lint.findings import FindingRow
from qdqbench.quantize.pipeline.pipeline import Timing
from qdqbench.quantize.training.results import ReconstructionRun, TrainingRun
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.schema import Strict, Tabular, field, read, stage_rows


class ModelChange(Strict):
    """Change of the model by the recipe, besides Q/DQ."""

    what: str = field("Name of the change, such as `training`, `tanh GELU` or `smoothing`.")
    count: int = field("Number of changed parts, as the description names them.")
    description: str = field("Change in a sentence.")


class EngineSize(Strict):
    """An engine without INT8 that the run's bench built, of the backend of the run's own."""

    name: str = field("Label in the bench.")
    precision: Literal["fp16", "bf16", "fp32"] = field("Compute precision.")
    bytes: int = field("Size of the engine in bytes.")


RESULTS_FILE = "results.json"


STAGES = ("fp32", "fake_quant", "onnxruntime", "engine")
BEFORE_TRAINING = ("ptq", "reconstructed")  # of what is deployed; fake_quant is the trained model


class FileRow(Strict):
    """One exported file."""

    name: str = field("Path in the run directory.")
    bytes: int = field("Size in bytes.")
    fp32_ratio: float | None = field("Size over that of the FP32 graph; null for other files than ONNX.")


class Results(Tabular):
    """Every number of one run, or of its stages up to one; what those do not write has its default."""

    schema_version: Literal[4] = field("Version of this schema.", default=4)
    until: str | None = field("Last stage requested, or `evaluate`; null with a report.", default=None)
    created: str = field("Time of the end, ISO 8601, UTC.")
    command: str = field("Command line.")
    recipe: dict[str, Any] = field("Recipe with every default filled in, as in `recipe.yaml`.")
    model: dict[str, Any] = field("Name, sha256, `revision` (hub commit or null), parameters, architecture.")
    task: dict[str, Any] = field("Name, metrics (the primary one first), label names.")
    data: dict[str, Any] = field("Source, `revision` (hub commit or null), splits with their sizes.")
    seed: int = field("Seed of all random numbers.")
    quantized_layers: list[str] = field("Linear layers in INT8.", default=[])
    quantized_attention: list[str] = field("Attention layers in INT8.", default=[])
    quantized_residual: list[str] = field("Modules whose residual is in INT8.", default=[])
    high_precision_layers: list[str] = field("Linear layers that stay in FP16 or FP32.", default=[])
    quantizers: list[QuantizerRow] = field("Calibrated quantizers; empty without INT8.", default=[])
    softmax: list[SoftmaxRow] = field("Cost of INT8 by softmax; empty without INT8 attention.", default=[])
    files: list[FileRow] = field("ONNX files; before the report all files of the stages.", default=[])
    findings: list[FindingRow] = field("Findings of `check` on the quantized ONNX file.", default=[])
    parity: Parity | None = field("ONNX Runtime against fake-quant by layer, or null.", default=None)
    stages: dict[str, StageResult] = field(
        "Evaluation by stage, in this order: `fp32` (PyTorch), `ptq` (only with training: quantized PyTorch "
        "model before it), `reconstructed` (only with reconstruction and QAT: between them), `fake_quant` "
        "(quantized PyTorch model; after training), `onnxruntime` (quantized ONNX file), `engine`.",
        default={},
    )
    skipped: dict[str, str] = field("Reason by stage without a result, such as no device.", default={})
    changed_predictions: ChangedPredictions | None = field("Samples answered otherwise.", default=None)
    classes: Classes | None = field("Confusion and recall by class, if there are classes.", default=None)
    layer_errors: LayerErrors | None = field("Cost of INT8 by layer, if any is quantized.", default=None)
    model_changes: list[ModelChange] = field("Changes of the model besides Q/DQ.", default=[])
    fp16: StageResult | None = field("FP16 graph in ONNX Runtime, by `report RUN --fp16`.", default=None)
    vs_fp16: Comparison | None = field("Last stage minus the FP16 graph; null if not run.", default=None)
    reconstruction: ReconstructionRun | None = field("Reconstruction, if it ran.", default=None)
    training: TrainingRun | None = field("QAT; null without `qat`, or before training.", default=None)
    qat_vs_ptq: Comparison | None = field("Fake-quant model after minus before training.", default=None)
    engine: EngineResult | None = field("Engine; null if none was built (`skipped`).", default=None)
    gpu_engine: EngineResult | None = field("Engine for GPUs, ahead of time too; or null.", default=None)
    lengths: Lengths | None = field("Lengths of the data and profiles; with `shapes: auto`.", default=None)
    verification: Verification | None = field("Engine against the reference; null if not run.", default=None)
    speed: list[Speedup] = field("Speed-ups of each bench of these files, the latest first.", default=[])
    unquantized_engines: list[EngineSize] = field("Engines without INT8 of the same backend.", default=[])
    gate: Gate = field("Verdict of the recipe's gate.")
    timings: dict[str, Timing] = field("Cost by stage, in the order of the run.")
    warnings: list[str] = field("Caveats of the numbers: `--limit`, skipped stages, partial splits.")
    notes: list[str] = field("How the data were read and calibrated.", default=[])
    environment: dict[str, Any] = field("Versions, hardware, `git`: commit (-dirty: with changes) or null.")

    def facts(self) -> dict[str, Any]:
        """Return what a notebook shows of it."""
        scores = {
            name: ", ".join(f"{metric} {value:.4f}" for metric, value in stage.metrics.items())
            for name, stage in self.stages.items()
            if stage.status == "done"
        }
        done = self.until or ("passed" if self.gate.passed else "failed")
        return {"recipe": self.recipe["name"], **scores, "until" if self.until else "gate": done}

    def rows(self) -> Iterator[dict[str, Any]]:
        return stage_rows(self.stages)

    @property
    def trained(self) -> bool:
        return self.training is not None or self.reconstruction is not None

    @property
    def expected_stages(self) -> tuple[str, ...]:
        trainings = [each for each in (self.reconstruction, self.training) if each is not None]
        return STAGES[:1] + BEFORE_TRAINING[: len(trainings)] + STAGES[1:]


def read_results(folder: Path) -> Results:
    return read(folder / RESULTS_FILE, Results, "report", f"run `qdqbench report {folder}`")


def write_results(folder: Path, results: Results) -> None:
    files.write_text(folder / RESULTS_FILE, results.model_dump_json(indent=2) + "\n")
