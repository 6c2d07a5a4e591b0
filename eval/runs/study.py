"""FP32, PTQ and QAT of one task over seeds: what seeds and quantization change (docs/how-to/qat.md)."""

from typing import TYPE_CHECKING, Any, Literal

from qdqbench.eval.runs.collect import score_stage
from qdqbench.eval.stages.stages import stages
from qdqbench.quantize.pipeline.pipeline import open_run, run_stages, select_stages
from qdqbench.quantize.pipeline.session import QAT, RECORD, RunConfig, Session
from qdqbench.quantize.recipe.schema import Recipe, require_qat
from qdqbench.quantize.report.document import SCREEN, Block, Prose, Report, Section, page_of, table_of
from qdqbench.quantize.report.formats import in_points, label, model_label, versions_text
from qdqbench.quantize.training.finetune import FinetuneRequest, finetune, spread
from qdqbench.quantize.training.results import Spread, TrainingRun
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.progress import Prefixed, reporter, reporting_to
from qdqbench.quantize.utils.schema import Strict, field
from qdqbench.quantize.utils.system.environment import now

if TYPE_CHECKING:
    from accelerate import Accelerator

STUDY_FILE = "study.json"
STUDY_STAGES = ("baseline", "ptq", "fake_quant")


class StudyRow(Strict):
    """One recipe on the FP32 model of one seed."""

    seed: int = field("Seed of fine-tuning, PTQ and QAT.")
    recipe: str = field("Name of the recipe.")
    status: Literal["done", "failed"] = field("`done`, or `failed` without figures.")
    reason: str | None = field("Reason of the failure; null if done.", default=None)
    fp32: dict[str, float] = field("Metrics of the fine-tuned model.", default={})
    ptq: dict[str, float] = field("Metrics of the fake-quant model before QAT.", default={})
    qat: dict[str, float] = field("Metrics of the fake-quant model after QAT.", default={})
    steps: int = field("Optimizer steps of the QAT.", default=0)
    best_step: int = field("Step whose weights were kept; 0: before training.", default=0)
    samples_per_s: float | None = field("Samples per second; null without a step.", default=None)


class StudySummary(Strict):
    """One recipe over the seeds that are done, of the primary metric."""

    fp32: Spread = field("Primary metric of the fine-tuned models.")
    ptq: Spread = field("Primary metric before QAT.")
    qat: Spread = field("Primary metric after QAT.")
    ptq_minus_fp32: Spread = field("PTQ minus FP32, paired by seed.")
    qat_minus_fp32: Spread = field("QAT minus FP32, paired by seed.")


class Study(Strict):
    """`study.json`."""

    schema_version: Literal[2] = field("Version of this schema.", default=2)
    created: str = field("Time of the end, ISO 8601, UTC.")
    command: str = field("Command line.")
    base: dict[str, Any] = field("Name, sha256 and `revision` (commit, null for a folder) of the encoder.")
    task: dict[str, Any] = field("Name, metrics (the primary one first), label names.")
    data: str = field("Fingerprint of the train split.")
    n: int = field("Number of samples that each seed is evaluated on.")
    finetune: dict[str, Any] = field("Settings of the FP32 models.")
    recipes: dict[str, Any] = field("Recipes by name, with every default filled in.")
    seeds: list[int] = field("Seeds of the fine-tuned models.")
    rows: list[StudyRow] = field("Recipes and seeds, failed ones too.")
    summary: dict[str, StudySummary] = field("Statistics by recipe with a seed that is done.")
    warnings: list[str] = field("Warnings of the fine-tunings, and failures.")
    environment: dict[str, Any] = field("Versions of the libraries, hardware, git hash.")


def study(request: FinetuneRequest, recipes: list[Recipe], accelerator: "Accelerator") -> Study:
    """Fine-tune for every seed, then PTQ and QAT of every recipe on each of these models.

    Rows that an earlier call finished are kept.

    Raises:
        UserError: a recipe without QAT section, several processes, or as `finetune`.
        CheckFailed: no row was finished.
    """
    if accelerator.num_processes > 1:
        raise UserError(
            f"a study runs in one process, not in {accelerator.num_processes}; start it without a launcher"
        )
    for recipe in recipes:
        require_qat(recipe)
    with reporting_to(Prefixed("fine-tuning")):
        models = finetune(request, accelerator)
    rows = [_measure(request, recipe, run) for run in models.runs for recipe in recipes]
    summary = {}
    for recipe in recipes:
        if done := [row for row in rows if row.recipe == recipe.name and row.status == "done"]:
            summary[recipe.name] = summarize(done, request.task.metrics[0])
    failed = [f"seed {r.seed}, {r.recipe} failed: {r.reason}" for r in rows if r.status == "failed"]
    result = Study(
        created=now(),
        command=request.command,
        base=models.base,
        task=models.task,
        data=models.data,
        n=next((run.n for run in models.runs if run.n), 0),
        finetune=request.settings.model_dump(mode="json"),
        recipes={recipe.name: recipe.model_dump(mode="json") for recipe in recipes},
        seeds=[run.seed for run in models.runs],
        rows=rows,
        summary=summary,
        warnings=list(dict.fromkeys([*models.warnings, *failed])),
        environment=models.environment,
    )
    files.write_text(request.folder / STUDY_FILE, result.model_dump_json(indent=2) + "\n")
    if not summary:
        raise CheckFailed(f"nothing came to its end: {rows[0].reason}")
    return result


def _session(request: FinetuneRequest, recipe: Recipe, seed: int) -> Session:
    seeded = recipe.qat and recipe.qat.model_copy(update={"seed": seed})
    config = RunConfig(
        recipe=recipe.model_copy(update={"qat": seeded}),
        model=str(request.folder / f"seed-{seed}" / "model"),
        task=request.task,
        data=request.data,
        seed=0,  # of the bootstrap
        command=request.command,
    )
    return Session(config, request.folder / f"seed-{seed}" / recipe.name)


def _measure(request: FinetuneRequest, recipe: Recipe, model: TrainingRun) -> StudyRow:
    name = f"seed {model.seed}: {recipe.name}"
    reporter().begin(name)
    row = StudyRow(seed=model.seed, recipe=recipe.name, status="failed", reason=model.reason)
    if model.status == "failed":
        return row
    planned = _session(request, recipe, model.seed)
    session = open_run(planned.config, planned.folder)
    needed = select_stages(stages(session), STUDY_STAGES)
    try:
        run_stages(session, needed, lambda stage, reused: reporter().begin(f"{name}, {stage}"))
    except CheckFailed as error:
        row.reason = str(error)
        return row
    training = TrainingRun.model_validate_json((session.folder / QAT / RECORD).read_text(encoding="utf-8"))
    row.status, row.reason = "done", None
    row.fp32, row.ptq, row.qat = (
        score_stage(session, stage).metrics for stage in ("fp32", "ptq", "fake_quant")
    )
    row.steps, row.best_step, row.samples_per_s = training.steps, training.best_step, training.samples_per_s
    return row


def summarize(rows: list[StudyRow], metric: str) -> StudySummary:
    by_seed = []
    for row in rows:
        fp32, ptq, qat = row.fp32[metric], row.ptq[metric], row.qat[metric]
        differences = {"ptq_minus_fp32": ptq - fp32, "qat_minus_fp32": qat - fp32}
        by_seed.append({"fp32": fp32, "ptq": ptq, "qat": qat} | differences)
    return StudySummary(**spread(by_seed))


def study_report(study: Study) -> Report:
    metric, (done, *_) = label(study.task["metrics"][0]), study.summary.values()
    base, task = model_label(str(study.base["name"])), label(str(study.task["name"]))
    head = (
        f"QAT over seeds: {base}, {task}. FP32 has {metric} {_percent(done.fp32)} (mean ± standard deviation "
        f"over {done.fp32.n} seeds, n = {study.n})."
    )
    table = table_of(
        study.summary.items(),
        ("recipe", lambda pair: pair[0]),
        (metric, lambda pair: _percent(pair[1].qat)),
        ("PTQ - FP32", lambda pair: _percent(pair[1].ptq_minus_fp32, "+")),
        ("QAT - FP32", lambda pair: _percent(pair[1].qat_minus_fp32, "+")),
        on=SCREEN,
    )
    lines = [conditions(study.environment, study.finetune, study.recipes), *study.warnings]
    blocks: list[Block] = [Prose(head, on=SCREEN), table, *(Prose(line, on=SCREEN) for line in lines)]
    page = page_of(study, "study", base, [task], STUDY_FILE)
    return Report(page, [Section("recipes", "Recipes", blocks, on=SCREEN)])


def _percent(spread: Spread, sign: str = "") -> str:
    return in_points(spread.mean, spread.sd, sign)


def conditions(environment: dict[str, Any], finetune: dict[str, Any], recipes: dict[str, Any]) -> str:
    hardware = environment["gpu"] if environment["gpu"] != "none" else environment["cpu"]
    trained = dict.fromkeys(_settings(recipe["qat"]) for recipe in recipes.values())
    return (
        f"{hardware}, {versions_text(environment)}; FP32: {_settings(finetune)}; QAT: {' or '.join(trained)}"
    )


def _settings(training: dict[str, Any]) -> str:
    most = f", at most {training['max_steps']} steps" if training["max_steps"] else ""
    return (
        f"{training['epochs']:g} epochs{most}, batch {training['batch_size']}, learning rate "
        f"{training['learning_rate']}, precision {training['precision']}"
    )
