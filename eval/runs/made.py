"""What a run that ended before its report has made: the part of `results.json` that there is by then."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from qdqbench.eval.gate.baseline import judge_baseline
from qdqbench.eval.gate.gate import issue_sentence
from qdqbench.eval.runs.collect import stage_results
from qdqbench.quantize.calibrate.record import read_record
from qdqbench.quantize.core import files
from qdqbench.quantize.core.comparison import Parity
from qdqbench.quantize.core.errors import CheckFailed
from qdqbench.quantize.core.results import (
    EngineResult,
    FileRow,
    FindingRow,
    StageResult,
    Timing,
    Verification,
)
from qdqbench.quantize.core.strict import Strict
from qdqbench.quantize.core.training_results import TrainingRun
from qdqbench.quantize.engine.build import require_int8
from qdqbench.quantize.rundir.artifacts import FP32, GPU
from qdqbench.quantize.rundir.outcomes import Skipped, read_built, read_verified
from qdqbench.quantize.rundir.pipeline import finished, timing
from qdqbench.quantize.rundir.session import QAT, Session
from qdqbench.quantize.train.record import RECORD


class Calibrated(Strict):
    """What the calibration of a run was made from, and what it left in INT8."""

    method: str  # of the calibration section; rules may refine it
    split: str
    samples: int
    tokens: int
    seed: int
    quantizers: int
    linears: int  # in INT8
    of_linears: int  # that the model has
    attention: int  # attentions in INT8
    residual: int  # residuals in INT8


class Made(Strict):
    """What a command that ends before the report prints."""

    schema_version: Literal[1] = 1
    folder: str  # the run directory
    until: str  # the stage that was asked for, or evaluate
    recipe: str
    model: str
    task: str
    timings: dict[str, Timing]  # by stage, in their order: these were run, or kept as they were
    skipped: dict[str, str] = {}  # stage -> why it has no result
    calibration: Calibrated | None = None
    training: TrainingRun | None = None
    files: list[FileRow] = []  # that these stages wrote
    findings: list[FindingRow] = []
    parity: Parity | None = None
    stages: dict[str, StageResult] = {}
    engine: EngineResult | None = None
    gpu_engine: EngineResult | None = None
    verification: Verification | None = None
    notes: list[str] = []
    warnings: list[str] = []
    failures: list[str] = []  # what does not hold; exit status 2


def collect_made(session: Session, until: str, ran: dict[str, bool]) -> Made:
    """What the stages of a run have made.

    Args:
        until: what was asked for.
        ran: stages in their order, and whether each was reused.
    """
    folder, config = session.folder, session.config
    known = finished(folder)
    found: dict[str, Any] = {}
    skipped: dict[str, str] = {}

    def put(stage: str, field: str, made: Strict) -> None:
        if isinstance(made, Skipped):
            skipped[stage] = made.skipped
        else:
            found[field] = made

    if "quantize" in ran:
        found["calibration"] = _calibrated(session)
    if "qat" in ran:
        found["training"] = TrainingRun.model_validate(files.read_json(folder / QAT / RECORD))
    if "check" in ran:
        found["findings"] = files.read_json(folder / "check.json")["findings"]
    if "parity" in ran:
        found["parity"] = Parity.model_validate(files.read_json(folder / "parity.json"))
    if "build" in ran:
        put("build", "engine", read_built(folder))
    if "gpu_build" in ran:
        put("gpu_build", "gpu_engine", read_built(folder / GPU))
    if "verify" in ran:
        put("verify", "verification", read_verified(folder))
    stages = stage_results(session, ran)
    skipped |= {name: row.reason for name, row in stages.items() if row.reason}
    made = Made(
        folder=str(folder),
        until=until,
        recipe=config.recipe.name,
        model=session.model_name,
        task=config.task.name,
        timings={name: timing(known[name], reused=reused) for name, reused in ran.items()},
        skipped=skipped,
        files=_files(session, [name for stage in ran for name in known[stage].outputs]),
        stages=stages,
        notes=list(session.notes),
        warnings=list(session.warnings),
        **found,
    )
    failures = _failures(made, config.recipe.gate.int8_layers == "all")
    issue = judge_baseline(session, stages["fp32"]) if "fp32" in stages else None
    if issue is not None and issue.state == "failed":
        failures.insert(0, issue_sentence(issue))
    return made.model_copy(update={"failures": failures})


def _calibrated(session: Session) -> Calibrated:
    record, plan = read_record(session.folder / "calibration.json"), session.plan
    return Calibrated(
        method=record.method,
        split=record.data["split"],
        samples=record.data["samples"],
        tokens=record.data["tokens"],
        seed=record.seed,
        quantizers=len(record.quantizers),
        linears=len(plan.int8),
        of_linears=len(plan.int8) + len(plan.high),
        attention=len(plan.attention),
        residual=len(plan.residual),
    )


def _files(session: Session, names: Sequence[str]) -> list[FileRow]:
    """Files of a run with their sizes; ONNX files beside their FP32 twin."""
    sizes = {name: (session.folder / name).stat().st_size for name in names}
    twin = sizes.get(FP32)
    return [
        FileRow(name=name, bytes=size, fp32_ratio=size / twin if twin and name.endswith(".onnx") else None)
        for name, size in sizes.items()
    ]


def _failures(made: Made, int8: bool) -> list[str]:
    """What of it does not hold; accuracy is judged by the gate, with the report."""
    errors = Counter(row.code for row in made.findings if row.severity == "error")
    found = [f"check: {count} of {code}" for code, count in errors.items()]
    if made.parity is not None and not made.parity.passed:
        bad = [row.name for row in made.parity.rows if not row.holds]
        found.append(f"ONNX Runtime does not follow the fake-quant model in {', '.join(bad)}")
    for built in (made.engine, made.gpu_engine):
        try:
            if built is not None and (int8 or made.until in ("build", "verify")):
                require_int8(built)
        except CheckFailed as error:
            found.append(str(error))
    if made.engine is not None and made.verification is not None and made.verification.failures:
        found.append(
            f"{made.engine.file} gives wrong outputs: {'; '.join(made.verification.failures)}; find the "
            f"tensor with `qdqbench inspect {made.folder} --bisect`"
        )
    return found
