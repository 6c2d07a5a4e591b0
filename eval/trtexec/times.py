"""What trtexec measured of a run's engines, as a bench."""

from pathlib import Path

import numpy as np

from qdqbench.eval.bench.loop import LEAST_FOR_P99
from qdqbench.eval.bench.results import Bench, BenchCell, BenchContestant, BenchRow, BenchSettings, speedups
from qdqbench.eval.bench.target import run_target
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.names import name_list
from qdqbench.quantize.core.results import EngineResult, LayerRow
from qdqbench.quantize.engine.hazards import hazards
from qdqbench.quantize.engine.inspection import slow_reasons
from qdqbench.quantize.engine.layers import read_table
from qdqbench.quantize.machine.environment import environment, now
from qdqbench.quantize.rundir.outcomes import read_built
from qdqbench.quantize.trtexec.command import SECONDS
from qdqbench.quantize.trtexec.log import Builder, read_builder
from qdqbench.quantize.trtexec.plan import FOLDER, PLAN, SCRIPT, Case, Plan, read_plan, require_current
from qdqbench.quantize.trtexec.read import Times, read_times

ROUNDS = 12  # parts of one measurement, in their order: its own spread, not that of a busy machine


def bench_of_times(run: Path, command: str) -> Bench:
    """Latency of a run's engines from the times that trtexec exported.

    Raises:
        UserError: trtexec measured nothing, or something else than this run's files; names what lacks.
    """
    folder = run / FOLDER
    if not (folder / PLAN).is_file():
        raise UserError(
            f"{folder} does not exist; write it with `qdqbench build {run} --print-trtexec`, and run its "
            f"{SCRIPT}"
        )
    plan, target = read_plan(folder), run_target(run)
    require_current(folder, plan)
    stems = {
        (name, graph): folder / "times" / f"{graph}.{name}.json" for name in plan.timed for graph in plan.onnx
    }
    if lost := [str(path.relative_to(folder)) for path in stems.values() if not path.is_file()]:
        raise UserError(f"{folder} has no {name_list(lost)}; go on with its {SCRIPT}")
    builder = read_builder(folder / f"{plan.graph}.log")
    made = f"tensorrt {builder.version}"
    tables: dict[str, list[LayerRow]] = {
        graph: read_table(folder / f"{graph}.layers.json") for graph in plan.onnx
    }
    built = read_built(run)
    cells = [
        _cell(name, case, {graph: read_times(stems[name, graph]) for graph in plan.onnx}, tables, built)
        for name, case in plan.timed.items()
    ]
    return Bench(
        created=now(),
        command=command,
        complete=True,
        device="gpu",
        compute_capability=builder.compute_capability,
        target=target.about,
        recipe=target.session.recipe.model_dump(mode="json"),
        settings=_settings(plan, target.session.config.seed, target.about.calibration),
        contestants=[
            BenchContestant(name=graph, label=f"{graph.upper()} engine", precision=graph, backend=made)
            for graph in plan.onnx
        ],
        cells=cells,
        notes=hazards("tensorrt", builder.version, builder.compute_capability),
        warnings=[
            "trtexec measured one engine after the other, so that clocks may differ between them; outputs "
            "were not compared while it did"
        ],
        errors=[],
        environment=_environment(builder),
    )


def _cell(
    name: str,
    case: Case,
    times: dict[str, Times],
    tables: dict[str, list[LayerRow]],
    built: object,
) -> BenchCell:
    rows = []
    for graph, found in times.items():
        parts = np.array_split(found.compute, min(ROUNDS, len(found.compute)))
        median = [float(np.median(part)) for part in parts]
        count = len(found.compute)
        p50, p90, p99 = (float(each) for each in np.percentile(found.compute, (50, 90, 99)))
        row = BenchRow(
            contestant=graph,
            status="done",
            detail=f"trtexec, CUDA graph, profile {case.profile}",
            launches=count,
            median_ms=float(np.median(median)),
            p50_ms=p50,
            p90_ms=p90,
            p99_ms=p99 if count >= LEAST_FOR_P99 else None,
            round_ms=median,
            sequences_per_s=1000 * case.batch / float(np.median(median)),
        )
        if graph == "int8" and isinstance(built, EngineResult):
            row.int8_gemms, row.not_int8 = built.int8_gemms, built.not_int8
            row.expected_int8_gemms, row.engine_bytes = built.expected_int8_gemms, built.bytes
        rows.append(row)
    int8, fp16 = tables.get("int8"), tables.get("fp16")
    return BenchCell(
        kind="fixed",
        batch=case.batch,
        length=case.length,
        sequences=case.batch,
        shapes=1,
        real_tokens=case.batch * case.length,
        padded_tokens=case.batch * case.length,
        reference=None,
        rows=rows,
        speedups=speedups(rows, 0, lambda: list(slow_reasons(int8, fp16)) if int8 and fp16 else []),
    )


def _settings(plan: Plan, seed: int, calibration: str) -> BenchSettings:
    shapes = plan.timed.values()
    return BenchSettings(
        batches=sorted({case.batch for case in shapes}),
        lengths=sorted({case.length for case in shapes}),
        real_lengths=None,
        streams=[1],
        rounds=ROUNDS,
        seconds=SECONDS,
        repeats=None,
        input_sets=1,
        profile="recipe",
        seed=seed,
        how=f"trtexec measured one engine after the other for {SECONDS:g} s each, as CUDA graphs without "
        f"copies: GPU time of every query, here in {ROUNDS} parts one after the other; random tokens, seed "
        f"{seed}; INT8 scales from {calibration}. A speed-up is the ratio of the medians over the parts with "
        "its 95% bootstrap interval over them.",
    )


def _environment(builder: Builder) -> dict[str, object]:
    """Versions of what is here, and the GPU that trtexec ran on; its driver is not in the log."""
    found = environment()
    versions = found["versions"] | {"tensorrt": builder.version}
    return found | {"gpu": builder.gpu, "driver": None, "versions": versions}
