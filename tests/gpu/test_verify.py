"""Real engines on a real GPU: a right one is verified, a wrong one caught, and bisecting names the tensor."""

import importlib.util
import shutil

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqbench.quantize.gpu import find_gpu
from qdqbench.quantize.recipe import load_recipe

from ..integration.tiny import Given, call, results, write_data, write_model  # noqa: TID252

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_gpu() is None, reason="needs an NVIDIA GPU; CUDA shows none here"),
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in ("tensorrt_rtx", "tensorrt")),
        reason="needs tensorrt_rtx or tensorrt: pip install 'qdqbench[rtx]'",
    ),
]
RECIPES = ["bert-int8-linears", "bert-int8-linears-per-tensor", "bert-int8-attention", "bert-fp16"]
FAULTY = "bert.encoder.layer.1.output.dense.bias_fp16"


@pytest.fixture(scope="module", autouse=True)
def needs_cuda_torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("engines run on torch's CUDA buffers; this torch has no CUDA")


@pytest.fixture(scope="module")
def sst2(tmp_path_factory):
    root = tmp_path_factory.mktemp("given")
    write_data(root / "data", "sst2")
    return Given(write_model(root / "model", "sst2"), "sst2", root / "data")


def new_run(sst2, recipe, folder):
    from qdqbench.eval.tasks import get_task
    from qdqbench.quantize.pipeline import open_run
    from qdqbench.quantize.run import run_until
    from qdqbench.quantize.session import RunConfig

    config = RunConfig(
        recipe=load_recipe(recipe), model=str(sst2.model), task=get_task("sst2"), data=str(sst2.data)
    )
    run_until(open_run(config, folder), None)
    return folder


@pytest.fixture(scope="module", params=RECIPES)
def run(request, sst2, tmp_path_factory):
    return request.param, new_run(sst2, request.param, tmp_path_factory.mktemp("runs") / request.param)


@pytest.fixture(scope="module")
def linears(sst2, tmp_path_factory):
    return new_run(sst2, "bert-int8-linears", tmp_path_factory.mktemp("linears") / "run")


def test_every_run_is_verified(run):
    recipe, folder = run
    found = results(folder)["verification"]
    assert found is not None
    assert found["failures"] == []
    assert found["passed"]
    assert found["reference"] == ("fp32" if recipe == "bert-fp16" else "fake_quant")
    assert [row["name"] for row in found["blocks"]] == ["embeddings", "layer.0", "layer.1", "head"]
    assert found["stitched_int8_gemms"] == results(folder)["engine"]["int8_gemms"]
    assert {(row["batch"], row["length"]) for row in found["shapes"]} >= {(1, 16), (32, 128), (128, 128)}


def spoiled(folder, target, change):
    """A copy of a run whose ONNX file is wrong, with the engine of that file."""
    from qdqbench.quantize import engine_stages
    from qdqbench.quantize.session import Session, read_config

    shutil.copytree(folder, target)
    path = target / "model.int8.onnx"
    model = onnx.load(path)
    tensor = next(t for t in model.graph.initializer if t.name == FAULTY)
    value = numpy_helper.to_array(tensor).copy()
    tensor.CopyFrom(numpy_helper.from_array(change(value).astype(value.dtype), FAULTY))
    onnx.save(model, path)
    session = Session(read_config(target), target)
    engine_stages.build(session)
    return session


FAULTS = {"offset": lambda bias: bias + 1.0 * np.sign(bias), "nan": lambda bias: bias * np.nan}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_block_is_named(linears, tmp_path, fault):
    from qdqbench.eval.results import Verification
    from qdqbench.quantize import engine_stages

    session = spoiled(linears, tmp_path / "run", FAULTS[fault])
    (record,) = engine_stages.verify(session)
    found = Verification.model_validate_json(record.read_text())
    assert [row.name for row in found.blocks if not row.holds] == ["layer.1"]
    assert not found.passed
    assert any("--bisect" in line and "layer.1" in line for line in found.failures)


def test_the_gate_fails_with_the_verification(linears, tmp_path):
    from qdqbench.eval.collect import collect
    from qdqbench.quantize import engine_stages

    session = spoiled(linears, tmp_path / "run", FAULTS["offset"])
    engine_stages.verify(session)
    found = collect(session, {})
    assert not found.gate.passed
    assert any("layer.1 is wrong" in line for line in found.gate.failures)


def test_bisecting_a_right_engine_finds_nothing(linears):
    from qdqbench.quantize.bisect import bisect_run

    assert bisect_run(linears).block is None


def test_bisecting_names_the_tensor(linears):
    """The engine is built from a graph with a fault that the reference graph does not have."""
    from qdqbench.quantize import blocks
    from qdqbench.quantize.bisect import bisect, run_onnxruntime
    from qdqbench.quantize.build import check_sidecar

    sidecar = check_sidecar(linears / "engine" / "model.int8.engine")

    def run_engine(model, feeds):
        twin = onnx.ModelProto()
        twin.CopyFrom(model)
        for tensor in twin.graph.initializer:
            if tensor.name == FAULTY:
                value = numpy_helper.to_array(tensor)
                changed = (value + 1.0 * np.sign(value)).astype(value.dtype)
                tensor.CopyFrom(numpy_helper.from_array(changed, FAULTY))
        with blocks.engine_of(twin, sidecar) as (engine, _):
            return engine.run(feeds)

    rng = np.random.default_rng(0)
    lengths = np.array([20, 16, 9, 20])
    mask = (np.arange(20) < lengths[:, None]).astype(np.int64)
    feeds = {
        "input_ids": rng.integers(5, 20, mask.shape) * mask,
        "attention_mask": mask,
        "token_type_ids": np.zeros_like(mask),
    }
    result = bisect(linears / "model.int8.onnx", feeds, run_engine, run_onnxruntime, suspects=["layer.1"])
    assert result.block == "layer.1"
    assert result.node == "/bert/encoder/layer.1/output/dense/Add"


def test_a_second_run_reuses_the_verification(linears, sst2, capsys):
    done = call(capsys, "run", "bert-int8-linears", *sst2.options, "--out", linears)
    assert (done.code, done.err) == (0, "")
    assert results(linears)["timings"]["verify"]["reused"]
