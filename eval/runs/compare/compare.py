"""Runs against each other on the same samples: what answers changed, layers side by side."""

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import numpy as np

from qdqbench.eval.metrics.changes import Answered, differing, has_answers_that_flip, sample_labels
from qdqbench.eval.metrics.compare import compare as paired
from qdqbench.eval.runs.compare.load import LoadedRun, describe_run, load_runs
from qdqbench.eval.runs.compare.results import (
    ComparedLayer,
    ComparedSample,
    Pair,
    RunComparison,
    SamplePrediction,
)
from qdqbench.quantize.utils.arrays import Array, Float64
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.environment import now

MOST_SAMPLES = 500  # that are kept, of each task
SCORES_KEPT = 50  # samples of a task without classes: all of them differ somehow
FP32 = "FP32"


def compare_runs(folders: list[Path], command: str = "qdqbench compare") -> RunComparison:
    """Return everything that distinguishes two or more finished runs.

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
    labels = sample_labels(first.task, first.gold, first.classes, order)
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
    tables: list[tuple[str, list[dict[str, float | None]]]] = [
        ("amax", [{q.name: q.amax for q in run.results.quantizers if q.kind != "weight"} for run in runs]),
        ("output error", [_outputs(run) for run in runs]),
        ("block error", [_blocks(run) for run in runs]),
    ]
    for what, values in tables:
        names = dict.fromkeys(name for each in values for name in each)
        for name in names:
            row = {run.name: each.get(name) for run, each in zip(runs, values, strict=True)}
            yield ComparedLayer.model_validate({"what": what, "name": name, "values": row})


def _outputs(run: LoadedRun) -> dict[str, float | None]:
    return {row.name: row.output_rel_error for row in run.results.parity.rows} if run.results.parity else {}


def _blocks(run: LoadedRun) -> dict[str, float | None]:
    checked = run.results.verification
    return {row.name: row.error for row in checked.blocks} if checked else {}


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
