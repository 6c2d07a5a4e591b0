"""What a training says: `finetune.md` and `finetune.html`, and the section on QAT of a run."""

from dataclasses import dataclass
from pathlib import Path

from qdqbench.eval.report.formats import clean, count_of, flat, label, model_label, seconds
from qdqbench.eval.report.page import page_of
from qdqbench.eval.report.render import write
from qdqbench.eval.runreport.training_charts import charts_of, labelled_measure, points_of, score_name
from qdqbench.eval.runreport.verdict import metric_text
from qdqbench.quantize.core.training_results import Finetuning, TrainingRun

SEED_COLUMNS = ("samples", "held-out {}", "steps", "best step", "samples/s", "time", "trained on", "stopped")
Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class SeedLine:
    """One seed in words."""

    seed: str
    metrics: list[str]
    cells: list[str]  # as `COLUMNS`
    best: bool
    failure: str


@dataclass(frozen=True)
class FinetuningView:
    """A fine-tuning in words, ready for templates."""

    title: str
    status: str  # passed, partly, failed
    headline: str
    metrics: list[str]
    columns: list[str]
    lines: list[SeedLine]
    spread: list[str]  # mean and standard deviation by metric
    explanation: list[str]
    notes: list[str]
    warnings: list[str]
    tiles: list[tuple[str, str, str, bool]]
    settings: Pairs
    inputs: Pairs
    environment: Pairs


@dataclass(frozen=True)
class TrainingSection:
    """QAT in the report of a run."""

    facts: Pairs
    explanation: list[str]
    charts: list[str]  # SVG
    settings: Pairs
    notes: list[str]


def write_finetuning(result: Finetuning, folder: Path) -> None:
    """Write `finetune.md` and `finetune.html` (one file, no external request).

    Raises:
        UserError: the folder cannot be written.
    """
    result = _cleaned(result)
    shown = finetuning_view(result)
    title, about = (
        model_label(str(result.base.get("name", "encoder"))),
        [label(str(result.task.get("name", "task")))],
    )
    facts = {"Settings": shown.settings, "Base, task and data": shown.inputs}
    page = page_of(result, "fine-tuning", title, about, "finetune.json", facts=facts)
    write("finetune", folder, {"r": result, "s": shown, "page": page, "charts": charts_of(result.runs)})


def training_headline(result: Finetuning) -> str:
    """The outcome in one sentence."""
    task, metric = label(str(result.task.get("name", "task"))), _metrics(result)[0]
    done = [run for run in result.runs if run.status == "done"]
    failed = [run for run in result.runs if run.status == "failed"]
    reasons = ", ".join(f"seed {run.seed} ({_reason(run)})" for run in failed)
    if not done:
        return f"No seed of {len(failed)} was trained to its end: {reasons}."
    spread = result.spread.get(metric)
    if spread is None:
        clauses = [f"{task}: {count_of(len(done), 'seed')} trained, {label(metric)} was not measured"]
    elif spread.sd is None:
        where = f"(one seed, so no spread; {done[0].n} validation samples)"
        clauses = [f"{task} {label(metric)} {_value(done[0], metric)} {where}"]
    else:
        clauses = [
            f"{task} {label(metric)} {spread.mean:.4f} on average over {spread.n} seeds, standard deviation "
            f"{spread.sd:.4f} ({done[0].n} validation samples)"
        ]
    best = next((run for run in done if run.seed == result.best_seed), None)
    if best is not None and len(result.runs) > 1:
        clauses.append(f"best on its held-out rows: seed {best.seed}, {_value(best, metric)} on validation")
    if failed:
        clauses.append(f"{len(failed)} of {len(result.runs)} seeds FAILED: {reasons}")
    return "; ".join(clauses) + "."


def finetuning_view(result: Finetuning) -> FinetuningView:
    """Words and figures for people; every one of them is in `finetune.json`."""
    result = _cleaned(result)
    runs, names = result.runs, _metrics(result)
    failed = [run for run in runs if run.status == "failed"]
    said = {f"seed {run.seed} failed: {run.reason}" for run in failed}
    settings = [row for row in flat(runs[0].settings) if row[0] != "seed"] if runs else []
    base = model_label(str(result.base.get("name", "encoder")))
    return FinetuningView(
        title=f"{base} · {label(str(result.task.get('name', 'task')))}",
        status="passed" if not failed else "partly" if len(failed) < len(runs) else "failed",
        headline=training_headline(result),
        metrics=[label(name) for name in names],
        columns=[name.format(labelled_measure(score_name(runs))) for name in SEED_COLUMNS],
        lines=[_line(run, names, best=run.seed == result.best_seed) for run in runs],
        spread=[_spread(result, name) for name in names] if len(runs) > 1 and result.spread else [],
        explanation=_explanation(result),
        notes=[*result.notes, *(f"Seed {run.seed}: {line}" for run in runs for line in run.notes)],
        tiles=_tiles(result),
        warnings=[line for line in result.warnings if line not in said],
        settings=[("seeds", ", ".join(str(run.seed) for run in runs)), *settings],
        inputs=[
            *flat(result.base, "base"),
            *flat(result.task, "task"),
            ("data", result.data),
            *_sizes(runs),
        ],
        environment=flat(result.environment),
    )


def _cleaned(result: Finetuning) -> Finetuning:
    """Without characters that garble a page or a terminal."""
    return Finetuning.model_validate(clean(result.model_dump()))


def section_of(run: TrainingRun | None) -> TrainingSection | None:
    """QAT of a run for its report; None where there was none."""
    if run is None:
        return None
    judged = labelled_measure(score_name([run]))
    best = str(run.best_step)
    if not run.best_step:
        best = "0: the weights before training, so it gained nothing"
    score, start = _held_out(run, run.best_step), _held_out(run, 0)
    began = f", before training {start}" if start and run.best_step else ""
    facts = [
        ("steps", _steps(run)),
        ("stopped", run.stopped or "after the last step"),
        ("weights kept", f"of step {best}"),
        (f"held-out {judged}", f"{score}{began}" if score else "not measured"),
        ("samples/s", _rate(run)),
        ("time in steps", seconds(run.seconds)),
        ("trained on", _place(run)),
        ("rows", f"{run.rows:,}, and {run.held_out:,} held out"),
    ]
    if run.parameters:
        facts.append(("parameters", f"{run.parameters:,}"))
    if run.status == "failed":
        facts.insert(0, ("failed", _reason(run)))
    explanation = [
        "Training starts from the PTQ model, with its placement of Q/DQ, and its loss is what "
        "the recipe's qat.distill says. It learns from rows of the train split.",
        f"{run.held_out:,} rows of the train split are held out: they are never learnt from, and their "
        f"{judged} chooses the weights that are kept. Step 0 is the PTQ model itself, so training that only "
        "does harm is not kept.",
        "The evaluation split of the table of stages was seen by neither. Time and samples/s are of the "
        "steps alone, without evaluations and checkpoints.",
    ]
    return TrainingSection(
        facts=facts,
        explanation=explanation,
        charts=charts_of([run]),
        settings=flat(run.settings),
        notes=list(run.notes),
    )


def _tiles(result: Finetuning) -> list[tuple[str, str, str, bool]]:
    done = [run for run in result.runs if run.status == "done"]
    tiles = [
        (label(name), f"{at.mean:.4f}", "one seed" if at.sd is None else f"mean, sd {at.sd:.4f}", True)
        for name, at in result.spread.items()
    ]
    return [
        *tiles,
        (
            "time in steps",
            seconds(sum(run.seconds for run in done)),
            f"of {len(done)} of {count_of(len(result.runs), 'seed')}",
            True,
        ),
    ]


def _metrics(result: Finetuning) -> list[str]:
    """Every metric that was measured, the primary one first."""
    asked = [str(name) for name in result.task.get("metrics") or []]
    found = [name for run in result.runs for name in run.metrics]
    return list(dict.fromkeys([*asked, *found])) or ["metric"]


def _line(run: TrainingRun, names: list[str], *, best: bool) -> SeedLine:
    if run.status == "failed":
        return SeedLine(str(run.seed), [], [], best=False, failure=_reason(run))
    cells = [
        f"{run.n:,}",
        _held_out(run, run.best_step),
        _steps(run),
        str(run.best_step),
        _rate(run),
        seconds(run.seconds),
        _place(run),
        run.stopped or "at the end",
    ]
    return SeedLine(str(run.seed), [_value(run, name) for name in names], cells, best=best, failure="")


def _explanation(result: Finetuning) -> list[str]:
    chosen = labelled_measure(score_name(result.runs))
    where = next((run.folder for run in result.runs if run.seed == result.best_seed), None)
    lines = [
        "Metrics are of the validation split, which no training saw; ± is one standard error over its "
        "samples, the standard deviation is over seeds.",
        f"Held-out rows are a draw from the train split, another one for each seed. Their {chosen} chooses "
        "the step whose weights are kept (best step), and the best seed: never the validation split. It "
        "flatters the model, being the best of several looks.",
        "Time and samples/s are of the optimizer steps alone, of all processes together, without evaluations "
        "and checkpoints.",
    ]
    if where:
        lines.append(f"The model of the best seed is in {where}.")
    return lines


def _sizes(runs: list[TrainingRun]) -> Pairs:
    if not runs:
        return []
    run = runs[0]
    rows = [("training rows", f"{run.rows:,}"), ("held-out rows", f"{run.held_out:,}")]
    known = max(run.parameters for run in runs)
    return [*rows, ("parameters", f"{known:,}")] if known else rows


def _spread(result: Finetuning, name: str) -> str:
    found = result.spread.get(name)
    if found is None:
        return ""
    return f"{found.mean:.4f}" + ("" if found.sd is None else f" sd {found.sd:.4f}")


def _value(run: TrainingRun, name: str) -> str:
    return metric_text(run, name) or "not measured"


def _held_out(run: TrainingRun, step: int) -> str:
    """The measure that chooses the weights, of those at a step."""
    value = dict(points_of(run, score_name([run]))).get(step)
    if value is None:
        return ""
    return f"{value:.4f}" if abs(value) >= 1e-3 or not value else f"{value:.2g}"


def _steps(run: TrainingRun) -> str:
    return f"{run.steps:,} of {run.planned_steps:,}"


def _rate(run: TrainingRun) -> str:
    return "not measured" if run.samples_per_s is None else f"{run.samples_per_s:,.0f}"


def _place(run: TrainingRun) -> str:
    many = f"{run.processes} x " if run.processes > 1 else ""
    return f"{many}{run.device}, {run.precision.upper()}"


def _reason(run: TrainingRun) -> str:
    return (run.reason or "no reason was recorded").rstrip(".")
