"""Schema of `sensitivity.json`: what INT8 costs, tensor by tensor (docs/how-to/sensitivity.md)."""

from pathlib import Path
from typing import Literal

from qdqbench.eval.metrics.results import Comparison
from qdqbench.eval.selection.trials.results import EMBEDDINGS, LAYERNORMS, DrawRecord, Scores
from qdqbench.quantize.models.families.family import ENCODER_KINDS
from qdqbench.quantize.utils.schema import Strict, field, read

SENSITIVITY_FILE = "sensitivity.json"
Group = Literal["linear", "attention", "block", "kind"]
DIAGNOSTIC = {LAYERNORMS: "LayerNorm", EMBEDDINGS: "Embedding"}  # kinds that no recipe can put into INT8
EVERYWHERE = (*ENCODER_KINDS, "attention", LAYERNORMS, EMBEDDINGS)  # kinds that all layers have or read


class Candidate(Strict):
    """A linear, the attention of a layer, a layer, or one kind of tensor in all layers."""

    name: str = field("Name as in recipes, without that of the base model; or of the kind.")
    group: Group = field("`linear`, `attention`, `block` or `kind`.")
    kind: str = field("Role of a linear, `attention`, `LayerNorm input`, `embeddings` or `block`.")
    layer: int | None = field("Number of the encoder layer; null outside and for kinds.")
    modules: list[str] = field("Full names of the modules that are switched.")
    diagnostic: bool = field("True if no recipe can put it in INT8.", default=False)

    @property
    def units(self) -> frozenset[str]:
        """Return what goes into INT8, or out of it, together."""
        return frozenset([self.name] if self.diagnostic else self.modules)

    @property
    def key(self) -> str:
        """Return a name that candidates share which switch the same: a classifier and its kind."""
        return next(iter(self.units)) if len(self.units) == 1 else f"{self.group} {self.name}"

    @property
    def start(self) -> int | None:
        """Return the layer whose input it does not touch (-1: the head), or None where it touches all."""
        return self.layer if self.layer is not None else None if self.kind in EVERYWHERE else -1


class CandidateRow(Candidate):
    """One candidate, and what it costs."""

    only: Comparison = field("This alone in INT8.")
    all_but: Comparison | None = field("All but this in INT8; null if not part of all.")


class CurvePoint(Strict):
    """The linears that cost the most kept out of INT8, everything else in INT8."""

    kept: int = field("Number of linear layers kept out of INT8.")
    linears: list[str] = field("Full names of these layers, in the order of the ranking.")
    attention: list[str] = field("Attention modules that leave INT8 with their output linear.")
    comparison: Comparison = field("All other layers in INT8.")


class SensitivityChoice(Strict):
    """The recipe that was written."""

    kept: int = field("Number of linear layers out of INT8; 0 if the full drop is within noise.")
    reached: bool = field("True if drop and SQNR hold; else it is the best point found.")
    file: str = field("File of the recipe.")


class Sensitivity(DrawRecord):
    """Everything that `qdqbench sensitivity` measured."""

    fp32: Scores = field("Metrics of the model without quantizers on the draw.")
    full: Comparison = field("Everything in INT8.")
    int8: list[str] = field("Full names of the linear layers and attention modules in `everything`.")
    rows: list[CandidateRow] = field("Candidates, in the order of the model.")
    curve: list[CurvePoint] = field("Points by rising number of linear layers kept out of INT8.")
    choice: SensitivityChoice = field("Recipe that was written.")
    timings: dict[str, float] = field("`candidates_s` of all measurements, and `this_run_s`, in seconds.")

    @property
    def chosen(self) -> CurvePoint:
        return next(point for point in self.curve if point.kept == self.choice.kept)

    @property
    def max_drop(self) -> float:
        return float(self.recipe["gate"]["max_drop"])


def sensitivity_file(path: Path) -> Path:
    return path / SENSITIVITY_FILE if path.is_dir() else path


def read_sensitivity(path: Path) -> Sensitivity:
    file = sensitivity_file(path)
    return read(file, Sensitivity, "sensitivity report", "run `qdqbench sensitivity` again")


def ranking(rows: list[CandidateRow]) -> list[CandidateRow]:
    """Return the linears that "everything in INT8" holds, lowest SQNR first."""
    linears = [row for row in rows if row.group == "linear" and row.all_but]
    return sorted(linears, key=lambda row: -row.only.noise_power)
