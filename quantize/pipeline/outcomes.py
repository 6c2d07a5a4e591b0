"""Outcomes of stages, as their JSON files keep them."""

from pathlib import Path
from typing import Any, TypeVar

from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.report.coverage import uncovered
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.schema import Strict, read

OPTIMIZED = "onnxruntime.json"  # of a graph for CPUs: what ONNX Runtime makes of it
BUILD, VERIFY, ENGINE = "build.json", "verify.json", "engine.json"  # outcomes of these stages
Result = TypeVar("Result", bound=Strict)


class Skipped(Strict):
    """Why a stage has no result."""

    skipped: str


class EngineRun(Strict):
    """Record of an engine's evaluation; its answers are logits/engine.npz."""

    detail: str  # what ran, on what, with how much memory
    memory: dict[str, Any]  # `EngineMemory`


class OptimizedRun(Strict):
    """The graph as ONNX Runtime optimizes it, evaluated next to the graph as exported."""

    metrics: dict[str, float] = {}
    exported: dict[str, float] = {}  # of the graph as exported
    int8_gemms: int = 0
    expected_int8_gemms: int = 0
    failed: str = ""  # why there are no figures

    def describe_loss(self, max_drop: float) -> str:
        """Return what is lost beyond a drop of the metrics; empty where it may be deployed."""
        lost = [
            f"{name} {value:.4f}, as exported {self.exported[name]:.4f}"
            for name, value in self.metrics.items()
            if round(self.exported[name] - value, 12) > max_drop
        ]
        if self.int8_gemms < self.expected_int8_gemms:
            lost.append(uncovered(self.expected_int8_gemms - self.int8_gemms))
        return self.failed or "; ".join(lost)


def write_outcome(path: Path, outcome: Strict) -> Path:
    files.write_json(path, outcome.model_dump(mode="json"))
    return path


def read_built(folder: Path) -> EngineResult | Skipped:
    if not (folder / BUILD).is_file():
        raise UserError(f"{folder} has no engine yet; run `qdqbench build {folder}` first")
    return read_outcome(folder / BUILD, EngineResult)


def engine_file(folder: Path, built: EngineResult) -> Path:
    if Path(built.file).name != built.file:
        again = f"run `qdqbench build {folder}` again"
        raise UserError(f"{folder / BUILD} names an engine outside of the run, {built.file!r}; {again}")
    return folder / "engine" / built.file


def read_engine_run(folder: Path) -> EngineRun | Skipped:
    return read_outcome(folder / ENGINE, EngineRun)


def read_optimized(folder: Path) -> OptimizedRun | None:
    """Return what ONNX Runtime's optimizations gave; None where they were not tried."""
    found = read_outcome(folder / OPTIMIZED, OptimizedRun) if (folder / OPTIMIZED).is_file() else None
    return None if isinstance(found, Skipped) else found


def read_outcome(path: Path, schema: type[Result]) -> Result | Skipped:
    value = files.read_json(path)
    skipped = isinstance(value, dict) and "skipped" in value
    about = "record of a stage", f"run `qdqbench build {path.parent}` again"
    return read(path, Skipped, *about) if skipped else read(path, schema, *about)
