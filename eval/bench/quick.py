"""The quick bench that ends a run: its engine against its twin without INT8 at shapes that users have."""

import copy
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qdqbench.eval.bench.report import stale_files
from qdqbench.eval.bench.results import BENCH_FILE, read_bench, row_of, write_bench
from qdqbench.eval.bench.run import open_work, require_gpu, run_bench
from qdqbench.eval.bench.systems import BenchPlan, systems_of
from qdqbench.eval.bench.target import model_target, session_target
from qdqbench.quantize.engine.backend import gpu_backend
from qdqbench.quantize.pipeline.outcomes import Skipped, read_built, read_engine_run
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.report.formats import label
from qdqbench.quantize.utils.errors import CheckFailed, QdqError
from qdqbench.quantize.utils.progress import Within, reporter, reporting_to
from qdqbench.quantize.utils.system.cpu import find_cpu

CPU_SHAPES, GPU_SHAPES = ((1, 128), (8, 128), (32, 32)), ((1, 128), (8, 128), (32, 128))
ROUNDS, DURATION_S, INPUT_SETS = 10, 1.0, 4
TIMED_LAYERS = 2  # of a model that `auto` times: enough to tell backends apart, and quick to build


def bench_quickly(session: Session) -> str:
    """Write `bench.json` of a run whose engine ran here; return why that failed.

    A bench of the same files stays, and so does any that is not quick. On a GPU the twin is the FP16 engine
    of the same backend; next to CUDA kernels, which have none, it is PyTorch in FP16.
    """
    folder, recipe, own = session.folder, session.recipe, session.target
    if not recipe.quantizes or isinstance(read_built(folder), Skipped):
        return ""
    if isinstance(read_engine_run(folder), Skipped):
        return ""
    twin = "torch-fp16" if own.backend == "cuda" else "fp16"
    twin = f"{own.compute}-{own.backend}" if own.on_cpu else twin
    try:
        if (folder / BENCH_FILE).is_file():
            known = read_bench(folder / BENCH_FILE)
            if not known.settings.quick or not stale_files(known, folder):
                return ""
        longest = recipe.export.max_length
        every = CPU_SHAPES if own.on_cpu else GPU_SHAPES
        shapes = [*dict.fromkeys((batch, min(length, longest)) for batch, length in every)]
        plan = _plan_for(shapes, own.on_cpu, session.config.seed, baselines=own.backend == "cuda")
        target, command = session_target(session), session.config.command
        others = {*systems_of(target, plan)} - {twin, "int8"}
        plan = plan.model_copy(update={"exclude": tuple(others)})
        with reporting_to(Within()), ExitStack() as stack:
            work = open_work(None if own.on_cpu else require_gpu(own.backend), stack)
            bench = run_bench(target, plan, work, command=command)
    except (QdqError, RuntimeError) as error:  # of CUDA too: no report is lost for it
        return f"no quick bench: {' '.join(str(error).split())[:300]}"
    failed = bench.errors[0] if bench.errors else ""
    bench.errors, bench.configs = [], [config for config in bench.configs if config.headline]
    if bench.configs:
        write_bench(folder / BENCH_FILE, bench)
    return failed and f"quick bench: {failed}"


def _plan_for(shapes: list[tuple[int, int]], on_cpu: bool, seed: int, *, baselines: bool) -> BenchPlan:
    return BenchPlan(
        quick=True,
        device="cpu" if on_cpu else "gpu",
        batches=[*dict.fromkeys(batch for batch, _ in shapes)],
        lengths=[*dict.fromkeys(length for _, length in shapes)],
        shapes=shapes,
        dataset=None,
        streams=[] if on_cpu else [1],
        rounds=ROUNDS,
        duration_s=DURATION_S,
        iterations=None,
        input_sets=INPUT_SETS,
        engine_shapes="recipe",
        seed=seed,
        threads=find_cpu().cores if on_cpu else None,
        baselines=baselines,
        fp32=on_cpu,
    )


def time_backends(recipe: Recipe, config: Any) -> tuple[bool, str]:
    """Time two layers of a model's sizes, with random weights, in backend cuda and in TensorRT(-RTX).

    Returns whether backend cuda was as fast at every shape, and what `auto` takes and why.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    small, other = copy.deepcopy(config), label(gpu_backend())
    small.num_hidden_layers = TIMED_LAYERS
    plan = _plan_for([*GPU_SHAPES], False, 0, baselines=False)
    reporter().log(f"auto times {TIMED_LAYERS} layers of this size in cuda and {other}, for about a minute")
    try:
        with TemporaryDirectory() as name, reporting_to(Within()), torch.random.fork_rng(devices=[]):
            folder = Path(name)
            torch.manual_seed(0)
            classifier: Any = AutoModelForSequenceClassification
            classifier.from_config(small).save_pretrained(folder / "model")
            target = model_target(str(folder / "model"), recipe.ptq, folder / "run", 0, 128, twins=False)
            others = {*systems_of(target, plan)} - {"int8", "int8-cuda"}
            plan = plan.model_copy(update={"exclude": tuple(others)})
            with ExitStack() as stack:
                work = open_work(require_gpu(gpu_backend()), stack)
                bench = run_bench(target, plan, work, command="auto")
        rows = [[row_of(cell, system) for system in ("int8-cuda", "int8")] for cell in bench.configs]
        times = [(ours.median_ms or 0.0, theirs.median_ms or 0.0) for ours, theirs in rows if ours and theirs]
        if len(times) < len(GPU_SHAPES):
            raise CheckFailed("; ".join([*bench.errors, *bench.warnings])[:300])
    except (QdqError, RuntimeError, OSError) as error:
        return False, f"auto takes {other}: timing cuda failed ({error})"
    better = all(ours <= theirs for ours, theirs in times)
    said = ", ".join(
        f"{ours:.3g} against {theirs:.3g} ms at {batch} x {length}"
        for (ours, theirs), (batch, length) in zip(times, GPU_SHAPES, strict=True)
    )
    which = "cuda" if better else other
    return better, f"auto takes {which}: {TIMED_LAYERS} layers took {said}, in cuda against {other}"
