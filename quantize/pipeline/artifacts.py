"""Artifacts that several stages of a run share: graphs, profiles for its data, records of stages."""

from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qdqbench.quantize.engine import profiles as shapes
from qdqbench.quantize.engine.backend import preferred_backend
from qdqbench.quantize.engine.build import list_gemms
from qdqbench.quantize.engine.cpu_runtimes import Compute, choose_compute
from qdqbench.quantize.engine.profiles import LengthBucket, Lengths
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.graph.index import module_of
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.tasks.rows import sorted_rows
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Int64
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName, has_profiles, takes_fp32_graph
from qdqbench.quantize.utils.schema import Strict, read
from qdqbench.quantize.utils.system.cpu import find_cpu

FP32, FP16, INT8 = "model.fp32.onnx", "model.fp16.onnx", "model.int8.onnx"
LAYER_ERRORS = "layer_errors.json"  # of the fake-quant model against FP32
REWRITES = "rewrites.json"  # how often each rewrite of a graph was made, by file
OPTIMIZED = "onnxruntime.json"  # of a graph for CPUs: what ONNX Runtime makes of it
GPU = "gpu"  # folder of the engine for GPUs, in a run whose own engine is for this CPU
GPU_INT8 = f"{GPU}/{INT8}"
BUILD, VERIFY, ENGINE = "build.json", "verify.json", "engine.json"  # outcomes of these stages


def graph_path(session: Session) -> Path:
    if session.recipe.quantizes:
        return session.folder / INT8
    return session.folder / (FP16 if computes_fp16(session.recipe, backend_of(session.recipe)) else FP32)


def computes_fp16(recipe: Recipe, backend: str) -> bool:
    return recipe.precision.compute == "fp16" and not takes_fp32_graph(backend)


def backend_of(recipe: Recipe) -> BackendName:
    return preferred_backend(recipe.engine.backend)


def proves_for_gpu(recipe: Recipe) -> bool:
    """Return whether an engine for GPUs is built ahead of time besides the one for this CPU."""
    return recipe.quantizes and recipe.engine.backend == "auto" and backend_of(recipe) in CPU_BACKENDS


def checked_path(session: Session) -> Path:
    """Return the graph that `check` is about: the one for GPUs where there are two."""
    return session.folder / GPU_INT8 if proves_for_gpu(session.recipe) else graph_path(session)


def cpu_compute(recipe: Recipe) -> Compute:
    return choose_compute(backend_of(recipe), find_cpu(), recipe.precision.compute)


def twin_compute(recipe: Recipe) -> str:
    """Return what an engine of the recipe computes in where nothing is in INT8."""
    if (backend := backend_of(recipe)) in CPU_BACKENDS:
        return cpu_compute(recipe)
    return "fp16" if backend == "cuda" else recipe.precision.compute


def graph_bytes(session: Session) -> int:
    sizes = {name: weights.numel() for name, weights in session.fp32_model.named_parameters()}
    whole, int8 = sum(sizes.values()), sum(sizes.get(f"{name}.weight", 0) for name in session.plan.int8)
    total = (4 + 2) * whole  # the twins in FP32 and FP16
    if session.recipe.quantizes:
        total += int8 + (4 if takes_fp32_graph(backend_of(session.recipe)) else 2) * (whole - int8)
        total += int8 + 2 * (whole - int8) if proves_for_gpu(session.recipe) else 0
    return total


def expected_modules(plan: Plan) -> set[str]:
    return {*plan.int8, *plan.attention, *plan.residual}


def list_expected_gemms(path: Path, plan: Plan) -> list[str]:
    modules = expected_modules(plan)
    return [name for name in list_gemms(path) if module_of(name) in modules]


def expected_gemms(session: Session) -> list[str]:
    return list_expected_gemms(graph_path(session), session.plan)


def engine_profiles(session: Session, backend: BackendName | None = None) -> list[Any]:
    """Return the profiles of an engine of the recipe's backend, or of another one."""
    if session.recipe.auto_shapes:
        return auto_profiles(session, backend)
    profiles = recipe_profiles(session.recipe)
    tuned = has_profiles(backend or backend_of(session.recipe))
    return profiles if tuned else [shapes.span_profiles(profiles)]


def recipe_profiles(recipe: Recipe) -> list[shapes.Profile]:
    bounds = (zip(each.batch, each.length, strict=True) for each in recipe.engine.profiles)
    return [shapes.Profile(*sizes) for sizes in bounds]


def row_lengths(session: Session) -> Int64:
    return np.concatenate([encoded.lengths for _, encoded in session.eval_splits.values()])


def length_edges(session: Session, backend: BackendName | None = None) -> list[int] | None:
    """Return the lengths that the engine's batches are padded to; None: each to its own longest row.

    Kernels without profiles take every length, so that padding buys nothing there.
    """
    if not session.recipe.auto_shapes or not has_profiles(backend or backend_of(session.recipe)):
        return None
    return shapes.choose_edges(row_lengths(session), session.recipe.export.max_length)


def auto_profiles(session: Session, backend: BackendName | None = None) -> list[shapes.Profile]:
    batch, longest = session.config.batch_size, session.recipe.export.max_length
    if edges := length_edges(session, backend):
        return shapes.bucket_profiles(edges, longest, batch)
    typical = int(np.median(row_lengths(session)))
    return [shapes.Profile((1, 1), (batch, typical), (max(batch, shapes.LARGEST_BATCH), longest))]


def describe_lengths(session: Session) -> Lengths | None:
    if not session.recipe.auto_shapes:
        return None
    lengths, edges = row_lengths(session), length_edges(session)
    values, counts = np.unique(lengths, return_counts=True)
    tokens, longest = int(lengths.sum()), int(lengths.max())
    ends = np.searchsorted(lengths, edges or (), sorter=np.argsort(lengths), side="right")
    parts = np.split(np.sort(lengths), ends[:-1])
    splits, batch = session.eval_splits.values(), session.config.batch_size
    batches = [each for _, encoded in splits for each in sorted_rows(encoded.lengths, batch, edges)]
    return Lengths(
        splits=list(session.eval_splits),
        rows=len(lengths),
        tokens=tokens,
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        p90=int(np.percentile(lengths, 90, method="higher")),
        longest=longest,
        histogram=[(int(value), int(count)) for value, count in zip(values, counts, strict=True)],
        buckets=[
            LengthBucket(length=edge, rows=len(part), tokens=int(part.sum()))
            for edge, part in zip(edges or (), parts, strict=False)
        ],
        padding=1 - tokens / sum(length * len(rows) for length, rows in batches),
        longest_padding=1 - tokens / (longest * len(lengths)),
        profiles=list(map(str, auto_profiles(session))),
    )


def graph_for_tensorrt(session: Session, graph: Path) -> Path | None:
    if not takes_fp32_graph(backend_of(session.recipe)):
        return graph
    beside = session.folder / GPU_INT8
    return beside if beside.is_file() else None


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
            if self.exported[name] - value > max_drop
        ]
        if self.int8_gemms < self.expected_int8_gemms:
            lost.append(f"{self.int8_gemms} of {self.expected_int8_gemms} GEMMs in INT8")
        return self.failed or "; ".join(lost)


Result = TypeVar("Result", bound=Strict)


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
