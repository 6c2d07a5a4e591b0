"""Gather the files of a run into one `Results`, and hold them to the recipe's gate."""

import importlib.metadata
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from qdqbench.eval.accuracy.compare import compare
from qdqbench.eval.accuracy.logits import read_logits, score
from qdqbench.eval.gate.gate import gate_of
from qdqbench.eval.gate.speed import speed_of, twins_of
from qdqbench.eval.runs.effects import add_effects
from qdqbench.quantize.activity.told import doing
from qdqbench.quantize.calibrate.record import CalibrationRecord, read_record
from qdqbench.quantize.calibrate.softmax import LONG
from qdqbench.quantize.core import files
from qdqbench.quantize.core.comparison import Comparison, Gate, Parity
from qdqbench.quantize.core.names import name_list
from qdqbench.quantize.core.results import EngineResult, FileRow, Results, StageResult, Timing
from qdqbench.quantize.core.training_results import TrainingRun
from qdqbench.quantize.encoders.identity import describe_model
from qdqbench.quantize.machine.environment import environment, now
from qdqbench.quantize.rundir.artifacts import GPU, GPU_INT8, proves_for_gpu
from qdqbench.quantize.rundir.lengths import found_lengths
from qdqbench.quantize.rundir.outcomes import Skipped, read_built, read_ran, read_verified
from qdqbench.quantize.rundir.session import QAT, Session
from qdqbench.quantize.tasks.sources import source_commit
from qdqbench.quantize.train.record import RECORD

# of the output of an INT8 attention: up to 128 tokens with scale 1/127 MiniLM is below it
MOST_SOFTMAX_ERROR = 0.2
ONNX_FILES = ("model.fp32.onnx", "model.fp16.onnx", "model.int8.onnx", GPU_INT8)


def collect(session: Session, timings: dict[str, Timing]) -> Results:
    """All numbers of a run, from the files in its directory."""
    folder, config = session.folder, session.config
    quantized = config.recipe.quantizes
    built, verified = read_built(folder), read_verified(folder)
    for_gpu = read_built(folder / GPU) if proves_for_gpu(config.recipe) else None
    doing("scoring")
    stages = stage_results(session)
    trained = quantized and config.recipe.qat is not None
    training = files.read_json(folder / QAT / RECORD) if trained else None
    calibrated = read_record(session.record_path) if quantized else None
    verification = None if isinstance(verified, Skipped) else verified
    samples = {name: len(gold) for name, gold in session.gold.items()}
    results = Results(
        created=now(),
        command=config.command,
        recipe=config.recipe.model_dump(mode="json"),
        model=_model(session),
        task=config.task.model_dump(mode="json"),
        data={
            "source": session.data_source,
            "revision": source_commit(config.task, session.data_source),
            "evaluation": samples,
            **_calibration(folder, quantized),
        },
        seed=config.seed,
        quantized_layers=list(session.plan.int8),
        high_precision_layers=list(session.plan.high),
        quantizers=list(calibrated.rows()) if calibrated else [],
        softmax=calibrated.softmax if calibrated else [],
        files=_files(folder),
        findings=files.read_json(folder / "check.json")["findings"],
        parity=_parity(session) if quantized else None,
        stages=stages,
        training=TrainingRun.model_validate(training) if trained else None,
        qat_vs_ptq=_compared(session, "ptq", "fake_quant") if trained else None,
        engine=None if isinstance(built, Skipped) else built,
        gpu_engine=None if isinstance(for_gpu, Skipped) else for_gpu,
        lengths=found_lengths(session),
        verification=verification,
        speed=speed_of(folder),
        twins=twins_of(folder, None if isinstance(built, Skipped) else built.backend),
        gate=Gate(passed=True, max_drop=config.recipe.gate.max_drop, failures=[]),
        timings=timings,
        warnings=list(
            dict.fromkeys(
                [
                    *_warnings(session, stages),
                    *_unbuilt(for_gpu),
                    *(softmax_warnings(session, calibrated) if calibrated else []),
                    *(verification.warnings if verification else []),
                ]
            )
        ),
        notes=list(dict.fromkeys(session.notes)),
        environment=environment(),
    )
    results.gate = gate_of(session, results)
    add_effects(session, results)
    return results


def stage_results(session: Session, done: Collection[str] | None = None) -> dict[str, StageResult]:
    """Accuracy of every stage of a session that was evaluated, in their order.

    Args:
        done: the stages of the run that are finished; None: all that it has.
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
            ran = read_ran(session.folder)
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


def _parity(session: Session) -> Parity:
    """Layer-local parity, and ONNX Runtime against fake-quant on the whole split."""
    parity = Parity.model_validate(files.read_json(session.folder / "parity.json"))
    return parity.model_copy(update={"end_to_end": _compared(session, "fake_quant", "onnxruntime")})


def _compared(session: Session, reference: str, stage: str) -> Comparison:
    """A stage against another one, on the same samples of the first evaluation split."""
    folder, task = session.folder / "logits", session.config.task
    before, after = (read_logits(folder / f"{name}.npz") for name in (reference, stage))
    first = next(iter(before))
    return compare(task, before[first], after[first], session.gold[first], seed=session.config.seed)


def _calibration(folder: Path, quantized: bool) -> dict[str, Any]:
    if not quantized:
        return {"calibration": None}
    record = files.read_json(folder / "calibration.json")
    return {"calibration": {"method": record["method"], "seed": record["seed"], **record["data"]}}


def _model(session: Session) -> dict[str, Any]:
    model = session.fp32_model
    info = asdict(describe_model(session.model_name, model, session.config.revision))
    return info | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "embedded": session.config.model is None,
    }


def _files(folder: Path) -> list[FileRow]:
    sizes = {name: (folder / name).stat().st_size for name in ONNX_FILES if (folder / name).is_file()}
    fp32 = sizes["model.fp32.onnx"]
    return [FileRow(name=name, bytes=size, fp32_ratio=size / fp32) for name, size in sizes.items()]


def _unbuilt(for_gpu: EngineResult | Skipped | None) -> list[str]:
    if not isinstance(for_gpu, Skipped):
        return []
    return [f"no engine for GPUs was built ahead of time: {for_gpu.skipped}"]


def _warnings(session: Session, stages: dict[str, StageResult]) -> list[str]:
    found = list(session.warnings)
    if session.config.limit is not None:
        found.insert(
            0, f"--limit {session.config.limit}: accuracy is measured on a part of the evaluation data only"
        )
    if session.config.model is None:
        found.append(
            "embedded default: a small BERT trained on generated sentences, for trying the path only"
        )
    truncated = sum(encoded.truncated for _, encoded in session.eval_splits.values())
    if truncated:
        length = session.recipe.export.max_length
        found.append(f"{truncated} evaluation samples were cut at export.max_length {length} in every stage")
    return found


def softmax_warnings(session: Session, record: CalibrationRecord) -> list[str]:
    """What the INT8 softmax loses, where that is much, or not known at the lengths of the evaluation data."""
    if not record.softmax:
        return []
    warnings = []
    if bad := [row for row in record.softmax if row.error > MOST_SOFTMAX_ERROR]:
        worst = max(bad, key=lambda row: row.error)
        cure = "" if any(row.centered for row in record.softmax) else "set calibration.softmax: error, or "
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
