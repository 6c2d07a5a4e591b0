"""`qdqbench inspect` with what only a GPU can say: the inspector's own table, and kernel times."""

import importlib.util
import json
import shutil

import pytest

from qdqbench.quantize.gpu import find_gpu
from qdqbench.quantize.recipe import load_recipe

from ..integration.tiny import Given, call, write_data, write_model  # noqa: TID252

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_gpu() is None, reason="needs an NVIDIA GPU; CUDA shows none here"),
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in ("tensorrt_rtx", "tensorrt")),
        reason="needs tensorrt_rtx or tensorrt: pip install 'qdqbench[rtx]'",
    ),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the default recipe up to its engine."""
    from qdqbench.eval.tasks import get_task
    from qdqbench.quantize.pipeline import open_run
    from qdqbench.quantize.run import run_until
    from qdqbench.quantize.session import RunConfig

    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("engines run on torch's CUDA buffers; this torch has no CUDA")
    root = tmp_path_factory.mktemp("inspected")
    write_data(root / "data", "sst2")
    sst2 = Given(write_model(root / "model", "sst2"), "sst2", root / "data")
    config = RunConfig(
        recipe=load_recipe("bert-int8-linears"),
        model=str(sst2.model),
        task=get_task("sst2"),
        data=str(sst2.data),
    )
    run_until(open_run(config, root / "run"), "build")
    return root / "run"


def test_the_inspector_agrees_with_the_saved_table(run, tmp_path, capsys):
    for name in ("model.int8.engine", "model.int8.engine.json"):
        shutil.copy(run / "engine" / name, tmp_path / name)
    told = [
        json.loads(call(capsys, "inspect", target, "--json").out)
        for target in (run, tmp_path / "model.int8.engine")
    ]
    assert [each["int8_gemms"] for each in told] == [12, 12]
    assert [each["attention_fused"] for each in told] == [2, 2]
    assert told[0]["kernel_counts"] == told[1]["kernel_counts"]


def test_kernel_times_are_of_the_kernels_in_the_table(run, capsys):
    done = call(capsys, "inspect", run, "--profile", "gpu", "--json")
    assert (done.code, done.err) == (0, "")
    time = json.loads(done.out)["time"]
    assert time["total"] > 0
    assert time["by_kind"]["gemm"] > 0
    assert {"embeddings", "layer.0", "layer.1", "head"} <= set(time["by_block"])
    assert sum(time["by_kernel"].values()) > 0.9 * time["total"]
