"""A real engine on a real GPU: what it computes is what the fake-quant model computes."""

import importlib.util

import numpy as np
import pytest

from qdqbench.quantize.gpu import find_gpu
from qdqbench.quantize.recipe import load_recipe

from ..integration.tiny import EVAL_ROWS, Given, call, results, write_data, write_model  # noqa: TID252

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_gpu() is None, reason="needs an NVIDIA GPU; CUDA shows none here"),
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in ("tensorrt_rtx", "tensorrt")),
        reason="needs tensorrt_rtx or tensorrt: pip install 'qdqbench[rtx]'",
    ),
]
RECIPES = ["bert-int8-linears", "bert-int8-linears-per-tensor", "bert-int8-attention", "bert-fp16"]


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


@pytest.fixture(scope="module", params=RECIPES)
def run(request, sst2, tmp_path_factory):
    """A recipe and its run directory."""
    from qdqbench.eval.tasks import get_task
    from qdqbench.quantize.pipeline import open_run
    from qdqbench.quantize.run import run_until
    from qdqbench.quantize.session import RunConfig

    folder = tmp_path_factory.mktemp("runs") / request.param
    config = RunConfig(
        recipe=load_recipe(request.param),
        model=str(sst2.model),
        task=get_task("sst2"),
        data=str(sst2.data),
    )
    run_until(open_run(config, folder), None)
    return request.param, folder


def logits(folder, stage):
    with np.load(folder / "logits" / f"{stage}.npz") as arrays:
        return arrays["validation.logits"]


def test_engine_is_built_for_this_gpu_and_evaluated(run):
    _, folder = run
    found = results(folder)
    assert found["engine"]["compute_capability"] == [find_gpu().compute_capability]
    assert not found["engine"]["ahead_of_time"]
    assert found["stages"]["engine"]["status"] == "done"
    assert found["stages"]["engine"]["n"] == EVAL_ROWS
    assert found["engine"]["int8_gemms"] == found["engine"]["expected_int8_gemms"]
    assert found["gate"]["failures"] == []


def test_logits_are_those_of_the_recipe(run):
    """Facts: FP16 is within 0.004 of FP32, INT8 within 0.035 of the same recipe in PyTorch."""
    recipe, folder = run
    quantized = recipe != "bert-fp16"
    reference, made = logits(folder, "fake_quant" if quantized else "fp32"), logits(folder, "engine")
    assert made.dtype == np.float32
    assert np.isfinite(made).all()
    error = np.linalg.norm(made - reference) / np.linalg.norm(reference)
    assert error < (0.1 if quantized else 0.01)
    assert np.mean(made.argmax(1) == reference.argmax(1)) > 0.95


def batch(rng, rows, length, padding=0):
    """Random words; the last `padding` positions of every other row are masked."""
    ids = rng.integers(5, 20, (rows, length))
    mask = np.ones((rows, length), dtype=np.int64)
    if padding:
        ids[1::2, -padding:] = 0
        mask[1::2, -padding:] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


@pytest.mark.parametrize(
    ("rows", "length", "padding"),
    [(1, 16, 0), (32, 128, 0), (128, 128, 0), (8, 64, 40), (5, 33, 17), (4, 9, 0), (4, 9, 5), (1, 1, 0)],
)
def test_any_shape_of_the_profile(run, rows, length, padding):
    """Shapes at the profile's corners, odd ones, and ones shorter than its minimum, against ONNX Runtime."""
    from qdqbench.eval.runners import onnxruntime_runner
    from qdqbench.quantize.engine_run import EngineRunner

    recipe, folder = run
    name = "model.fp16" if recipe == "bert-fp16" else "model.int8"
    inputs = batch(np.random.default_rng(rows + length), rows, length, padding)
    expected = onnxruntime_runner(folder / f"{name}.onnx")(inputs)
    with EngineRunner(folder / "engine" / f"{name}.engine", folder / f"{name}.onnx") as engine:
        assert engine.max_batch == 128
        made = engine(inputs)
        again = engine(inputs)
    assert made.shape == (rows, 2)
    assert np.isfinite(made).all()
    assert np.array_equal(made, again)
    assert np.linalg.norm(made - expected) / np.linalg.norm(expected) < 0.1


def test_padding_changes_nothing(run):
    """A sentence alone, and the same sentence padded to 128 in a batch of others."""
    from qdqbench.quantize.engine_run import EngineRunner

    recipe, folder = run
    name = "model.fp16" if recipe == "bert-fp16" else "model.int8"
    rng = np.random.default_rng(0)
    alone, others = batch(rng, 1, 20), batch(rng, 4, 128)
    padded = {key: value.copy() for key, value in others.items()}
    for key, value in alone.items():
        padded[key][2] = 0
        padded[key][2, :20] = value[0]
    with EngineRunner(folder / "engine" / f"{name}.engine", folder / f"{name}.onnx") as engine:
        short, long = engine(alone)[0], engine(padded)[2]
    assert np.linalg.norm(short - long) / np.linalg.norm(short) < 0.1


def test_shapes_outside_of_the_profile_are_refused(run):
    from qdqbench.quantize.engine_run import EngineRunner
    from qdqbench.quantize.errors import CheckFailed

    recipe, folder = run
    name = "model.fp16" if recipe == "bert-fp16" else "model.int8"
    rng = np.random.default_rng(0)
    with EngineRunner(folder / "engine" / f"{name}.engine", folder / f"{name}.onnx") as engine:
        for inputs in (batch(rng, 129, 16), batch(rng, 1, 129)):
            with pytest.raises(CheckFailed, match="profile does not take"):
                engine(inputs)


def test_second_run_reuses_the_engine(run, sst2, capsys):
    recipe, folder = run
    done = call(capsys, "run", recipe, *sst2.options, "--out", folder)
    assert (done.code, done.err) == (0, "")
    assert all(row["reused"] for row in results(folder)["timings"].values())
