"""Latency: a bench of a run directory, a model or a built-in shape, with its reports."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

from qdqbench._options import BenchOptions
from qdqbench._progress import displayed
from qdqbench._runs import Progress
from qdqbench.eval.bench.gpu import start_compiles, start_export
from qdqbench.eval.bench.report import write_bench_reports
from qdqbench.eval.bench.results import BENCH_FILE, TENSORRT_SYSTEMS, Bench, read_earlier, write_bench
from qdqbench.eval.bench.run import open_work, require_gpu, run_bench
from qdqbench.eval.bench.systems import TABLE, BenchPlan, Work, own_backend, reads_floats
from qdqbench.eval.bench.target import (
    Target,
    batched_splits,
    check_lengths,
    model_target,
    recipe_for,
    run_target,
)
from qdqbench.eval.runs.report.report import refresh_reports
from qdqbench.quantize.engine.backend import preferred_backend
from qdqbench.quantize.models.families.known import MODEL_SHAPES
from qdqbench.quantize.models.identity import Pooling, model_fingerprint
from qdqbench.quantize.pipeline import ownership
from qdqbench.quantize.pipeline.session import read_config
from qdqbench.quantize.recipe.schema import Recipe, dump_recipe
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import write_text
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.options import path_of, take_options
from qdqbench.quantize.utils.progress import reporter
from qdqbench.quantize.utils.system.cpu import find_cpu
from qdqbench.quantize.utils.system.process import invocation

DEFAULT_BATCHES, DEFAULT_CPU_BATCHES = (1, 8, 32, 128), (1, 8)
DEFAULT_DATASET_BATCH = 32
INPUT_SETS = 8  # different inputs of each shape
DEFAULT_ROUNDS, DEFAULT_CPU_ROUNDS = 12, 6  # 12 is balanced for 2, 3, 4 and 6 contestants


@take_options
def bench(target: str | Path | None = None, *, options: BenchOptions, progress: Progress = None) -> Bench:
    """Measure INT8 against other engines, PyTorch and other quantizers; write bench.json and its reports.

    Measurements that failed are in `errors` of the result.

    Args:
        target: run directory; or `model` is given.
        progress: True for a bar (default in notebooks), or a function that is called with what is being done.

    Raises:
        UserError: arguments that do not fit together, or a target that cannot be used.
        MissingDevice: the GPU or the runtime that is asked for is not there; before anything is exported.
    """
    with displayed(progress):
        return start_bench(target, options)[0]


def start_bench(target: str | Path | None, options: BenchOptions) -> tuple[Bench, list[Path]]:
    """Measure; return the result and its reports."""
    path = None if target is None else path_of(target, "target")
    _check_target(path, options)
    pooling = options.find_pooling()
    if path:
        recipes = [read_config(path).recipe]
    else:
        names = (options.recipe, *(options.extra_recipe or ()))
        recipes = [options.adapt(recipe_for(str(options.model), name)).ptq for name in names]
    own_recipe = recipes[0]
    if own_recipe.auto_shapes and path is None and options.engine_shapes != "exact":
        raise UserError(
            f"the shapes of recipe {own_recipe.name} are those of a run's data (shapes: auto); give its "
            "run directory, or --engine-shapes exact"
        )
    choice = own_recipe.engine.backend
    if cpu := options.cpu or preferred_backend(choice) in CPU_BACKENDS:
        own_backend(choice)
    backend = None if cpu else require_gpu(choice)
    if options.extra_recipe and path:
        raise UserError("--extra-recipe belongs to --model: other recipes of the model measured")
    if cpu and options.build_only:
        raise UserError("--build-only belongs to a bench on a GPU")
    known = dict.fromkeys([*(system.name for system in TABLE), *TENSORRT_SYSTEMS])
    if unknown := sorted({*(options.exclude or ())} - {*known}):
        raise UserError(f"--exclude {', '.join(unknown)}: no system is called that, but {', '.join(known)}")
    plan = _plan(options, cpu)
    place = options.out or path or ownership.default_folder("bench", options.model, own_recipe.name)
    with ExitStack() as stack:
        reporter().begin("exporting")
        stack.enter_context(_owned_folder(place, path, own_recipe, options))
        work = open_work(backend, stack)
        if path:
            opened = run_target(path)
            start_compiles(work, path, plan)
        else:
            opened = _export_all(str(options.model), recipes, place, plan, pooling, work)
        if options.dataset is not None:
            batches = tuple(dict.fromkeys(options.dataset_batch or (DEFAULT_DATASET_BATCH,)))
            source = {"data": options.data, "tokenizer": options.tokenizer}
            splits = batched_splits(opened, options.dataset, batches=batches, **source, buckets=not cpu)
            plan = plan.model_copy(update={"splits": splits})
        check_lengths(opened, plan.lengths)
        save = partial(write_bench, place / BENCH_FILE)
        result = run_bench(
            opened,
            plan,
            work,
            command=invocation(),
            save=save,
            earlier=read_earlier(place / BENCH_FILE, opened.about.files, own_recipe.model_dump(mode="json")),
        )
        if options.build_only:
            return result, []
        refreshed, why = refresh_reports(place)  # those of its run
        if why:
            result = result.model_copy(update={"warnings": [*result.warnings, why]})
        return result, [*write_bench_reports(result, place), *refreshed]


def _plan(options: BenchOptions, cpu: bool) -> BenchPlan:
    """Return what is measured, with the defaults of the device."""
    threads, streams = _threads(options.threads, options.streams, cpu)
    batches: Sequence[int] = DEFAULT_CPU_BATCHES if cpu else DEFAULT_BATCHES
    if options.dataset is not None and options.length is None:
        batches = ()
    values = {name: value for name, value in options if name in BenchPlan.model_fields}
    changed = {
        "device": "cpu" if cpu else "gpu",
        "batches": list(dict.fromkeys(options.batch or batches)),
        "lengths": list(dict.fromkeys(options.length or (128,))),
        "streams": list(streams),
        "rounds": options.rounds or (DEFAULT_CPU_ROUNDS if cpu else DEFAULT_ROUNDS),
        "duration_s": options.duration,
        "input_sets": INPUT_SETS,
        "keep_engines": options.keep_engines or options.build_only,
        "exclude": tuple(options.exclude or ()),
        "threads": threads if cpu else None,
    }
    return BenchPlan(**(values | changed))


def _check_target(target: Path | None, options: BenchOptions) -> None:
    if (target is None) == (options.model is None):
        raise UserError(f"give either a run directory or --model (a folder or {', '.join(MODEL_SHAPES)})")
    for name in ("recipe", "pooling", "set"):
        if target is not None and getattr(options, name):
            raise UserError(f"--{name} belongs to --model; {target} has its own, and its engine is built")
    for name in ("dataset_batch", "data", "tokenizer"):
        if options.dataset is None and getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} belongs to --dataset TASK, whose texts are timed")


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
    place: Path, target: Path | None, recipe: Recipe, options: BenchOptions
) -> AbstractContextManager[None]:
    """Hold the folder of a bench: of the run that is measured, or one for this model and recipe."""
    if target is not None and place.resolve() == target.resolve():
        if options.overwrite:
            raise UserError(f"--overwrite would move the run that is measured, {target}; give another --out")
        return ownership.locked_folder(place)
    name = read_config(target).model if target else options.model
    known = None if name in MODEL_SHAPES or name is None else model_fingerprint(name)
    identity = ownership.RunIdentity(
        kind="bench", recipe=recipe.name, model=ownership.model_location(name), model_sha256=known
    )
    return ownership.owned_folder(place, identity, overwrite=options.overwrite)


def _export_all(  # noqa: PLR0913, PLR0917
    model: str, recipes: Sequence[Recipe], folder: Path, plan: BenchPlan, pooling: Pooling | None, work: Work
) -> Target:
    """Return the target by the first recipe, with those by the others, exported at the same time."""
    recipe, *others = recipes
    if twice := [name for name, count in Counter(each.name for each in recipes).items() if count > 1]:
        raise UserError(f"two recipes to measure are called {twice[0]!r}; give one another name")
    places = {other.name: folder / "extra" / other.name for other in others}
    waits = []
    if work.background is not None and pooling is None:
        for other in others:
            file = places[other.name] / "recipe.yaml"
            write_text(file, dump_recipe(other))
            waits.append(start_export(work, model, str(file), places[other.name] / "work", plan))
    start = partial(start_compiles, work, options=plan)
    seed, longest = plan.seed, max(plan.lengths)
    twins = reads_floats(plan)
    target = model_target(model, recipe, folder / "work", seed, longest, pooling, start, twins=twins)
    for wait in waits:
        wait()
    for other in others:
        place = places[other.name] / "work"
        target.extra[other.name] = model_target(model, other, place, seed, longest, pooling, twins=False)
    return target
