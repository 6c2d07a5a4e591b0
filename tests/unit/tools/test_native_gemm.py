"""The benchmark of native kernels, where no GPU is: its sums, its table, and what it says without headers."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "tools" / "native_gemm"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("native_gemm_bench", FOLDER / "bench.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cells(bench: ModuleType, us: float, *kinds: str) -> list[dict[str, Any]]:
    best = {kind: {"name": f"{kind} of a tile", "us": us, "hot_us": 2 * us, "tops": 3.0} for kind in kinds}
    return [
        {"model": "bert-large", "tokens": 128, "linear": linear, "n": n, "k": k, "best": best}
        for linear, n, k, _ in bench.sizes("bert-large")
    ]


def test_a_model_is_the_sum_of_its_linears_over_its_layers(bench: ModuleType) -> None:
    (row,) = bench.summed(cells(bench, 10.0, "cutlass", "fp16"))
    assert row["cutlass_ms"] == pytest.approx(24 * 4 * 10.0 / 1e3)
    assert row["cutlass_hot_ms"] == pytest.approx(24 * 4 * 20.0 / 1e3)
    assert row["triton_ms"] is None  # nothing is made up for what did not run
    part = cells(bench, 10.0, "cutlass")[:3]
    assert bench.summed(part)[0]["cutlass_ms"] is None


def test_the_table_has_every_size(bench: ModuleType) -> None:
    lines = bench.table(cells(bench, 10.0, "cutlass")).splitlines()
    assert sum(line.startswith("| bert-large | 128 |") for line in lines) == 4 + 1
    assert "| bert-large | 128 |  | 0.960 |  |  |  |  |" in lines


def test_headers_that_are_not_there(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "bench.py"), "--cutlass", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "give a checkout of https://github.com/NVIDIA/cutlass" in done.stderr
