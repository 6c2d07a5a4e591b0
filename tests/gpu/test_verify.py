"""Real engines on a real GPU: a right one is verified, a wrong one caught, and bisecting names the tensor."""

import shutil

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqbench.eval.runs.collect import collect
from qdqbench.eval.stages import stages
from qdqbench.eval.verification.bisect import bisect, bisect_run, run_onnxruntime
from qdqbench.eval.verification.blocks import open_reference, reference_blocks
from qdqbench.eval.verification.engine import engine_of
from qdqbench.eval.verification.results import Verification
from qdqbench.quantize.engine.sidecar import check_sidecar
from qdqbench.quantize.models.families.known import BERT
from qdqbench.quantize.pipeline.pipeline import read_finished
from qdqbench.quantize.pipeline.session import Session, read_config

from ..integration.tiny import results

FAULTY = "bert.encoder.layer.1.output.dense.bias_fp16"


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


FAULTS = {"offset": lambda bias: bias + 1.0 * np.sign(bias), "nan": lambda bias: bias * np.nan}


@pytest.fixture(scope="module", params=FAULTS)
def faulty(request, linears, tmp_path_factory):
    """A copy of a run whose ONNX file is wrong, with the engine of that file, verified."""
    target = shutil.copytree(linears, tmp_path_factory.mktemp("faulty") / request.param)
    path = target / "model.int8.onnx"
    model = onnx.load(path)
    tensor = next(t for t in model.graph.initializer if t.name == FAULTY)
    value = numpy_helper.to_array(tensor).copy()
    changed = FAULTS[request.param](value).astype(value.dtype)
    tensor.CopyFrom(numpy_helper.from_array(changed, FAULTY))
    onnx.save(model, path)
    session = Session(read_config(target), target)
    stages.build_stage(session)
    stages.verify_stage(session)
    return session


def test_a_wrong_block_is_named(faulty):
    found = Verification.model_validate_json((faulty.folder / "verify.json").read_text())
    assert [row.name for row in found.blocks if not row.holds] == ["layer.1"]
    assert not found.passed
    assert any("--bisect" in line and "layer.1" in line for line in found.failures)


@pytest.mark.parametrize("faulty", ["offset"], indirect=True)
def test_the_gate_fails_with_the_verification(faulty):
    timings = {name: done.timing(reused=True) for name, done in read_finished(faulty.folder).items()}
    found = collect(faulty, timings)
    assert not found.gate.passed
    assert any("layer.1 is wrong" in issue.detail for issue in found.gate.failures)


def test_bisecting_a_right_engine_finds_nothing(linears):
    assert bisect_run(linears).block is None


def test_bisecting_names_the_tensor(linears):
    """The engine is built from a graph with a fault that the reference graph does not have."""
    sidecar = check_sidecar(linears / "engine" / "model.int8.engine")

    def run_engine(model, feeds):
        twin = onnx.ModelProto()
        twin.CopyFrom(model)
        for tensor in twin.graph.initializer:
            if tensor.name == FAULTY:
                value = numpy_helper.to_array(tensor)
                changed = (value + 1.0 * np.sign(value)).astype(value.dtype)
                tensor.CopyFrom(numpy_helper.from_array(changed, FAULTY))
        with engine_of(twin, sidecar) as (engine, _):
            return engine.run(feeds)

    rng = np.random.default_rng(0)
    lengths = np.array([20, 16, 9, 20])
    mask = (np.arange(20) < lengths[:, None]).astype(np.int64)
    feeds = {
        "input_ids": rng.integers(5, 20, mask.shape) * mask,
        "attention_mask": mask,
        "token_type_ids": np.zeros_like(mask),
    }
    with open_reference(Session(read_config(linears), linears)) as (model, fp32):
        how = {"family": BERT, "tensors": reference_blocks(model, fp32, feeds, half=True)}
    onnx_path = linears / "model.int8.onnx"
    result = bisect(onnx_path, feeds, run_engine, run_onnxruntime, suspects=["layer.1"], **how)
    assert result.block == "layer.1"
    assert result.node == "/bert/encoder/layer.1/output/dense/Add"
