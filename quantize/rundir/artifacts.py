"""What several stages of a run share: the graph that it is about, what must be INT8 there, and evaluation."""

from pathlib import Path
from typing import Any

from qdqbench.quantize.engine.backend import preferred_backend
from qdqbench.quantize.engine.build import gemm_names
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.graph.export import default_weight_form
from qdqbench.quantize.graph.index import module_of
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.rundir.session import Session

FP32, FP16, INT8 = "model.fp32.onnx", "model.fp16.onnx", "model.int8.onnx"


def graph_path(session: Session) -> Path:
    """The graph that the recipe is about."""
    if session.recipe.quantizes:
        return session.folder / INT8
    return session.folder / (FP16 if session.recipe.precision.compute == "fp16" else FP32)


def weight_form(recipe: Recipe) -> Any:
    """Form of per-channel weights: the recipe's, or the default of the backend that will build."""
    asked = recipe.export.weights
    return default_weight_form(preferred_backend(recipe.engine.backend)) if asked == "auto" else asked


def expected_modules(session: Session) -> set[str]:
    """Modules whose MatMuls, or whose residual, must be in INT8."""
    return {*session.plan.int8, *session.plan.attention, *session.plan.residual}


def expected_gemms(session: Session) -> list[str]:
    """ONNX MatMul and Gemm nodes that must run in INT8."""
    modules = expected_modules(session)
    return [name for name in gemm_names(graph_path(session)) if module_of(name) in modules]


def engine_profiles(session: Session) -> list[Any]:
    """Optimization profiles of the recipe."""
    bounds = (zip(each.batch, each.length, strict=True) for each in session.recipe.engine.profiles)
    return [Profile(*sizes) for sizes in bounds]
