"""The quick bench that ends a run whose engine ran on this GPU."""

from qdqbench.eval.bench.quick import GPU_SHAPES
from qdqbench.eval.bench.results import read_bench

from .conftest import TIMED


def test_a_run_ends_with_its_engine_next_to_the_fp16_twin(finished_run):
    bench = read_bench(finished_run(TIMED) / "bench.json")
    assert bench.settings.quick
    own = next(system for system in bench.systems if system.name == "int8")
    twin = "torch-fp16" if own.backend.startswith("cuda") else "fp16"
    assert [(config.batch, config.length) for config in bench.configs] == list(GPU_SHAPES)
    for config in bench.configs:
        assert [(row.system, row.status) for row in config.rows] == [("int8", "done"), (twin, "done")]
        assert [row.baseline for row in config.speedups] == [twin]
