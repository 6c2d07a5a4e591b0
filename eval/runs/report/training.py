"""The report of a fine-tuning, the section on QAT of a run, and their curves."""

import math
from functools import partial

from qdqbench.eval.metrics import figures
from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report import svg
from qdqbench.quantize.report.formats import cleaned, flat, label, model_label, seconds
from qdqbench.quantize.training.results import (
    Finetuning,
    ReconstructionRun,
    Spread,
    TrainingRun,
    describe_tries,
)
from qdqbench.quantize.utils.names import count_of

COLORS = (svg.BLUE, svg.ORANGE, svg.GREEN, svg.PURPLE, svg.SKY, svg.INK)
# after six seeds: color alone is not enough
SEED_DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))
LEGEND_COLUMNS = 4  # a page's font may be wider than the one that matplotlib measures with
MANY = 25  # points of a curve, above which they are not marked one by one
NO_STEP = "No step was logged, so there is no curve."
MEASURES = {
    "sqnr_db": "SQNR of the answers in dB",
    "hidden_db": "SQNR of the hidden states in dB",
    "score_db": "mean SQNR in dB",
}


def finetuning_report(result: Finetuning) -> doc.Report:
    result = cleaned(result)
    runs = result.runs
    names = [*map(str, result.task.get("metrics") or []), *(name for run in runs for name in run.metrics)]
    names = list(dict.fromkeys(names)) or ["metric"]  # the primary one first
    done = [run for run in runs if run.status == "done"]
    failed = [run for run in runs if run.status == "failed"]
    task = label(str(result.task.get("name", "task")))
    settings = [("seeds", ", ".join(str(run.seed) for run in runs))]
    inputs = [*flat(result.base, "base"), *flat(result.task, "task"), ("data", result.data)]
    if runs:
        settings += [pair for pair in flat(runs[0].settings) if pair[0] != "seed"]
        inputs += [("training rows", f"{runs[0].rows:,}"), ("held-out rows", f"{runs[0].held_out:,}")]
        if parameters := max(run.parameters for run in runs):
            inputs.append(("parameters", f"{parameters:,}"))
    page = doc.page_of(
        result,
        "fine-tuning",
        model_label(str(result.base.get("name", "encoder"))),
        [task],
        "finetune.json",
        facts={"Settings": settings, "Base, task and data": inputs},
    )
    state: doc.State = "good" if not failed else "unclear" if done else "bad"
    title = {"good": "Trained", "unclear": "Some seeds failed"}.get(state, "Nothing was trained to its end")
    tiles = [
        doc.Tile(label(name), f"{at.mean:.4f}", "one seed" if at.sd is None else f"mean, sd {at.sd:.4f}")
        for name, at in result.spread.items()
    ]
    total = seconds(sum(run.seconds for run in done))
    tiles.append(doc.Tile("time in steps", total, f"of {len(done)} of {count_of(len(runs), 'seed')}"))
    notes = [*result.notes, *(f"Seed {run.seed}: {line}" for run in runs for line in run.notes)]
    quiet = [doc.Prose(line, "quiet") for line in [*_explanation(result), *notes]]
    told = {f"seed {run.seed} failed: {run.reason}" for run in failed}
    return doc.Report(
        page,
        [
            doc.Section("seeds", "Seeds", [_seeds_table(result, names), *quiet]),
            doc.Section("curves", "Curves", [*curve_blocks(runs)]),
        ],
        verdict=doc.Verdict(state, title, _headline(result, names[0], done, failed)),
        tiles=tiles,
        warnings=[line for line in result.warnings if line not in told],
    )


def _seeds_table(result: Finetuning, names: list[str]) -> doc.Table:
    runs = result.runs

    def seed_cell(run: TrainingRun) -> doc.Cell:
        best = run.seed == result.best_seed
        return doc.Cell(str(run.seed), note="best" if best else "", short=f"{run.seed} *" if best else None)

    def failed_row(run: TrainingRun) -> doc.Row | None:
        if run.status != "failed":
            return None
        # on a terminal the verdict says why
        return doc.row(run.seed, doc.Cell(f"failed: {_reason(run)}", "bad", short="failed"))

    def spread_text(spread: Spread | None) -> str:
        if spread is None:
            return ""
        return f"{spread.mean:.4f}" + ("" if spread.sd is None else f" sd {spread.sd:.4f}")

    spread = [doc.row("mean", *(spread_text(result.spread.get(name)) for name in names), "")]
    at = 1 + len(names)  # of the column of samples
    return doc.table_of(
        runs,
        ("seed", seed_cell),
        *((label(name), partial(_value, name)) for name in names),
        ("samples", lambda run: f"{run.n:,}"),
        (f"held-out {labelled_measure(score_name(runs))}", lambda run: _held_out(run, run.best_step)),
        ("steps", _steps),
        ("best step", lambda run: run.best_step),
        ("samples/s", _rate),
        ("time", lambda run: seconds(run.seconds)),
        ("trained on", _place),
        ("stopped", lambda run: run.stopped or "at the end"),
        chosen=lambda run: run.seed == result.best_seed,
        instead=failed_row,
        look="full cards",
        foot=spread if len(runs) > 1 and result.spread else [],
        screen=[*range(at), *(at + column for column in (2, 3, 4, 5))],  # what fits with two metrics
        on=doc.EVERYWHERE,
    )


def _headline(result: Finetuning, metric: str, done: list[TrainingRun], failed: list[TrainingRun]) -> str:
    task = label(str(result.task.get("name", "task")))
    reasons = ", ".join(f"seed {run.seed} ({_reason(run)})" for run in failed)
    if not done:
        return f"No seed of {len(failed)} was trained to its end: {reasons}."
    spread = result.spread.get(metric)
    if spread is None:
        clauses = [f"{task}: {count_of(len(done), 'seed')} trained, {label(metric)} was not measured"]
    elif spread.sd is None:
        where = f"(one seed, so no spread; {done[0].n} validation samples)"
        clauses = [f"{task} {label(metric)} {_value(metric, done[0])} {where}"]
    else:
        clauses = [
            f"{task} {label(metric)} {spread.mean:.4f} on average over {spread.n} seeds, standard deviation "
            f"{spread.sd:.4f} ({done[0].n} validation samples)"
        ]
    best = next((run for run in done if run.seed == result.best_seed), None)
    if best is not None and len(result.runs) > 1:
        clauses.append(f"best on its held-out rows: seed {best.seed}, {_value(metric, best)} on validation")
    if failed:
        clauses.append(f"{len(failed)} of {len(result.runs)} seeds FAILED: {reasons}")
    return "; ".join(clauses) + "."


def _explanation(result: Finetuning) -> list[str]:
    chosen = labelled_measure(score_name(result.runs))
    where = next((run.folder for run in result.runs if run.seed == result.best_seed), None)
    return [
        "Metrics are of the validation split, which no training saw; ± is one standard error over its "
        "samples, the standard deviation is over seeds.",
        f"Held-out rows are a draw from the train split, another one for each seed. Their {chosen} chooses "
        "the step whose weights are kept (best step), and the best seed: never the validation split. It "
        "flatters the model, being the best of several looks.",
        "Time and samples/s are of the optimizer steps alone, of all processes together, without evaluations "
        "and checkpoints.",
        *([f"The model of the best seed is in {where}."] if where else []),
    ]


def reconstruction_blocks(run: ReconstructionRun | None) -> list[doc.Block]:
    if run is None:
        return []
    rows = [
        doc.row(
            row.layer,
            f"{row.before_db:.1f}",
            "NaN" if row.after_db is None else f"{row.after_db:.1f}",
            "yes" if row.kept else "no",
        )
        for row in run.layers
    ]
    kept = "" if run.gained else " That is no more, so the PTQ weights are kept."
    return [
        doc.Table(["layer", "SQNR before, dB", "after, dB", "kept"], rows),
        f"Answers to held-out rows: {run.before_db:.1f} dB before, {run.after_db:.1f} dB after.{kept}",
        *run.notes,
        doc.Prose(
            f"Each layer was trained to give FP32's output on {run.rows:,} calibration rows, in the order of "
            f"the table. The SQNR is that of its output on {run.held_out:,} held-out rows. "
            f"It reads what the layers before it give. It took {seconds(run.seconds)} on {run.device}.",
            "quiet",
        ),
    ]


def training_blocks(run: TrainingRun | None) -> list[doc.Block]:
    if run is None:
        return []
    measure = labelled_measure(score_name([run]))
    best = str(run.best_step) if run.best_step else "0: the weights before training, so it gained nothing"
    score, start = _held_out(run, run.best_step), _held_out(run, 0)
    began = f", before training {start}" if start and run.best_step else ""
    facts = [
        *([("failed", _reason(run))] if run.status == "failed" else []),
        ("steps", _steps(run)),
        ("stopped", run.stopped or "after the last step"),
        *([("learning rate", f"{run.learning_rate:g}")] if run.learning_rate else []),
        ("weights kept", f"of step {best}"),
        (f"held-out {measure}", f"{score}{began}" if score else "not measured"),
        ("samples/s", _rate(run)),
        ("time in steps", seconds(run.seconds)),
        ("trained on", _place(run)),
        ("rows", f"{run.rows:,}, and {run.held_out:,} held out"),
        *([("parameters", f"{run.parameters:,}")] if run.parameters else []),
    ]
    explanation = [
        "Training starts from the PTQ model, with its placement of Q/DQ, and its loss is what "
        "the recipe's qat.distill says. It learns from rows of the train split.",
        f"{run.held_out:,} rows of the train split are held out: they are never learned from, and their "
        f"{measure} chooses the weights that are kept. Step 0 is the PTQ model itself, so training that only "
        "does harm is not kept.",
        "The evaluation split of the table of stages was seen by neither. Time and samples/s are of the "
        "steps alone, without evaluations and checkpoints.",
    ]
    settings = flat(run.settings)
    tries = [f"{describe_tries(run.tried, run.learning_rate)}."] if run.tried else []
    beside: list[doc.Block] = [*tries, *run.notes, *(doc.Prose(line, "quiet") for line in explanation)]
    return [
        *curve_blocks([run]),
        doc.Columns([[doc.Pairs(facts, "training")], beside]),
        doc.Fold(f"All {len(settings)} settings", [doc.Pairs(settings, "setting")]),
    ]


def _value(name: str, run: TrainingRun) -> str:
    return figures.metric(run, name) or "not measured"


def _held_out(run: TrainingRun, step: int) -> str:
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


def curve_blocks(runs: list[TrainingRun]) -> list[doc.Block]:
    if not any(run.log for run in runs):
        return [doc.Prose(NO_STEP, "quiet")]
    chosen = score_name(runs)
    others = dict.fromkeys(name for run in runs for line in run.log for name in line.values)
    draws = [partial(curves_svg, runs, "training-loss", "training loss", None)]
    for number, name in enumerate([chosen, *(name for name in others if name != chosen)]):
        remark = " (chooses the weights)" if name == chosen else ""
        title = f"held-out {labelled_measure(name)}{remark}"
        draws.append(partial(curves_svg, runs, f"held-out-{number}", title, name))
    return [
        doc.Columns([[doc.Chart(draw)] for draw in draws]),
        doc.Prose("The curves are in the page.", on=("text",)),
    ]


def labelled_measure(name: str) -> str:
    return MEASURES.get(name, label(name))


def score_name(runs: list[TrainingRun]) -> str:
    """Return the held-out measure that the score is, with either sign; "score" when it is none."""
    lines = [line for run in runs for line in run.log if line.score is not None]
    for name in lines[0].values if lines else ():
        pairs = [(line.values.get(name, math.nan), line.score or 0.0) for line in lines]
        if any(all(value == sign * score for value, score in pairs) for sign in (1, -1)):
            return name
    return "score"


def points_of(run: TrainingRun, name: str | None) -> list[tuple[int, float]]:
    """Return finite (step, value) pairs of a held-out measure, or of the training loss (None)."""
    if name is None:
        values = [line.loss for line in run.log]
    else:
        values = [line.score if name == "score" else line.values.get(name) for line in run.log]
    points = zip((line.step for line in run.log), values, strict=True)
    return [(step, value) for step, value in points if value is not None and math.isfinite(value)]


def curves_svg(runs: list[TrainingRun], identity: str, title: str, name: str | None) -> str:
    curves = [(number, run, points_of(run, name)) for number, run in enumerate(runs)]
    curves = [curve for curve in curves if curve[2]]
    if not curves:
        return ""
    several = len(runs) > 1
    rows = -(-(len(curves) + 1) // LEGEND_COLUMNS) if several else 1
    figure, axes = svg.axes_of(2.3 + 0.17 * rows)
    for number, run, points in curves:
        failed = ", failed" if run.status == "failed" else ""
        axes.plot(
            *zip(*points, strict=True),
            color=COLORS[number % len(COLORS)],
            linestyle=SEED_DASHES[number // len(COLORS) % len(SEED_DASHES)],
            linewidth=1.2,
            marker="o" if len(points) <= MANY else None,
            markersize=2.6,
            label=f"seed {run.seed}{failed}" if several else None,
        )
    best = [(run, dict(points).get(run.best_step)) for _, run, points in curves]
    stars = [(run.best_step, height) for run, height in best if run.status == "done" and height is not None]
    if stars:
        star = {"marker": "*", "s": 95, "color": svg.VERMILLION, "edgecolors": "white", "linewidths": 0.5}
        axes.scatter(*zip(*stars, strict=True), **star, zorder=4, label="weights kept")
    if name is not None and not several and curves[0][2][0][0] == 0:
        start = {"color": svg.MUTED, "linestyle": (0, (4, 2)), "linewidth": 1}
        axes.axhline(curves[0][2][0][1], **start, label="before training (PTQ)")
    values = [value for *_, points in curves for _, value in points]
    if name is None and min(values) > 0 and max(values) > 50 * min(values):
        svg.log_scale(axes)
    axes.margins(x=0.02, y=0.1)
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=8)
    axes.set_xlabel("optimizer step")
    svg.dress(axes, title)
    svg.legend(figure, LEGEND_COLUMNS if several else 3)
    return svg.svg_of(figure, identity, f"{title} by step")
