"""Gather the files of a run into one `Results`, and judge them by the recipe's gate."""

import importlib.metadata
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from qdqbench.eval.metrics.answers import PairedAnswers, compare_classes, list_changed_answers
from qdqbench.eval.metrics.compare import compare
from qdqbench.eval.metrics.logits import read_logits, score
from qdqbench.eval.metrics.results import Comparison, Gate, LayerErrors, Parity, StageResult
from qdqbench.eval.runs.gate import judge_gate, judge_stages, read_engine_sizes, read_speed
from qdqbench.eval.runs.report.verdict import last_measured
from qdqbench.eval.runs.results import FileRow, ModelChange, Results
from qdqbench.eval.stages.stages import FP16_STAGE, RECONSTRUCTED
from qdqbench.eval.verification.results import read_verified
from qdqbench.quantize.calibration.record import CalibrationRecord, read_record
from qdqbench.quantize.calibration.techniques import (
    Change,
    bias_correction,
    centering,
    channel_splitting,
    qkv_bias_folding,
    smoothing,
    softmax_scale,
)
from qdqbench.quantize.calibration.techniques.softmax_scale import LONG
from qdqbench.quantize.models.identity import describe_model
from qdqbench.quantize.pipeline import data_profiles, graphs, outcomes
from qdqbench.quantize.pipeline.pipeline import Timing, read_finished
from qdqbench.quantize.pipeline.session import QAT, RECONSTRUCTION, RECORD, Session
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.report.formats import label
from qdqbench.quantize.tasks.data.splits import source_commit
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.names import count_of, name_list
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.system.environment import describe_environment, now


def model_changes(  # noqa: PLR0913
    plan: Plan,
    record: CalibrationRecord,
    rewrites: dict[str, int],
    *,
    to_tanh: bool,
    half: bool,
    reconstructed: int,
    trained: int,
) -> list[ModelChange]:
    """Return the changes of a model besides Q/DQ, each with how often it was made.

    Args:
        rewrites: of the graph that the run is about.
        to_tanh: GELU is exact in FP32, and has its tanh form in the graph.
        half: what is not INT8 computes in FP16.
        reconstructed: layers whose weights are those of reconstruction.
        trained: the step of training whose weights were kept.
    """
    tanh_gelus = rewrites.get("tanh GELU", 0) if to_tanh else 0
    joined, turned, short = (rewrites.get(name, 0) for name in ("joined heads", "tokens first", "short GELU"))
    changes: list[Change] = [
        ("reconstruction", reconstructed, "layer", "The weights of {} were trained to give FP32's output."),
        ("training", trained, "step", "The weights are those after {} of quantization-aware training."),
        *bias_correction.list_changes(plan, record.biases),
        ("tanh GELU", tanh_gelus, "feed-forward", "GELU has its tanh form in {}, off by 5e-4 at most."),
        (
            "given ranges",
            len(record.replaced),
            "activation",
            "The amax of {} is the recipe's and not calibration's.",
        ),
        *smoothing.list_changes(record.smoothing),
        *channel_splitting.list_changes(record.splits),
        *centering.list_changes(record.centering, record.shifts),
        *qkv_bias_folding.list_changes(plan, record.centers, record.shifts),
        *softmax_scale.list_changes(record.softmax),
        ("INT8 attention", len(plan.attention), "attention", "q, k, v and the softmax of {} are in INT8."),
        (
            "INT8 residuals",
            len(plan.residual),
            "residual sum",
            "{} read the INT8 tensor that the next linears read.",
        ),
        ("FP16", len(plan.high) * half, "linear", "What is not INT8 computes in FP16, {} among it."),
        ("joined heads", joined, "attention", "q, k and v of {} go to their heads in one step."),
        (
            "tokens first",
            turned,
            "attention",
            "Hidden states are [length, batch, hidden] through {}, which saves copies.",
        ),
        ("short GELU", short, "tanh GELU", "{} written as x sigmoid(x (a + b x²)), the same function."),
    ]
    return [
        ModelChange(what=what, count=count, description=sentence.format(count_of(count, noun)))
        for what, count, noun, sentence in changes
        if count
    ]


# of the output of an INT8 attention: up to 128 tokens with scale 1/127 MiniLM is below it
MOST_SOFTMAX_ERROR = 0.2
ONNX_FILES = ("model.fp32.onnx", "model.fp16.onnx", "model.int8.onnx", graphs.GPU_INT8)


def collect(session: Session, timings: dict[str, Timing], until: str | None = None) -> Results:
    """Gather the numbers of a run from the files in its directory.

    Args:
        timings: of its stages that ran or were reused, in order.
        until: the stage at which it stops; None: the whole run.
    """
    folder, config, whole = session.folder, session.config, until is None
    readers: dict[str, Callable[[], Any]] = {
        "build": lambda: outcomes.read_built(folder),
        "gpu_build": lambda: outcomes.read_built(folder / graphs.GPU),
        "verify": lambda: read_verified(folder),
    }
    done = {name: read() for name, read in readers.items() if name in timings}
    skipped = {name: record.skipped for name, record in done.items() if isinstance(record, outcomes.Skipped)}
    done = {name: record for name, record in done.items() if name not in skipped}
    report_phase("scoring")
    stages = stage_results(session, None if whole else timings)
    planned = whole or "quantize" in timings  # else the model need not be loaded
    trained = [name for name in (RECONSTRUCTION, QAT) if name in timings]
    ptq = session.ptq_record if trained or "quantize" in timings else None
    calibrated = read_record(folder / trained[-1] / "calibration.json") if trained else ptq
    if whole:
        names = [name for name in ONNX_FILES if (folder / name).is_file()]
    else:
        names = [name for stage in timings for name in read_finished(folder)[stage].outputs]
    sizes = {name: (folder / name).stat().st_size for name in names}
    onnx = [name for name in names if name.endswith(".onnx") and graphs.FP32 in sizes]
    ratios = {name: sizes[name] / sizes[graphs.FP32] for name in onnx}
    qat_scored = {"ptq", "fake_quant"} <= timings.keys()
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
            "calibration": {"method": ptq.method, "seed": ptq.seed, **ptq.data} if ptq else None,
        },
        seed=config.seed,
        quantized_layers=list(session.plan.int8) if planned else [],
        quantized_attention=list(session.plan.attention) if planned else [],
        quantized_residual=list(session.plan.residual) if planned else [],
        high_precision_layers=list(session.plan.high) if planned else [],
        quantizers=list(calibrated.rows()) if calibrated else [],
        softmax=calibrated.softmax if calibrated else [],
        files=[FileRow(name=name, bytes=count, fp32_ratio=ratios.get(name)) for name, count in sizes.items()],
        findings=files.read_json(folder / "check.json")["findings"] if "check" in timings else [],
        parity=_parity(session, timings) if "parity" in timings else None,
        stages=stages,
        skipped=skipped | {name: row.reason for name, row in stages.items() if row.reason},
        reconstruction=files.read_json(folder / RECONSTRUCTION / RECORD)
        if RECONSTRUCTION in trained
        else None,
        training=files.read_json(folder / QAT / RECORD) if QAT in trained else None,
        qat_vs_ptq=_compare_stages(session, "ptq", "fake_quant") if qat_scored else None,
        engine=done.get("build"),
        gpu_engine=done.get("gpu_build"),
        lengths=data_profiles.describe_lengths(session) if whole else None,
        verification=done.get("verify"),
        gate=Gate(passed=True, max_drop=config.recipe.gate.max_drop),
        timings=timings,
        warnings=session.warnings,
        notes=list(dict.fromkeys(session.notes)),
        environment=describe_environment(),
    )
    if not whole:
        results.gate = judge_stages(session, results)
        return results
    results.speed = read_speed(folder)
    results.unquantized_engines = read_engine_sizes(folder, results.engine)
    results.warnings = list(dict.fromkeys(_warnings(session, results, calibrated)))
    results.gate = judge_gate(session, results)
    _add_effects(session, results)
    return results


def stage_results(session: Session, done: Collection[str] | None = None) -> dict[str, StageResult]:
    """Return the accuracy of every evaluated stage in order; of `done` only, if given."""
    trainings = [label(name) for name in session.recipe.trainings]
    version = importlib.metadata.version("onnxruntime")
    fake_quant = "PyTorch, ModelOpt fake-quant"
    details = {
        "baseline": "PyTorch, FP32",
        **({"ptq": f"{fake_quant} before {trainings[0]}"} if trainings else {}),
        **({RECONSTRUCTED: f"{fake_quant} after {trainings[0]}"} if len(trainings) > 1 else {}),
        "fake_quant": f"{fake_quant} after {trainings[-1]}" if trainings else fake_quant,
        "onnxruntime": f"ONNX Runtime {version}, CPU, graph as exported (no optimizations)",
        "engine": "",
    }
    result = {}
    for stage in details if done is None else [name for name in details if name in done]:
        name, detail, reason = "fp32" if stage == "baseline" else stage, details[stage], None
        if stage == "fake_quant" and not session.recipe.quantizes:
            reason = "the recipe quantizes nothing"
        elif stage == "engine":
            ran = outcomes.read_engine_run(session.folder)
            reason, detail = (ran.skipped, "") if isinstance(ran, outcomes.Skipped) else (None, ran.detail)
        skipped = StageResult(status="skipped", reason=reason)
        result[name] = skipped if reason else score_stage(session, name, detail)
    return result


def score_stage(session: Session, stage: str, detail: str = "") -> StageResult:
    """Score a stage, paired with FP32 unless `--until` left that out."""
    folder = session.folder / "logits"
    reference = folder / "fp32.npz" if stage != "fp32" and (folder / "fp32.npz").is_file() else None
    task, seed = session.config.task, session.config.seed
    return score(task, folder / f"{stage}.npz", reference, session.gold, seed, detail)


def _parity(session: Session, stages: Collection[str]) -> Parity:
    """Return layer-local parity; with both evaluated, also ONNX Runtime against fake-quant end to end."""
    parity = Parity.model_validate(files.read_json(session.folder / "parity.json"))
    if {"fake_quant", "onnxruntime"} <= {*stages}:
        parity.end_to_end = _compare_stages(session, "fake_quant", "onnxruntime")
    return parity


def _compare_stages(session: Session, reference: str, stage: str) -> Comparison:
    folder, task = session.folder / "logits", session.config.task
    before, after = (read_logits(folder / f"{name}.npz") for name in (reference, stage))
    first = next(iter(before))
    return compare(task, before[first], after[first], session.gold[first], seed=session.config.seed)


def _model(session: Session, whole: bool) -> dict[str, Any]:
    if not whole:
        return {"name": session.model_name, "sha256": session.model_sha256}
    model = session.fp32_model
    return describe_model(session.model_name, model, session.config.revision) | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "embedded": session.config.model is None,
    }


def _warnings(session: Session, results: Results, record: CalibrationRecord | None) -> Iterator[str]:
    config = session.config
    limit, rows = config.limit, [split.rows for split, _ in session.eval_splits.values()]
    if limit is not None and limit < max(rows, default=0):
        yield f"--limit {config.limit}: accuracy is measured on a part of the evaluation data only"
    yield from session.warnings
    if config.model is None:
        yield (
            "built-in BERT: a small BERT, trained on generated sentences to try the path; its accuracy "
            "and speed say nothing about your model"
        )
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
    if (last := last_measured(results)) is not None and last[0] != "fp32":
        both = PairedAnswers.of(session, last[0])
        dataset = session.eval_splits[both.split][0].dataset
        results.changed_predictions = list_changed_answers(both, dataset, session.folder)
        results.classes = compare_classes(both)
        if FP16_STAGE in results.timings:
            detail = "ONNX Runtime, CPU, FP16 graph as exported (no optimizations)"
            results.fp16 = score_stage(session, FP16_STAGE, detail)
            results.vs_fp16 = _compare_stages(session, FP16_STAGE, last[0])
    if session.recipe.quantizes:
        errors = files.read_json(session.folder / graphs.LAYER_ERRORS)
        results.layer_errors = LayerErrors.model_validate(errors)
        plan = session.plan
        exact_gelu = getattr(session.fp32_model.config, plan.family.activation) == "gelu"
        results.model_changes = model_changes(
            plan,
            read_record(session.record_path),
            files.read_json(session.folder / graphs.REWRITES).get(graphs.graph_path(session).name, {}),
            to_tanh=exact_gelu and session.computes_tanh,
            half=session.target.half,
            reconstructed=results.reconstruction.kept if results.reconstruction else 0,
            trained=results.training.best_step if results.training else 0,
        )


def softmax_warnings(session: Session, record: CalibrationRecord) -> Iterator[str]:
    """Warn where the INT8 softmax loses much, or was not measured at the lengths of the evaluation data."""
    if not record.softmax:
        return
    if bad := [row for row in record.softmax if row.error > MOST_SOFTMAX_ERROR]:
        worst = max(bad, key=lambda row: row.error)
        fixed = session.recipe.calibration.softmax_scale == "fixed"
        cure = "set calibration.softmax_scale: auto, or " if fixed else ""
        yield (
            f"the INT8 softmax puts the output of {name_list(dict.fromkeys(row.module for row in bad))} off "
            f"by up to {worst.error:.0%}: at {worst.length} tokens, {worst.zeroed:.0%} of the attention "
            f"rounds to zero; {cure}keep them out with rules of type Attention and precision fp16"
        )
    lengths = np.concatenate([encoded.lengths for _, encoded in session.eval_splits.values()])
    seen = max(int(record.data["lengths"]["max"]), LONG)
    if longer := int((lengths > seen).sum()):
        yield (
            f"{longer} of {len(lengths)} evaluation samples have more than the {seen} tokens up to which "
            f"the INT8 softmax was measured (the longest has {lengths.max()}). It loses more the longer "
            "they are; calibrate on samples as long"
        )
