"""Latency: a bench of a run directory, a model or a built-in shape, with its reports."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Literal

from qdqbench.eval.api.runs import silent
from qdqbench.eval.bench.cell import BenchOptions, Makers
from qdqbench.eval.bench.real import real_splits
from qdqbench.eval.bench.results import BENCH_FILE, Bench, write_bench
from qdqbench.eval.bench.run import require_gpu, run_bench
from qdqbench.eval.bench.target import Target, check_lengths, model_target, recipe_for, run_target
from qdqbench.eval.benchreport.report import write_bench_reports
from qdqbench.eval.cpubench.cell import cpu_makers
from qdqbench.eval.cpubench.contestants import own_backend, runs_on_cpu
from qdqbench.eval.gpubench.cell import gpu_makers
from qdqbench.eval.gpubench.contestants import TABLE
from qdqbench.eval.runreport.report import refresh_reports
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.encoders.identity import model_fingerprint
from qdqbench.quantize.encoders.pooling import Pooling
from qdqbench.quantize.families.shapes import MODEL_SHAPES
from qdqbench.quantize.machine.cpu import find_cpu
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.rundir.config import asked_pooling
from qdqbench.quantize.rundir.ownership import (
    RunIdentity,
    default_folder,
    locked_folder,
    model_location,
    owned_folder,
)
from qdqbench.quantize.rundir.session import read_config

DEFAULT_BATCHES, DEFAULT_CPU_BATCHES = (1, 8, 32, 128), (1, 8)
DEFAULT_REAL_BATCH = 32
DEFAULT_ROUNDS, DEFAULT_CPU_ROUNDS = 12, 6  # 12 is balanced for 2, 3, 4 and 6 contestants


def bench(  # noqa: PLR0913
    target: str | Path | None = None,
    *,
    model: str | None = None,
    pooling: str | None = None,
    normalize: bool = False,
    recipe: str | None = None,
    also: Sequence[str] | None = None,
    batch: Sequence[int] | None = None,
    length: Sequence[int] | None = None,
    real_lengths: str | None = None,
    real_batch: Sequence[int] | None = None,
    data: str | None = None,
    tokenizer: str | None = None,
    streams: Sequence[int] | None = None,
    threads: int | None = None,
    rounds: int | None = None,
    seconds: float = 1.0,
    repeats: int | None = None,
    peers: bool = True,
    fp32: bool = True,
    compile_seconds: float = 90.0,
    profile: Literal["both", "static", "recipe"] = "both",
    cpu: bool = False,
    keep_engines: bool = False,
    prepare: bool = False,
    without: Sequence[str] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    replace: bool = False,
    progress: Callable[[str], None] = silent,
    written: Callable[[Path], None] = silent,
    note: Callable[[str], None] = silent,
    command: str = "qdqbench.bench",
) -> Bench:
    """INT8 against its twins and its peers, on a GPU or a CPU; bench.json and its reports are written.

    Measurements that failed are in `errors` of the result.

    Args:
        target: run directory; or `model` is given.
        model: model folder, or a name of `families.shapes` with random weights, such as "bert-base".
        pooling: with `model`: as an embedding model that pools by mean, cls or last.
        normalize: to length 1; with `pooling`.
        recipe: with `model`: name or YAML file; None: the default.
        also: with `model`, on a GPU: INT8 engines by these recipes too, in the same process.
        batch: batch sizes; None: 1, 8, 32 and 128, on a CPU 1 and 8; with `real_lengths` none.
        length: tokens per sequence; None: 128.
        real_lengths: time the whole evaluation split of this task, in batches of similar lengths.
        real_batch: batch sizes of `real_lengths`; None: 32.
        data: data of `real_lengths`; None: the run's.
        tokenizer: of `real_lengths` for a built-in shape.
        streams: inferences at once; None: 1 and 2.
        threads: of each contestant on a CPU, all streams together; None: one for each core.
        rounds: interleaved rounds; None: 12, on a CPU 6.
        seconds: latency time per contestant and shape, over all rounds.
        repeats: launches per round, instead of `seconds`.
        peers: PyTorch and torch.compile too.
        fp32: the FP32 twin too.
        compile_seconds: for each shape and mode of torch.compile on a GPU; what takes longer is left out.
        profile: engines for the recipe's shapes, for exactly each shape ("static"), or both; on a GPU.
        cpu: on the CPU, even where a GPU is; without a GPU that is so if the recipe's backend allows it.
        keep_engines: leave the engines in the work folder; the next bench takes them.
        prepare: measure nothing, only leave there what a bench needs.
        without: names of contestants that are left out; on a GPU.
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
    _check_arguments(path, model, recipe, profile)
    asked = asked_pooling(pooling, normalize)
    if path is not None and asked:
        raise UserError(f"--pooling belongs to --model; {path} has its own")
    for option, value in (("--seconds", seconds), ("--compile-seconds", compile_seconds)):
        if not value > 0:
            raise UserError(f"{option} is {value}; give a positive number")
    asked_recipe = read_config(path).recipe if path else recipe_for(str(model), recipe)
    if asked_recipe.auto_shapes and path is None and profile != "static":
        raise UserError(
            f"the shapes of recipe {asked_recipe.name} are those of a run's data (shapes: auto); give its "
            "run directory, or --profile static"
        )
    wanted = asked_recipe.engine.backend
    if cpu := cpu or runs_on_cpu(wanted):
        own_backend(wanted)
    backend = ("", "") if cpu else require_gpu(wanted)
    _check_gpu_options(also or (), without or (), prepare=prepare, model=model, cpu=cpu)
    running, counts = _threads(threads, streams, cpu)
    progress("exporting")
    lengths = tuple(dict.fromkeys(length or (128,)))
    sizes: Sequence[int] = DEFAULT_CPU_BATCHES if cpu else DEFAULT_BATCHES
    if real_lengths is not None and length is None:
        sizes = ()
    options = BenchOptions(
        batches=tuple(dict.fromkeys(batch or sizes)),
        lengths=lengths,
        real=(),
        streams=counts,
        rounds=rounds or (DEFAULT_CPU_ROUNDS if cpu else DEFAULT_ROUNDS),
        seconds=seconds,
        repeats=repeats,
        peers=peers,
        fp32=fp32,
        compile_seconds=compile_seconds,
        profile=profile,
        seed=seed,
        cpu=cpu,
        keep_engines=keep_engines or prepare,
        without=tuple(without or ()),
        measured=not prepare,
        threads=running,
    )
    place = Path(out) if out else path or default_folder("bench", model, asked_recipe.name)
    with ExitStack() as stack:
        stack.enter_context(_taken(place, path, model, asked_recipe, replace=replace, note=note))
        makers = cpu_makers() if cpu else gpu_makers(backend, stack)
        chosen = _open_all(path, model, (recipe, *(also or ())), place, options, asked, makers)
        if real_lengths is not None:
            splits = real_splits(
                chosen,
                real_lengths,
                batches=tuple(dict.fromkeys(real_batch or (DEFAULT_REAL_BATCH,))),
                data=data,
                tokenizer=tokenizer,
                buckets=not cpu,
            )
            options = dataclasses.replace(options, real=splits)
        check_lengths(chosen, lengths)
        found = run_bench(
            chosen,
            options,
            makers,
            command=command,
            backend=backend,
            save=lambda result: write_bench(place / BENCH_FILE, result),
            announce=progress,
        )
        return found if prepare else report_bench(found, place, written)


def report_bench(found: Bench, folder: Path, written: Callable[[Path], None]) -> Bench:
    """Write the reports of a bench and again those of its run; why these cannot be is a warning of it."""
    refreshed, why = refresh_reports(folder)
    if why:
        found = found.model_copy(update={"warnings": [*found.warnings, why]})
    for report in [*write_bench_reports(found, folder), *refreshed]:
        written(report)
    return found


def _check_arguments(target: Path | None, model: str | None, recipe: str | None, profile: str) -> None:
    if (target is None) == (model is None):
        raise UserError(
            f"give either a run directory or --model (a folder, or one of {', '.join(MODEL_SHAPES)})"
        )
    if target is not None and recipe is not None:
        raise UserError(f"--recipe belongs to --model; {target} has a recipe of its own")
    if profile not in ("both", "static", "recipe"):
        raise UserError(f"--profile {profile!r} is unknown; use both, static or recipe")


def _check_gpu_options(
    also: Sequence[str], without: Sequence[str], *, prepare: bool, model: str | None, cpu: bool
) -> None:
    if also and (model is None or cpu):
        raise UserError("--also belongs to --model on a GPU: other recipes of the model that is measured")
    if cpu and (prepare or without):
        raise UserError("--prepare and --without belong to a bench on a GPU")
    if unknown := sorted({*without} - {kind.name for kind in TABLE}):
        names = ", ".join(kind.name for kind in TABLE)
        raise UserError(f"--without {', '.join(unknown)}: no contestant is called that; there are {names}")


def _threads(threads: int | None, streams: Sequence[int] | None, cpu: bool) -> tuple[int, tuple[int, ...]]:
    """Threads of a contestant and numbers of streams."""
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


def _taken(  # noqa: PLR0913
    place: Path,
    target: Path | None,
    model: str | None,
    recipe: Recipe,
    *,
    replace: bool,
    note: Callable[[str], None],
) -> AbstractContextManager[None]:
    """The folder of a bench: of the run that is measured, or one for this model and recipe."""
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
    makers: Makers,
) -> Target:
    """The target by the first recipe, with those by the others, which are exported beside it."""
    if target is not None:
        found = run_target(target)
        makers.start(target, options)
        return found
    assert model is not None
    first, *others = recipes
    places = {str(other): folder / "also" / Path(str(other)).stem / "work" for other in others}
    waits = [
        makers.export(model, other, place, options) for other, place in places.items() if pooling is None
    ]
    chosen, seed, longest = recipe_for(model, first), options.seed, max(options.lengths)
    found = model_target(
        model, chosen, folder / "work", seed, longest, pooling, lambda run: makers.start(run, options)
    )
    for wait in waits:
        wait()
    for other, place in places.items():
        made = model_target(model, recipe_for(model, other), place, seed, longest, pooling)
        name = made.session.recipe.name
        if name in {found.session.recipe.name, *found.also}:
            raise UserError(f"two recipes to measure are called {name!r}; give one another name")
        found.also[name] = made
    return found
