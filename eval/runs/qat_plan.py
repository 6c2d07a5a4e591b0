"""What a QAT run would train, cost and buy, before it is started."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qdqbench.eval.accuracy.runners import placed
from qdqbench.eval.gate.gate import cannot_hold
from qdqbench.eval.runs.collect import scored
from qdqbench.eval.runs.pace import probed, unchecked
from qdqbench.eval.runs.run import planned, run_until
from qdqbench.eval.stages import engine as engine_stages
from qdqbench.eval.stages import stages
from qdqbench.quantize.activity.told import doing
from qdqbench.quantize.calibrate.ptq import calibrate
from qdqbench.quantize.calibrate.record import write_record
from qdqbench.quantize.core import files
from qdqbench.quantize.core.comparison import Comparison
from qdqbench.quantize.core.strict import Strict
from qdqbench.quantize.engine.build import attention_count
from qdqbench.quantize.machine.process import leads
from qdqbench.quantize.machine.usage import measured
from qdqbench.quantize.qat.stage import settings_of
from qdqbench.quantize.rundir.artifacts import expected_gemms
from qdqbench.quantize.rundir.outcomes import Skipped, read_built
from qdqbench.quantize.rundir.pipeline import Stage, unchanged
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.tasks.rows import encode
from qdqbench.quantize.train.loop import measure_steps
from qdqbench.quantize.train.processes import group, matrix_products, new_accelerator, precision_here
from qdqbench.quantize.train.rows import divide, evaluation_steps, held_of, steps_of

if TYPE_CHECKING:
    from accelerate import Accelerator

MEASURED, MEASURED_S = 8, 4.0  # optimizer steps, and seconds after which no further one is measured
DRAWN = 128  # train rows at least that all of it is measured on
CALIBRATED = 8  # samples: scales do not change what a step costs
FOLDER = "plan"
BYTES_PER_PARAMETER = 12  # a weight and the two moments of AdamW
CHECKPOINTS_ON_DISK = 4  # two, the best, and one being written


class Runs(Strict):
    """What the PTQ engine runs, from its layer table: QAT does not change it."""

    int8_gemms: int | None = None  # None: no engine could be built here
    expected: int
    not_int8: list[str] = []
    attention_int8: int | None = None
    expected_attention_int8: int
    backend: str | None = None
    reason: str | None = None  # why there is no engine


class TrainingCost(Strict):
    """Of the training alone, from measured steps."""

    device: str
    processes: int
    precision: str
    steps: int
    evaluations: int
    rows: int
    held_out: int
    measured_steps: int
    step_s: float  # median
    step_s_sd: float
    drawn: int  # train rows that all of this was measured on
    teacher_s: float  # answers of the FP32 model to every row, once
    evaluation_s: float  # all of them
    total_s: float
    memory_bytes: int  # peak with the longest batch of these: of the GPU, else of this process
    memory_of: Literal["GPU", "process"]
    disk_bytes: int  # of checkpoints
    disk_free_bytes: int


class QatPlan(Strict):
    """Everything that `qat --plan` says."""

    schema_version: Literal[1] = 1
    recipe: str
    family: str  # of the model
    quantized: list[str]
    high_precision: list[str]
    attention: list[str]
    settings: dict[str, Any]
    engine: Runs | None  # None: PTQ was not asked for
    metric: str
    fp32: float | None  # None: not evaluated yet
    gap: Comparison | None  # PTQ minus FP32, to be closed; None: not evaluated yet
    ptq_s: float | None  # estimate of what is missing for that; None: nothing
    cost: TrainingCost
    plan_s: float  # that the plan itself took
    findings: list[str]
    warnings: list[str] = []
    notes: list[str]


def make_plan(
    session: Session,
    show: Callable[[str, bool], None] = lambda name, reused: None,
    *,
    with_ptq: bool = False,
) -> QatPlan | None:
    """Measure a few training steps on a draw of the data, on all processes.

    Args:
        session: of a recipe with a QAT section, opened by the main process.
        show: as of `run_until`.
        with_ptq: run PTQ first and build its engine in `OUT/plan`, to say what there is to win back; the
            training takes up what PTQ wrote. Without it PTQ is said to be what an earlier call left, if any.

    Returns:
        The plan in the main process, None in the others.
    """
    start, engine, findings = time.monotonic(), None, list[str]()
    draft = _draft(session)
    if leads():
        if session.config.model is None:
            run_until(session, "embedded", show)
        if with_ptq:
            for stage in ("baseline", "ptq"):
                run_until(session, stage, show)
            engine, findings = _engine(session)
        _rough_scales(draft)
    try:
        with group():  # the others wait to meet
            cost = measure_training(draft, new_accelerator(settings_of(session).precision))
    finally:
        if leads():
            shutil.rmtree(draft.folder, ignore_errors=True)
            with suppress(OSError):  # the engine of `with_ptq` stays
                draft.folder.parent.rmdir()
    if not leads():
        return None
    known = with_ptq or unchanged(session, _scoring(session))
    plan = _plan(session, engine, findings, cost, known=known)
    return plan.model_copy(update={"plan_s": time.monotonic() - start})


def _scoring(session: Session) -> list[Stage]:
    """The stages that say what PTQ loses."""
    both = {stage.name: stage for name in ("baseline", "ptq") for stage in planned(session, name)}
    return [stage for name, stage in stages.stages(session).items() if name in both]


def _draft(session: Session) -> Session:
    """The same run with a record of its own; in a folder that all processes know."""
    update = {"model": session.model_name, "data": session.data_source}
    return Session(session.config.model_copy(update=update), session.folder / FOLDER / "draft")


def _rough_scales(draft: Session) -> None:
    """A calibration on a few samples: scales do not change what a step costs."""
    few = draft.recipe.calibration.model_copy(update={"samples": CALIBRATED, "bias_correction": False})
    config = draft.config.model_copy(update={"recipe": draft.recipe.model_copy(update={"calibration": few})})
    draft.folder.mkdir(parents=True, exist_ok=True)
    rough = Session(config, draft.folder)
    record = calibrate(placed(rough.new_int8_model()), rough.plan, rough.calibration_batches(), few)
    write_record(draft.folder / "calibration.json", record)


def _engine(session: Session) -> tuple[Runs, list[str]]:
    """The engine of the PTQ graph, and the findings of `check`: QAT changes neither."""
    folder = session.folder / FOLDER
    folder.mkdir(exist_ok=True)
    shutil.copyfile(session.folder / "calibration.json", folder / "calibration.json")
    update = {"recipe": session.recipe.ptq, "model": session.model_name, "data": session.data_source}
    config = session.config.model_copy(update=update)
    ptq = Session(config, folder)
    stages.export_stage(ptq)
    stages.check_stage(ptq)
    engine_stages.build_stage(ptq)
    built = read_built(folder)
    gemms = expected_gemms(ptq)
    attentions = attention_count(gemms, ptq.plan.attention)
    findings = [
        f"{row['severity']} {row['code']} at {row['node']}: {row['why']}"
        for row in files.read_json(folder / "check.json")["findings"]
    ]
    runs: dict[str, Any]
    if isinstance(built, Skipped):
        runs = {"reason": built.skipped}
    else:
        target = ", ".join(built.compute_capability)
        runs = built.model_dump(include={"int8_gemms", "not_int8", "attention_int8"})
        runs["backend"] = f"{built.backend} {built.version}, compute capability {target}"
    return Runs(expected=len(gemms), expected_attention_int8=attentions, **runs), findings


def measure_training(session: Session, accelerator: "Accelerator") -> TrainingCost:
    """Time and memory of the training, from a few steps on every process, on a draw of the train split."""
    from qdqbench.quantize.qat.job import new_job, prepare_student

    settings, task = settings_of(session), session.config.task
    split = session.split(task.train_split, limit=None)
    drawn = max(DRAWN, MEASURED // 2 * settings.batch_size)
    part = session.split(task.train_split, limit=min(drawn, split.rows), seed=settings.seed)
    encoded = encode(part, task, session.tokenizer, session.recipe.export.max_length)
    data = divide(encoded, session.pad_id, settings.holdout, settings.seed)
    more = split.rows / len(part.dataset)  # of everything that grows with the rows
    model = prepare_student(session, settings)
    parameters = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    job = new_job(session, settings, accelerator, model, data)  # asks the teacher
    teacher_s = more * (time.perf_counter() - start)
    doing("measuring steps")
    with _peak_memory(accelerator) as memory, matrix_products(settings.precision):
        seconds = measure_steps(job, accelerator, MEASURED, MEASURED_S)
    job.model.eval()
    start = time.perf_counter()
    job.judge(job.model)
    held_out = held_of(round(more * len(encoded.gold)), settings.holdout)
    rows = round(more * encoded.rows) - round(held_out * encoded.rows / len(encoded.gold))
    steps = steps_of(rows, settings)
    evaluations = len(evaluation_steps(steps, settings.evaluations)) + 1  # the weights before training too
    evaluation_s = evaluations * (time.perf_counter() - start) * held_out / len(data.held_out)
    step_s = float(np.median(seconds))
    return TrainingCost(
        **memory,
        processes=accelerator.num_processes,
        precision=precision_here(settings.precision),
        steps=steps,
        evaluations=evaluations,
        rows=rows,
        held_out=held_out,
        drawn=encoded.rows,
        measured_steps=len(seconds),
        step_s=step_s,
        step_s_sd=float(np.std(seconds, ddof=1)),
        teacher_s=teacher_s,
        evaluation_s=evaluation_s,
        total_s=teacher_s + steps * step_s + evaluation_s,
        disk_bytes=CHECKPOINTS_ON_DISK * parameters * BYTES_PER_PARAMETER,
        disk_free_bytes=shutil.disk_usage(session.folder).free,
    )


@contextmanager
def _peak_memory(accelerator: "Accelerator") -> Iterator[dict[str, Any]]:
    """Device and peak of the GPU of this process, or of the process, as `TrainingCost` names them."""
    import torch

    found: dict[str, Any] = {}
    if accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(accelerator.device)
        yield found
        found["memory_bytes"] = torch.cuda.max_memory_allocated(accelerator.device)
        found |= {"memory_of": "GPU", "device": torch.cuda.get_device_name(accelerator.device)}
        return
    with measured() as cost:
        yield found
    found |= {"memory_bytes": cost.peak_rss_bytes, "memory_of": "process", "device": "CPU"}


def _plan(
    session: Session, runs: Runs | None, findings: list[str], cost: TrainingCost, *, known: bool
) -> QatPlan:
    metric, ptq_s = session.config.task.metrics[0], None
    if not known:
        doing("timing a few rows")
        pace, rows = probed(session), sum(each.rows for _, each in session.eval_splits.values())
        ptq_s = pace.calibrated(1, session.recipe.calibration.samples) + rows * (pace.fp32_s + pace.fake_s)
    settings = session.recipe.qat
    said = cannot_hold(session.recipe), "" if known else unchecked(None)
    return QatPlan(
        recipe=session.recipe.name,
        family=session.plan.family.name,
        quantized=list(session.plan.int8),
        high_precision=list(session.plan.high),
        attention=list(session.plan.attention),
        settings=settings.model_dump(mode="json") if settings else {},
        engine=runs,
        metric=metric,
        fp32=scored(session, "fp32").metrics[metric] if known else None,
        gap=scored(session, "ptq").vs_fp32 if known else None,
        ptq_s=ptq_s,
        cost=cost,
        plan_s=0.0,
        findings=findings,
        warnings=[*session.warnings, *filter(None, said)],
        notes=list(session.notes),
    )
