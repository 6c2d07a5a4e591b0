"""Latency: a bench of a run directory, a model or a built-in shape, with its reports."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from qdqbench._options import BenchOptions
from qdqbench._runs import silent
from qdqbench.eval.bench.cpu import CpuWork
from qdqbench.eval.bench.gpu import GpuWork, background, start_compiles, start_export
from qdqbench.eval.bench.report import write_bench_reports
from qdqbench.eval.bench.results import BENCH_FILE, Bench, write_bench
from qdqbench.eval.bench.run import require_gpu, run_bench
from qdqbench.eval.bench.systems import TABLE, BenchPlan, own_backend, runs_on_cpu
from qdqbench.eval.bench.target import (
    Target,
    batched_splits,
    check_lengths,
    model_target,
    recipe_for,
    run_target,
)
from qdqbench.eval.runs.report.report import refresh_reports
from qdqbench.quantize.models.families.known import MODEL_SHAPES
from qdqbench.quantize.models.identity import model_fingerprint
from qdqbench.quantize.models.pooling import Pooling
from qdqbench.quantize.pipeline.config import select_pooling
from qdqbench.quantize.pipeline.ownership import (
    RunIdentity,
    default_folder,
    locked_folder,
    model_location,
    owned_folder,
)
from qdqbench.quantize.pipeline.session import read_config
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.options import take_options
from qdqbench.quantize.utils.system.cpu import find_cpu

DEFAULT_BATCHES, DEFAULT_CPU_BATCHES = (1, 8, 32, 128), (1, 8)
DEFAULT_DATASET_BATCH = 32
INPUT_SETS = 8  # different random inputs of each shape
DEFAULT_ROUNDS, DEFAULT_CPU_ROUNDS = 12, 6  # 12 is balanced for 2, 3, 4 and 6 contestants


@take_options
def bench(  # noqa: PLR0913
    target: str | Path | None = None,
    *,
    options: BenchOptions,
    progress: Callable[[str], None] = silent,
    written: Callable[[Path], None] = silent,
    note: Callable[[str], None] = silent,
    command: str = "qdqbench.bench",
) -> Bench:
    """Measure INT8 against other engines, PyTorch and other quantizers; write bench.json and its reports.

    Measurements that failed are in `errors` of the result.

    Args:
        target: run directory; or `model` is given.
        progress: called with what is being done.
        written: called with each report.
        note: called with what was moved.
        command: recorded in the result.

    Raises:
        UserError: arguments that do not fit together, or a target that cannot be used.
        MissingDevice: the GPU or the runtime that is asked for is not there; before anything is exported.
    """
    path = None if target is None else Path(target)
    _check_target(path, options.model, options.recipe)
    pooling = select_pooling(options.pooling, options.normalize)
    if path is not None and pooling:
        raise UserError(f"--pooling belongs to --model; {path} has its own")
    own_recipe = read_config(path).recipe if path else recipe_for(str(options.model), options.recipe)
    if own_recipe.auto_shapes and path is None and options.engine_shapes != "exact":
        raise UserError(
            f"the shapes of recipe {own_recipe.name} are those of a run's data (shapes: auto); give its "
            "run directory, or --engine-shapes exact"
        )
    choice = own_recipe.engine.backend
    if cpu := options.cpu or runs_on_cpu(choice):
        own_backend(choice)
    backend = ("", "") if cpu else require_gpu(choice)
    extra = options.extra_recipe or []
    if extra and (options.model is None or cpu):
        raise UserError("--extra-recipe belongs to --model on a GPU: other recipes of the model measured")
    if cpu and options.build_only:
        raise UserError("--build-only belongs to a bench on a GPU")
    _check_names(options.exclude or ())
    plan = _plan(options, cpu)
    progress("exporting")
    place = options.out or path or default_folder("bench", options.model, own_recipe.name)
    with ExitStack() as stack:
        stack.enter_context(_owned_folder(place, path, own_recipe, options, note))
        work = CpuWork() if cpu else GpuWork(stack.enter_context(background(os.cpu_count() or 1)))
        opened = _open_all(path, options.model, (options.recipe, *extra), place, plan, pooling, work)
        if options.dataset is not None:
            splits = batched_splits(
                opened,
                options.dataset,
                batches=tuple(dict.fromkeys(options.dataset_batch or (DEFAULT_DATASET_BATCH,))),
                data=options.data,
                tokenizer=options.tokenizer,
                buckets=not cpu,
            )
            plan = plan.model_copy(update={"splits": splits})
        check_lengths(opened, plan.lengths)
        result = run_bench(
            opened,
            plan,
            work,
            command=command,
            backend=backend,
            save=lambda partial: write_bench(place / BENCH_FILE, partial),
            announce=progress,
        )
        return result if options.build_only else _report(result, place, written)


def _plan(options: BenchOptions, cpu: bool) -> BenchPlan:
    """Return what is measured, with the defaults of the device."""
    threads, streams = _threads(options.threads, options.streams, cpu)
    batches: Sequence[int] = DEFAULT_CPU_BATCHES if cpu else DEFAULT_BATCHES
    if options.dataset is not None and options.length is None:
        batches = ()
    same = {
        "dataset",
        "iterations",
        "baselines",
        "fp32",
        "compile_seconds",
        "engine_shapes",
        "seed",
        "build_only",
    }
    return BenchPlan(
        **options.model_dump(include=same),
        device="cpu" if cpu else "gpu",
        batches=list(dict.fromkeys(options.batch or batches)),
        lengths=list(dict.fromkeys(options.length or (128,))),
        streams=list(streams),
        rounds=options.rounds or (DEFAULT_CPU_ROUNDS if cpu else DEFAULT_ROUNDS),
        duration_s=options.duration,
        input_sets=INPUT_SETS,
        keep_engines=options.keep_engines or options.build_only,
        exclude=tuple(options.exclude or ()),
        threads=threads if cpu else None,
    )


def _report(bench: Bench, folder: Path, written: Callable[[Path], None]) -> Bench:
    """Write the reports of a bench and again those of its run; why these cannot be is a warning of it."""
    refreshed, why = refresh_reports(folder)
    if why:
        bench = bench.model_copy(update={"warnings": [*bench.warnings, why]})
    for report in [*write_bench_reports(bench, folder), *refreshed]:
        written(report)
    return bench


def _check_target(target: Path | None, model: str | None, recipe: str | None) -> None:
    if (target is None) == (model is None):
        raise UserError(
            f"give either a run directory or --model (a folder, or one of {', '.join(MODEL_SHAPES)})"
        )
    if target is not None and recipe is not None:
        raise UserError(f"--recipe belongs to --model; {target} has a recipe of its own")


def _check_names(exclude: Sequence[str]) -> None:
    known = dict.fromkeys(system.name for system in TABLE)
    if unknown := sorted({*exclude} - {*known}):
        raise UserError(
            f"--exclude {', '.join(unknown)}: no system is called that; there are {', '.join(known)}"
        )


def _threads(threads: int | None, streams: Sequence[int] | None, cpu: bool) -> tuple[int, tuple[int, ...]]:
    """Return threads of a system and numbers of streams."""
    counts = tuple(dict.fromkeys(streams or (1, 2)))
    if not cpu:
        if threads:
            raise UserError("--threads belongs to a bench on a CPU; add --cpu")
        return 1, counts
    cores = find_cpu().cores
    if (running := threads or cores) > cores:
        raise UserError(f"--threads {running} is more than the {cores} cores of this process")
    if wrong := [str(count) for count in streams or () if count > running]:
        raise UserError(f"--streams {', '.join(wrong)} is more than {running} threads: one for each at least")
    return running, tuple(count for count in counts if count <= running)


def _owned_folder(
    place: Path, target: Path | None, recipe: Recipe, options: BenchOptions, note: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Hold the folder of a bench: of the run that is measured, or one for this model and recipe."""
    if target is not None and place.resolve() == target.resolve():
        if options.overwrite:
            raise UserError(f"--overwrite would move the run that is measured, {target}; give another --out")
        return locked_folder(place)
    name = read_config(target).model if target else options.model
    known = None if name in MODEL_SHAPES or name is None else model_fingerprint(name)
    identity = RunIdentity(kind="bench", recipe=recipe.name, model=model_location(name), model_sha256=known)
    return owned_folder(place, identity, overwrite=options.overwrite, say=note)


def _open_all(  # noqa: PLR0913, PLR0917
    target: Path | None,
    model: str | None,
    recipes: Sequence[str | None],
    folder: Path,
    options: BenchPlan,
    pooling: Pooling | None,
    work: GpuWork | CpuWork,
) -> Target:
    """Return the target by the first recipe, with those by the others, exported at the same time."""

    def start(run: Path) -> None:
        if isinstance(work, GpuWork):
            start_compiles(work, run, options)

    if target is not None:
        opened = run_target(target)
        start(target)
        return opened
    assert model is not None
    first, *others = recipes
    places = {str(other): folder / "extra" / Path(str(other)).stem / "work" for other in others}
    waits = [
        start_export(work, model, other, place, options)
        for other, place in places.items()
        if pooling is None and isinstance(work, GpuWork)
    ]
    seed, longest = options.seed, max(options.lengths)
    opened = model_target(model, recipe_for(model, first), folder / "work", seed, longest, pooling, start)
    for wait in waits:
        wait()
    for other, place in places.items():
        extra = model_target(model, recipe_for(model, other), place, seed, longest, pooling)
        name = extra.session.recipe.name
        if name in {opened.session.recipe.name, *opened.extra}:
            raise UserError(f"two recipes to measure are called {name!r}; give one another name")
        opened.extra[name] = extra
    return opened
