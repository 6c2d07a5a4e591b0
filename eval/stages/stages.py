"""The stages of a run: each reads files and the configuration, and writes files into the run directory."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from qdqbench.eval.accuracy.logits import evaluate_stage
from qdqbench.eval.accuracy.parity import compare_layers
from qdqbench.eval.accuracy.runners import evaluating, onnxruntime_runner, placed, torch_runner
from qdqbench.eval.stages.engine import build_stage, engine_stage, gpu_build_stage, verify_stage
from qdqbench.eval.verify.layer_errors import layer_errors
from qdqbench.quantize.activity.told import counted, doing
from qdqbench.quantize.calibrate.ptq import calibrate
from qdqbench.quantize.calibrate.record import read_record, shifted_states, write_record
from qdqbench.quantize.check.check import check_file, to_json
from qdqbench.quantize.core import files
from qdqbench.quantize.engine.backend import available_backends, gpu_backend
from qdqbench.quantize.graph.export import ExportSettings, trace, write_graph
from qdqbench.quantize.machine.cpu import find_cpu
from qdqbench.quantize.machine.gpu import find_gpu
from qdqbench.quantize.qat.files import remove_checkpoints
from qdqbench.quantize.qat.stage import train_qat
from qdqbench.quantize.rundir.artifacts import (
    FP16,
    FP32,
    GPU_INT8,
    INT8,
    LAYER_ERRORS,
    REWRITES,
    backend_of,
    checked_path,
    engine_profiles,
    expected_modules,
    graph_bytes,
    graph_path,
    proves_for_gpu,
)
from qdqbench.quantize.rundir.outcomes import record
from qdqbench.quantize.rundir.pipeline import Stage
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.tasks.embedded import write_embedded
from qdqbench.quantize.tasks.sources import source_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FP16_STAGE = "fp16"  # is run only where it is asked for
PARITY_SAMPLES, PARITY_BATCH = 64, 16
LAYER_SAMPLES = 8  # enough tokens for a relative norm; each goes through a model some five times


def embedded(session: Session) -> list[Path]:
    """Generate the default task and train its small BERT."""
    run = write_embedded(
        session.folder / "embedded",
        seed=session.config.seed,
        progress=lambda fraction: session.progress(fraction, 1),
    )
    return sorted(path for path in run.model_dir.parent.rglob("*") if path.is_file())


def baseline(session: Session) -> list[Path]:
    """Evaluate the FP32 model."""
    return [_evaluate_torch(session, "fp32", session.fp32_model)]


def quantize_stage(session: Session) -> list[Path]:
    """Calibrate and record every amax."""
    settings = session.recipe.calibration
    batches = session.calibration_batches()
    total, seen = len(batches.split.dataset), 0

    def progress(count: int) -> None:
        nonlocal seen
        seen = seen % total + count  # smoothing goes through the data twice
        session.progress(seen, total)

    found = calibrate(placed(session.new_int8_model()), session.plan, batches, settings, progress)
    split = batches.split
    found.data |= {"source": split.source, "split": settings.split, "fingerprint": split.fingerprint}
    session.notes += found.notes
    session.warnings += found.warnings
    path = session.folder / "calibration.json"
    write_record(path, found)
    return [path]


def ptq_stage(session: Session) -> list[Path]:
    """Evaluate the fake-quant model before QAT."""
    return [_evaluate_torch(session, "ptq", session.new_ptq_model())]


def fake_quant(session: Session) -> list[Path]:
    """Evaluate the fake-quant model."""
    return [_evaluate_torch(session, "fake_quant", session.fake_quant_model)]


def export_stage(session: Session) -> list[Path]:
    """Write the FP32 and FP16 twins, and the INT8 graph when the recipe quantizes."""
    recipe = session.recipe
    backend, folder = backend_of(recipe), session.folder
    outputs = session.config.task.kind.outputs
    files.require_room(folder, graph_bytes(session), "model.*.onnx")
    doing("tracing")
    twin = trace(session.fp32_model, recipe.export.opset, outputs)
    jobs = [
        (twin, ExportSettings.of(recipe, backend, "fp32"), folder / FP32),
        (twin, ExportSettings.of(recipe, backend, "fp16"), folder / FP16),
    ]
    if recipe.quantizes:
        traced = trace(session.fake_quant_model, recipe.export.opset, outputs)
        jobs.append((traced, ExportSettings.of(recipe, backend), folder / INT8))
        if proves_for_gpu(recipe):
            jobs.append((traced, ExportSettings.of(recipe, gpu_backend()), folder / GPU_INT8))
    done = {}
    for model, settings, path in counted("writing graphs", jobs):
        done[str(path.relative_to(folder))] = write_graph(
            model, session.plan, settings, path, session.warnings
        )
    files.write_json(session.folder / REWRITES, done)
    return [*(path for _, _, path in jobs), session.folder / REWRITES]


def check_stage(session: Session) -> list[Path]:
    """Check the graph that will be built, or the one for GPUs beside it, against the recipe."""
    report = check_file(checked_path(session), expected_quantized=expected_modules(session))
    path = session.folder / "check.json"
    files.write_json(path, to_json(report))
    return [path]


def parity(session: Session) -> list[Path]:
    """Compare ONNX Runtime with the fake-quant model, and that with FP32, layer by layer, padded batches."""
    from qdqbench.quantize.fakequant.native import frozen

    graph, model = onnx.load(graph_path(session)), session.fake_quant_model
    biases, plan = read_record(session.record_path).biases, session.plan
    with frozen(model):
        found = compare_layers(graph, model, _parity_batches(session))
        few = {name: rows[:LAYER_SAMPLES] for name, rows in next(_parity_batches(session)).items()}
        moved = shifted_states(session.ptq_record, plan)
        with session.fp32_shifted() as fp32:
            errors = layer_errors(model, fp32, list(plan.int8), [few], biases, moved)
    return [record(session.folder / "parity.json", found), record(session.folder / LAYER_ERRORS, errors)]


def onnxruntime(session: Session) -> list[Path]:
    """Evaluate the exported graph in ONNX Runtime."""
    return [evaluate_stage(session, "onnxruntime", onnxruntime_runner(graph_path(session)))]


def fp16(session: Session) -> list[Path]:
    """Evaluate the FP16 twin in ONNX Runtime."""
    return [evaluate_stage(session, FP16_STAGE, onnxruntime_runner(session.folder / FP16))]


def _evaluate_torch(session: Session, stage: str, model: "PreTrainedModel") -> Path:
    with evaluating(model):
        return evaluate_stage(session, stage, torch_runner(model))


def _parity_batches(session: Session) -> Iterator[dict[str, Any]]:
    """A seeded draw in random order, so that the batches are padded."""
    _, encoded = next(iter(session.eval_splits.values()))
    count = encoded.rows
    order = np.random.default_rng(session.config.seed).permutation(count)[:PARITY_SAMPLES]
    for start in range(0, len(order), PARITY_BATCH):
        session.progress(start, len(order))
        rows = order[start : start + PARITY_BATCH].tolist()
        yield encoded.batch(rows, session.pad_id)[1]


def _model(session: Session) -> Any:
    return [session.model_sha256, session.config.task.model_dump(), session.recipe.export.max_length]


def _evaluation(session: Session) -> Any:
    task = session.config.task
    data = [source_fingerprint(task, session.data_source, split) for split in task.eval_splits]
    return [_model(session), data, session.config.limit, session.config.batch_size]


def _placement(session: Session) -> Any:
    recipe = session.recipe
    rules = [rule.model_dump() for rule in recipe.rules]
    return [_model(session), rules, recipe.attention, recipe.residual, recipe.export.gelu]


def _calibration(session: Session) -> Any:
    settings = session.recipe.calibration
    data = source_fingerprint(session.config.task, session.data_source, settings.split)
    return [_placement(session), data, settings.model_dump()]


def _trained(session: Session) -> Any:
    task, settings = session.config.task, session.recipe.qat
    data = source_fingerprint(task, session.data_source, task.train_split)
    return [_placement(session), data, settings.model_dump() if settings else None]


def _exported(session: Session) -> Any:
    recipe = session.recipe
    settings = [recipe.export.model_dump(), recipe.precision.model_dump()]
    return [_placement(session), *settings, backend_of(recipe), proves_for_gpu(recipe), recipe.name]


def _built(session: Session) -> Any:
    device, auto = (str(find_gpu()), str(find_cpu())), session.recipe.auto_shapes
    shapes = [str(profile) for profile in engine_profiles(session)] if auto else []
    return [_placement(session), session.recipe.engine.model_dump(), available_backends(), device, *shapes]


def _measured(session: Session) -> Any:
    return [_evaluation(session), _built(session)]


def _verified(session: Session) -> Any:
    return [_measured(session), session.recipe.gate.max_drop, session.config.seed]


def stages(session: Session) -> dict[str, Stage]:
    """The stages of this run, in order: the embedded default trains first, a twin is not quantized."""
    first = () if session.config.model else ("embedded",)
    quantized = session.recipe.quantizes
    calibrated = (*first, "quantize") if quantized else first
    trains = quantized and session.recipe.qat is not None
    if trains:
        calibrated = (*calibrated, "qat")
    evaluated = (*calibrated, "baseline", *(["fake_quant"] if quantized else []))
    last = ("build", "verify", "engine")
    behind = ("export", "check", "onnxruntime", "parity", FP16_STAGE, "gpu_build", "build")
    listed = {  # and whether this run has it
        Stage("embedded", embedded, (), lambda s: s.config.seed): bool(first),
        Stage("baseline", baseline, first, _evaluation, beside=("quantize",)): True,
        Stage("quantize", quantize_stage, first, _calibration): quantized,
        Stage("ptq", ptq_stage, (*first, "quantize"), _evaluation): trains,  # QAT is compared with it
        Stage("qat", train_qat, (*first, "quantize"), _trained, remove_checkpoints): trains,
        Stage("fake_quant", fake_quant, calibrated, _evaluation, beside=behind): quantized,
        Stage("export", export_stage, calibrated, _exported): True,
        Stage("check", check_stage, ("export",), _placement): True,
        Stage(
            "onnxruntime",
            onnxruntime,
            (*first, "export"),
            _evaluation,
            beside=("parity", FP16_STAGE, "gpu_build", *last),
        ): True,
        Stage(
            "parity",
            parity,
            (*calibrated, "export"),
            lambda s: [_evaluation(s), s.config.seed],
            beside=(FP16_STAGE, "gpu_build", *last),
        ): quantized,
        Stage(FP16_STAGE, fp16, (*first, "export"), _evaluation, beside=("gpu_build", *last)): quantized,
        # here, while what fake_quant computes is waited for
        Stage("gpu_build", gpu_build_stage, ("export",), _built): proves_for_gpu(session.recipe),
        Stage("build", build_stage, ("export",), _built): True,
        Stage("verify", verify_stage, (*evaluated, "export", "build"), _verified): True,
        Stage("engine", engine_stage, (*first, "export", "build", "verify"), _measured): True,
    }
    return {stage.name: stage for stage, wanted in listed.items() if wanted}
