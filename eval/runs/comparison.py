"""Finished runs side by side: accuracy paired on the same samples, speed, size, and where they differ."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qdqbench.eval.bench.results import BENCH_FILE
from qdqbench.eval.metrics import figures
from qdqbench.eval.metrics.answers import Predictions, find_changed, predict_answers, sample_texts
from qdqbench.eval.metrics.compare import compare, measure_powers
from qdqbench.eval.metrics.logits import Logits, read_answers
from qdqbench.eval.metrics.results import Comparison, GateCode, GateState, Speedup
from qdqbench.eval.runs.gate import read_speed
from qdqbench.eval.runs.report import verdict
from qdqbench.eval.runs.results import RESULTS_FILE, Results, read_results
from qdqbench.quantize.pipeline.pipeline import read_finished
from qdqbench.quantize.pipeline.session import RunConfig, Session, read_config
from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report.coverage import share
from qdqbench.quantize.report.formats import cleaned, in_points, known, label, model_label, size
from qdqbench.quantize.report.render import write_report
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Array, Floats
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import count_of
from qdqbench.quantize.utils.schema import Strict, Tabular, field
from qdqbench.quantize.utils.system.environment import now


class ComparedRun(Strict):
    """One run, as its own results have it."""

    name: str = field("Last parts of its path that make the name unique.")
    folder: str = field("Path of the run directory as given.")
    model: str = field("Name of the model.")
    recipe: str = field("Name of the recipe.")
    task: str = field("Name of the task.")
    stage: str = field("Scored stage nearest to deployment, whose predictions are compared.")
    n: int = field("Number of samples that it scored.")
    metrics: dict[str, float] = field("Metrics of that stage, the primary one first.")
    stderr: dict[str, float] = field("Standard errors of the metrics, where known.")
    fp32: dict[str, float] = field("Metrics of the run's own FP32.")
    vs_fp32: Comparison | None = field("Comparison with the run's own FP32; null without.")
    backend: str | None = field("Backend of the engine; null if none was built.")
    int8: int | None = field("Matrix products that the engine runs in INT8; null without one.")
    planned_int8: int = field("Linear layers that the recipe puts in INT8.")
    linears: int = field("Linear layers of the model.")
    onnx_bytes: int | None = field("Bytes of the quantized ONNX file, else of the FP16 graph; or null.")
    engine_bytes: int | None = field("Size of the engine in bytes; null without one.")
    gate: GateState = field("State of the gate.")
    failures: list[GateCode] = field("Codes of the gate's failed checks.")
    warnings: list[str] = field("Warnings of its `results.json`.")
    speed: list[Speedup] = field("Speed-ups by config of its bench; empty without one of these files.")


class ComparedPair(Strict):
    """Two runs on the same samples: the second against the first."""

    first: str = field("Name of the run that is the baseline.")
    second: str = field("Name of the run that is compared with it.")
    not_paired: str | None = field("Why they are not paired: another task, other samples.", default=None)
    comparison: Comparison | None = field("Second run minus the first; null if not paired.", default=None)


class SamplePrediction(Strict):
    """Prediction of one model for a sample."""

    prediction: str = field("Class, score or text.")
    margin: float | None = field("Probability of the class minus the next; null without classes.")
    right: bool | None = field("True if it is right, false if wrong; null if neither.")


class ComparedSample(Strict):
    """A sample with different answers, or scores that differ most."""

    task: str = field("Name of the task.")
    sample: int = field("Row of the evaluation split; number of the sample if it has several.")
    text: str | None = field("Text of the sample; null if the data were not found.")
    label: str | None = field("Label in words; null for a task without labels.")
    predictions: dict[str, SamplePrediction] = field("Predictions by run; FP32's as `FP32`, `FP32 of NAME`.")
    distance: float = field("Squared logit difference over mean power, of the two farthest models.")


class ComparedLayer(Strict):
    """Quantizer, linear layer or block side by side in several runs."""

    what: Literal["amax", "output error", "block error"] = field("Quantity that is compared.")
    name: str = field("Name of the quantizer, linear layer or block.")
    values: dict[str, float | None] = field("Values by run; null if not known. Errors are relative.")


class RunComparison(Tabular):
    """A whole comparison."""

    schema_version: Literal[4] = field("Version of this schema.", default=4)
    created: str = field("Time of the end, ISO 8601, UTC.")
    command: str = field("Command line.")
    runs: list[ComparedRun] = field("Runs, in the order given.")
    pairs: list[ComparedPair] = field("Each pair of runs.")
    samples: list[ComparedSample] = field("Samples with different predictions or scores.")
    sample_count: int = field("Number of such samples before the list was cut.")
    layers: list[ComparedLayer] = field("Quantizers, linear layers and blocks of several runs.")
    notes: list[str] = field("Parts that could not be compared, with the reason.")

    def rows(self) -> Iterator[dict[str, Any]]:
        for run in self.runs:
            flat = run.model_dump(exclude={"metrics", "stderr", "fp32", "vs_fp32", "speed"})
            metric, versus = next(iter(run.metrics)), run.vs_fp32
            flat |= {
                "metric": metric,
                "value": run.metrics[metric],
                "stderr": run.stderr.get(metric),
                "fp32": run.fp32.get(metric),
                "delta": versus.delta.get(metric) if versus else None,
                "delta_stderr": versus.delta_stderr.get(metric) if versus else None,
            }
            yield flat | {f"ms at {each.config}": each.system_ms for each in reversed(run.speed)}


MOST_SAMPLES = 500  # that are kept, of each task
SCORES_KEPT = 50  # samples of a task without classes: all of them differ somehow
SAME_FP32 = 0.01  # relative distance of FP32 answers to the same samples
FP32 = "FP32"
NAME = "compare"  # of its files
LAYERS = {
    "amax": "amax of activations",
    "output error": "Relative error of each linear's output, ONNX Runtime against fake-quant",
    "block error": "Relative error of each block of the engine against the reference",
}


@dataclass(frozen=True)
class LoadedRun:
    name: str
    folder: Path
    config: RunConfig
    results: Results
    stage: str
    fp32: Floats  # answers [answers, width] of the first evaluation split
    answers: Floats  # the same of `stage`
    labels: Array  # [answers, ...] of that split
    split: str

    @property
    def task(self) -> Task:
        return self.config.task

    @cached_property
    def session(self) -> Session:
        return Session(self.config, self.folder)

    @cached_property
    def gold(self) -> metrics.Gold:
        kind = self.task.kind
        if not kind.labelled:
            return self.fp32
        return self.labels if kind.gold_is_labels else self.session.gold[self.split]

    @cached_property
    def classes(self) -> list[str]:
        """Return the names of the classes, or their numbers if the model is not there any more."""
        try:
            return [*self.session.class_names]
        except UserError:
            return [str(number) for number in range(self.task.num_labels)]

    @cached_property
    def predictions(self) -> Predictions:
        return predict_answers(self.task, self.answers, self.gold, self.classes)


def load_runs(folders: list[Path]) -> list[LoadedRun]:
    """Load finished runs, each under a name of its own.

    Raises:
        UserError: fewer than two, one of them twice, or any that is not finished; names all of them.
    """
    if len(folders) < 2:
        raise UserError("one run has nothing to be compared with; give two or more run directories")
    paths = [folder.resolve() for folder in folders]
    if twice := sorted({str(f) for f, path in zip(folders, paths, strict=True) if paths.count(path) > 1}):
        raise UserError(f"given more than once: {', '.join(twice)}; give each run once")
    by_parts = (["/".join(path.parts[-count:]) for path in paths] for count in itertools.count(1))
    names = next(names for names in by_parts if len(set(names)) == len(names))  # as few parts as tell them
    runs: list[LoadedRun] = []
    problems = []
    for folder, name in zip(folders, names, strict=True):
        try:
            runs.append(_load(folder, name))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; ".join(problems))
    return runs


def _load(folder: Path, name: str) -> LoadedRun:
    config = read_config(folder)
    if not (folder / RESULTS_FILE).is_file():
        raise UserError(f"{folder} has no {RESULTS_FILE}; run `qdqbench report {folder}` first")
    results = read_results(folder)
    if (last := verdict.last_measured(results)) is None or last[0] == "fp32":
        raise UserError(f"{folder} has scored nothing but FP32; run it to its end first")
    (fp32, labels), (answers, _) = (_read_unchanged(folder, stage) for stage in ("fp32", last[0]))
    split = next(iter(fp32))
    if split not in answers:
        raise UserError(f"{folder} has no answers of {last[0]} to {split}; run `qdqbench evaluate {folder}`")
    return LoadedRun(
        name, folder, config, results, last[0], fp32[split], answers[split], labels[split], split
    )


def _read_unchanged(folder: Path, stage: str) -> tuple[Logits, dict[str, Array]]:
    """Read answers and labels of a stage, from a file that is as the stage left it."""
    name = f"logits/{stage}.npz"
    path = folder / name
    recorded = {done.outputs[name] for done in read_finished(folder).values() if name in done.outputs}
    if recorded and path.is_file() and files.sha256(path) not in recorded:
        raise UserError(f"{path} changed after its stage; run `qdqbench evaluate {folder}` again")
    return read_answers(path)


def describe_run(run: LoadedRun) -> ComparedRun:
    results, row = run.results, run.results.stages[run.stage]
    engine, file = results.engine, verdict.quantized_file(results)
    return ComparedRun(
        name=run.name,
        folder=str(run.folder),
        model=model_label(str(results.model.get("name", "model"))),
        recipe=str(results.recipe.get("name", "unnamed recipe")),
        task=run.task.name,
        stage=run.stage,
        n=row.n,
        metrics=row.metrics,
        stderr=row.stderr,
        fp32=results.stages["fp32"].metrics,
        vs_fp32=row.vs_fp32,
        backend=engine.backend if engine else None,
        int8=verdict.count_linears(results, engine)[0] if engine else None,
        planned_int8=len(results.quantized_layers),
        linears=len(results.quantized_layers) + len(results.high_precision_layers),
        onnx_bytes=file[2] if file else None,
        engine_bytes=engine.bytes if engine else None,
        gate=results.gate.state,
        failures=[issue.code for issue in results.gate.failures],
        warnings=results.warnings,
        speed=read_speed(run.folder),
    )


def compare_runs(folders: list[Path], command: str = "qdqbench compare") -> RunComparison:
    """Compare finished runs by metrics, latency (ms) and size (bytes), then their samples and layers.

    Runs of equal task, metrics and labels are paired by answers, [answers, width] of the first split.
    UserError: fewer than two folders, one given twice, or any unfinished or changed; names all of them.
    """
    runs = load_runs(folders)
    notes, samples, total = list[str](), list[ComparedSample](), 0
    groups: list[list[LoadedRun]] = []  # whose answers can be compared sample by sample
    for run in runs:
        group = next((group for group in groups if why_not_paired(group[0], run) is None), None)
        if group is None:
            groups.append(group := [])
        group.append(run)
    for group in groups:
        try:
            found, count = _changed_samples(group, notes)
        except UserError as error:
            notes.append(f"samples of {', '.join(run.name for run in group)} are not compared: {error}")
            continue
        samples += found
        total += count
    return RunComparison(
        created=now(),
        command=command,
        runs=[describe_run(run) for run in runs],
        pairs=[_pair(first, second) for first, second in itertools.combinations(runs, 2)],
        samples=samples,
        sample_count=total,
        layers=[*_layers(runs)],
        notes=list(dict.fromkeys([*notes, *_not_comparable(runs)])),
    )


def why_not_paired(first: LoadedRun, second: LoadedRun) -> str | None:
    if (first.task.name, first.task.kind) != (second.task.name, second.task.kind):
        return f"{first.name} is of task {first.task.name}, {second.name} of {second.task.name}"
    if first.task.metrics != second.task.metrics:
        return f"{first.name} and {second.name} are scored by other metrics"
    if len(first.labels) != len(second.labels):
        return f"{first.name} has {len(first.labels)} answers, {second.name} {len(second.labels)}"
    same_labels = np.array_equal(first.labels, second.labels, equal_nan=first.labels.dtype.kind == "f")
    models = [run.results.model.get("sha256") for run in (first, second)]
    one_model = models[0] is not None and models[0] == models[1]
    if not same_labels or (one_model and not _agree(first.fp32, second.fp32)):
        differ = "FP32 answers of one model" if same_labels else "labels"
        return f"{first.name} and {second.name} have other {differ}, so other samples"
    if not first.task.kind.labelled:
        return "without labels each run is scored against its own FP32"
    return None


def _agree(one: Floats, other: Floats) -> bool:
    """Return whether answers are the same but for what a device and batches make of FP32 (TF32: 1e-3)."""
    exact, same = one.astype(np.float64), one.shape == other.shape
    return same and bool(np.linalg.norm(exact - other) <= SAME_FP32 * np.linalg.norm(exact))


def _pair(first: LoadedRun, second: LoadedRun) -> ComparedPair:
    pair = ComparedPair(first=first.name, second=second.name, not_paired=why_not_paired(first, second))
    if pair.not_paired is None:
        try:
            pair.comparison = compare(
                first.task, first.answers, second.answers, first.gold, seed=first.config.seed
            )
        except UserError as error:
            pair.not_paired = str(error)
    return pair


def _changed_samples(runs: list[LoadedRun], notes: list[str]) -> tuple[list[ComparedSample], int]:
    """Return samples that any of the runs, or FP32, predicts otherwise, the largest distance first."""
    first = runs[0]
    models: dict[str, LoadedRun] = {}
    for run in runs:
        models.setdefault(str(run.results.model.get("sha256")), run)
    columns: dict[str, Predictions] = {}
    for run in models.values():
        name = FP32 if len(models) == 1 else f"{FP32} of {run.name}"
        columns[name] = predict_answers(run.task, run.fp32, run.gold, run.classes)
    columns |= {run.name: run.predictions for run in runs}
    everything = [first.fp32, *(run.answers for run in runs)]
    if len({answers.shape for answers in everything}) > 1:
        raise UserError("their answers have other widths")
    pairs = itertools.combinations(everything, 2)
    distances = [measure_powers(first.task.kind, *pair, first.gold).noise for pair in pairs]
    distance = np.max(distances, axis=0)  # of the two that differ most, [samples]
    if first.predictions.is_discrete:
        changed = [find_changed(a, b) for a, b in itertools.combinations(columns.values(), 2)]
        chosen = np.unique(np.concatenate(changed))
    else:
        chosen = np.argsort(-distance, kind="stable")[:SCORES_KEPT]
    order = chosen[np.argsort(-distance[chosen], kind="stable")][:MOST_SAMPLES]
    texts: list[str | None] = [None] * len(order)
    try:
        dataset = first.session.split(first.split, limit=first.config.limit).dataset
        texts = [*sample_texts(dataset, first.task, order)]
    except UserError as error:
        notes.append(f"the texts of {first.name} are not shown: {error}")
    labels = first.task.kind.label_texts(first.gold[order], first.classes)
    rows = [
        ComparedSample(
            task=first.task.name,
            sample=int(sample),
            text=text,
            label=label,
            predictions={
                name: SamplePrediction(
                    prediction=column.word(sample),
                    margin=column.margin_of(sample),
                    right=column.is_right(sample),
                )
                for name, column in columns.items()
            },
            distance=float(distance[sample]),
        )
        for sample, text, label in zip(order, texts, labels, strict=True)
    ]
    return rows, len(chosen)


def _layers(runs: list[LoadedRun]) -> Iterator[ComparedLayer]:
    tables: dict[str, list[dict[str, float | None]]] = {what: [] for what in LAYERS}
    for results in (run.results for run in runs):
        activations = [row for row in results.quantizers if row.kind != "weight"]
        linears = results.parity.compared if results.parity else []
        blocks = results.verification.blocks if results.verification else []
        tables["amax"].append({row.name: row.amax for row in activations})
        tables["output error"].append({row.name: row.output_rel_error for row in linears})
        tables["block error"].append({row.name: row.error for row in blocks})
    for what, values in tables.items():
        for name in dict.fromkeys(name for by_name in values for name in by_name):
            row = {run.name: by_name.get(name) for run, by_name in zip(runs, values, strict=True)}
            yield ComparedLayer.model_validate({"what": what, "name": name, "values": row})


def _not_comparable(runs: list[LoadedRun]) -> list[str]:
    notes = [
        f"the bench of {run.name} is of other files: no latency is shown"
        for run in runs
        if (run.folder / BENCH_FILE).is_file() and not read_speed(run.folder)
    ]
    conditions: dict[str, list[object]] = {
        "were made on other machines": [run.results.environment.get("cpu") for run in runs],
        "have engines of other versions": [run.results.engine and run.results.engine.version for run in runs],
        "were made by other versions of the code": [run.results.environment.get("git") for run in runs],
    }
    for said, values in conditions.items():
        distinct = dict.fromkeys(str(value) for value in values if value)
        if len(distinct) > 1:
            notes.append(f"the runs {said}: {', '.join(distinct)}")
    return notes


def write_comparison(comparison: RunComparison, folder: Path) -> list[Path]:
    """Write `compare.html`, `compare.md` and `compare.json`."""
    record = folder / f"{NAME}.json"
    files.write_json(record, comparison.model_dump(mode="json"))
    return [*write_report(comparison_report(comparison), folder, NAME), record]


def comparison_report(comparison: RunComparison) -> doc.Report:
    comparison = cleaned(comparison)
    lines = [_pair_text(pair, pair.comparison) for pair in comparison.pairs if pair.comparison]
    refused = [pair for pair in comparison.pairs if pair.not_paired]
    apart = [f"{pair.second} and {pair.first}: {pair.not_paired}" for pair in refused]
    pairs: list[doc.Block] = [doc.Bullets(lines, on=doc.EVERYWHERE)]
    if apart:
        pairs += [doc.Fold(f"Not paired: {len(apart)}", [doc.Bullets(apart)])]
        pairs += [doc.Prose(f"{count_of(len(apart), 'pair')} not paired: {apart[0]}", "unclear", doc.SCREEN)]
    title = " against ".join(run.name for run in comparison.runs)
    return doc.Report(
        doc.page_of(comparison, "runs side by side", title, [], f"{NAME}.json"),
        [
            doc.Section("overview", "Runs", _run_blocks(comparison.runs)),
            doc.Section("differences", "Paired differences", pairs),
            doc.Section("changed", "Answers that differ", _sample_blocks(comparison)),
            *_layer_sections(comparison),
        ],
        warnings=comparison.notes,
        warnings_title="Know before you compare",
    )


def _run_blocks(runs: list[ComparedRun]) -> list[doc.Block]:
    configs = [*dict.fromkeys(latency.config for run in runs for latency in run.speed)]
    table = doc.table_of(
        runs,
        ("run", lambda run: doc.Cell(run.name, note=f"{run.recipe}, model {run.model}")),
        ("result", lambda run: figures.points(run.metrics, run.stderr)),
        (
            "against FP32",
            lambda run: figures.points(at.delta, at.delta_stderr, "+") if (at := run.vs_fp32) else None,
        ),
        *((f"{config}, ms", partial(_latency_cell, config)) for config in configs),
        ("gate", lambda run: doc.Cell(run.gate, verdict.GATE_STATES.get(run.gate, "unclear"))),
        ("INT8", _int8_text),
        (
            "ONNX file",
            lambda run: doc.Cell(
                "" if run.onnx_bytes is None else size(run.onnx_bytes), sort=run.onnx_bytes or 0
            ),
        ),
        ("engine", lambda run: doc.Cell(_engine_size(run), sort=run.engine_bytes or 0)),
        ("answers of", lambda run: f"{label(run.stage)}, n {run.n}"),
        look="full cards sortable names",
        anchor="runs",
    )
    blocks: list[doc.Block] = [table]
    for run in runs:  # a block for each on a terminal, as 80 columns have no room for the table
        metric = next(iter(run.metrics))
        drop = figures.change(run.vs_fp32, in_percent=True).text if run.vs_fp32 else "not known"
        score = f"{label(metric)} {in_points(run.metrics[metric], run.stderr.get(metric))}"
        engine = f", engine {_engine_size(run)}" if run.engine_bytes else ""
        pairs = [
            ("result", f"{score}, against FP32 {drop}"),
            ("INT8", f"{_int8_text(run)}{engine}"),
            ("gate", run.gate.replace("_", " ")),
            *(("latency", _latency_text(latency)) for latency in run.speed),
        ]
        blocks.append(doc.Pairs(pairs, run.name, on=doc.SCREEN))
    lines = [f"{run.name}: {_latency_text(latency)}" for run in runs for latency in run.speed]
    bench = "" if lines else " No run has a bench: `qdqbench bench RUN` measures latency."
    text = f"Points of the metric ± one standard error; against FP32 is paired on the same samples.{bench}"
    return [*blocks, doc.Bullets(lines, on=doc.TEXT), doc.Prose(text, "quiet")]


def _latency_cell(config: str, run: ComparedRun) -> doc.Cell:
    if (ratio := next((each for each in run.speed if each.config == config), None)) is None:
        return doc.Cell()
    over = f"{figures.speed_text(ratio)} over {ratio.baseline}"
    return doc.Cell(figures.latency(ratio), figures.speed(ratio).state, over)


def _latency_text(ratio: Speedup) -> str:
    quick = " (quick bench)" if ratio.quick else ""
    return f"{ratio.config}{quick} {figures.latency(ratio)} ms, {figures.speed_place(ratio)}"


def _int8_text(run: ComparedRun) -> str:
    if run.int8 is None:
        return f"{run.planned_int8} planned, no engine" if run.planned_int8 else "none asked"
    return share(run.int8, run.linears)


def _engine_size(run: ComparedRun) -> str:
    return "" if run.engine_bytes is None else f"{label(run.backend or '')} {size(run.engine_bytes)}"


def _pair_text(pair: ComparedPair, versus: Comparison) -> str:
    difference = f"{label(next(iter(versus.delta)))} {figures.change_text(versus, in_percent=True)}"
    parts = [f"{pair.second} against {pair.first}: {difference}"]
    if differing := figures.differing(versus):
        parts.append(f"{differing} answers differ")
    if versus.mcnemar_p is not None:
        parts.append(f"McNemar p {versus.mcnemar_p:.2g}")
    return ", ".join(parts)


def _sample_blocks(comparison: RunComparison) -> list[doc.Block]:
    text = doc.Prose(_samples_text(comparison), on=doc.EVERYWHERE)
    if not comparison.samples:
        return [text]
    names = [*dict.fromkeys(name for sample in comparison.samples for name in sample.predictions)]

    def show(name: str, sample: ComparedSample) -> doc.Cell:
        if (answer := sample.predictions.get(name)) is None:
            return doc.Cell()
        look = "" if answer.right is None else "right" if answer.right else "wrong-answer"
        return doc.Cell(answer.prediction, note=known(answer.margin, ".2f"), sort=answer.margin, look=look)

    table = doc.table_of(
        comparison.samples,
        ("sample", lambda sample: sample.sample),
        ("text", lambda sample: doc.Cell("not found" if sample.text is None else sample.text, look="text")),
        ("label", lambda sample: sample.label),
        *((name, partial(show, name)) for name in names),
        ("distance", lambda sample: f"{sample.distance:.3g}"),
        texts=range(len(names) + 4),
        look="full cards sortable",
        filter="texts, labels, answers",
        anchor="samples",
    )
    about = (
        "With an answer: its margin, the probability of that class less that of the next; near 0 the answer "
        "was near the threshold."
    )
    return [text, table, doc.Prose(about, "quiet", doc.PAGE)]


def _samples_text(comparison: RunComparison) -> str:
    if not comparison.sample_count:
        return "No sample is answered otherwise by any of them."
    answers = [answer for sample in comparison.samples for answer in sample.predictions.values()]
    scores = all(answer.margin is None and answer.right is None for answer in answers)
    what = "scored most differently" if scores else "answered otherwise by at least one of them"
    kept = len(comparison.samples)
    rest = f"; the {kept} whose answers are farthest apart are listed"
    return f"{comparison.sample_count} samples are {what}{rest if kept < comparison.sample_count else ''}."


def _layer_sections(comparison: RunComparison) -> Iterator[doc.Section]:
    for number, (what, title) in enumerate(LAYERS.items(), 1):
        if layers := [layer for layer in comparison.layers if layer.what == what]:
            table = doc.table_of(
                layers,
                ("name", lambda layer: doc.code(layer.name)),
                *(
                    (run.name, lambda layer, name=run.name: known(layer.values.get(name), ".3g"))
                    for run in comparison.runs
                ),
                look="sortable",
                filter="layers",
                anchor=f"layers-{number}",
                on=doc.PAGE,
            )
            yield doc.Section(what.replace(" ", "-"), title, [table], on=doc.PAGE)
