"""A bench of BERT-base on a GPU; every number is invented."""

from typing import Any

from qdqbench.eval.bench import results
from qdqbench.eval.bench.results import Bench

from .records import sample_of

NAMES = ("int8", "fp16", "fp32", "torch-fp32", "torch-fp16", "compile-fp16")


# invented for the tests: milliseconds of each contestant by batch; INT8 is slower than FP16 at batch 1
TIMES = {
    1: (0.8, 0.72, 1.9, 6.1, 5.2, 1.0),
    8: (1.0, 1.7, 6.0, 6.4, 5.4, 1.6),
    32: (1.8, 2.6, 21, 20, 3.1, 2.9),
}


SLOW_REASON = "12 GELU run in a kernel of their own"


def bench_row(name: str, ms: float, batch: int) -> results.BenchRow:
    return results.BenchRow(
        system=name,
        median_ms=ms,
        p50_ms=ms,
        p90_ms=1.1 * ms,
        p99_ms=1.25 * ms,
        round_ms=[ms * factor for factor in (0.99, 0.99, 1.0, 1.01, 1.01)],
        sequences_per_s=1000 * batch / ms,
        throughput=[
            results.BenchThroughput(streams=n, sequences_per_s=1000 * batch * gain / ms, low=1.0, high=9.0)
            for n, gain in ((1, 1.0), (2, 1.3))
        ],
        rel_error=None if name == "torch-fp32" else 0.03,
        int8_gemms=72 if name == "int8" else None,
        expected_int8_gemms=72 if name == "int8" else None,
        engine_bytes=112_000_000 if "-" not in name else None,
        **sample_of("bench row"),
    )


def sample_bench(**changes: Any) -> results.Bench:
    """A bench of BERT-base with random weights on a GPU; every number is invented."""
    configs = []
    for batch, times in TIMES.items():
        rows = [bench_row(name, ms, batch) for name, ms in zip(NAMES, times, strict=True)]
        configs.append(
            results.BenchConfig(
                kind="fixed",
                batch=batch,
                length=128,
                sequences=batch,
                shapes=1,
                real_tokens=128 * batch,
                padded_tokens=128 * batch,
                reference="torch-fp32",
                rows=rows,
                speedups=results.compute_speedups(rows, f"b{batch} s128", 0),
                slow_reasons=[SLOW_REASON] if batch == 1 else [],
            )
        )
    bench = results.Bench.model_validate(sample_of("bench", configs=configs) | changes)
    for cell in bench.configs:
        cell.headline = results.headline_of(bench.systems, cell)
    return bench


def bench_that_is(kind: str) -> Bench:
    bench = sample_bench()
    for cell in bench.configs:
        for ratio in cell.speedups:
            if kind != "slower" and ratio.verdict == "slower":
                ratio.value, ratio.ci95_low, ratio.ci95_high = 1.01, 1.005, 1.02
            if kind == "unclear":
                ratio.ci95_low = 0.99
    return bench


def many_shapes() -> Bench:
    """Twelve shapes."""
    bench = sample_bench()
    lengths = [(cell, cell.length // part) for part in (1, 2, 4, 8) for cell in bench.configs]
    cells = [cell.model_copy(update={"length": length}) for cell, length in lengths]
    return bench.model_copy(update={"configs": cells})


def odd_bench() -> Bench:
    """A bench with an error, a skip, FP8, another recipe, kernels in other forms, a price, and no clocks."""
    bench = sample_bench(errors=["8 x 128: INT8 engine: NaN or infinite logits for 2 of 2 inputs"])
    bench.settings.cost_per_hour = 3.6
    one, eight, last = bench.configs
    for name, label, precision, ms in (
        ("int8-mine", "INT8 engine, mine", "int8", 0.6),
        ("unpadded-fp8", "unpadded FP8", "fp8", 0.7),
    ):
        system = {"name": name, "label": label, "precision": precision, "backend": "torch 2.11.0"}
        bench.systems.append(results.BenchSystem.model_validate(system))
        one.rows.append(bench_row(name, ms, 1))
    for row, (fused, wide) in zip(one.rows[3:6], ((12, 0), (0, 24), (12, 1)), strict=True):
        row.kernels = results.BenchKernels(names={"sgemm": 24}, fused_attention=fused, fp32_gemms=wide)
    eight.rows[0] = results.BenchRow(system="int8", status="error", reason="NaN or infinite logits")
    last.rows[5] = results.BenchRow(system="compile-fp16", status="skipped", reason="no C compiler")
    for cell in bench.configs:
        for row in cell.rows:
            row.clock_mhz = row.power_w = row.temperature_c = None
        cell.speedups = results.compute_speedups(cell.rows, results.config_label(cell, None), 0)
        cell.headline = results.headline_of(bench.systems, cell)
    return bench
