"""Bisect the engine of a run directory, with what its verification found as a hint."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx

from qdqbench.eval.verify import blocks
from qdqbench.eval.verify.bisect import BisectResult, Feeds, bisect, run_onnxruntime
from qdqbench.eval.verify.cases import batch_of, block_cases, widest
from qdqbench.eval.verify.cut_engine import engine_of
from qdqbench.eval.verify.tensors import compare_tensors
from qdqbench.quantize.core.arrays import Array
from qdqbench.quantize.core.errors import MissingDevice, UserError
from qdqbench.quantize.encoders.inputs import inputs_of
from qdqbench.quantize.engine.sidecar import check_sidecar
from qdqbench.quantize.machine.gpu import find_gpu
from qdqbench.quantize.rundir.artifacts import Skipped, expected_gemms, graph_path, read_built, read_verified
from qdqbench.quantize.rundir.session import Session, read_config


def bisect_run(folder: Path) -> BisectResult:
    """Find the first tensor that the engine of a run directory gets wrong, on this machine.

    Raises:
        MissingDevice: no GPU, or no library to run engines with.
        UserError: no run directory, no engine in it, or one that is not for this machine.
    """
    session = Session(read_config(folder), folder)
    built = read_built(folder)
    if find_gpu() is None and (isinstance(built, Skipped) or not built.on_cpu):
        raise MissingDevice("bisecting runs engines, and CUDA shows no GPU here; run it on the engine's GPU")
    if isinstance(built, Skipped):
        raise UserError(f"{folder} has no engine ({built.skipped}); build it first")
    path = graph_path(session)
    sidecar = check_sidecar(folder / "engine" / built.file, path)
    gemms = expected_gemms(session)

    def run_engine(model: onnx.ModelProto, feeds: Feeds) -> dict[str, Array]:
        with engine_of(model, sidecar, gemms) as (engine, _):
            return engine.run(feeds)

    _, encoded = next(iter(session.eval_splits.values()))
    case = block_cases(encoded.lengths, widest(sidecar.profiles), session.config.seed)[0]
    batch = batch_of(encoded, case, session.pad_id)
    quantized = session.recipe.quantizes
    reference = session.fake_quant_model if quantized else session.fp32_model
    half = session.recipe.precision.compute == "fp16" and not built.on_cpu
    verified = read_verified(folder)
    rows = [] if isinstance(verified, Skipped) else verified.blocks
    with session.fp32_shifted() if quantized else nullcontext() as fp32:
        tensors = blocks.reference_blocks(reference, fp32, batch, half=half)
    costs = {name: _relative(t.unquantized, t.output, batch) for name, t in tensors.items()}
    return bisect(
        path,
        inputs_of(reference, batch),
        run_engine,
        run_onnxruntime,
        family=session.plan.family,
        inputs={name: t.input for name, t in tensors.items() if t.input is not None},
        limits={name: max(0.01, cost) for name, cost in costs.items()},
        suspects={row.name for row in rows if not row.holds},
        layers=built.layers,
    )


def _relative(got: Array, reference: Array, batch: Mapping[str, Array]) -> float:
    mask = np.asarray(batch["attention_mask"], bool)
    return compare_tensors("", got, reference, mask, 0.0).error or 0.0
