"""The stages of a run: each reads files and the configuration, and writes files into the run directory."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from qdqbench.eval.metrics.logits import Logits, evaluate_stage, read_logits
from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.eval.metrics.runners import evaluating, onnxruntime_runner, placed, predict, torch_runner
from qdqbench.eval.verification.blocks import layer_errors
from qdqbench.eval.verification.engine import verify_engine
from qdqbench.eval.verification.results import read_verified
from qdqbench.quantize.calibration.ptq import calibrate
from qdqbench.quantize.calibration.record import get_state_shifts, read_record, write_record
from qdqbench.quantize.deployment.opened import TEXTS_FILE, describe_texts
from qdqbench.quantize.deployment.write import read_labels
from qdqbench.quantize.engine.backend import available_backends, find_missing_builder, gpu_backend
from qdqbench.quantize.engine.build import build as build_engine
from qdqbench.quantize.engine.profiles import note_distant_data
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.engine.runtime.runners import open_runner
from qdqbench.quantize.engine.sidecar import find_misfit, sidecar_path
from qdqbench.quantize.graph.export import ExportSettings, trace, write_graph
from qdqbench.quantize.graph.index import count_attentions
from qdqbench.quantize.lint.check import check_file, to_json
from qdqbench.quantize.pipeline import data_profiles, graphs, outcomes
from qdqbench.quantize.pipeline.data_profiles import engine_profiles
from qdqbench.quantize.pipeline.outcomes import Skipped, write_outcome
from qdqbench.quantize.pipeline.pipeline import Stage
from qdqbench.quantize.pipeline.session import CHECKPOINTS, QAT, RECONSTRUCTION, Session
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.data.splits import source_fingerprint
from qdqbench.quantize.tasks.embedded import write_embedded
from qdqbench.quantize.tasks.task import merge_splits
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import MissingDevice, QdqError
from qdqbench.quantize.utils.limits import CPU_BACKENDS, has_profiles
from qdqbench.quantize.utils.names import count_of
from qdqbench.quantize.utils.progress import report_phase, track
from qdqbench.quantize.utils.system.cpu import find_cpu
from qdqbench.quantize.utils.system.gpu import find_gpu

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECONSTRUCTED = "reconstructed"  # the evaluation between reconstruction and QAT
FP16_STAGE = "fp16"  # is run only where it is asked for
PARITY_SAMPLES, PARITY_BATCH = 64, 16
LAYER_SAMPLES = 8  # enough tokens for a relative norm; each goes through a model some five times


def train_stage(session: Session) -> list[Path]:
    from qdqbench.quantize.training.qat import train_qat

    return train_qat(session)


def reconstruct_stage(session: Session) -> list[Path]:
    from qdqbench.quantize.training.reconstruct import run_reconstruction

    return run_reconstruction(session)


def remove_checkpoints(training: str, session: Session) -> None:
    """Remove checkpoints once the stage is recorded; killed before, it resumes and trains no step again."""
    shutil.rmtree(session.folder / training / CHECKPOINTS, ignore_errors=True)


def _run_or_skip(outcome: Path, reason: str | None, run: Callable[[], list[Path]]) -> list[Path]:
    """Run what a device or library may be missing for, or write the reason as its outcome."""
    if reason is None:
        try:
            return run()
        except MissingDevice as error:
            reason = str(error)
    return [write_outcome(outcome, Skipped(skipped=reason))]


def build_stage(session: Session, *, for_gpu: bool = False) -> list[Path]:
    backend, graph, out = session.target.backend, graphs.graph_path(session), session.folder
    if for_gpu:
        backend, graph, out = gpu_backend(), out / graphs.GPU_INT8, out / graphs.GPU
    settings, folder = session.recipe.engine, out / "engine"
    gemms, profiles = graphs.expected_gemms(session), engine_profiles(session)
    path, layers = folder / graph.with_suffix(".engine").name, out / "layers.json"
    files.require_room(folder, graph.stat().st_size, path.name)  # an engine holds the graph's weights
    try:
        result = build_engine(
            graph,
            path,
            backend=backend,
            profiles=profiles,
            expected_gemms=gemms,
            expected_attention=count_attentions(gemms, session.plan.attention),
            compute_capability=settings.compute_capability,
            layers_path=layers,
            timing_cache=folder / "timing.cache",  # no output of the stage: it changes and may go
            compute=session.target.compute,
            times_streams=True,
            note=session.warnings.append,
            progress=lambda phase, fraction: report_phase(phase, fraction, 1),
        )
    except MissingDevice as error:
        return [write_outcome(out / outcomes.BUILD, Skipped(skipped=str(error)))]
    texts, longest = folder / TEXTS_FILE, max(profile.max[1] for profile in profiles)
    files.write_json(texts, describe_texts(session, min(session.recipe.export.max_length, longest)))
    return [write_outcome(out / outcomes.BUILD, result), path, sidecar_path(path), layers, texts]


def verify_stage(session: Session) -> list[Path]:
    path = session.folder / outcomes.VERIFY
    return _run_or_skip(path, cannot_run(session), lambda: [write_outcome(path, verify_engine(session))])


def cannot_run(session: Session) -> str | None:
    built, gpu = outcomes.read_built(session.folder), find_gpu()
    if isinstance(built, Skipped):
        return built.skipped
    if built.backend in CPU_BACKENDS:
        return None
    if gpu is None:
        return "no GPU here to run it on"
    return find_misfit(built.backend, built.compute_capability, gpu)


def _cannot_evaluate(session: Session) -> str | None:
    if (reason := cannot_run(session)) is not None:
        return reason
    verified = read_verified(session.folder)
    if not isinstance(verified, Skipped):
        counts = [verified.padding.nonfinite, verified.predictions.nonfinite]
        if any(counts) or any(shape.nonfinite for shape in verified.shapes):
            return "its logits are NaN or infinite, see the verification"
    return None


def engine_stage(session: Session) -> list[Path]:
    """Evaluate the engine where it runs, or record why not.

    One that gives NaN is not evaluated, so that its run still ends with a report that says so.
    """
    # some kernels are tuned for no shape, and profiles of the data for its shapes
    tuned = not has_profiles(session.target.backend) or session.recipe.auto_shapes
    for _, encoded in () if tuned else session.eval_splits.values():
        doubts = note_distant_data(engine_profiles(session), encoded.lengths, session.config.batch_size)
        session.warnings += [line for line in doubts if line not in session.warnings]
    outcome = session.folder / outcomes.ENGINE
    return _run_or_skip(outcome, _cannot_evaluate(session), lambda: _run_engine(session))


def _run_engine(session: Session) -> list[Path]:
    folder, gpu, built = session.folder / "engine", find_gpu(), outcomes.read_built(session.folder)
    assert isinstance(built, EngineResult)  # `cannot_run` looked
    cpu = find_cpu()  # its instruction sets are in engine.json
    device = gpu.name if gpu else "an unknown GPU"
    if built.on_cpu:
        device = f"{cpu.name}, {count_of(cpu.cores, 'core')}"
    detail = f"{built.backend} {built.version} on {device}"
    cache = folder / "runtime.cache"  # no output of the stage: it changes and may go
    graph, outputs = graphs.graph_path(session), session.config.task.kind.outputs
    path, pad_id, edges = folder / built.file, session.pad_id, data_profiles.length_edges(session)
    report_phase("loading the engine")
    with open_runner(path, graph, pad_id=pad_id, runtime_cache=cache, outputs=outputs) as runner:
        size = min(session.config.batch_size, runner.max_batch)
        logits = evaluate_stage(session, "engine", runner, batch_size=size, edges=edges)
        memory = runner.engine.memory
    session.warnings += [line for line in runner.engine.notes if line not in session.warnings]
    done = outcomes.EngineRun(detail=f"{detail}; {memory}", memory=asdict(memory))
    return [write_outcome(session.folder / outcomes.ENGINE, done), logits]


def embedded(session: Session) -> list[Path]:
    run = write_embedded(session.folder / "embedded", seed=session.config.seed)
    return sorted(path for path in run.model_dir.parent.rglob("*") if path.is_file())


def quantize_stage(session: Session) -> list[Path]:
    settings, path = session.calibration, session.folder / "calibration.json"
    if session.config.calibrated:
        record = read_record(Path(session.model_name) / path.name)
        session.notes += record.notes
        session.warnings += record.warnings
        write_record(path, record)
        return [path]
    batches = session.calibration_batches()
    found = calibrate(placed(session.new_int8_model()), session.plan, batches, settings)
    split = batches.split
    found.data |= {"source": split.source, "split": settings.split, "fingerprint": split.fingerprint}
    session.notes += found.notes
    session.warnings += found.warnings
    write_record(path, found)
    return [path]


def export_stage(session: Session, *, twins: bool = True) -> list[Path]:
    """Write the INT8 graph, with `twins` those in FP32 and FP16 too."""
    recipe = session.recipe
    backend, folder = session.target.backend, session.folder
    outputs = session.config.task.kind.outputs
    files.require_room(folder, graphs.graph_bytes(session), "model.*.onnx")
    report_phase("tracing")
    jobs = []
    if twins:
        twin = trace(session.fp32_model, recipe.export.opset, outputs)
        jobs = [
            (twin, ExportSettings.of(recipe, backend, "fp32"), folder / graphs.FP32),
            (twin, ExportSettings.of(recipe, backend, "fp16"), folder / graphs.FP16),
        ]
    if recipe.quantizes:
        traced = trace(session.fake_quant_model, recipe.export.opset, outputs)
        jobs.append((traced, ExportSettings.of(recipe, backend), folder / graphs.INT8))
        if session.target.proves_for_gpu:
            jobs.append((traced, ExportSettings.of(recipe, gpu_backend()), folder / graphs.GPU_INT8))
    done = {}
    for model, settings, path in track("writing graphs", jobs):
        rewrites = write_graph(model, session.plan, settings, path, session.warnings)
        done[str(path.relative_to(folder))] = rewrites
    files.write_json(session.folder / graphs.REWRITES, done)
    return [*(path for _, _, path in jobs), session.folder / graphs.REWRITES]


def check_stage(session: Session) -> list[Path]:
    expected = graphs.expected_modules(session.plan)
    unsigned = session.target.backend == "cuda"
    report = check_file(graphs.checked_path(session), expected_quantized=expected, unsigned=unsigned)
    files.write_json(session.folder / "check.json", to_json(report))
    return [session.folder / "check.json"]


def parity(session: Session) -> list[Path]:
    """Compare ONNX Runtime with the fake-quant model, and that with FP32, layer by layer, padded batches."""
    from qdqbench.quantize.calibration.fakequant.native import use_frozen_weights

    graph, model = onnx.load(graphs.graph_path(session)), session.fake_quant_model
    biases, plan = read_record(session.record_path).biases, session.plan
    with use_frozen_weights(model):
        found = compare_layers(graph, model, _parity_batches(session))
        few = {name: rows[:LAYER_SAMPLES] for name, rows in next(_parity_batches(session)).items()}
        moved = get_state_shifts(session.ptq_record)
        with session.fp32_shifted() as fp32:
            errors = layer_errors(model, fp32, list(plan.int8), few, biases, moved)
    return [
        write_outcome(session.folder / "parity.json", found),
        write_outcome(session.folder / graphs.LAYER_ERRORS, errors),
    ]


def torch_stage(
    name: str, needs: tuple[str, ...], model: "Callable[[Session], PreTrainedModel]", results_name: str = ""
) -> Stage:
    def evaluate(session: Session) -> list[Path]:
        with evaluating(model(session)) as placed_model:
            return [evaluate_stage(session, results_name or name, torch_runner(placed_model))]

    # a record that comes with the model is the same for each form of GELU
    return Stage(name, evaluate, needs, lambda s: [_evaluation(s), name != "baseline" and s.computes_tanh])


def onnxruntime_stage(session: Session) -> list[Path]:
    """Evaluate the graph as exported; one for OpenVINO with ONNX Runtime's optimizations too, to deploy them.

    Those of ONNX Runtime's own engine are evaluated with it, and a graph for GPUs is for no CPU.
    """
    graph, name = graphs.graph_path(session), "onnxruntime"
    exported = evaluate_stage(session, name, onnxruntime_runner(graph))
    if not session.recipe.quantizes or session.target.backend != "openvino":
        return [exported]
    try:
        found = _evaluate_optimized(session, graph, read_logits(exported))
    except QdqError as error:
        found = outcomes.OptimizedRun(failed=str(error))
    return [exported, write_outcome(session.folder / outcomes.OPTIMIZED, found)]


def _evaluate_optimized(session: Session, graph: Path, exported: Logits) -> outcomes.OptimizedRun:
    task, gemms = session.config.task, graphs.expected_gemms(session)
    with tempfile.TemporaryDirectory(prefix="qdqbench-optimized-") as folder:
        path = Path(folder) / graph.with_suffix(".engine").name
        built = build_engine(
            graph,
            path,
            backend="onnxruntime",
            profiles=engine_profiles(session),
            expected_gemms=gemms,
            expected_attention=count_attentions(gemms, session.plan.attention),
            layers_path=path.with_suffix(".json"),
        )
        told: dict[str, Any] = {"pad_id": session.pad_id, "stage": "onnxruntime"}
        with open_runner(path, graph, pad_id=session.pad_id, outputs=task.kind.outputs) as runner:
            told["batch_size"] = min(session.config.batch_size, runner.max_batch)
            answers = {name: predict(runner, each, **told) for name, (_, each) in session.eval_splits.items()}
    gold = {
        name: metrics.select_reference(task, session.gold[name], values) for name, values in exported.items()
    }
    before, after = (
        merge_splits(metrics.compute(task, values[name], gold[name]) for name in gold)
        for values in (exported, answers)
    )
    return outcomes.OptimizedRun(
        metrics=after,
        exported=before,
        int8_gemms=built.int8_gemms,
        expected_int8_gemms=built.expected_int8_gemms,
    )


def fp16_stage(session: Session) -> list[Path]:
    return [evaluate_stage(session, FP16_STAGE, onnxruntime_runner(session.folder / graphs.FP16))]


def _parity_batches(session: Session) -> Iterator[dict[str, Any]]:
    """Draw samples in random order, so that the batches are padded."""
    _, encoded = next(iter(session.eval_splits.values()))
    order = np.random.default_rng(session.config.seed).permutation(encoded.rows)[:PARITY_SAMPLES]
    for start in track("comparing", range(0, len(order), PARITY_BATCH)):
        yield encoded.batch(order[start : start + PARITY_BATCH].tolist(), session.pad_id)[1]


def _model(session: Session) -> Any:
    return [session.model_identity, session.config.task.model_dump(), session.recipe.export.max_length]


def _evaluation(session: Session) -> Any:
    task = session.config.task
    data = [source_fingerprint(task, session.data_source, split) for split in task.eval_splits]
    return [_model(session), data, session.config.limit, session.config.batch_size]


def _placement(session: Session) -> Any:
    recipe = session.recipe
    asked = recipe.model_dump(include={"model", "rules", "attention", "residual"})
    return [_model(session), asked, recipe.export.qkv_scales, session.computes_tanh]


def _calibration(session: Session) -> Any:
    settings = session.calibration
    if session.config.calibrated:  # the record is hashed with the model
        return _placement(session)
    data = source_fingerprint(session.config.task, session.data_source, settings.split)
    return [_placement(session), data, settings.model_dump()]


def _trained(session: Session) -> Any:
    task, settings = session.config.task, session.recipe.qat
    source = (settings and settings.texts) or session.data_source
    data = source_fingerprint(task, source, task.train_split)
    return [_placement(session), data, settings.model_dump() if settings else None]


def _reconstructed(session: Session) -> Any:
    settings = session.recipe.reconstruction
    if settings is None:
        return [_calibration(session), None]
    task = session.config.task
    own = source_fingerprint(task, settings.texts, task.train_split) if settings.texts else None
    return [_calibration(session), settings.model_dump(), own]


def _exported(session: Session) -> Any:
    recipe = session.recipe
    settings = [recipe.export.model_dump(), recipe.precision.model_dump()]
    target = [session.target.backend, session.target.proves_for_gpu]
    return [_placement(session), *settings, *target, recipe.name]


def _built(session: Session) -> Any:
    device, auto = (str(find_gpu()), str(find_cpu())), session.recipe.auto_shapes
    shapes = [str(profile) for profile in engine_profiles(session)] if auto else []
    # labels may be the data's: `predict` and `serve` read them next to the engine
    settings = session.recipe.engine.model_dump(), session.target.compute, read_labels(session)
    return [_placement(session), *settings, available_backends(), device, *shapes]


def _measured(session: Session) -> Any:
    return [_evaluation(session), _built(session)]


def _verified(session: Session) -> Any:
    return [_measured(session), session.recipe.gate.max_drop, session.config.seed]


def _while_missing(
    read: Callable[[Session], object], find_reason: Callable[[Session], str | None]
) -> Callable[[Session], bool]:
    """Return whether an outcome still holds: a skipped one does while its reason is found here.

    A reason that only an attempt shows, such as an engine that does not load, asks for another attempt.
    """

    def holds(session: Session) -> bool:
        outcome = read(session)
        return not isinstance(outcome, Skipped) or outcome.skipped == find_reason(session)

    return holds


_BUILT_FOR_GPU = _while_missing(
    lambda s: outcomes.read_built(s.folder / graphs.GPU), lambda _: find_missing_builder(gpu_backend())
)
_BUILT = _while_missing(
    lambda s: outcomes.read_built(s.folder), lambda s: find_missing_builder(s.target.backend)
)
_VERIFIED = _while_missing(lambda s: read_verified(s.folder), cannot_run)
_RAN = _while_missing(lambda s: outcomes.read_engine_run(s.folder), _cannot_evaluate)


def stages(session: Session) -> dict[str, Stage]:
    """Return the stages of this run in order; a twin is not quantized."""
    first = () if session.config.model else ("embedded",)
    quantized = session.recipe.quantizes
    calibrated = (*first, "quantize") if quantized else first
    trainings = session.recipe.trainings if quantized else ()
    started = (*calibrated, *[RECONSTRUCTION] * (RECONSTRUCTION in trainings))  # what QAT starts from
    calibrated = (*started, *[QAT] * (QAT in trainings))
    evaluated = (*calibrated, "baseline", *(["fake_quant"] if quantized else []))
    listed = {  # and whether this run has it
        Stage("embedded", embedded, (), lambda s: s.config.seed): bool(first),
        torch_stage("baseline", first, lambda s: s.fp32_model, "fp32"): True,
        Stage("quantize", quantize_stage, first, _calibration): quantized,
        # what is trained is compared with it
        torch_stage("ptq", (*first, "quantize"), lambda s: s.new_ptq_model()): bool(trainings),
        Stage(
            RECONSTRUCTION,
            reconstruct_stage,
            (*first, "quantize"),
            _reconstructed,
            partial(remove_checkpoints, RECONSTRUCTION),
        ): RECONSTRUCTION in trainings,
        # between the two; alone it is `fake_quant`
        torch_stage(RECONSTRUCTED, started, lambda s: s.new_start_model()): len(trainings) > 1,
        Stage(QAT, train_stage, started, _trained, partial(remove_checkpoints, QAT)): QAT in trainings,
        torch_stage("fake_quant", calibrated, lambda s: s.fake_quant_model): quantized,
        Stage("export", export_stage, calibrated, _exported): True,
        Stage("check", check_stage, ("export",), _placement): True,
        Stage("onnxruntime", onnxruntime_stage, (*first, "export"), _evaluation): True,
        Stage(
            "parity", parity, (*calibrated, "export"), lambda s: [_evaluation(s), s.config.seed]
        ): quantized,
        Stage(FP16_STAGE, fp16_stage, (*first, "export"), _evaluation): quantized,
        Stage(
            "gpu_build", partial(build_stage, for_gpu=True), ("export",), _built, holds=_BUILT_FOR_GPU
        ): session.target.proves_for_gpu,
        Stage("build", build_stage, ("export",), _built, holds=_BUILT): True,
        Stage("verify", verify_stage, (*evaluated, "export", "build"), _verified, holds=_VERIFIED): True,
        Stage("engine", engine_stage, (*first, "export", "build", "verify"), _measured, holds=_RAN): True,
    }
    return {stage.name: stage for stage, wanted in listed.items() if wanted}
