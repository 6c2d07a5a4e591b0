"""Skips where there is no GPU, and runs that are made once for all files: time on a GPU is short."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qdqbench.cli.app import app
from qdqbench.quantize.utils.system.gpu import find_gpu

from ..integration.tiny import Given, write_data, write_model

HERE = Path(__file__).parent
RECIPES = ["bert-int8-linears", "bert-int8-linears-per-tensor", "bert-int8-attention", "bert-fp16"]
TIMED = "bert-int8-attention"  # its run ends with a quick bench
WITHOUT_TENSORRT = ("test_cuda.py", "test_torch.py")


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks = [
        pytest.mark.slow,
        pytest.mark.skipif(find_gpu() is None, reason="needs an NVIDIA GPU; CUDA shows none here"),
        pytest.mark.skipif(
            not any(importlib.util.find_spec(name) for name in ("tensorrt_rtx", "tensorrt")),
            reason="needs tensorrt_rtx or tensorrt: pip install 'qdqbench[rtx]'",
        ),
    ]
    for item in items:  # of the whole session, whatever folder it is in
        if HERE in item.path.parents:
            for mark in marks[:2] if item.path.name in WITHOUT_TENSORRT else marks:
                item.add_marker(mark)


@pytest.fixture(scope="session", autouse=True)
def needs_cuda_torch() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("engines run on torch's CUDA buffers; this torch has no CUDA")


@pytest.fixture(scope="session")
def sst2(tmp_path_factory) -> Given:
    root = tmp_path_factory.mktemp("given")
    write_data(root / "data", "sst2")
    return Given(write_model(root / "model", "sst2"), "sst2", root / "data")


@pytest.fixture(scope="session")
def finished_run(sst2, tmp_path_factory) -> Callable[[str], Path]:
    """Folder of a whole run by its recipe, made when first asked for. Never to be written to: copy it."""
    from qdqbench.eval.runs.run import run_until
    from qdqbench.quantize.pipeline.pipeline import open_run

    root, made = tmp_path_factory.mktemp("runs"), {}

    def make(recipe: str) -> Path:
        if recipe not in made:
            run_until(open_run(sst2.config(recipe), root / recipe), None, quick_bench=recipe == TIMED)
            made[recipe] = root / recipe
        return made[recipe]

    return make


@pytest.fixture(scope="session", params=RECIPES)
def run(request, finished_run) -> tuple[str, Path]:
    """A recipe and its finished run."""
    return request.param, finished_run(request.param)


@pytest.fixture(scope="session")
def linears(finished_run) -> Path:
    """The finished run of the default recipe."""
    return finished_run("bert-int8-linears")
