"""What several stages of a run share: the graph that it is about, what must be INT8 there, and evaluation."""

from pathlib import Path
from typing import Any

import numpy as np

from qdqbench.quantize import files
from qdqbench.quantize.session import Session

FP32, FP16, INT8 = "model.fp32.onnx", "model.fp16.onnx", "model.int8.onnx"


def graph_path(session: Session) -> Path:
    """The graph that the recipe is about."""
    if session.recipe.quantizes:
        return session.folder / INT8
    return session.folder / (FP16 if session.recipe.precision.compute == "fp16" else FP32)


def weight_form(session: Session) -> Any:
    """Form of per-channel weights: the recipe's, or the default of the backend that will build."""
    from qdqbench.quantize.export import default_weight_form
    from qdqbench.quantize.trt import preferred_backend

    asked = session.recipe.export.weights
    return default_weight_form(preferred_backend(session.recipe.engine.backend)) if asked == "auto" else asked


def expected_modules(session: Session) -> set[str]:
    """Modules whose MatMuls, or whose residual, must be in INT8."""
    return {*session.plan.int8, *session.plan.attention, *session.plan.residual}


def expected_gemms(session: Session) -> list[str]:
    """ONNX MatMul and Gemm nodes that must run in INT8."""
    from qdqbench.quantize.build import gemm_names
    from qdqbench.quantize.graph import module_of

    modules = expected_modules(session)
    return [name for name in gemm_names(graph_path(session)) if module_of(name) in modules]


def engine_profiles(session: Session) -> list[Any]:
    """Optimization profiles of the recipe."""
    from qdqbench.quantize.engine_shapes import Profile

    bounds = (zip(each.batch, each.length, strict=True) for each in session.recipe.engine.profiles)
    return [Profile(*sizes) for sizes in bounds]


def evaluate(session: Session, stage: str, runner: Any, batch_size: int | None = None) -> Path:
    """Write logits and labels of every evaluation split as arrays."""
    from qdqbench.eval.runners import predict

    total, seen = sum(len(encoded.labels) for _, encoded in session.eval_splits.values()), 0

    def progress(count: int) -> None:
        nonlocal seen
        seen += count
        session.progress(seen, total)

    arrays: dict[str, Any] = {}
    for name, (_, encoded) in session.eval_splits.items():
        arrays[f"{name}.logits"] = predict(
            runner,
            encoded,
            pad_id=session.pad_id,
            batch_size=batch_size or session.config.batch_size,
            stage=stage,
            progress=progress,
        )
        arrays[f"{name}.labels"] = encoded.labels
    path = session.folder / "logits" / f"{stage}.npz"
    with files.atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)
    return path
