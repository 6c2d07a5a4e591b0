"""FP32, PTQ and QAT of one task over seeds: what changes by seed, and what by quantization (docs/qat.md)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qdqbench.eval.runs.collect import scored
from qdqbench.eval.stages.stages import stages
from qdqbench.quantize.pipeline.pipeline import open_run, run_stages, select_stages
from qdqbench.quantize.pipeline.session import QAT, RunConfig, Session
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.training.finetune import FinetuneRequest, finetune
from qdqbench.quantize.training.qat.stage import get_settings
from qdqbench.quantize.training.record import RECORD, spread
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.comparison import Comparison
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.schema import Strict, read
from qdqbench.quantize.utils.system.environment import now
from qdqbench.quantize.utils.training_results import Finetuning, Spread, TrainingRun, training_line

if TYPE_CHECKING:
    from accelerate import Accelerator

STUDY_FILE = "study.json"
STUDY_STAGES = ("baseline", "ptq", "fake_quant")


class StudyRow(Strict):
    """One recipe on the FP32 model of one seed."""

    seed: int
    recipe: str
    status: Literal["done", "failed"]
    reason: str | None = None
    fp32: dict[str, float] = {}
    ptq: dict[str, float] = {}
    qat: dict[str, float] = {}
    ptq_vs_fp32: Comparison | None = None
    qat_vs_fp32: Comparison | None = None
    steps: int = 0
    best_step: int = 0
    training_s: float = 0.0  # in steps
    samples_per_s: float | None = None


class StudySummary(Strict):
    """One recipe over the seeds that are done, of the primary metric."""

    fp32: Spread
    ptq: Spread
    qat: Spread
    ptq_minus_fp32: Spread
    qat_minus_fp32: Spread


class Study(Strict):
    """`study.json`."""

    schema_version: Literal[1] = 1
    created: str
    command: str
    base: dict[str, Any]  # name, sha256
    task: dict[str, Any]
    data: str
    n: int  # validation samples
    finetune: dict[str, Any]  # settings of the FP32 models
    recipes: dict[str, Any]  # by name, resolved
    seeds: list[int]
    rows: list[StudyRow]
    summary: dict[str, StudySummary]  # by recipe
    warnings: list[str]
    environment: dict[str, Any]


def read_study(path: Path) -> Study:
    """Read `study.json`.

    Raises:
        UserError: missing or of another version.
    """
    return read(path, Study, "study", "run `qdqbench study` again")


@dataclass
class StudyPlan:
    """What a study goes through."""

    request: FinetuneRequest  # of the FP32 models
    recipes: list[Recipe]
    folder: Path
    say: Callable[[str], None] = lambda text: None


def study(plan: StudyPlan, accelerator: "Accelerator") -> Study:
    """Fine-tune for every seed, then PTQ and QAT of every recipe on each of these models.

    What an earlier call finished is kept.

    Raises:
        UserError: a recipe without QAT section, several processes, or as `finetune`.
        CheckFailed: nothing came to its end.
    """
    if accelerator.num_processes > 1:
        raise UserError(
            f"a study runs in one process, not in {accelerator.num_processes}; start it without a launcher"
        )
    for recipe in plan.recipes:
        get_settings(_session(plan, recipe, 0))
    plan.say("fine-tuning")
    told = replace(
        plan.request,
        report=lambda seed, row, steps: plan.say(f"fine-tuning, seed {seed}: {training_line(row, steps)}"),
    )
    models = finetune(told, accelerator)
    rows = []
    for run in models.runs:
        for recipe in plan.recipes:
            plan.say(f"seed {run.seed}: {recipe.name}")
            rows.append(_row(plan, recipe, run))
    found = _study(plan, models, rows)
    files.write_text(plan.folder / STUDY_FILE, found.model_dump_json(indent=2) + "\n")
    if not found.summary:
        raise CheckFailed(f"nothing came to its end: {rows[0].reason}")
    return found


def _session(plan: StudyPlan, recipe: Recipe, seed: int) -> Session:
    request = plan.request
    seeded = recipe.qat and recipe.qat.model_copy(update={"seed": seed})
    config = RunConfig(
        recipe=recipe.model_copy(update={"qat": seeded}),
        model=str(request.folder / f"seed-{seed}" / "model"),
        task=request.task,
        data=request.data,
        seed=0,  # of the bootstrap
        command=request.command,
    )
    return Session(config, plan.folder / f"seed-{seed}" / recipe.name)


def _row(plan: StudyPlan, recipe: Recipe, model: TrainingRun) -> StudyRow:
    """PTQ and QAT of one recipe and seed; a failure is a result."""
    row = StudyRow(seed=model.seed, recipe=recipe.name, status="failed", reason=model.reason)
    if model.status == "failed":
        return row
    wanted = _session(plan, recipe, model.seed)
    session = open_run(wanted.config, wanted.folder)
    name = f"seed {model.seed}: {recipe.name}"
    session.report = lambda row, steps: plan.say(f"{name}, qat, {training_line(row, steps)}")
    try:
        run_stages(
            session,
            select_stages(stages(session), STUDY_STAGES),
            lambda stage, reused: plan.say(f"{name}, {stage}"),
        )
    except CheckFailed as error:
        return row.model_copy(update={"reason": str(error)})
    training = TrainingRun.model_validate_json((session.folder / QAT / RECORD).read_text(encoding="utf-8"))
    fp32, ptq, qat = (scored(session, name) for name in ("fp32", "ptq", "fake_quant"))
    return StudyRow(
        seed=model.seed,
        recipe=recipe.name,
        status="done",
        fp32=fp32.metrics,
        ptq=ptq.metrics,
        qat=qat.metrics,
        ptq_vs_fp32=ptq.vs_fp32,
        qat_vs_fp32=qat.vs_fp32,
        steps=training.steps,
        best_step=training.best_step,
        training_s=training.seconds,
        samples_per_s=training.samples_per_s,
    )


def _study(plan: StudyPlan, models: Finetuning, rows: list[StudyRow]) -> Study:
    summary = {}
    for recipe in plan.recipes:
        done = [row for row in rows if row.recipe == recipe.name and row.status == "done"]
        if done:
            summary[recipe.name] = summarize(done, plan.request.task.metrics[0])
    failed = [f"seed {r.seed}, {r.recipe} failed: {r.reason}" for r in rows if r.status == "failed"]
    return Study(
        created=now(),
        command=plan.request.command,
        base=models.base,
        task=models.task,
        data=models.data,
        n=next((run.n for run in models.runs if run.n), 0),
        finetune=plan.request.settings.model_dump(mode="json"),
        recipes={recipe.name: recipe.model_dump(mode="json") for recipe in plan.recipes},
        seeds=[run.seed for run in models.runs],
        rows=rows,
        summary=summary,
        warnings=list(dict.fromkeys([*models.warnings, *failed])),
        environment=models.environment,
    )


def summarize(rows: list[StudyRow], metric: str) -> StudySummary:
    """Mean and standard deviation over seeds; differences are taken seed by seed."""

    def over(values: list[float]) -> Spread:
        return spread([{metric: value} for value in values])[metric]

    return StudySummary(
        fp32=over([row.fp32[metric] for row in rows]),
        ptq=over([row.ptq[metric] for row in rows]),
        qat=over([row.qat[metric] for row in rows]),
        ptq_minus_fp32=over([row.ptq[metric] - row.fp32[metric] for row in rows]),
        qat_minus_fp32=over([row.qat[metric] - row.fp32[metric] for row in rows]),
    )
