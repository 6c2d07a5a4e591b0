"""Finished runs as `compare` reads them: results, answers of the deployed stage, and samples."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from qdqbench.eval.bench.report import stale_files
from qdqbench.eval.bench.results import BENCH_FILE, Bench, config_label, headline_of, read_bench, row_of
from qdqbench.eval.metrics.changes import Answered, answered, sample_texts
from qdqbench.eval.metrics.logits import read_answers
from qdqbench.eval.reporting.formats import model_label
from qdqbench.eval.runs.compare.results import ComparedRun, RunLatency
from qdqbench.eval.runs.report.verdict import last_measured, quantized_file
from qdqbench.quantize.models.load import read_class_names
from qdqbench.quantize.pipeline.pipeline import read_finished
from qdqbench.quantize.pipeline.session import RunConfig, Session, read_config
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Array, Floats
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.results import RESULTS_FILE, Results, read_results


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
        plain = kind.units is None and kind.groups is None and not kind.texts_apart
        return self.labels if plain else self.session.gold[self.split]

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
    """Return finished runs, each under a name of its own.

    Raises:
        UserError: fewer than two, one of them twice, or any that is not finished; names all of them.
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
