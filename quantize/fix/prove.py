"""Proof of a mended file: outputs beside its values without Q/DQ, and the layer tables of engines."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from qdqbench.quantize.core.arrays import Array
from qdqbench.quantize.core.errors import MissingDevice, UserError
from qdqbench.quantize.engine.backend import Backend, build_engine, choose_backend, gpu_backend
from qdqbench.quantize.engine.facts import graph_of
from qdqbench.quantize.engine.inspection import inspect_layers
from qdqbench.quantize.engine.layers import parse_inspector_json, parse_log
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.fix.results import EngineRow, Outputs
from qdqbench.quantize.fix.runs import outputs
from qdqbench.quantize.graph.read import read_model

FACTOR = 1.5  # a range made symmetric has steps up to twice as wide
PROFILE = Profile((1, 8), (8, 64), (32, 128))


def compare_outputs(  # noqa: PLR0913  the last two are keywords
    before: Path,
    plain: onnx.ModelProto,
    after: Path,
    feeds: Mapping[str, Array],
    *,
    inputs: str,
    limit: float,
) -> Outputs:
    """Run the file, its values without Q/DQ, and what was written, on the same inputs.

    What was written may be FACTOR times as far from its values without Q/DQ as the file was, or `limit`.

    Raises:
        UserError: ONNX Runtime refuses what was written.
    """
    reference = outputs(plain, feeds)
    made = outputs(after, feeds)
    try:
        own = outputs(before, feeds)
    except UserError:
        own = None
    before_error = None if own is None else _distance(own, reference)
    difference = None if own is None else _distance(made, own)
    return Outputs(
        inputs=inputs,
        n=max((len(value) for value in feeds.values()), default=0),
        before_error=before_error,
        after_error=_distance(made, reference),
        difference=difference,
        limit=max(limit, FACTOR * (before_error or 0.0)),
        largest=None if own is None else _largest(made, own),
        disagreements=None if own is None else _disagreements(made, own),
    )


def _distance(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """||one - other|| / ||other||, 1e9 where a number is missing or not finite."""
    above = below = 0.0
    for name, value in other.items():
        if name not in one or one[name].shape != value.shape:
            return 1e9
        reference, got = value.astype(np.float64), one[name].astype(np.float64)
        if not np.isfinite(got).all():
            return 1e9
        above += float(np.square(got - reference).sum())
        below += float(np.square(reference).sum())
    return float(np.sqrt(above / below)) if below else float(above > 0)


def _largest(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    parts = (np.abs(one[name].astype(np.float64) - value).max(initial=0.0) for name, value in other.items())
    value = max(map(float, parts), default=0.0)
    return value if np.isfinite(value) else 1e9


def _disagreements(one: Mapping[str, Array], other: Mapping[str, Array]) -> int | None:
    scores = [name for name, value in other.items() if value.ndim == 2 and 1 < value.shape[1] < 1000]
    if len(other) != 1 or not scores:
        return None
    name = scores[0]
    return int((one[name].argmax(1) != other[name].argmax(1)).sum())


def find_builder() -> Backend | None:
    """What builds engines for GPUs here, ahead of time where there is none; None where nothing does."""
    try:
        return choose_backend(gpu_backend())
    except MissingDevice:
        return None


def engine_row(path: Path, backend: Backend) -> EngineRow:
    """Build an engine of a file and read from its layer table what runs in INT8."""
    profiles = [PROFILE] if _is_dynamic(read_model(path)) else []
    made = f"{backend.name} {backend.version}"
    try:
        built = build_engine(path, backend, profiles)
    except UserError as error:
        why = " ".join(str(error).replace(str(path), path.name).split())
        return EngineRow(engine=made, refused=why[:600])
    rows = (
        parse_inspector_json(built.inspector_json) if built.inspector_json else parse_log(built.layer_lines)
    )
    made += f", compute capability {', '.join(built.compute_capability)}"
    made += ", built ahead of time" if built.ahead_of_time else ""
    if not rows:
        return EngineRow(engine=made, refused="the builder shows no layer table")
    judged = inspect_layers(rows, graph_of(path))
    facts = judged.facts
    return EngineRow(
        engine=made,
        gemms=judged.gemms,
        int8_gemms=len(set(judged.proof.int8_gemms).intersection(judged.graph.linears)),
        attentions=facts.attentions,
        attention_fused=judged.proof.attention_fused,
        attention_int8=judged.proof.attention_int8,
        kernels=len(facts.rows),
    )


def _is_dynamic(model: onnx.ModelProto) -> bool:
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    return any(
        not entry.HasField("dim_value") for value in inputs for entry in value.type.tensor_type.shape.dim
    )
