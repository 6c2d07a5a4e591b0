"""The quick bench that ends a run: its engine against its twin without INT8 at shapes that users have."""

import os
from contextlib import ExitStack

from qdqbench.eval.bench.gpu import GpuWork, background
from qdqbench.eval.bench.report import stale_files
from qdqbench.eval.bench.results import BENCH_FILE, read_bench, write_bench
from qdqbench.eval.bench.run import require_gpu, run_bench
from qdqbench.eval.bench.systems import BenchPlan, Work, systems_of
from qdqbench.eval.bench.target import session_target
from qdqbench.quantize.pipeline.outcomes import Skipped, read_built, read_engine_run
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.utils.errors import QdqError
from qdqbench.quantize.utils.progress import Within, reporting_to
from qdqbench.quantize.utils.system.cpu import find_cpu

CPU_SHAPES, GPU_SHAPES = ((1, 128), (8, 128), (32, 32)), ((1, 128), (8, 128), (32, 128))
ROUNDS, DURATION_S, INPUT_SETS = 10, 1.0, 4


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
        plan = BenchPlan(
            quick=True,
            device="cpu" if own.on_cpu else "gpu",
            batches=[*dict.fromkeys(batch for batch, _ in shapes)],
            lengths=[*dict.fromkeys(length for _, length in shapes)],
            shapes=shapes,
            dataset=None,
            streams=[] if own.on_cpu else [1],
            rounds=ROUNDS,
            duration_s=DURATION_S,
            iterations=None,
            input_sets=INPUT_SETS,
            engine_shapes="recipe",
            seed=session.config.seed,
            threads=find_cpu().cores if own.on_cpu else None,
            baselines=own.backend == "cuda",
            fp32=own.on_cpu,
        )
        target, command = session_target(session), session.config.command
        others = {*systems_of(target, plan)} - {twin, "int8"}
        plan = plan.model_copy(update={"exclude": tuple(others)})
        with reporting_to(Within()), ExitStack() as stack:
            if own.on_cpu:
                bench = run_bench(target, plan, Work(), command=command)
            else:
                work = GpuWork(stack.enter_context(background(os.cpu_count() or 1)))
                bench = run_bench(target, plan, work, command=command, backend=require_gpu(own.backend))
    except (QdqError, RuntimeError) as error:  # of CUDA too: no report is lost for it
        return f"no quick bench: {' '.join(str(error).split())[:300]}"
    failed = bench.errors[0] if bench.errors else ""
    bench.errors, bench.configs = [], [config for config in bench.configs if config.headline]
    if bench.configs:
        write_bench(folder / BENCH_FILE, bench)
    return failed and f"quick bench: {failed}"
