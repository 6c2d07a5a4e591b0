"""The quick bench that ends a run on a CPU: its engine against its twin without INT8 at one shape."""

from qdqbench.eval.bench.cpu import CpuWork
from qdqbench.eval.bench.report import stale_files
from qdqbench.eval.bench.results import BENCH_FILE, read_bench, write_bench
from qdqbench.eval.bench.run import run_bench
from qdqbench.eval.bench.systems import TABLE, BenchPlan
from qdqbench.eval.bench.target import session_target
from qdqbench.quantize.pipeline.artifacts import Skipped, backend_of, cpu_compute, read_built, read_engine_run
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.system.cpu import find_cpu

BATCH, LENGTH, INPUT_SETS = 8, 128, 4
ROUNDS, DURATION_S = 12, 3.0  # with what is prepared and checked about ten seconds


def bench_quickly(session: Session) -> str:
    """Write `bench.json` of a run whose engine ran on this CPU; return why that failed.

    A bench of the same files stays, and so does any that is not quick.
    """
    folder, recipe = session.folder, session.recipe
    backend = backend_of(recipe)
    if backend not in CPU_BACKENDS or not recipe.quantizes:
        return ""
    if isinstance(read_built(folder), Skipped) or isinstance(read_engine_run(folder), Skipped):
        return ""
    try:
        if (folder / BENCH_FILE).is_file():
            known = read_bench(folder / BENCH_FILE)
            if not known.settings.quick or not stale_files(known, folder):
                return ""
        twin = f"{cpu_compute(recipe)}-{backend}"
        others = {each.name for each in TABLE if each.device == "cpu"} - {twin, f"int8-{backend}"}
        plan = BenchPlan(
            quick=True,
            device="cpu",
            batches=[BATCH],
            lengths=[min(LENGTH, recipe.export.max_length)],
            dataset=None,
            streams=[],
            rounds=ROUNDS,
            duration_s=DURATION_S,
            iterations=None,
            input_sets=INPUT_SETS,
            engine_shapes="recipe",
            seed=session.config.seed,
            threads=find_cpu().cores,
            baselines=False,
            fp32=True,
            exclude=tuple(others),
        )
        bench = run_bench(session_target(session), plan, CpuWork(), command=session.config.command)
    except (UserError, CheckFailed, MissingDevice) as error:
        return f"no quick bench: {error}"
    if bench.errors:
        return f"no quick bench: {bench.errors[0]}"
    write_bench(folder / BENCH_FILE, bench)
    return ""
