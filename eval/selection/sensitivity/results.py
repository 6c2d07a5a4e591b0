"""Schema of `sensitivity.json`: what INT8 costs, tensor by tensor (documented in docs/sensitivity.md)."""

from pathlib import Path
from typing import Any, Literal

from qdqbench.eval.selection.trials.results import Scores
from qdqbench.quantize.tasks.types.kind import Divergence
from qdqbench.quantize.utils.comparison import Comparison
from qdqbench.quantize.utils.schema import Strict, read

SENSITIVITY_FILE = "sensitivity.json"
Group = Literal["linear", "attention", "block", "kind"]


class CandidateRow(Strict):
    """One candidate: a linear, the attention of a layer, a layer, or one kind of tensor in all layers."""

    name: str  # as recipes write it, without the name of the base model; of a kind its name
    group: Group
    kind: str  # qkv, output, ffn-in, ffn-out, attention, pooler, classifier, ...; of a block "block"
    layer: int | None  # None outside of the encoder and for kinds
    modules: list[str]  # full names of what is switched
    diagnostic: bool  # no recipe can put it into INT8
    only: Comparison  # this in INT8, everything else in FP32
    all_but: Comparison | None  # everything in INT8 but this; None where "everything" does not hold it


class CurvePoint(Strict):
    """The linears that cost the most kept out of INT8, everything else in INT8."""

    kept: int  # number of linears
    linears: list[str]  # full names, in the order of the ranking
    attention: list[str]  # attention modules that go to FP16 with their output linear
    comparison: Comparison  # the rest in INT8


class SensitivityChoice(Strict):
    """The recipe that was written."""

    kept: int  # linears; 0 and reached: the drop of everything in INT8 is within noise
    reached: bool  # the drop and the divergence hold; else the best point that was measured
    file: str  # of the recipe
    recipe_name: str  # its name


class Sensitivity(Strict):
    """Everything that `qdqbench sensitivity` measured."""

    schema_version: Literal[2] = 2
    created: str  # ISO 8601, UTC
    command: str
    recipe: dict[str, Any]  # with every default filled in
    model: dict[str, Any]  # name, sha256
    task: dict[str, Any]
    data: dict[str, Any]  # source, split, fingerprint, calibration and evaluated samples
    seed: int  # of the bootstrap; the draw has the recipe's calibration.seed
    batch_size: int
    metric: str  # primary metric of the task
    # KL(FP32 || INT8) per sample, nat; MSE / variance of FP32 logits; or 1 - cosine to FP32 embeddings
    divergence: Divergence
    fp32: Scores  # the model without quantizers on the draw
    full: Comparison  # everything in INT8
    int8: list[str]  # what "everything" is: full names of linears and attention modules
    rows: list[CandidateRow]  # in the order of the model
    curve: list[CurvePoint]  # by rising `kept`
    choice: SensitivityChoice
    warnings: list[str]  # what needs a look
    notes: list[str]  # how data were read, what was calibrated
    timings: dict[str, float]  # seconds; candidates of an interrupted run are counted once
    environment: dict[str, Any]  # versions, hardware, git hash

    @property
    def chosen(self) -> CurvePoint:
        """Return the point of the curve that the written recipe has."""
        return next(point for point in self.curve if point.kept == self.choice.kept)

    @property
    def max_drop(self) -> float:
        """Return the gate of the recipe."""
        return float(self.recipe["gate"]["max_drop"])


def sensitivity_file(path: Path) -> Path:
    """Return the file itself, or the one in a folder."""
    return path / SENSITIVITY_FILE if path.is_dir() else path


def read_sensitivity(path: Path) -> Sensitivity:
    """Read `sensitivity.json`, or the one in a folder.

    Raises:
        UserError: missing, or not of this version.
    """
    file = sensitivity_file(path)
    return read(file, Sensitivity, "sensitivity report", "run `qdqbench sensitivity` again")


def ranking(rows: list[CandidateRow]) -> list[CandidateRow]:
    """Return the linears that "everything in INT8" holds, largest divergence first."""
    linears = [row for row in rows if row.group == "linear" and row.all_but]
    return sorted(linears, key=lambda row: -row.only.distance)
