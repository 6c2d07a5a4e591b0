"""ONNX files of a run: names, and the GEMMs that must be INT8 in them."""

from pathlib import Path

from qdqbench.quantize.engine.build import list_gemms
from qdqbench.quantize.graph.index import module_of
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.utils.limits import takes_fp32_graph

LAYER_ERRORS = "layer_errors.json"  # of the fake-quant model against FP32
REWRITES = "rewrites.json"  # how often each rewrite of a graph was made, by file
GPU = "gpu"  # folder of the engine for GPUs, in a run whose own engine is for this CPU


FP32, FP16, INT8 = "model.fp32.onnx", "model.fp16.onnx", "model.int8.onnx"


GPU_INT8 = f"{GPU}/{INT8}"


def graph_path(session: Session) -> Path:
    if session.recipe.quantizes:
        return session.folder / INT8
    return session.folder / (FP16 if session.target.half else FP32)


def checked_path(session: Session) -> Path:
    """Return the graph that `check` is about: the one for GPUs where there are two."""
    return session.folder / GPU_INT8 if session.target.proves_for_gpu else graph_path(session)


def graph_bytes(session: Session) -> int:
    sizes = {name: weights.numel() for name, weights in session.fp32_model.named_parameters()}
    whole, int8 = sum(sizes.values()), sum(sizes.get(f"{name}.weight", 0) for name in session.plan.int8)
    total = (4 + 2) * whole  # the twins in FP32 and FP16
    if session.recipe.quantizes:
        total += int8 + (4 if takes_fp32_graph(session.target.backend) else 2) * (whole - int8)
        total += int8 + 2 * (whole - int8) if session.target.proves_for_gpu else 0
    return total


def expected_modules(plan: Plan) -> set[str]:
    return {*plan.int8, *plan.attention, *plan.residual}


def list_expected_gemms(path: Path, plan: Plan) -> list[str]:
    modules = expected_modules(plan)
    return [name for name in list_gemms(path) if module_of(name) in modules]


def expected_gemms(session: Session) -> list[str]:
    return list_expected_gemms(graph_path(session), session.plan)


def graph_for_tensorrt(session: Session, graph: Path) -> Path | None:
    if not takes_fp32_graph(session.target.backend):
        return graph
    beside = session.folder / GPU_INT8
    return beside if beside.is_file() else None
