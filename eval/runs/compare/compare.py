"""Runs against each other on the same samples: what answers changed, layers side by side."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

import numpy as np

from qdqbench.eval.bench.report import stale_files
from qdqbench.eval.bench.results import BENCH_FILE, Bench, config_label, headline_of, read_bench, row_of
from qdqbench.eval.metrics.answers import (
    Answered,
    answered,
    differing,
    has_answers_that_flip,
    sample_texts,
)
from qdqbench.eval.metrics.compare import compare as paired
from qdqbench.eval.metrics.logits import read_answers
from qdqbench.eval.reporting.formats import model_label
from qdqbench.eval.runs.compare.results import (
    ComparedLayer,
    ComparedRun,
    ComparedSample,
    Pair,
    RunComparison,
    RunLatency,
    SamplePrediction,
)
from qdqbench.eval.runs.report.verdict import last_measured, quantized_file
from qdqbench.quantize.models.load import read_class_names
from qdqbench.quantize.pipeline.pipeline import read_finished
from qdqbench.quantize.pipeline.session import RunConfig, Session, read_config
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Array, Float64, Floats
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.results import RESULTS_FILE, Results, read_results
from qdqbench.quantize.utils.system.environment import now


@dataclass(frozen=True)
class LoadedRun:
    """A run and what it answered."""

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
        """Return its task."""
        return self.config.task

    @cached_property
    def session(self) -> Session:
        """Return a session that loads its data and tokenizer again."""
        return Session(self.config, self.folder)

    @cached_property
    def gold(self) -> metrics.Gold:
        """Return what its answers are scored against.

        Raises:
            UserError: the kind of task needs the data for it, and that is not there any more.
        """
        kind = self.task.kind
        if not kind.labelled:
            return self.fp32
        return self.labels if kind.gold_is_labels else self.session.gold[self.split]

    @cached_property
    def classes(self) -> list[str]:
        """Return names of the model's classes; their numbers where the model is not there any more."""
        if self.task.classes:
            return list(self.task.classes)
        try:
            return read_class_names(self.session.model_name, self.config.revision, self.task.kind)
        except UserError:
            return [str(number) for number in range(self.task.num_labels)]

    @cached_property
    def answered(self) -> Answered:
        """Return what the deployed stage answered."""
        return answered(self.task, self.answers, self.gold, self.classes)

    @cached_property
    def answered_fp32(self) -> Answered:
        """Return what FP32 answered."""
        return answered(self.task, self.fp32, self.gold, self.classes)

    @cached_property
    def bench(self) -> Bench | None:
        """Return the bench in its folder."""
        path = self.folder / BENCH_FILE
        return read_bench(path) if path.is_file() else None

    @property
    def stale_bench(self) -> list[str]:
        """Return files of the run that changed after its bench, whose latencies are not theirs."""
        return stale_files(self.bench, self.folder) if self.bench else []

    def texts(self, samples: list[int]) -> list[str]:
        """Return the texts of some samples, in one line each.

        Raises:
            UserError: the data is not there any more.
        """
        dataset = self.session.split(self.split, limit=self.config.limit).dataset
        return sample_texts(dataset, self.task, np.asarray(samples, dtype=np.int64))


def load_runs(folders: list[Path]) -> list[LoadedRun]:
    """Return complete_record runs, each under a name of its own.

    Raises:
        UserError: fewer than two, one of them twice, or any that is not complete_record; names all of them.
    """
    if len(folders) < 2:
        raise UserError("one run has nothing to be compared with; give two or more run directories")
    twice = sorted({str(f) for f in folders if [g.resolve() for g in folders].count(f.resolve()) > 1})
    if twice:
        raise UserError(f"given more than once: {', '.join(twice)}; give each run once")
    runs: list[LoadedRun] = []
    problems = []
    for folder, name in zip(folders, _names(folders), strict=True):
        try:
            runs.append(_load(folder, name))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; ".join(problems))
    return runs


def _names(folders: list[Path]) -> list[str]:
    """Return as few last parts of the paths as make them distinct."""
    whole = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-count:]) for parts in whole]
        if len(set(names)) == len(names):
            break
    return names


def _load(folder: Path, name: str) -> LoadedRun:
    config = read_config(folder)
    if not (folder / RESULTS_FILE).is_file():
        raise UserError(f"{folder} has no {RESULTS_FILE}; run `qdqbench report {folder}` first")
    results = read_results(folder)
    last = last_measured(results)
    if last is None or last[0] == "fp32":
        raise UserError(f"{folder} has scored nothing but FP32; run it to its end first")
    (fp32, labels), (answers, _) = (read_answers(_answers_file(folder, stage)) for stage in ("fp32", last[0]))
    split = next(iter(fp32))
    if split not in answers:
        raise UserError(f"{folder} has no answers of {last[0]} to {split}; run `qdqbench evaluate {folder}`")
    return LoadedRun(
        name, folder, config, results, last[0], fp32[split], answers[split], labels[split], split
    )


def _answers_file(folder: Path, stage: str) -> Path:
    """Return the file of a stage's answers, which is as the stage left it.

    Raises:
        UserError: it changed since.
    """
    name = f"logits/{stage}.npz"
    path = folder / name
    recorded = {done.outputs[name] for done in read_finished(folder).values() if name in done.outputs}
    if recorded and path.is_file() and files.sha256(path) not in recorded:
        raise UserError(f"{path} changed after its stage; run `qdqbench evaluate {folder}` again")
    return path


def describe_run(run: LoadedRun) -> ComparedRun:
    """Return the run's own numbers."""
    results, row = run.results, run.results.stages[run.stage]
    engine, file = results.engine, quantized_file(results)
    bench = None if run.stale_bench else run.bench
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
        int8=engine.int8_gemms if engine else None,
        expected_int8=engine.expected_int8_gemms if engine else None,
        planned_int8=len(results.quantized_layers),
        onnx_bytes=file[2] if file else None,
        engine_bytes=engine.bytes if engine else None,
        gate=results.gate.state,
        failures=[issue.code for issue in results.gate.failures],
        warnings=results.warnings,
        device=_device(bench) if bench else None,
        latency=[*_latencies(bench)] if bench else [],
    )


def _device(bench: Bench) -> str:
    return bench.cpu.name if bench.cpu else str(bench.environment.get("gpu", "GPU"))


def _latencies(bench: Bench) -> list[RunLatency]:
    latencies = []
    for config in bench.configs:
        best = headline_of(bench.systems, config)
        if (row := row_of(config, best.system if best else "int8")) is None or row.median_ms is None:
            continue
        latencies.append(
            RunLatency(
                config=config_label(config, bench.settings.dataset),
                system=row.system,
                median_ms=row.median_ms,
                speedup=best,
            )
        )
    return latencies


MOST_SAMPLES = 500  # that are kept, of each task
SCORES_KEPT = 50  # samples of a task without classes: all of them differ somehow
FP32 = "FP32"


def compare_runs(folders: list[Path], command: str = "qdqbench compare") -> RunComparison:
    """Return everything that distinguishes two or more complete_record runs.

    Raises:
        UserError: as `load_runs`.
    """
    runs = load_runs(folders)
    notes: list[str] = []
    pairs = [_pair(first, second) for first, second in combinations(runs, 2)]
    samples, total = [], 0
    for group in _groups(runs):
        found, count = _samples(group, notes)
        samples += found
        total += count
    return RunComparison(
        created=now(),
        command=command,
        runs=[describe_run(run) for run in runs],
        pairs=pairs,
        samples=samples,
        sample_count=total,
        layers=[*_layers(runs)],
        notes=list(dict.fromkeys([*notes, *_not_comparable(runs)])),
    )


def why_not_paired(first: LoadedRun, second: LoadedRun) -> str | None:
    """Return why two runs did not answer the same samples; None where they did."""
    if (first.task.name, first.task.kind) != (second.task.name, second.task.kind):
        return f"{first.name} is of task {first.task.name}, {second.name} of {second.task.name}"
    if first.task.metrics != second.task.metrics:
        return f"{first.name} and {second.name} are scored by other metrics"
    if len(first.labels) != len(second.labels):
        return f"{first.name} has {len(first.labels)} answers, {second.name} {len(second.labels)}"
    if not np.array_equal(first.labels, second.labels, equal_nan=first.labels.dtype.kind == "f"):
        return f"{first.name} and {second.name} have other labels, so other samples"
    if not first.task.kind.labelled:
        return "without labels each run is scored against its own FP32"
    return None


def _pair(first: LoadedRun, second: LoadedRun) -> Pair:
    names = first.name, second.name
    if why := why_not_paired(first, second):
        return Pair(first=names[0], second=names[1], not_paired=why)
    try:
        comparison = paired(first.task, first.answers, second.answers, first.gold, seed=first.config.seed)
    except UserError as error:
        return Pair(first=names[0], second=names[1], not_paired=str(error))
    return Pair(first=names[0], second=names[1], comparison=comparison)


def _groups(runs: list[LoadedRun]) -> list[list[LoadedRun]]:
    """Return groups of runs whose answers can be compared sample by sample."""
    groups: list[list[LoadedRun]] = []
    for run in runs:
        group = next((g for g in groups if why_not_paired(g[0], run) is None), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return groups


def _samples(runs: list[LoadedRun], notes: list[str]) -> tuple[list[ComparedSample], int]:
    """Return samples that any of the runs, or FP32, answers otherwise, the largest distance first."""
    first = runs[0]
    try:
        columns = _columns(runs)
        distance = _distance(runs)
    except UserError as error:
        notes.append(f"samples of {', '.join(run.name for run in runs)} are not compared: {error}")
        return [], 0
    if has_answers_that_flip(first.answered):
        changed = [differing(a, b) for a, b in combinations(columns.values(), 2)]
        chosen = np.unique(np.concatenate(changed))
    else:
        chosen = np.argsort(-distance, kind="stable")[:SCORES_KEPT]
    order = chosen[np.argsort(-distance[chosen], kind="stable")][:MOST_SAMPLES]
    texts: list[str | None] = [None] * len(order)
    try:
        texts = [*first.texts(order.tolist())]
    except UserError as error:
        notes.append(f"the texts of {first.name} are not shown: {error}")
    labels = first.task.kind.label_texts(first.gold[order], first.classes)
    rows = [
        ComparedSample(
            task=first.task.name,
            sample=int(sample),
            text=text,
            label=label,
            predictions={name: _answer(column, int(sample)) for name, column in columns.items()},
            distance=float(distance[sample]),
        )
        for sample, text, label in zip(order, texts, labels, strict=True)
    ]
    return rows, len(chosen)


def _columns(runs: list[LoadedRun]) -> dict[str, Answered]:
    """Return answers by run, those of FP32 first: once where all runs have the same FP32 model."""
    models: dict[str, LoadedRun] = {}
    for run in runs:
        models.setdefault(str(run.results.model.get("sha256")), run)
    alone = len(models) == 1
    references = {FP32 if alone else f"{FP32} of {run.name}": run.answered_fp32 for run in models.values()}
    return references | {run.name: run.answered for run in runs}


def _distance(runs: list[LoadedRun]) -> Float64:
    """Return the kind's divergence of the two answers of a sample that differ most, [samples]."""
    kind, gold = runs[0].task.kind, runs[0].gold
    everything = [runs[0].fp32.astype(np.float64), *(run.answers.astype(np.float64) for run in runs)]
    shapes = {each.shape for each in everything}
    if len(shapes) > 1:
        raise UserError("their answers have other widths")
    found: list[Array] = [kind.divergence(a, b, gold) for a, b in combinations(everything, 2)]
    return np.asarray(np.max(found, axis=0), dtype=np.float64)


def _answer(found: Answered, sample: int) -> SamplePrediction:
    return SamplePrediction(
        prediction=found.word(sample),
        margin=None if found.margin is None else float(found.margin[sample]),
        right=None if found.right is None else bool(found.right[sample]),
    )


def _layers(runs: list[LoadedRun]) -> Iterator[ComparedLayer]:
    """Yield amax of activations, output errors of linears and errors of blocks, in model order."""
    tables: dict[str, list[dict[str, float | None]]] = {"amax": [], "output error": [], "block error": []}
    for run in runs:
        parity, verified = run.results.parity, run.results.verification
        quantizers = [row for row in run.results.quantizers if row.kind != "weight"]
        tables["amax"].append({row.name: row.amax for row in quantizers})
        tables["output error"].append(
            {row.name: row.output_rel_error for row in (parity.rows if parity else [])}
        )
        tables["block error"].append({row.name: row.error for row in (verified.blocks if verified else [])})
    for what, values in tables.items():
        for name in dict.fromkeys(name for by_name in values for name in by_name):
            row = {run.name: by_name.get(name) for run, by_name in zip(runs, values, strict=True)}
            yield ComparedLayer.model_validate({"what": what, "name": name, "values": row})


def _not_comparable(runs: list[LoadedRun]) -> list[str]:
    """Return what makes numbers of several runs not comparable."""
    notes = [
        f"the bench of {run.name} is of other files than {', '.join(run.stale_bench)}: no latency is shown"
        for run in runs
        if run.stale_bench
    ]
    asked: list[tuple[str, Callable[[LoadedRun], object]]] = [
        ("were made on other machines", lambda run: run.results.environment.get("cpu")),
        ("have engines of other versions", lambda run: run.results.engine and run.results.engine.version),
        ("were made by other versions of the code", lambda run: run.results.environment.get("git")),
    ]
    for said, of in asked:
        values = dict.fromkeys(str(of(run)) for run in runs if of(run))
        if len(values) > 1:
            notes.append(f"the runs {said}: {', '.join(values)}")
    return notes
