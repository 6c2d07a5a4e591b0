"""Measured tables of the documents, and `recipes/figures.json`, from the results files in `docs/measured*`.

    python tools/tables.py             write every page, and the figures
    python tools/tables.py --check     change nothing; exit status 2 where something would change
    python tools/tables.py --summarize docs/measured

A page gets its tables between two markers; `cuda.md` has two pairs. The same files give the same bytes, in
any order. `--summarize` replaces the `results.json` and `study.json` of new runs by a
`summary.json` of what tables read, which is all that the repository keeps of them.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qdqbench.eval.bench import report as words
from qdqbench.eval.bench.results import (
    BENCH_FILE,
    Bench,
    BenchConfig,
    headline_of,
    over_fastest,
    rate_of,
    read_bench,
    row_of,
)
from qdqbench.eval.metrics import figures
from qdqbench.eval.runs.results import QAT_STAGES, RESULTS_FILE, STAGES, Results, read_results
from qdqbench.eval.runs.study import STUDY_FILE, Study, conditions
from qdqbench.quantize.engine.hazards import find_hazards
from qdqbench.quantize.models.families.known import family_named
from qdqbench.quantize.models.modules import ModuleInfo
from qdqbench.quantize.recipe.plan import match_modules
from qdqbench.quantize.recipe.schema import Recipe, adapt_recipe, load_recipe, shipped_recipes
from qdqbench.quantize.recipe.sections import AUTO
from qdqbench.quantize.recipe.shipped import UNJUDGED, Accuracy, Figure, Speed
from qdqbench.quantize.report.document import Cell
from qdqbench.quantize.report.formats import (
    clean,
    cleaned,
    code,
    flat,
    in_points,
    known,
    label,
    model_label,
    size,
    text,
)
from qdqbench.quantize.tasks.task import EMBED, GLUE
from qdqbench.quantize.tasks.types.embedding import PAIRS
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.names import SECOND

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "docs/results/cpu.md": "docs/measured-cpu",
    "docs/results/families.md": "docs/measured-families",
    "docs/results/cuda.md": "docs/measured-cuda",
    "docs/results/heads.md": "docs/measured-heads",
    "docs/results/xlm-r-case.md": "docs/measured-embeddings",
    "docs/results/lengths.md": "docs/measured-lengths",
    "docs/results/real-size.md": "docs/measured-real",
    "docs/results/recipes.md": "docs/measured",
}
FIGURES = "recipes/figures.json"
FIGURES_FROM = (
    "docs/measured", "docs/measured-cpu", "docs/measured-cuda", "docs/measured-families",
    "docs/measured-heads", "docs/measured-lengths", "docs/measured-real",
)  # fmt: skip
BEGIN, END = "<!-- tables:begin -->", "<!-- tables:end -->"
KERNELS, KERNEL_MARKS = "docs/results/cuda.md", ("<!-- kernels:begin -->", "<!-- kernels:end -->")
SUMMARY_FILE = "summary.json"
CHANGED = "†"
SQUAD = "squad-lengths"  # in the path of made-up rows
UNPADDED = "unpadded-fp16"  # a system of a bench
DISTANCES = {"distance": "answers", "hidden": "hidden states"}  # of the log of a QAT
FEWEST_TASKS = 3  # of a mean, unless a model has less
SMOOTHING = "calibration.smoothing"
JOINT = 128, 128  # batch and tokens of the speed next to accuracy
QAT_NOTE = (
    "Where a recipe trains (QAT), PTQ fake-quant is the model before training and fake-quant the one after; "
    "QAT minus PTQ is between these two, with its paired error."
)


class Record(dict[str, Any]):
    """A JSON object whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def _keep(names: str, **inner: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split()) | inner


VERSUS = _keep("delta delta_stderr", agreement=_keep("values stderr"))
KEPT = {  # what tables read of a file: None is all of a value, "*" every key of an object
    "run": _keep(
        "created command recipe model task data seed trained environment",
        stages={"*": _keep("status n metrics stderr", vs_fp32=VERSUS)},
        qat_vs_ptq=VERSUS,
        training=_keep("best_step steps before best"),
        engine=_keep(
            "backend version compute_capability int8_gemms expected_int8_gemms attention_int8 "
            "expected_attention_int8 int8_residuals expected_int8_residuals"
        ),
        gate=_keep("state"),
    ),
    "study": _keep("created command base task n finetune recipes summary warnings environment"),
}


def _project(value: Any, kept: dict[str, Any] | None) -> Any:
    if isinstance(value, list):
        return [_project(item, kept) for item in value]
    if not isinstance(value, dict):
        return value
    if kept is None or "*" in kept:
        return Record({key: _project(item, kept and kept["*"]) for key, item in value.items()})
    return Record({key: _project(value[key], inner) for key, inner in kept.items()})


def run_of(results: Results) -> Record:
    derived: dict[str, Any] = {"trained": results.trained, "gate": {"state": results.gate.state}}
    if run := results.training:
        judged = {row.step: row.values for row in run.log if row.score is not None}
        chosen = {"before": judged.get(0, {}), "best": judged.get(run.best_step, {})}
        derived["training"] = run.model_dump(mode="json") | chosen
    if results.task.get("type") == PAIRS.name:  # STS-B by an embedder is another task than by a regressor
        derived["task"] = results.task | {"name": EMBED.name}
    return _summary("run", results.model_dump(mode="json") | derived)


def _bench(bench: Bench) -> Bench:
    """Return a bench with the right name of rows that `measure_tables.py` made up in the layout of SST-2."""
    if SQUAD not in bench.command:
        return bench
    return bench.model_copy(update={"settings": bench.settings.model_copy(update={"dataset": "SQuAD-like"})})


def _summary(kind: str, value: dict[str, Any]) -> Record:
    return Record(kind=kind, **_project(clean(value), KEPT[kind]))


READERS: dict[str, Callable[[Path], Any]] = {
    RESULTS_FILE: lambda path: run_of(read_results(path.parent)),
    STUDY_FILE: lambda path: _summary(
        "study", Study.model_validate_json(path.read_text()).model_dump(mode="json")
    ),
    SUMMARY_FILE: lambda path: _project(clean(files.read_json(path)), None),
    BENCH_FILE: lambda path: _bench(cleaned(read_bench(path))),
}


def read_records(paths: Sequence[Path]) -> list[Any]:
    """Read the results files that are named or lie below a named folder, in an order of their contents."""
    sources: dict[Path, None] = {}
    for path in paths:
        below = [file for name in READERS for file in path.rglob(name)] if path.is_dir() else [path]
        if not below:
            raise UserError(f"{path} holds no {', '.join(READERS)}; name the folders of finished runs")
        sources.update(dict.fromkeys(below))
    records: dict[tuple[Any, ...], tuple[Path, Any]] = {}
    for path in sources:
        record = READERS[path.name](path)
        key = _key(record)
        if key in records:
            raise UserError(f"{records[key][0]} and {path} measured the same thing; name only one of them")
        records[key] = path, record
    return [records[key][1] for key in sorted(records)]


def _key(record: Any) -> tuple[Any, ...]:
    if isinstance(record, Bench):
        about, chosen = record.target.name, record.settings
        shapes = chosen.engine_shapes, tuple(chosen.lengths), tuple(chosen.batches), str(chosen.dataset)
        return "bench", record.device, about, str(record.recipe.get("name")), words.hardware(record), *shapes
    if record.kind == "run":
        of = str(record.recipe.get("name")), _rate(record.recipe), _model_name(record), record.task.name
        return "run", *of, record.seed, _environment(record)
    return "study", record.task.name, tuple(sorted(record.recipes)), record.created


def _of(kind: str, records: Sequence[Any]) -> list[Any]:
    return [each for each in records if ("bench" if isinstance(each, Bench) else each.kind) == kind]


def summarize(folder: Path) -> list[Path]:
    written = []
    for name in (RESULTS_FILE, STUDY_FILE):
        for path in sorted(folder.rglob(name)):
            written.append(path.with_name(SUMMARY_FILE))
            files.write_text(written[-1], json.dumps(READERS[name](path), indent=1) + "\n")
            path.unlink()
    return written


# Labels of recipes and places, with the notes that explain them


class Notes:
    """Recipes that differ from the shipped one of their name, and where accuracy was measured."""

    def __init__(self) -> None:
        self.changed: dict[str, dict[str, None]] = {}  # name -> differences, each once
        self.places: list[str] = []

    def label(self, recipe: dict[str, Any], *, timed: bool = False) -> str:
        name, length, backend = str(recipe.get("name")), *_own(recipe)
        if changes := differences(recipe, timed=timed):
            self.changed[name] = self.changed.get(name, {}) | dict.fromkeys(changes)
        own = [f", {length} tokens" if length else "", f", {label(backend)}" if backend else ""]
        own += [f", learning rate {rate}" if (rate := _rate(recipe)) else ""]
        own += [", shapes: auto" if _follows_data(recipe) else "", f" {CHANGED}" if changes else ""]
        return code(name) + "".join(own)

    def place(self, run: Record) -> str:
        line = _environment(run)
        if line not in self.places:
            self.places.append(line)
        return str(self.places.index(line) + 1)

    def parts(self) -> list[str]:
        lines = [f"- {code(name)}: {text(', '.join(self.changed[name]))}" for name in sorted(self.changed)]
        mark = f"{CHANGED} Measured with other settings than the shipped recipe of this name has now:"
        numbered = [f"{number}. {text(line)}" for number, line in enumerate(self.places, 1)]
        blocks = (mark, lines), ("Accuracy was measured on:", numbered)
        return ["\n".join([head, "", *below]) for head, below in blocks if below]


def differences(recipe: dict[str, Any], *, timed: bool = False) -> list[str]:
    """Return the settings of a recorded recipe that the shipped one has otherwise, but for what runs get.

    `timed` leaves out another degree of smoothing: it changes values of an engine, not its kernels.
    """
    name = str(recipe.get("name"))
    if name not in shipped_recipes():
        return []
    try:
        then = _settings(Recipe.model_validate(recipe))
    except ValidationError:
        return ["it is of another version of qdqbench"]
    length, backend = _own(recipe)
    shapes = AUTO if _follows_data(recipe) else None
    shipped = adapt_recipe(load_recipe(name), max_length=length, backend=backend, shapes=shapes)
    now = _settings(shipped if recipe.get("qat") else shipped.ptq)
    written = _settings(load_recipe(name))["engine.shapes"]
    if then["engine.shapes"] == written:  # `--set export.max_length` leaves them; `--max-length` does not
        now["engine.shapes"] = written
    return [
        f"{key} {then.get(key)} (now {now.get(key)})"
        for key in dict.fromkeys((*then, *now))
        if then.get(key) != now.get(key)
        and key.split(".")[0] not in ("description", "gate")
        and not (timed and key == SMOOTHING and "none" not in (then.get(key), now.get(key)))
    ]


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe's settings, with what its rules do to each linear: older results have no roles."""
    family = family_named(recipe.model.family)
    linears = {f"{family.layers}.0.{path}": ModuleInfo("Linear") for path in family.linears}
    rules: dict[str, dict[str, Any]] = {}
    for rule in recipe.rules:
        fields = rule.model_dump(mode="json", exclude_none=True, exclude={"match", "role", "type"})
        for name in match_modules(rule, linears, family) or [rule.target]:
            rules[name] = rules.get(name, {}) | fields
    return dict(flat(recipe.model_dump(mode="json") | {"rules": [*rules.items()]}))


def _follows_data(recipe: dict[str, Any]) -> bool:
    return bool(recipe.get("engine", {}).get("shapes") == AUTO)


def _own(recipe: dict[str, Any]) -> tuple[int | None, str | None]:
    if (name := str(recipe.get("name"))) not in shipped_recipes():
        return None, None
    shipped, length = load_recipe(name), recipe.get("export", {}).get("max_length")
    backend = recipe.get("engine", {}).get("backend")
    return (
        None if length in (None, shipped.export.max_length) else int(length),
        None if backend in (None, shipped.engine.backend) else str(backend),
    )


def _rate(recipe: dict[str, Any]) -> str:
    """Return the learning rate of a QAT where it is another than the shipped recipe's."""
    rate, name = (recipe.get("qat") or {}).get("learning_rate"), str(recipe.get("name"))
    shipped = load_recipe(name).qat if name in shipped_recipes() else None
    return "" if rate is None or (shipped and shipped.learning_rate == rate) else f"{rate:g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, unpadded so that a new figure changes one line; cells are Markdown already."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows])


# Accuracy


def accuracy_tables(runs: Sequence[Record], notes: Notes) -> list[str]:
    parts = []
    for task in sorted({run.task.name for run in runs}, key=_task_order):
        same = [run for run in runs if run.task.name == task]
        trained = any(run.trained for run in same)
        parts.append(
            f"### {text(label(task))}: {text(label(_metric(same[0])))} by stage\n\nIn points; ± is one "
            "standard error over the samples. The difference is the last stage that ran minus FP32, with "
            "its paired error."
        )
        parts += [QAT_NOTE] if trained else []
        header = [
            "recipe", "model", *map(label, QAT_STAGES if trained else STAGES), "difference",
            *(["QAT minus PTQ"] if trained else []), "INT8 proven", "n", "seed", "gate", "where",
        ]  # fmt: skip
        parts.append(table(header, [_accuracy_row(run, notes, trained=trained) for run in same]))
        if agreeing := [line for run in same if (line := _agreement(run, notes))]:
            parts.append("\n".join(agreeing))
        limited = {str(limit) for run in same if (limit := run.data.get("limit")) is not None}
        if limited:
            parts.append(f"Partial data: evaluated on {', '.join(sorted(limited))} rows.")
    return parts


def _accuracy_row(run: Record, notes: Notes, *, trained: bool) -> list[str]:
    last = _last(run, STAGES[::-1])
    counts = {row.n for name, row in run.stages.items() if name in STAGES and row.status == "done"}
    return [
        notes.label(run.recipe),
        text(_model_name(run)),
        *(_metric_cell(run, name) for name in (QAT_STAGES if trained else STAGES)),
        _difference(run, last and run.stages[last].vs_fp32),
        *([_difference(run, run.qat_vs_ptq)] if trained else []),
        _proven(run.engine),
        ", ".join(map(str, sorted(counts))),
        str(run.seed),
        {"passed": "✓", "failed": "✗"}.get(run.gate.state, "?"),
        notes.place(run),
    ]


def _model_name(run: Record) -> str:
    return Path(run.model.name).name


def _without_seed(run: Record) -> str:
    return _model_name(run).partition("-seed-")[0]


def _metric(run: Record) -> str:
    return str(run.task.metrics[0])


def _last(run: Record, stages: Sequence[str]) -> str | None:
    return next((name for name in stages if name in run.stages and run.stages[name].vs_fp32), None)


def _proven(engine: Record | None) -> str:
    if engine is None:
        return "no engine"
    counts = [f"{engine.int8_gemms}/{engine.expected_int8_gemms}"]
    counts = counts if engine.expected_int8_gemms else ["none asked"]
    if engine.expected_attention_int8:
        counts.append(f"attention {engine.attention_int8}/{engine.expected_attention_int8}")
    if engine.expected_int8_residuals:
        counts.append(f"residuals {engine.int8_residuals}/{engine.expected_int8_residuals}")
    return ", ".join(counts)


def _agreement(run: Record, notes: Notes) -> str:
    last = _last(run, STAGES[::-1])
    agreement = last and run.stages[last].vs_fp32.agreement
    if not agreement:
        return ""
    values, stderr = agreement["values"].items(), agreement["stderr"]
    figures = ", ".join(f"{label(name)} {value:.4f} ± {stderr[name]:.4f}" for name, value in values)
    return f"- {notes.label(run.recipe)}, {text(_model_name(run))}, last stage: {text(figures)}"


def _difference(run: Record, versus: Record | None) -> str:
    metric = _metric(run)
    return in_points(versus.delta[metric], versus.delta_stderr.get(metric), "+") if versus else ""


def _metric_cell(run: Record, stage: str) -> str:
    if stage == "ptq" and not run.trained:
        return "no QAT"
    row, metric = run.stages.get(stage), _metric(run)
    if row is None or metric not in row.metrics:
        return "not measured"
    return in_points(row.metrics[metric], row.stderr.get(metric))


def training_tables(runs: Sequence[Record], notes: Notes) -> list[str]:
    """Return what QAT did to the distances from FP32 on held-out rows, which choose its weights."""
    rows = []
    for run in runs:
        if not (training := run.get("training")) or "distance" not in training.before:
            continue
        cells = [notes.label(run.recipe), text(_model_name(run)), f"{training.best_step} of {training.steps}"]
        for name in DISTANCES:
            before, best = training.before.get(name), training.best.get(name)
            cells.append(f"{before:.5f} → {best:.5f} ({best / before - 1:+.0%})" if before and best else "")
        rows.append(cells)
    title = (
        "### Distance from FP32 on held-out rows\n\nBefore QAT → at the step whose weights are kept. That "
        "step has the smallest sum of both distances."
    )
    header = ["recipe", "model", "step", *DISTANCES.values()]
    return [title, table(header, rows)] if rows else []


def mean_tables(runs: Sequence[Record], notes: Notes) -> list[str]:
    """Return the means of each model over each set of tasks that a recipe was measured on."""
    by_model: dict[str, list[Record]] = defaultdict(list)
    for run in runs:
        if run.task.name != UNJUDGED:
            by_model[_without_seed(run).removesuffix(f"-{run.task.name}")].append(run)
    return [part for model, same in by_model.items() for part in _mean_tables(model, same, notes)]


def _mean_tables(model: str, runs: Sequence[Record], notes: Notes) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for run in runs:
        groups[notes.label(run.recipe), str(run.seed), notes.place(run)].append(run)
    sets = {tuple(sorted({run.task.name for run in same}, key=_task_order)) for same in groups.values()}
    fewest = min(FEWEST_TASKS, max(2, len({run.task.name for run in runs})))
    for tasks in sorted((each for each in sets if len(each) >= fewest), key=lambda each: (-len(each), each)):
        chosen = {key: [run for run in same if run.task.name in tasks] for key, same in groups.items()}
        # elsewhere a task is missing, or has several models
        whole = {
            key: same
            for key, same in chosen.items()
            if sorted(run.task.name for run in same) == sorted(tasks)
        }
        if not whole:
            continue
        stages = QAT_STAGES if any(run.trained for same in whole.values() for run in same) else STAGES
        rows = []
        for (recipe, *where), same in whole.items():
            untrained = not any(run.trained for run in same)
            cells = ["no QAT" if stage == "ptq" and untrained else _mean(same, stage) for stage in stages]
            rows.append([recipe, *cells, _mean_difference(same), *where])
        title = (
            f"### {text(model)}: mean over {', '.join(text(label(task)) for task in tasks)}\n\n"
            "Of the primary metrics, in points; the difference is engine minus FP32, its standard error from "
            "the paired errors of the tasks."
        )
        yield title
        yield table(["recipe", *map(label, stages), "difference", "seed", "where"], rows)


def _mean(runs: Sequence[Record], stage: str) -> str:
    values = [run.stages[stage].metrics.get(_metric(run)) if stage in run.stages else None for run in runs]
    if None in values:
        return "not measured"
    return f"{100 * sum(values) / len(values):.2f}"


def _mean_difference(runs: Sequence[Record]) -> str:
    pairs = [(_metric(run), run.stages.engine.vs_fp32) for run in runs if _last(run, ["engine"])]
    if len(pairs) < len(runs):
        return "not measured"
    delta = sum(versus.delta[metric] for metric, versus in pairs) / len(pairs)
    # of different samples, so errors add up as squares
    squares = sum(versus.delta_stderr.get(metric, math.nan) ** 2 for metric, versus in pairs)
    error = math.sqrt(squares) / len(pairs)
    return in_points(delta, error if math.isfinite(error) else None, "+")


def _environment(run: Record) -> str:
    about, versions, engine = run.environment, run.environment.get("versions", {}), run.engine
    device = f"GPU {about.get('gpu') or 'none'}"
    device += f", driver {about['driver']}" if about.get("driver") else ""
    if engine and engine.backend in CPU_BACKENDS:
        device = f"CPU {about['cpu']}, {about['cores']} cores"
    names = ("torch", "transformers", "nvidia-modelopt", "onnxruntime", "qdqbench")
    used = [f"{name} {versions[name]}" for name in names if name in versions]
    line = ", ".join([device, _backend(engine.backend, engine.version) if engine else "no engine", *used])
    targets = engine.compute_capability if engine else []
    return "; ".join(
        [line, *(each for at in targets for each in find_hazards(engine.backend, engine.version, at))]
    )


def _backend(name: str, version: str) -> str:
    return f"{label(name)} {version.partition('-')[0]}"


def _task_order(task: str) -> tuple[int, str]:
    order = ["sst2", "mrpc", "stsb", *GLUE]
    return (order.index(task) if task in order else len(order), task)


# Accuracy and speed in one row


def joint_tables(runs: Sequence[Record], benches: Sequence[Bench], notes: Notes) -> list[str]:
    """Return a row for each model, recipe and runtime whose engine was scored and timed, over seeds."""
    timed: dict[tuple[str, str, Any], list[Bench]] = defaultdict(list)
    for bench in benches:
        if bench.settings.dataset:
            gpu = bench.environment.get("gpu")  # one machine scored and timed
            timed[bench.target.name, bench.settings.dataset, gpu].append(bench)
    groups: dict[tuple[str, str, str, str], list[Record]] = defaultdict(list)
    for run in runs:
        model, task = _without_seed(run), run.task.name
        if run.engine and _last(run, ["engine"]) and (model, task, run.environment.get("gpu")) in timed:
            groups[model, task, str(run.recipe["name"]), run.engine.backend].append(run)
    rows = []
    for (model, task, recipe, backend), same in groups.items():
        first, pairs = same[0], [(run.stages.engine, _metric(run)) for run in same]
        points = [row.vs_fp32.delta[metric] for row, metric in pairs]
        errors = [row.vs_fp32.delta_stderr.get(metric) or 0.0 for row, metric in pairs]
        found = (
            _joint_speeds(bench, recipe, backend)
            for bench in timed[model, task, first.environment.get("gpu")]
        )
        if (speeds := next(filter(any, found), None)) is None:
            continue
        spread = f"{100 * statistics.stdev(points):.2f}" if len(points) > 1 else "one seed"
        rows.append(
            [
                text(model), text(f"{label(task)}, {label(_metric(first))}"), notes.label(first.recipe),
                *(_mean(same, stage) for stage in ("fp32", "fake_quant", "engine")),
                in_points(statistics.fmean(points), statistics.fmean(errors), "+"),
                spread, str(len(points)), str(first.stages.engine.n),
                *(speed or "not measured" for speed in speeds), notes.place(first),
            ]
        )  # fmt: skip
    if not rows:
        return []
    title = (
        "### Accuracy and speed\n\nAccuracy in points: means over the seeds of the fine-tuning. Differences "
        "are engine minus FP32, ± the paired standard error of one seed; sd is over seeds. Speed-ups are of "
        "that recipe in that runtime, over the fastest other of its bench. Those at the task's lengths are "
        "of its largest batches."
    )
    header = ["model", "task", "recipe", "FP32", "fake-quant", "engine", "difference", "sd", "seeds", "n"]
    return [title, table([*header, "task's lengths", "128 x 128", "where"], rows)]


def _joint_speeds(bench: Bench, recipe: str, backend: str) -> list[str]:
    """Return the speed-ups at the task's lengths and at 128 x 128, empty where not measured."""
    own = str(bench.recipe.get("name"))
    systems = [
        each.name
        for each in bench.systems
        if each.precision == "int8"
        and each.backend.split()[0] == backend
        and str((each.recipe or {}).get("name", own)) == recipe
    ]
    cells = []
    for wanted in (lambda c: c.kind == "dataset", lambda c: (c.batch, c.length) == JOINT):
        config = max(filter(wanted, bench.configs), key=lambda each: each.batch, default=None)
        found = [over_fastest(bench.systems, config, name) for name in systems] if config else []
        best = max(filter(None, found), key=lambda each: each.value, default=None)
        cells.append("" if best is None else _ratio_cell(figures.speed(best)))
    return cells


# QAT over seeds


def study_tables(studies: Sequence[Record], notes: Notes) -> list[str]:
    parts = []
    for base in sorted({study.base.sha256 for study in studies}):
        same = [study for study in studies if study.base.sha256 == base]
        places = list(dict.fromkeys(map(_study_place, same)))
        rows = [
            [
                text(study.task.name), text(_metric(study)), notes.label(study.recipes[name]),
                str(row.qat.n), str(study.n), *(_spread(row[stage]) for stage in ("fp32", "ptq", "qat")),
                *(_spread(row[f"{stage}_minus_fp32"], "+") for stage in ("ptq", "qat")),
                str(places.index(_study_place(study)) + 1),
            ]
            for study in same
            for name, row in study.summary.items()
        ]  # fmt: skip
        title = (
            f"### QAT over seeds: {text(same[0].base.name)}\n\nMean ± standard deviation over seeds of "
            "the validation metric in percent, fake-quant in PyTorch. Differences are taken seed by seed. "
            "For each seed, the model is fine-tuned, then taken through PTQ and QAT."
        )
        header = ["task", "metric", "recipe", "seeds", "n", "FP32", "PTQ", "QAT", "PTQ - FP32", "QAT - FP32"]
        lines = [f"- {number}: {text(line)}" for number, line in enumerate(places, 1)]
        lines += [f"- {text(study.task.name)}: {text(line)}" for study in same for line in study.warnings]
        parts += [title, table([*header, "where"], rows + _study_means(same, notes)), "\n".join(lines)]
    return parts


def _study_means(studies: Sequence[Record], notes: Notes) -> list[list[str]]:
    groups: dict[str, list[tuple[str, Record]]] = defaultdict(list)
    for study in studies:
        for name, summary in study.summary.items():
            groups[notes.label(study.recipes[name])].append((study.task.name, summary))
    rows = []
    for recipe, pairs in groups.items():
        if len(pairs) == len({task for task, _ in pairs}) > 1:
            differences = [[row[f"{stage}_minus_fp32"].mean for _, row in pairs] for stage in ("ptq", "qat")]
            means = [f"{100 * (sum(values) / len(pairs)):+.2f}" for values in differences]
            rows.append([f"mean of {len(pairs)}", "", recipe, *[""] * 5, *means, ""])
    return rows


def _study_place(study: Record) -> str:
    return conditions(study.environment, study.finetune, study.recipes)


def _spread(spread: Record, sign: str = "") -> str:
    return in_points(spread.mean, spread.sd, sign)


# Benches


def without_changed(bench: Bench) -> Bench:
    """Return a bench without the `--extra-recipe` engines of recipes that are shipped otherwise now."""
    outdated = {
        about.name: about.label for about in bench.systems if differences(about.recipe or {}, timed=True)
    }
    if not outdated:
        return bench
    warning = f"left out because the shipped recipe has changed since: {', '.join(outdated.values())}"
    rest = [system for system in bench.systems if system.name not in outdated]
    configs = []
    for config in bench.configs:
        rows = [row for row in config.rows if row.system not in outdated]
        ratios = [ratio for ratio in config.speedups if not {ratio.system, ratio.baseline} & {*outdated}]
        left = config.model_copy(update={"rows": rows, "speedups": ratios})
        configs.append(left.model_copy(update={"headline": headline_of(rest, left)}))
    changes = {"configs": configs, "systems": rest, "warnings": [*bench.warnings, warning]}
    return bench.model_copy(update=changes)


def length_tables(benches: Sequence[Bench], notes: Notes) -> list[str]:
    cells = [(bench, cell) for bench in benches for cell in bench.configs if cell.kind == "dataset"]
    if not cells:
        return []
    title = (
        "### Real lengths\n\nThe whole validation split, sorted by length; every system gets the same "
        "batches. Sequences per second of the split's rows, from the median time of a launch; the ratio is "
        "over the fastest other system of that run, with its 95% interval. All times are below."
    )
    over = " or ".join(dict.fromkeys(words.headline_title(bench) for bench, _ in cells))
    header = ["model", "recipe", "split", "batch", "padded to", "padding", "INT8", "fastest other", over]
    return [title, table(header, [_length_row(bench, cell, notes) for bench, cell in cells])]


def _length_row(bench: Bench, cell: BenchConfig, notes: Notes) -> list[str]:
    names = {about.name: about.label for about in bench.systems}
    lengths, best = cell.padded_to, cell.headline

    def rate(name: str) -> str:
        row = row_of(cell, name)
        return "" if row is None else f"{row.sequences_per_s:,.0f} ({text(names[name])})"

    return [
        _bench_model(bench),
        notes.label(bench.recipe, timed=True),
        text(label(bench.settings.dataset or "")),
        str(cell.batch),
        ", ".join(map(str, lengths)) if len(lengths) <= 8 else f"{lengths[0]} to {lengths[-1]} by 8",
        f"{1 - cell.real_tokens / cell.padded_tokens:.1%}",
        rate(best.system if best else ""),
        rate(best.baseline if best else ""),
        _ratio_cell(figures.speed(best)),
    ]


def _bench_model(bench: Bench) -> str:
    return f"{text(bench.target.name)}{' (random weights)' if bench.target.random_weights else ''}"


def _ratio_cell(cell: Cell) -> str:
    return f"**{cell.text} ✗**" if cell.state == "bad" else cell.text


def latency_tables(bench: Bench, notes: Notes) -> list[str]:
    shape = bench.target.shape
    on_gpu = bench.device == "gpu"
    profile = words.ENGINE_SHAPES[bench.settings.engine_shapes] if on_gpu else "engines for any shape"
    title = (
        f"### Latency: {_bench_model(bench)}, {notes.label(bench.recipe, timed=True)}, {profile}\n\n"
        f"{text(words.hardware(bench))}. {shape.get('layers')} layers, hidden {shape.get('hidden')}, "
        f"{shape.get('heads')} heads, {shape.get('parameters', 0) / 1e6:.0f}M parameters. "
        f"Median milliseconds. {text(words.method(bench))}"
    )
    names = {about.name: about.label for about in bench.systems}
    shapes = [text(words.config_text(bench, cell)) for cell in bench.configs]
    heads = []
    for name, cell in zip(shapes, bench.configs, strict=True):
        ratio, *sides = words.headline_cells(bench, cell)
        heads.append([name, _ratio_cell(ratio), *(text(side.text) for side in sides)])
    marks = (*words.latency_rows(bench), *words.ratio_rows(bench))
    remarks = [
        *bench.notes,
        *_built_as(bench),
        *_proofs(bench),
        words.clocks(bench),
        *words.slow_lines(bench),
    ]
    lines = [] if bench.complete else ["- interrupted: not every shape was measured"]
    if on_gpu and UNPADDED not in names:
        without = "without the unpadded FP16 baseline, so the fastest FP16 may be faster than here"
        lines.append(f"- measured {without}")
    lines += [f"- {text(line)}" for line in (*remarks, *bench.errors, *bench.warnings)]
    return [
        title,
        table(["shape", text(words.headline_title(bench)), "INT8, ms", "over, ms"], heads),
        "Medians, and ratios with their intervals:",
        table(["ms", *shapes], [[text(name), *map(_ratio_cell, row)] for name, row in marks]),
        *_throughput(bench, names),
        *_memory(bench, names),
        "\n".join(lines),
    ]


def _built_as(bench: Bench) -> list[str]:
    if bench.settings.engine_shapes == "exact" or bench.device == "cpu":
        return []
    shapes = bench.recipe["engine"]["shapes"]
    if shapes == AUTO:
        return ["optimization profiles: those of the data (shapes: auto)"]
    profiles = [shapes] if isinstance(shapes, dict) else shapes
    remarks = "; ".join(f"batch {list(each['batch'])}, length {list(each['length'])}" for each in profiles)
    return [f"optimization profiles [min, opt, max]: {remarks}"]


def _proofs(bench: Bench) -> list[str]:
    rows = [row for cell in bench.configs for row in cell.rows]
    counts = {(r.int8_gemms, r.expected_int8_gemms) for r in rows if r.expected_int8_gemms is not None}
    remarks = [f"INT8 proven in {done} of {all_} GEMMs of the timed engines" for done, all_ in sorted(counts)]
    if fused := sorted({row.kernels.fused_attention for row in rows if row.kernels}):
        counted = ", ".join(map(str, fused))
        remarks.append(f"fused attention kernels of each PyTorch baseline, by torch.profiler: {counted}")
    return remarks


def _throughput(bench: Bench, names: dict[str, str]) -> list[str]:
    rows = []
    for cell, streams in itertools.product(bench.configs, bench.settings.streams):
        rates = [rate_of(cell, name, streams) for name in names]
        if any(rates):
            shown = [known(rate, ",.0f") for rate in rates]
            rows.append([text(words.config_text(bench, cell)), str(streams), *shown])
    header = ["shape", "streams", *map(text, names.values())]
    return ["Sequences per second:", table(header, rows)] if rows else []


def _memory(bench: Bench, names: dict[str, str]) -> list[str]:
    sizes: dict[str, dict[str, str]] = defaultdict(dict)
    for cell in bench.configs:
        for row in cell.rows:
            if row.engine_bytes is not None and row.activation_bytes is not None:
                both = f"{size(row.engine_bytes)} + {size(row.activation_bytes)}"
                sizes[text(words.config_text(bench, cell))][row.system] = both
    built = [name for name in names if any(name in engines for engines in sizes.values())]
    rows = [[shape, *(engines.get(name, "") for name in built)] for shape, engines in sizes.items()]
    header = ["shape", *(text(names[name]) for name in built)]
    return ["Memory on the GPU, engine + one context:", table(header, rows)] if rows else []


def markdown(records: Sequence[Any]) -> str:
    notes, runs = Notes(), _of("run", records)
    benches = [without_changed(bench) for bench in _of("bench", records)]
    parts = [
        "Written by `tools/tables.py` from results files; do not edit by hand.",
        *accuracy_tables(runs, notes),
        *training_tables(runs, notes),
        *mean_tables(runs, notes),
        *joint_tables(runs, benches, notes),
        *study_tables(_of("study", records), notes),
        *length_tables(benches, notes),
        *(part for bench in benches for part in latency_tables(bench, notes)),
    ]
    return "\n\n".join(part for part in [*parts, *notes.parts()] if part)


def kernel_tables(benches: Sequence[Bench]) -> str:
    """Return a table for each GPU: `cuda` and TensorRT-RTX in one bench, each over the fastest FP16."""
    backends = "cuda", "tensorrt_rtx"
    rows: dict[str, list[list[str]]] = defaultdict(list)
    for bench in sorted(benches, key=lambda each: not each.target.random_weights):
        about = {each.name: each for each in bench.systems}
        int8 = {each.backend.split()[0]: name for name, each in about.items() if each.precision == "int8"}
        if not int8.keys() >= {*backends}:
            continue
        fixed = [cell for cell in bench.configs if cell.kind == "fixed"]
        splits = sorted(
            (cell for cell in bench.configs if cell.kind == "dataset"), key=lambda each: each.batch
        )
        for cell in [*fixed, *splits[-1:]]:
            medians = {row.system: row.median_ms for row in cell.rows}
            ratios = [over_fastest(bench.systems, cell, int8[backend]) for backend in backends]
            fastest = next((each.baseline for each in ratios if each), "")
            split = f"{text(label(bench.settings.dataset or ''))} lengths, batches of {cell.batch}"
            other = f", {about[fastest].label}" if fastest not in ("", UNPADDED) else ""
            line = [
                _bench_model(bench),
                split if cell.length is None else f"{cell.batch} x {cell.length}",
                figures.latency(medians.get(fastest)) + other,
                *(figures.latency(medians.get(int8[backend])) for backend in backends),
                *(_ratio_cell(figures.speed(each)) for each in ratios),
            ]
            rows[str(bench.environment["gpu"])].append(line)
    names = [code("cuda"), label("tensorrt_rtx")]
    head = ["model", "batch x tokens", "fastest FP16, ms", *(f"{name}, ms" for name in names)]
    head += [f"{name} over FP16" for name in names]
    return "\n\n".join(f"## One {gpu}\n\n{table(head, rows[gpu])}" for gpu in sorted(rows, reverse=True))


def insert(before: str, tables: str, name: str, begin: str = BEGIN, end: str = END) -> str:
    if before.count(begin) != 1 or before.count(end) != 1 or before.index(begin) > before.index(end):
        raise UserError(f"{name} must hold the line {begin} once and after it {end} once; add them")
    head, _, rest = before.partition(begin)
    return f"{head}{begin}\n{tables.strip()}\n{end}{rest.partition(end)[2]}"


# Figures of `recipes list`


def figures_of(records: Sequence[Any]) -> list[Figure]:
    accuracy: dict[tuple[str, str], list[Accuracy]] = defaultdict(list)
    speed: dict[tuple[str, str], dict[tuple[str, int, int], Speed]] = defaultdict(dict)
    for run in _of("run", records):
        name = run.recipe["name"]
        device = "cpu" if run.engine and run.engine.backend in CPU_BACKENDS else "gpu"
        if name in shipped_recipes() and not differences(run.recipe):
            accuracy[name, device] += _accuracies(run)
    for bench in _of("bench", records):
        for recipe, row in _speeds(bench):
            least, shape = speed[recipe, bench.device], (row.model, row.length, row.batch)
            # the smallest, as benches do not all time the same others
            least[shape] = min(least.get(shape, row), row, key=lambda each: each.value)
    order = [*shipped_recipes()]
    return [
        Figure(
            recipe=key[0],
            device=key[1],
            accuracy=tuple(sorted(accuracy[key], key=lambda row: (row.task, row.model, row.where))),
            speed=tuple(speed[key][shape] for shape in sorted(speed[key])),
        )
        for key in sorted({*accuracy, *speed}, key=lambda key: (order.index(key[0]), key[1]))
    ]


def _accuracies(run: Record) -> Iterator[Accuracy]:
    """Yield the primary metric of the last stage that ran, on both splits where the task has two."""
    if (stage := _last(run, ("engine", "onnxruntime", "fake_quant"))) is None:
        return
    versus, engine = run.stages[stage].vs_fp32, run.engine
    ran = engine if stage == "engine" else None
    where = _hardware(run.environment, on_cpu=ran is None or ran.backend in CPU_BACKENDS)
    for metric in (_metric(run), _metric(run) + SECOND):
        if metric not in versus.delta:
            continue
        error = versus.delta_stderr.get(metric)
        yield Accuracy(
            model=model_label(run.model.name),
            task=run.task.name,
            metric=metric,
            points=round(100 * versus.delta[metric], 4),
            stderr=None if error is None else round(100 * error, 4),
            n=run.stages[stage].n,
            stage=stage,
            where=where if ran is None else f"{where}, {_backend(ran.backend, ran.version)}",
        )


def _hardware(environment: dict[str, Any], *, on_cpu: bool) -> str:
    if on_cpu:
        return f"{environment.get('cpu')}, {environment.get('cores')} cores"
    return str(environment.get("gpu"))


def _speeds(bench: Bench) -> Iterator[tuple[str, Speed]]:
    """Of the engines for the recipe's shapes, its own and those of `--extra-recipe`, at fixed shapes."""
    if bench.device == "gpu" and bench.settings.engine_shapes == "exact":
        return  # engines for each shape alone are not what `run` builds
    about = {each.name: each for each in bench.systems}
    recipes = {name: each.recipe or {} for name, each in about.items()} | {"int8": bench.recipe}
    engines = {  # where its recipe was not recorded, a system is called after it
        name: recipe.get("name", name.removeprefix("int8-"))
        for name, recipe in recipes.items()
        if not differences(recipe, timed=True)
    }
    device = _hardware(bench.environment, on_cpu=bench.device == "cpu")
    for cell in bench.configs:
        for system, recipe in engines.items():
            best = over_fastest(bench.systems, cell, system)
            if recipe not in shipped_recipes() or cell.length is None or best is None:
                continue  # not a recipe of ours, or real lengths, which are another measure
            peer = row_of(cell, UNPADDED)
            padded = bench.device == "gpu" and (peer is None or peer.median_ms is None)
            yield (
                recipe,
                Speed(
                    model=bench.target.name,
                    batch=cell.batch,
                    length=cell.length,
                    value=round(best.value, 4),
                    low=best.ci95_low and round(best.ci95_low, 4),
                    high=best.ci95_high and round(best.ci95_high, 4),
                    over=about[best.baseline].precision.upper(),
                    where=f"{device}, {_backend(*about[system].backend.split())}",
                    padded=padded,
                ),
            )


def figures_json(records: Sequence[Any]) -> str:
    return json.dumps([figure.model_dump(mode="json") for figure in figures_of(records)], indent=1) + "\n"


def contents() -> Iterator[tuple[Path, str]]:
    records = {folder: read_records([ROOT / folder]) for folder in {*PAGES.values(), *FIGURES_FROM}}
    measured = [record for folder in FIGURES_FROM for record in records[folder]]
    for page, folder in PAGES.items():
        before = (ROOT / page).read_text(encoding="utf-8")
        if page == KERNELS:
            before = insert(before, kernel_tables(_of("bench", measured)), page, *KERNEL_MARKS)
        yield ROOT / page, insert(before, markdown(records[folder]), page)
    yield ROOT / FIGURES, figures_json(measured)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 2 where it would")
    parser.add_argument("--summarize", type=Path, nargs="+", metavar="FOLDER", help="of new results files")
    options = parser.parse_args(arguments)
    if options.summarize:
        for path in (path for folder in options.summarize for path in summarize(folder)):
            print(path)
        return 0
    stale = [(path, page) for path, page in contents() if path.read_text(encoding="utf-8") != page]
    for path, page in stale:
        print(f"{path.relative_to(ROOT)} {'does not hold these results' if options.check else 'written'}")
        if not options.check:
            files.write_text(path, page)
    return 2 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
