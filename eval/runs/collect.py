"""Gather the files of a run into one `Results`, and judge them by the recipe's gate."""

import importlib.metadata
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qdqbench.eval.metrics.answers import PairedAnswers, compare_classes, list_changed_answers
from qdqbench.eval.metrics.compare import compare
from qdqbench.eval.metrics.logits import read_logits, score
from qdqbench.eval.metrics.model_changes import ExportedRun, model_changes
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
    Skipped,
    describe_lengths,
    read_built,
    read_engine_run,
    read_verified,
)
from qdqbench.quantize.pipeline.pipeline import read_finished
from qdqbench.quantize.pipeline.session import QAT, Session
from qdqbench.quantize.tasks.sources import source_commit
from qdqbench.quantize.training.loop import RECORD
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.comparison import Comparison, Gate, LayerErrors, Parity
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.results import FileRow, Results, StageResult, Timing, TrainingRun
from qdqbench.quantize.utils.system.environment import describe_environment, now

# of the output of an INT8 attention: up to 128 tokens with scale 1/127 MiniLM is below it
MOST_SOFTMAX_ERROR = 0.2
ONNX_FILES = ("model.fp32.onnx", "model.fp16.onnx", "model.int8.onnx", GPU_INT8)


def collect(session: Session, timings: dict[str, Timing], until: str | None = None) -> Results:
    """Gather the numbers of a run, from the files in its directory.

    Args:
        timings: of its stages that ran or were reused, in their order.
        until: the stage at which it stops, with results of the stages up to there; None: the whole run.
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
    """Accuracy of every stage of a session that was evaluated, in their order.

    Args:
        done: the stages of the run that are complete_record; None: all that it has.
    """
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
    """Metrics of a stage that was evaluated, paired with FP32's unless `--until` left that out."""
    folder = session.folder / "logits"
    reference = folder / "fp32.npz" if stage != "fp32" and (folder / "fp32.npz").is_file() else None
    task, seed = session.config.task, session.config.seed
    return score(task, folder / f"{stage}.npz", reference, session.gold, seed, detail)


def _parity(session: Session, stages: Collection[str]) -> Parity:
    """Layer-local parity; where both were evaluated also ONNX Runtime against fake-quant on the split."""
    parity = Parity.model_validate(files.read_json(session.folder / "parity.json"))
    if not {"fake_quant", "onnxruntime"} <= {*stages}:
        return parity
    return parity.model_copy(update={"end_to_end": _compared(session, "fake_quant", "onnxruntime")})


def _compared(session: Session, reference: str, stage: str) -> Comparison:
    """A stage against another one, on the same samples of the first evaluation split."""
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
    """Name and hash of the model; of a whole run also what loading it says."""
    if not whole:
        return {"name": session.model_name, "sha256": session.model_sha256}
    model = session.fp32_model
    info = describe_model(session.model_name, model, session.config.revision)
    return info | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "embedded": session.config.model is None,
    }


def _file_rows(folder: Path, names: list[str]) -> list[FileRow]:
    """Files of a run with their sizes, ONNX files compared with the FP32 one."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    fp32 = sizes.get(FP32)
    return [
        FileRow(name=name, bytes=size, fp32_ratio=size / fp32 if fp32 and name.endswith(".onnx") else None)
        for name, size in sizes.items()
    ]


def _warnings(session: Session, results: Results, record: CalibrationRecord | None) -> Iterator[str]:
    """What a reader must know of a whole run."""
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
    """Fill in what quantization changed: answers, classes, layers, and the model besides Q/DQ."""
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
    """The FP16 graph against FP32, and the stage nearest to deployment against it."""
    task, seed, folder = session.config.task, session.config.seed, session.folder / "logits"
    path, reference = folder / f"{FP16_STAGE}.npz", folder / "fp32.npz"
    detail = "ONNX Runtime, CPU, FP16 graph as exported (no optimizations)"
    results.fp16 = score(task, path, reference, session.gold, seed, detail)
    half = read_logits(path)[both.split]
    results.vs_fp16 = compare(task, half, both.made, both.gold, seed=seed)


def softmax_warnings(session: Session, record: CalibrationRecord) -> list[str]:
    """What the INT8 softmax loses, where that is much, or not known at the lengths of the evaluation data."""
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
