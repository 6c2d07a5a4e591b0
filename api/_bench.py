"""Latency: a bench of a run directory, a model or a built-in shape, with its reports."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from qdqbench._runs import silent
from qdqbench.eval.bench.config import BenchOptions
from qdqbench.eval.bench.cpu import CpuWork
from qdqbench.eval.bench.dataset import batched_splits
from qdqbench.eval.bench.gpu import GpuWork, start_compiles, start_export
from qdqbench.eval.bench.prebuild import background
from qdqbench.eval.bench.report import write_bench_reports
from qdqbench.eval.bench.results import BENCH_FILE, Bench, EngineShapes, write_bench
from qdqbench.eval.bench.run import require_gpu, run_bench
from qdqbench.eval.bench.systems import TABLE, own_backend, runs_on_cpu
from qdqbench.eval.bench.target import Target, check_lengths, model_target, recipe_for, run_target
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
from qdqbench.quantize.utils.system.cpu import find_cpu

DEFAULT_BATCHES, DEFAULT_CPU_BATCHES = (1, 8, 32, 128), (1, 8)
DEFAULT_DATASET_BATCH = 32
DEFAULT_ROUNDS, DEFAULT_CPU_ROUNDS = 12, 6  # 12 is balanced for 2, 3, 4 and 6 contestants


def bench(  # noqa: PLR0913
    target: str | Path | None = None,
    *,
    model: str | None = None,
    pooling: str | None = None,
    normalize: bool = False,
    recipe: str | None = None,
    extra_recipe: Sequence[str] | None = None,
    batch: Sequence[int] | None = None,
    length: Sequence[int] | None = None,
    dataset: str | None = None,
    dataset_batch: Sequence[int] | None = None,
    data: str | None = None,
    tokenizer: str | None = None,
    streams: Sequence[int] | None = None,
    threads: int | None = None,
    rounds: int | None = None,
    duration: float = 1.0,
    iterations: int | None = None,
    baselines: bool = True,
    fp32: bool = True,
    compile_seconds: float = 90.0,
    engine_shapes: EngineShapes = "both",
    cpu: bool = False,
    keep_engines: bool = False,
    build_only: bool = False,
    exclude: Sequence[str] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    replace: bool = False,
    progress: Callable[[str], None] = silent,
    written: Callable[[Path], None] = silent,
    note: Callable[[str], None] = silent,
    command: str = "qdqbench.bench",
) -> Bench:
    """Measure INT8 against other engines, PyTorch and other quantizers; write bench.json and its reports.

    Measurements that failed are in `errors` of the result.

    Args:
        target: run directory; or `model` is given.
        model: model folder, or a name of `families.shapes` with random weights, such as "bert-base".
        pooling: with `model`: as an embedding model that pools by mean, cls or last.
        normalize: to length 1; with `pooling`.
        recipe: with `model`: name or YAML file; None: the default.
        extra_recipe: with `model`, on a GPU: INT8 engines by these recipes too, in the same process.
        batch: batch sizes; None: 1, 8, 32 and 128, on a CPU 1 and 8; with `dataset` none.
        length: tokens per sequence; None: 128.
        dataset: task whose whole evaluation split is timed, in batches of similar lengths.
        dataset_batch: batch sizes of `dataset`; None: 32.
        data: data of `dataset`; None: the run's.
        tokenizer: of `dataset` for a built-in shape.
        streams: inferences at once; None: 1 and 2.
        threads: of each system on a CPU, all streams together; None: one for each core.
        rounds: interleaved rounds; None: 12, on a CPU 6.
        duration: seconds of latency per system and config, over all rounds.
        iterations: launches per round, instead of `duration`.
        baselines: PyTorch, torch.compile, unpadded FP16 and other quantizers too.
        fp32: the FP32 engine too.
        compile_seconds: for each shape and mode of torch.compile on a GPU; what takes longer is left out.
        engine_shapes: engines for the recipe's shapes, for exactly each shape, or both; on a GPU.
        cpu: on the CPU, even where a GPU is; without a GPU that is so if the recipe's backend allows it.
        keep_engines: leave the engines in the work folder; the next bench takes them.
        build_only: measure nothing, only leave there what a bench needs; on a GPU.
        exclude: names of systems that are left out.
        seed: of weights, inputs and bootstrap.
        out: folder; None: that of the run, or runs/bench-MODEL-RECIPE.
        replace: what an earlier bench left in a folder of its own is removed, whatever it was of; else
            another recipe or model is refused.
        progress: called with what is being done.
        written: called with each report.
        note: called with what was removed.
        command: recorded in the result.

    Raises:
        UserError: arguments that do not fit together, or a target that cannot be used.
        MissingDevice: the GPU or the runtime that is asked for is not there; before anything is exported.
    """
    path = None if target is None else Path(target)
    _check_target(path, model, recipe)
    asked = select_pooling(pooling, normalize)
    if path is not None and asked:
        raise UserError(f"--pooling belongs to --model; {path} has its own")
    for option, value in (("--duration", duration), ("--compile-seconds", compile_seconds)):
        if not value > 0:
            raise UserError(f"{option} is {value}; give a positive number")
    own_recipe = read_config(path).recipe if path else recipe_for(str(model), recipe)
    if own_recipe.auto_shapes and path is None and engine_shapes != "exact":
        raise UserError(
            f"the shapes of recipe {own_recipe.name} are those of a run's data (shapes: auto); give its "
            "run directory, or --engine-shapes exact"
        )
    choice = own_recipe.engine.backend
    if cpu := cpu or runs_on_cpu(choice):
        own_backend(choice)
    backend = ("", "") if cpu else require_gpu(choice)
    extra = tuple(extra_recipe or ())
    if extra and (model is None or cpu):
        raise UserError("--extra-recipe belongs to --model on a GPU: other recipes of the model measured")
    if cpu and build_only:
        raise UserError("--build-only belongs to a bench on a GPU")
    _check_names(exclude or ())
    running, counts = _threads(threads, streams, cpu)
    progress("exporting")
    sizes: Sequence[int] = DEFAULT_CPU_BATCHES if cpu else DEFAULT_BATCHES
    if dataset is not None and length is None:
        sizes = ()
    options = BenchOptions(
        device="cpu" if cpu else "gpu",
        batches=tuple(dict.fromkeys(batch or sizes)),
        lengths=tuple(dict.fromkeys(length or (128,))),
        splits=(),
        streams=counts,
        rounds=rounds or (DEFAULT_CPU_ROUNDS if cpu else DEFAULT_ROUNDS),
        duration_s=duration,
        iterations=iterations,
        baselines=baselines,
        fp32=fp32,
        compile_s=compile_seconds,
        engine_shapes=engine_shapes,
        seed=seed,
        keep_engines=keep_engines or build_only,
        exclude=tuple(exclude or ()),
        build_only=build_only,
        threads=running,
    )
    place = Path(out) if out else path or default_folder("bench", model, own_recipe.name)
    with ExitStack() as stack:
        stack.enter_context(_owned_folder(place, path, model, own_recipe, replace=replace, note=note))
        work = CpuWork() if cpu else GpuWork(stack.enter_context(background(os.cpu_count() or 1)))
        opened = _open_all(path, model, (recipe, *extra), place, options, asked, work)
        if dataset is not None:
            splits = batched_splits(
                opened,
                dataset,
                batches=tuple(dict.fromkeys(dataset_batch or (DEFAULT_DATASET_BATCH,))),
                data=data,
                tokenizer=tokenizer,
                buckets=not cpu,
            )
            options = dataclasses.replace(options, splits=splits)
        check_lengths(opened, options.lengths)
        result = run_bench(
            opened,
            options,
            work,
            command=command,
            backend=backend,
            save=lambda partial: write_bench(place / BENCH_FILE, partial),
            announce=progress,
        )
        return result if build_only else _report(result, place, written)


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


def _owned_folder(  # noqa: PLR0913
    place: Path,
    target: Path | None,
    model: str | None,
    recipe: Recipe,
    *,
    replace: bool,
    note: Callable[[str], None],
) -> AbstractContextManager[None]:
    """Hold the folder of a bench: of the run that is measured, or one for this model and recipe."""
    if target is not None and place.resolve() == target.resolve():
        if replace:
            raise UserError(f"--replace would move the run that is measured, {target}; give another --out")
        return locked_folder(place)
    name = read_config(target).model if target else model
    known = None if name in MODEL_SHAPES or name is None else model_fingerprint(name)
    identity = RunIdentity(kind="bench", recipe=recipe.name, model=model_location(name), model_sha256=known)
    return owned_folder(place, identity, replace=replace, say=note)


def _open_all(  # noqa: PLR0913, PLR0917
    target: Path | None,
    model: str | None,
    recipes: Sequence[str | None],
    folder: Path,
    options: BenchOptions,
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
