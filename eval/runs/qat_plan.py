"""What a QAT run would train, cost and buy, before it is started."""

import math
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qdqbench.eval.runs.collect import scored
from qdqbench.eval.runs.run import run_until
from qdqbench.eval.stages import engine as engine_stages
from qdqbench.eval.stages import stages
from qdqbench.quantize.core import files
from qdqbench.quantize.core.comparison import Comparison
from qdqbench.quantize.core.strict import Strict
from qdqbench.quantize.engine.build import attention_count
from qdqbench.quantize.families.known import family_named
from qdqbench.quantize.machine.usage import measured
from qdqbench.quantize.qat.stage import settings_of
from qdqbench.quantize.rundir.artifacts import expected_gemms
from qdqbench.quantize.rundir.outcomes import Skipped, read_built
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.train.loop import measure_steps
from qdqbench.quantize.train.processes import group, leads, matrix_products, new_accelerator, precision_here
from qdqbench.quantize.train.rows import evaluation_steps, total_steps

if TYPE_CHECKING:
    from accelerate import Accelerator
    from rich.console import Group

MEASURED = 8  # optimizer steps
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
    teacher_s: float  # answers of the FP32 model to every row, once
    evaluation_s: float  # all of them
    total_s: float
    memory_bytes: int  # peak with the longest batch: of the GPU, else of this process
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
    engine: Runs
    metric: str
    fp32: float
    gap: Comparison  # PTQ minus FP32, to be closed
    cost: TrainingCost
    findings: list[str]
    notes: list[str]


def make_plan(session: Session) -> QatPlan | None:
    """Run PTQ, build its engine in `OUT/plan`, and measure a few training steps on all processes.

    What PTQ wrote is taken up again by the training.

    Args:
        session: of a recipe with a QAT section, opened by the main process.

    Returns:
        The plan in the main process, None in the others.
    """
    engine = None
    if leads():
        for stage in ("baseline", "ptq"):
            run_until(session, stage)
        engine = _engine(session)
    with group():
        # the others wait to meet
        cost = measure_training(session, new_accelerator(settings_of(session).precision))
    return _plan(session, *engine, cost) if engine else None


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
    """Time and memory of the training, from a few steps on every process."""
    from qdqbench.quantize.qat.job import new_job, prepare_student, training_data

    settings = settings_of(session)
    data, _ = training_data(session, settings)
    model = prepare_student(session, settings)
    parameters = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    job = new_job(session, settings, accelerator, model, data)  # asks the teacher
    teacher_s = time.perf_counter() - start
    steps = total_steps(data, settings)
    with _peak_memory(accelerator) as memory, matrix_products(settings.precision):
        seconds = measure_steps(job, accelerator, MEASURED)
    job.model.eval()
    start = time.perf_counter()
    job.judge(job.model)
    evaluations = len(evaluation_steps(steps, settings.evaluations)) + 1  # the weights before training too
    evaluation_s = evaluations * (time.perf_counter() - start)
    step_s = float(np.median(seconds))
    return TrainingCost(
        **memory,
        processes=accelerator.num_processes,
        precision=precision_here(settings.precision),
        steps=steps,
        evaluations=evaluations,
        rows=len(data.rows),
        held_out=len(data.held_out),
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


def _plan(session: Session, runs: Runs, findings: list[str], cost: TrainingCost) -> QatPlan:
    metric = session.config.task.metrics[0]
    fp32, gap = scored(session, "fp32"), scored(session, "ptq").vs_fp32
    assert gap is not None  # PTQ is compared with FP32
    settings = session.recipe.qat
    return QatPlan(
        recipe=session.recipe.name,
        family=session.plan.family.name,
        quantized=list(session.plan.int8),
        high_precision=list(session.plan.high),
        attention=list(session.plan.attention),
        settings=settings.model_dump(mode="json") if settings else {},
        engine=runs,
        metric=metric,
        fp32=fp32.metrics[metric],
        gap=gap,
        cost=cost,
        findings=findings,
        notes=list(session.notes),
    )


def plan_lines(plan: QatPlan) -> "Group":
    """The plan on a terminal, as a rich renderable."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in _lines(plan):
        table.add_row(Text(name, style="bold"), Text(text))  # Text: names are never read as markup
    warned = [Text(line, style="yellow") for line in [*plan.findings, *plan.notes]]
    return Group(Text(f"QAT plan of {plan.recipe}; nothing was trained", style="bold"), table, *warned)


def _lines(plan: QatPlan) -> list[tuple[str, str]]:
    runs, cost, gap = plan.engine, plan.cost, plan.gap
    if runs.int8_gemms is None:
        proof = f"not known, no engine was built: {runs.reason}"
    else:
        proof = f"{runs.int8_gemms} of {runs.expected} GEMMs"
        if runs.expected_attention_int8:
            proof += f", {runs.attention_int8} of {runs.expected_attention_int8} attentions"
        proof += f" in INT8 ({runs.backend}, from its layer table)"
        if runs.not_int8:
            proof += f"; NOT in INT8: {', '.join(runs.not_int8)}"
    kinds = Counter(map(family_named(plan.family).kind, plan.quantized))
    delta, error = gap.delta[plan.metric], gap.delta_stderr[plan.metric]
    noise = " (within noise: there may be nothing to win back)" if gap.within_noise else ""
    settings = plan.settings
    per_step = settings["batch_size"] / cost.step_s
    epochs = cost.steps * settings["batch_size"] / cost.rows
    return [
        ("quantized", f"{len(plan.quantized)} linears ({', '.join(f'{n} {k}' for k, n in kinds.items())})"),
        ("attention", f"{len(plan.attention)} in INT8"),
        ("high precision", ", ".join(plan.high_precision) or "no linear"),
        ("engine", proof),
        ("gap to close", f"{plan.metric} {plan.fp32:.4f} in FP32, PTQ {delta:+.4f} ± {error:.4f}{noise}"),
        (
            "training",
            f"{cost.steps} steps of {settings['batch_size']} samples "
            f"({epochs:.2g} epochs of "
            f"{cost.rows} rows, {cost.held_out} held out), {cost.evaluations} evaluations",
        ),
        (
            "time",
            f"{_duration(cost.total_s)}: steps {_duration(cost.steps * cost.step_s)} "
            f"({1000 * cost.step_s:.0f} ± {1000 * cost.step_s_sd:.0f} ms each, median of "
            f"{cost.measured_steps}; {per_step:.0f} samples/s), FP32 answers "
            f"{_duration(cost.teacher_s)}, evaluations {_duration(cost.evaluation_s)}",
        ),
        (
            "memory",
            f"{cost.memory_bytes / 1e9:.2f} GB at most, of the {cost.memory_of}, with the longest batch",
        ),
        (
            "disk",
            f"{cost.disk_bytes / 1e9:.2f} GB of checkpoints, {cost.disk_free_bytes / 1e9:.0f} GB are free",
        ),
        (
            "device",
            f"{cost.device}, {cost.processes} process{'es'[: 2 * (cost.processes > 1)]}, {cost.precision}",
        ),
    ]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
