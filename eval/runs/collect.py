"""Gather the files of a run into one `Results`, and judge them by the recipe's gate."""

import importlib.metadata
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qdqbench.eval.metrics.answers import PairedAnswers, compare_classes, list_changed_answers
from qdqbench.eval.metrics.compare import compare
from qdqbench.eval.metrics.logits import read_logits, score
from qdqbench.eval.reporting.formats import count_of
from qdqbench.eval.runs.gate import judge_gate, judge_stages, read_engine_sizes, read_speed
from qdqbench.eval.runs.report.verdict import last_measured
from qdqbench.eval.stages.stages import FP16_STAGE
from qdqbench.quantize.calibration.record import CalibrationRecord, read_record
from qdqbench.quantize.calibration.softmax import LONG
from qdqbench.quantize.models.identity import describe_model
from qdqbench.quantize.pipeline.artifacts import (
    FP32,
    GPU,
    GPU_INT8,
    LAYER_ERRORS,
    REWRITES,
    Skipped,
    backend_of,
    describe_lengths,
    graph_path,
    read_built,
    read_engine_run,
    read_verified,
)
from qdqbench.quantize.pipeline.pipeline import read_finished
from qdqbench.quantize.pipeline.session import QAT, Session
from qdqbench.quantize.recipe.plan import Plan, list_bias_free_linears
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.tasks.sources import source_commit
from qdqbench.quantize.training.record import RECORD
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.comparison import Comparison, Gate, LayerErrors, ModelChange, Parity
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.results import FileRow, Results, StageResult, Timing, TrainingRun
from qdqbench.quantize.utils.system.environment import describe_environment, now


@dataclass(frozen=True)
class ExportedRun:
    """Model and graph of a finished export."""

    recipe: Recipe
    plan: Plan
    record: CalibrationRecord
    rewrites: dict[str, int]  # of the graph that the run is about
    exact_gelu: bool  # of the FP32 model
    half: bool  # what is not INT8 computes in FP16
    training: TrainingRun | None = None

    @classmethod
    def of(cls, session: Session, training: TrainingRun | None) -> "ExportedRun":
        config, graph = session.fp32_model.config, graph_path(session)
        on_cpu = backend_of(session.recipe) in CPU_BACKENDS
        return cls(
            recipe=session.recipe,
            plan=session.plan,
            record=read_record(session.record_path),
            rewrites=files.read_json(session.folder / REWRITES).get(graph.name, {}),
            exact_gelu=getattr(config, session.plan.family.activation) == "gelu",
            half=session.recipe.precision.compute == "fp16" and not on_cpu,
            training=training,
        )


def model_changes(done: ExportedRun) -> list[ModelChange]:
    """Return the changes of a model besides Q/DQ, each with how often it was made."""
    return [
        ModelChange(what=what, count=count, description=sentence.format(count_of(count, noun)))
        for what, count, noun, sentence in (*_weights(done), *_moved(done), *_graph(done))
        if count
    ]


Row = tuple[str, int, str, str]  # what, how often, of which noun, and a sentence that takes both as one


def _weights(done: ExportedRun) -> Iterator[Row]:
    """Yield changes of the weights and amax."""
    record, plan, training = done.record, done.plan, done.training
    steps = training.best_step if training else 0
    yield "training", steps, "step", "The weights are those after {} of quantization-aware training."
    tried = count_of(
        len([name for name in plan.int8 if name not in list_bias_free_linears(plan)]), "INT8 linear"
    )
    said = f"The biases of {{}} of {tried} make up for the mean error of rounding; the others gained nothing."
    yield "bias correction", len(record.biases), "linear", said
    if done.exact_gelu and done.recipe.export.gelu == "tanh":
        said = "GELU has its tanh form in {}, off by 5e-4 at most."
        yield "tanh GELU", done.rewrites.get("tanh GELU", 0), "feed-forward", said
    said = "The amax of {} is the recipe's and not calibration's."
    yield "given ranges", len(record.replaced), "activation", said


def _moved(done: ExportedRun) -> Iterator[Row]:
    """Yield what is computed elsewhere, with the same result before rounding."""
    record, straight = done.record, list_bias_free_linears(done.plan)
    said = "The input channels of {} are multiplied by powers of two, which their weights undo (SmoothQuant)."
    yield "smoothing", len(record.smoothing.inputs), "linear", said
    said = "The rows of {} (q, k, v) are scaled by powers of two, undone in scores or behind the attention."
    yield "scaled rows", len(record.smoothing.rows), "linear", said
    copied = sum(len(split.outliers) for split in record.splits.values())
    extra = max((split.extra for split in record.splits.values()), default=0)
    said = (
        f"{{}} of {count_of(len(record.splits), 'feed-forward')} are split into copies, for which each "
        f"feed-forward is {extra} channels wider."
    )
    yield "split channels", copied, "outlier channel", said
    moved = len([name for name in record.centers if name in straight])
    said = "The biases of {} of q, k and v are gone; k's changes no softmax, v's is behind the attention."
    yield "moved biases", moved, "linear", said
    said = (
        "What q, k and v of {} read is shifted where it is made, which does what the bias of q did; "
        "what else that does is taken out behind the attention."
    )
    yield "shifted inputs", len(record.shifts), "INT8 attention", said
    centred = {row.module for row in record.softmax if row.centered}
    said = (
        "The values of {} are centred, so that a softmax that rounds to zero loses little; their mean is in "
        "the attention's output."
    )
    yield "centred values", len(centred), "INT8 attention", said


def _graph(done: ExportedRun) -> Iterator[Row]:
    plan, rewrites = done.plan, done.rewrites
    yield "INT8 attention", len(plan.attention), "attention", "q, k, v and the softmax of {} are in INT8."
    said = "{} read the INT8 tensor that the next linears read."
    yield "INT8 residuals", len(plan.residual), "residual sum", said
    if done.half:
        yield "FP16", len(plan.high), "linear", "What is not INT8 computes in FP16, {} among it."
    said = "q, k and v of {} go to their heads in one step."
    yield "joined heads", rewrites.get("joined heads", 0), "attention", said
    said = "Hidden states are [length, batch, hidden] through {}, which saves copies."
    yield "tokens first", rewrites.get("tokens first", 0), "attention", said
    said = "{} written as x sigmoid(x (a + b x²)), the same function."
    yield "short GELU", rewrites.get("short GELU", 0), "tanh GELU", said


# of the output of an INT8 attention: up to 128 tokens with scale 1/127 MiniLM is below it
MOST_SOFTMAX_ERROR = 0.2
ONNX_FILES = ("model.fp32.onnx", "model.fp16.onnx", "model.int8.onnx", GPU_INT8)


def collect(session: Session, timings: dict[str, Timing], until: str | None = None) -> Results:
    """Gather the numbers of a run from the files in its directory.

    Args:
        timings: of its stages that ran or were reused, in order.
        until: the stage at which it stops; None: the whole run.
    """
    folder, config, whole = session.folder, session.config, until is None
    outcomes: dict[str, Any] = {}
    if "build" in timings:
        outcomes["build"] = read_built(folder)
    if "gpu_build" in timings:
        outcomes["gpu_build"] = read_built(folder / GPU)
    if "verify" in timings:
        outcomes["verify"] = read_verified(folder)
    skipped = {name: each.skipped for name, each in outcomes.items() if isinstance(each, Skipped)}
    outcomes = {name: each for name, each in outcomes.items() if name not in skipped}
    report_phase("scoring")
    stages = stage_results(session, None if whole else timings)
    planned = whole or "quantize" in timings  # else the model need not be loaded
    calibrated = None
    if "qat" in timings or "quantize" in timings:
        calibrated = read_record(session.record_path) if "qat" in timings else session.ptq_record
    if whole:
        names = [name for name in ONNX_FILES if (folder / name).is_file()]
    else:
        names = [name for stage in timings for name in read_finished(folder)[stage].outputs]
    results = Results(
        until=until,
        created=now(),
        command=config.command,
        recipe=config.recipe.model_dump(mode="json"),
        model=_model(session, whole),
        task=config.task.model_dump(mode="json"),
        data={
            "source": session.data_source,
            "revision": source_commit(config.task, session.data_source),
            "evaluation": {name: len(gold) for name, gold in session.gold.items()} if stages else {},
            "limit": config.limit,
            "calibration": _calibration(folder) if calibrated else None,
        },
        seed=config.seed,
        quantized_layers=list(session.plan.int8) if planned else [],
        quantized_attention=list(session.plan.attention) if planned else [],
        quantized_residual=list(session.plan.residual) if planned else [],
        high_precision_layers=list(session.plan.high) if planned else [],
        quantizers=list(calibrated.rows()) if calibrated else [],
        softmax=calibrated.softmax if calibrated else [],
        files=_file_rows(folder, names),
        findings=files.read_json(folder / "check.json")["findings"] if "check" in timings else [],
        parity=_parity(session, timings) if "parity" in timings else None,
        stages=stages,
        skipped=skipped | {name: row.reason for name, row in stages.items() if row.reason},
        training=_training(folder) if "qat" in timings else None,
        qat_vs_ptq=_compared(session, "ptq", "fake_quant") if {"qat", "fake_quant"} <= {*timings} else None,
        engine=outcomes.get("build"),
        gpu_engine=outcomes.get("gpu_build"),
        lengths=describe_lengths(session) if whole else None,
        verification=outcomes.get("verify"),
        gate=Gate(passed=True, max_drop=config.recipe.gate.max_drop),
        timings=timings,
        warnings=session.warnings,
        notes=list(dict.fromkeys(session.notes)),
        environment=describe_environment(),
    )
    if whole:
        results.speed = read_speed(folder)
        results.unquantized_engines = read_engine_sizes(
            folder, results.engine.backend if results.engine else None
        )
        results.warnings = list(dict.fromkeys(_warnings(session, results, calibrated)))
        results.gate = judge_gate(session, results)
        _add_effects(session, results)
    else:
        results.gate = judge_stages(session, results)
    return results


def stage_results(session: Session, done: Collection[str] | None = None) -> dict[str, StageResult]:
    """Return the accuracy of every evaluated stage in order; of `done` only, if given."""
    trained = "after QAT" if session.recipe.qat else ""
    version = importlib.metadata.version("onnxruntime")
    fake_quant = "PyTorch, ModelOpt fake-quant"
    details = {
        "baseline": "PyTorch, FP32",
        **({"ptq": f"{fake_quant} before QAT"} if trained else {}),
        "fake_quant": f"{fake_quant} {trained}".strip(),
        "onnxruntime": f"ONNX Runtime {version}, CPU, graph as exported (no optimizations)",
        "engine": "",
    }
    result = {}
    for stage in details if done is None else [name for name in details if name in done]:
        name, detail, reason = "fp32" if stage == "baseline" else stage, details[stage], None
        if stage == "fake_quant" and not session.recipe.quantizes:
            reason = "the recipe quantizes nothing"
        elif stage == "engine":
            ran = read_engine_run(session.folder)
            reason, detail = (ran.skipped, "") if isinstance(ran, Skipped) else (None, ran.detail)
        result[name] = (
            StageResult(status="skipped", reason=reason) if reason else scored(session, name, detail)
        )
    return result


def scored(session: Session, stage: str, detail: str = "") -> StageResult:
    """Score a stage, paired with FP32 unless `--until` left that out."""
    folder = session.folder / "logits"
    reference = folder / "fp32.npz" if stage != "fp32" and (folder / "fp32.npz").is_file() else None
    task, seed = session.config.task, session.config.seed
    return score(task, folder / f"{stage}.npz", reference, session.gold, seed, detail)


def _parity(session: Session, stages: Collection[str]) -> Parity:
    """Return layer-local parity; with both evaluated, also ONNX Runtime against fake-quant end to end."""
    parity = Parity.model_validate(files.read_json(session.folder / "parity.json"))
    if not {"fake_quant", "onnxruntime"} <= {*stages}:
        return parity
    return parity.model_copy(update={"end_to_end": _compared(session, "fake_quant", "onnxruntime")})


def _compared(session: Session, reference: str, stage: str) -> Comparison:
    folder, task = session.folder / "logits", session.config.task
    before, after = (read_logits(folder / f"{name}.npz") for name in (reference, stage))
    first = next(iter(before))
    return compare(task, before[first], after[first], session.gold[first], seed=session.config.seed)


def _calibration(folder: Path) -> dict[str, Any]:
    record = files.read_json(folder / "calibration.json")
    return {"method": record["method"], "seed": record["seed"], **record["data"]}


def _training(folder: Path) -> TrainingRun:
    return TrainingRun.model_validate(files.read_json(folder / QAT / RECORD))


def _model(session: Session, whole: bool) -> dict[str, Any]:
    if not whole:
        return {"name": session.model_name, "sha256": session.model_sha256}
    model = session.fp32_model
    info = asdict(describe_model(session.model_name, model, session.config.revision))
    return info | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "embedded": session.config.model is None,
    }


def _file_rows(folder: Path, names: list[str]) -> list[FileRow]:
    sizes = {name: (folder / name).stat().st_size for name in names}
    fp32 = sizes.get(FP32)
    return [
        FileRow(name=name, bytes=size, fp32_ratio=size / fp32 if fp32 and name.endswith(".onnx") else None)
        for name, size in sizes.items()
    ]


def _warnings(session: Session, results: Results, record: CalibrationRecord | None) -> Iterator[str]:
    config = session.config
    if config.limit is not None:
        yield f"--limit {config.limit}: accuracy is measured on a part of the evaluation data only"
    yield from session.warnings
    if config.model is None:
        yield "embedded default: a small BERT trained on generated sentences, for trying the path only"
    if truncated := sum(encoded.truncated for _, encoded in session.eval_splits.values()):
        length = session.recipe.export.max_length
        yield f"{truncated} evaluation samples were cut at export.max_length {length} in every stage"
    if reason := results.skipped.get("gpu_build"):
        yield f"no engine for GPUs was built ahead of time: {reason}"
    if record is not None:
        yield from softmax_warnings(session, record)
    if results.verification is not None:
        yield from results.verification.warnings


def _add_effects(session: Session, results: Results) -> None:
    last = last_measured(results)
    if last is not None and last[0] != "fp32":
        both = PairedAnswers.of(session, last[0])
        dataset = session.eval_splits[both.split][0].dataset
        results.changed_predictions = list_changed_answers(both, dataset, session.folder)
        results.classes = compare_classes(both)
        if FP16_STAGE in results.timings:
            _add_fp16(session, results, both)
    if session.recipe.quantizes:
        errors = files.read_json(session.folder / LAYER_ERRORS)
        results.layer_errors = LayerErrors.model_validate(errors)
        results.model_changes = model_changes(ExportedRun.of(session, results.training))


def _add_fp16(session: Session, results: Results, both: PairedAnswers) -> None:
    task, seed, folder = session.config.task, session.config.seed, session.folder / "logits"
    path, reference = folder / f"{FP16_STAGE}.npz", folder / "fp32.npz"
    detail = "ONNX Runtime, CPU, FP16 graph as exported (no optimizations)"
    results.fp16 = score(task, path, reference, session.gold, seed, detail)
    half = read_logits(path)[both.split]
    results.vs_fp16 = compare(task, half, both.made, both.gold, seed=seed)


def softmax_warnings(session: Session, record: CalibrationRecord) -> list[str]:
    """Warn where the INT8 softmax loses much, or was not measured at the lengths of the evaluation data."""
    if not record.softmax:
        return []
    warnings = []
    if bad := [row for row in record.softmax if row.error > MOST_SOFTMAX_ERROR]:
        worst = max(bad, key=lambda row: row.error)
        cure = (
            ""
            if any(row.centered for row in record.softmax)
            else "set calibration.softmax_scale: min-error, or "
        )
        warnings.append(
            f"the INT8 softmax puts the output of {name_list(dict.fromkeys(row.module for row in bad))} off "
            f"by up to {worst.error:.0%} (at {worst.length} tokens, {worst.zeroed:.0%} of the attention "
            f"rounds to zero); {cure}keep them out with rules of type Attention and precision fp16"
        )
    lengths = np.concatenate([encoded.lengths for _, encoded in session.eval_splits.values()])
    seen = max(int(record.data["lengths"]["max"]), LONG)
    if longer := int((lengths > seen).sum()):
        warnings.append(
            f"{longer} of {len(lengths)} evaluation samples have more than the {seen} tokens up to which "
            f"the INT8 softmax was measured (the longest has {lengths.max()}), and it loses more the longer "
            "they are; calibrate on samples as long"
        )
    return warnings
