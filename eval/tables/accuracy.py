"""The accuracy half of the measured tables: by task and stage, and means over tasks."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from qdqbench.eval.report.formats import code, in_points, label, text
from qdqbench.eval.tables.changed import Changed
from qdqbench.quantize.core.comparison import Comparison
from qdqbench.quantize.core.results import QAT_STAGES, STAGES, Results
from qdqbench.quantize.engine.hazards import hazards
from qdqbench.quantize.tasks.task import GLUE

QAT_NOTE = (
    "Where a recipe trains (QAT), PTQ fake-quant is the model before training and fake-quant the one after; "
    "QAT minus PTQ is between these two, with its paired error."
)


class Places:
    """Environments of the runs, numbered in the order in which tables name them."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def number(self, run: Results) -> int:
        """Number of a run's environment, from 1."""
        line = _environment(run)
        if line not in self.known:
            self.known.append(line)
        return self.known.index(line) + 1

    def text(self) -> str:
        """The numbered list."""
        if not self.known:
            return ""
        lines = [f"{number + 1}. {text(line)}" for number, line in enumerate(self.known)]
        return "\n".join(["Accuracy was measured on:", "", *lines])


def accuracy_tables(runs: Sequence[Results], places: Places, changed: Changed) -> list[str]:
    """One table per task: a row per recipe and model, the primary metric of every stage."""
    by_task: dict[str, list[Results]] = defaultdict(list)
    for run in runs:
        by_task[str(run.task.get("name"))].append(run)
    parts = []
    for task in sorted(by_task, key=_task_order):
        metric = label(str(by_task[task][0].task["metrics"][0]))
        parts.append(
            f"### {text(label(task))}: {text(metric)} by stage\n\nIn points; ± is one standard error over "
            "the samples. The difference is the last stage that ran minus FP32, with its paired error."
        )
        trained = any(run.trained for run in by_task[task])
        if trained:
            parts.append(QAT_NOTE)
        header = [
            "recipe", "model", *map(label, _stages(trained)), "difference",
            *(["QAT minus PTQ"] if trained else []), "INT8 proven", "n", "seed", "gate", "where",
        ]  # fmt: skip
        rows = [_accuracy_row(run, places, changed, trained=trained) for run in by_task[task]]
        parts.append(table(header, rows))
        if agreeing := [line for run in by_task[task] if (line := _agreement(run, changed))]:
            parts.append("\n".join(agreeing))
        parts += [f"Partial data: {line}" for run in by_task[task] if (line := _limited(run))]
    return parts


def _stages(trained: bool) -> tuple[str, ...]:
    """Columns; PTQ has one of its own where a run of the table was trained."""
    return QAT_STAGES if trained else STAGES


def _accuracy_row(run: Results, places: Places, changed: Changed, *, trained: bool) -> list[str]:
    metric = str(run.task["metrics"][0])
    stages = [run.stages[name] for name in STAGES if name in run.stages]
    last = next((row for row in reversed(stages) if row.vs_fp32 is not None), None)
    proven = "no engine"
    if run.engine is not None:
        proven = f"{run.engine.int8_gemms}/{run.engine.expected_int8_gemms}"
        if not run.engine.expected_int8_gemms:
            proven = "none asked"
        if run.engine.expected_attention_int8:
            proven += f", attention {run.engine.attention_int8}/{run.engine.expected_attention_int8}"
        if run.engine.expected_int8_residuals:
            proven += f", residuals {run.engine.int8_residuals}/{run.engine.expected_int8_residuals}"
    counts = sorted({row.n for row in stages if row.status == "done"})
    return [
        changed.label(run.recipe),
        text(_model_name(run)),
        *(_percent(run, name, metric) for name in _stages(trained)),
        _difference(last.vs_fp32 if last else None, metric),
        *([_difference(run.qat_vs_ptq, metric)] if trained else []),
        proven,
        ", ".join(map(str, counts)),
        str(run.seed),
        {"passed": "✓", "failed": "✗"}.get(run.gate.state, "?"),
        str(places.number(run)),
    ]


def _agreement(run: Results, changed: Changed) -> str:
    """How the embeddings of the last stage agree with FP32's; empty where there are none."""
    stages = [row.vs_fp32 for name in STAGES if (row := run.stages.get(name)) and row.vs_fp32]
    found = stages[-1].agreement if stages else None
    if found is None:
        return ""
    said = (f"{label(name)} {value:.4f} ± {found.stderr[name]:.4f}" for name, value in found.values.items())
    return f"- {changed.label(run.recipe)}, {text(_model_name(run))}, last stage: {text(', '.join(said))}"


def _difference(versus: Comparison | None, metric: str) -> str:
    """In points, with its paired error; nothing where it was not measured."""
    if versus is None:
        return ""
    return in_points(versus.delta[metric], versus.delta_stderr.get(metric), "+")


def mean_tables(runs: Sequence[Results], places: Places, changed: Changed) -> list[str]:
    """Mean of the primary metrics over all tasks, for recipes that were measured once on each of them."""
    tasks = sorted({str(run.task.get("name")) for run in runs}, key=_task_order)
    groups: dict[tuple[Any, ...], list[Results]] = defaultdict(list)
    for run in runs:
        groups[changed.label(run.recipe), run.seed, places.number(run)].append(run)
    trained = any(run.trained for run in runs)
    rows = []
    for (recipe, seed, place), found in groups.items():
        if sorted(str(run.task.get("name")) for run in found) != sorted(tasks):
            continue  # a task is missing, or has several models
        cells = [
            "no QAT" if stage == "ptq" and not any(run.trained for run in found) else _mean(found, stage)
            for stage in _stages(trained)
        ]
        rows.append([recipe, *cells, _mean_difference(found), str(seed), str(place)])
    if len(tasks) < 2 or not rows:
        return []
    title = (
        f"### Mean over {', '.join(text(label(task)) for task in tasks)}\n\nOf the primary metrics, in "
        "points; the difference is engine minus FP32, its standard error from the paired errors of the tasks."
    )
    header = ["recipe", *map(label, _stages(trained)), "difference", "seed", "where"]
    return [title, table(header, rows)]


def _mean(runs: Iterable[Results], stage: str) -> str:
    values = [run.stages[stage].metrics.get(run.task["metrics"][0]) for run in runs if stage in run.stages]
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.2f}" if known and len(known) == len(values) else "not measured"


def _mean_difference(runs: Iterable[Results]) -> str:
    deltas, squares = [], 0.0
    for run in runs:
        metric, row = run.task["metrics"][0], run.stages.get("engine")
        if row is None or row.vs_fp32 is None:
            return "not measured"
        deltas.append(row.vs_fp32.delta[metric])
        squares += row.vs_fp32.delta_stderr.get(metric, math.nan) ** 2
    error = math.sqrt(squares) / len(deltas)  # of different samples, so errors add up as squares
    return in_points(sum(deltas) / len(deltas), error if math.isfinite(error) else None, "+")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all cells are Markdown already.

    Not tabulate's, which pads columns: one new figure would change every line of a table that git keeps.
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_key(run: Results) -> tuple[Any, ...]:
    """What tells two measurements of accuracy apart."""
    return (
        str(run.recipe.get("name")),
        _model_name(run),
        str(run.task.get("name")),
        run.seed,
        _environment(run),
    )


def _percent(run: Results, stage: str, metric: str) -> str:
    """A metric of a stage in points, with its standard error."""
    if stage not in run.expected_stages:
        return "no QAT"
    row = run.stages.get(stage)
    if row is None or metric not in row.metrics:
        return "not measured"
    return in_points(row.metrics[metric], row.stderr.get(metric))


def _environment(run: Results) -> str:
    """GPU and driver or CPU, engine builder and the libraries that accuracy depends on, in one line."""
    found, versions = run.environment, run.environment.get("versions", {})
    engine = (
        f"{label(run.engine.backend)} {run.engine.version.partition('-')[0]}" if run.engine else "no engine"
    )
    driver = f", driver {found['driver']}" if found.get("driver") else ""
    libraries = [
        f"{name} {versions[name]}"
        for name in ("torch", "transformers", "nvidia-modelopt", "onnxruntime", "qdqbench")
        if name in versions
    ]
    device = f"GPU {found.get('gpu') or 'none'}{driver}"
    if run.engine and run.engine.on_cpu:
        device = f"CPU {found['cpu']}, {found['cores']} cores"
    line = ", ".join([device, engine, *libraries])
    return "; ".join([line, *_hazards(run)])


def _hazards(run: Results) -> list[str]:
    """What is known of the engine's version on its GPU."""
    if run.engine is None:
        return []
    made = run.engine
    return [
        line for target in made.compute_capability for line in hazards(made.backend, made.version, target)
    ]


def _limited(run: Results) -> str:
    limit = run.data.get("limit")
    about = f"--limit {limit}: accuracy is measured on a part of the evaluation data only"
    return f"{code(run.recipe.get('name'))}: {text(about)}" if limit is not None else ""


def _model_name(run: Results) -> str:
    """Without the folders of the machine that it was measured on."""
    return Path(str(run.model.get("name"))).name


def _task_order(task: str) -> tuple[int, str]:
    order = ["sst2", "mrpc", "stsb", *GLUE]
    return (order.index(task) if task in order else len(order), task)
