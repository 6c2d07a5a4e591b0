"""What `recipes list` shows of the shipped recipes, from results files and nothing else."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from qdqbench.eval.bench.results import Bench, over_fastest
from qdqbench.eval.report.formats import label, model_label
from qdqbench.eval.tables.changed import differences
from qdqbench.eval.tables.write import find_results
from qdqbench.quantize.core.results import Results
from qdqbench.quantize.recipe.figures import Accuracy, Device, Figure, Speed
from qdqbench.quantize.recipe.schema import shipped_recipes

STAGES: tuple[Literal["engine", "onnxruntime", "fake_quant"], ...] = ("engine", "onnxruntime", "fake_quant")


def figures_json(paths: Sequence[Path]) -> str:
    """Text of `recipes/figures.json`.

    Args:
        paths: results files or folders of them; each may hold one measurement once.

    Raises:
        UserError: as `find_results`.
    """
    found = [find_results([path]) for path in paths]
    made = figures_of([run for runs, _ in found for run in runs], [each for _, of in found for each in of])
    return json.dumps([figure.model_dump(mode="json") for figure in made], indent=1) + "\n"


def figures_of(runs: Sequence[Results], benches: Sequence[Bench]) -> list[Figure]:
    """Accuracy and speed by recipe and device; results of recipes that have changed since are left out."""
    accuracy: dict[tuple[str, Device], list[Accuracy]] = defaultdict(list)
    for run in runs:
        name = str(run.recipe.get("name"))
        if name in shipped_recipes() and not differences(run.recipe) and (found := _accuracy(run)):
            accuracy[name, _device(run)].append(found)
    speed: dict[tuple[str, Device], list[Speed]] = defaultdict(list)
    for bench in benches:
        for recipe, row in _speeds(bench):
            speed[recipe, bench.device].append(row)
    order = [*shipped_recipes()]
    return [
        Figure(
            recipe=recipe,
            device=device,
            accuracy=tuple(
                sorted(accuracy[recipe, device], key=lambda row: (row.task, row.model, row.where))
            ),
            speed=_least(speed[recipe, device]),
        )
        for recipe, device in sorted({*accuracy, *speed}, key=lambda key: (order.index(key[0]), key[1]))
    ]


def _least(rows: list[Speed]) -> tuple[Speed, ...]:
    """One of each shape: the smallest, as benches do not all time the same others."""
    least: dict[tuple[str, int, int], Speed] = {}
    for row in rows:
        shape = (row.model, row.length, row.batch)
        least[shape] = min(least.get(shape, row), row, key=lambda each: each.value)
    return tuple(least[shape] for shape in sorted(least))


def _device(run: Results) -> Device:
    return "cpu" if run.engine and run.engine.on_cpu else "gpu"


def _accuracy(run: Results) -> Accuracy | None:
    """Of the last stage that ran."""
    metric = str(run.task["metrics"][0])
    for stage in STAGES:
        row = run.stages.get(stage)
        if row is None or row.vs_fp32 is None:
            continue
        error = row.vs_fp32.delta_stderr.get(metric)
        return Accuracy(
            model=model_label(str(run.model.get("name"))),
            task=str(run.task["name"]),
            metric=metric,
            points=round(100 * row.vs_fp32.delta[metric], 4),
            stderr=None if error is None else round(100 * error, 4),
            n=row.n,
            stage=stage,
            where=_where(run),
        )
    return None


def _where(run: Results) -> str:
    """Hardware, and what ran there."""
    found, made = run.environment, run.engine
    if made is None or "engine" not in run.stages or run.stages["engine"].vs_fp32 is None:
        return _hardware(found, on_cpu=True)
    return f"{_hardware(found, on_cpu=made.on_cpu)}, {_backend(made.backend, made.version)}"


def _hardware(environment: dict[str, Any], *, on_cpu: bool) -> str:
    if on_cpu:
        return f"{environment.get('cpu')}, {environment.get('cores')} cores"
    return str(environment.get("gpu"))


def _backend(name: str, version: str) -> str:
    """With the version that is released, without its build."""
    return f"{label(name)} {version.partition('-')[0]}"


def _speeds(bench: Bench) -> Iterator[tuple[str, Speed]]:
    """Of the engines for the recipe's shapes, its own and those of `--extra-recipe`, at fixed shapes."""
    if bench.device == "gpu" and bench.settings.engine_shapes == "exact":
        return  # engines for each shape alone are not what `run` builds
    made = {each.name: each.recipe or {"name": each.name.removeprefix("int8-")} for each in bench.systems}
    made["int8"] = bench.recipe
    stale = {each.name for each in bench.systems if each.recipe and differences(each.recipe)}
    stale |= {"int8"} if differences(bench.recipe) else set()
    engines = {name: str(recipe.get("name")) for name, recipe in made.items() if name not in stale}
    about = {each.name: each for each in bench.systems}
    device = _hardware(bench.environment, on_cpu=bench.device == "cpu")
    for cell in bench.configs:
        for contestant, recipe in engines.items():
            found = over_fastest(bench.systems, cell, contestant)
            if recipe not in shipped_recipes() or cell.length is None or found is None:
                continue  # not a recipe of ours, or real lengths, which are another measure
            yield (
                recipe,
                Speed(
                    model=bench.target.name,
                    batch=cell.batch,
                    length=cell.length,
                    value=round(found.value, 4),
                    low=found.ci95_low and round(found.ci95_low, 4),
                    high=found.ci95_high and round(found.ci95_high, 4),
                    over=about[found.baseline].precision.upper(),
                    where=f"{device}, {_backend(*about[contestant].backend.split())}",
                ),
            )
