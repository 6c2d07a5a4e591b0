"""What runs of the tiny model compute, held to `tests/golden/tiny_run.json`; to the bit where that was made.

A change that is meant to change numbers records them anew (in one process, one thread as in `dev.py test`):

OMP_NUM_THREADS=1 RECORD_GOLDEN=1 .venv/bin/python -m pytest tests/integration/test_golden.py
"""

import copy
import hashlib
import json
import os
import platform
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from .tiny import fine

RECORDED = Path(__file__).parents[1] / "golden" / "tiny_run.json"
OF_FINISHED_RUN, OTHER = "bert-int8-linears", "bert-int8-attention"
EVALUATED = {"baseline": "fp32", "fake_quant": "fake_quant", "onnxruntime": "onnxruntime"}  # stage -> logits
# Elsewhere the model is trained anew, and rounding moves its key biases, which have no gradient, by 1e-3.
# Measured with 2 threads, AVX2 and SSE4: amax 4e-4, no code, logits 2 %. A scale's factors are FP16.
AMAX, SCALES, CODES, LOGITS = 1e-3, 1e-3, 1e-3, {"fp32": 1e-4, "fake_quant": 0.05, "onnxruntime": 0.05}
pytestmark = pytest.mark.slow


def where():
    """What decides about the last bit besides the code."""
    import onnxruntime
    import torch

    path, cpu = Path("/proc/cpuinfo"), {"model name": platform.processor()}
    if path.is_file():  # some virtual machines call every CPU of a maker the same: family and model tell
        lines = [line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines()]
        cpu = {name.strip(): value.strip() for name, _, value in lines}
    return {
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "numpy": np.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": " ".join(cpu[key] for key in ("model name", "cpu family", "model") if key in cpu),
        "threads": torch.get_num_threads(),
    }


def digest(data):
    return hashlib.sha256(data).hexdigest()


def exact(values):
    """Floats as the shortest decimals that give the same bits at their precision."""
    return [float(str(value)) for value in values.ravel()]


def measured(folder, model):
    """Every number of a run that is held, out of its files."""
    calibration = json.loads((folder / "calibration.json").read_text())
    amax = {}
    for name, state in calibration.pop("quantizers").items():
        values = np.atleast_1d(np.array(state["amax"]))
        assert (values == values.astype(np.float32)).all(), name
        amax[name] = exact(values.astype(np.float32))
    made = ("methods", "splits", "smoothing", "biases")
    graph = onnx.load(folder / "model.int8.onnx").graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    codes = {name: array for name, array in constants.items() if array.dtype == np.int8 and array.size > 1}
    logits = {}
    for stage in EVALUATED.values():
        with np.load(folder / "logits" / f"{stage}.npz") as arrays:
            logits[stage] = {name: exact(arrays[name]) for name in arrays.files}
    return {
        "model": digest((model / "model.safetensors").read_bytes()),
        "amax": amax,
        "calibration": {name: digest(json.dumps(calibration[name]).encode()) for name in made},
        "codes": {name: digest(array.tobytes()) for name, array in codes.items()},
        "size": sum(array.size for array in codes.values()),
        "rows": {name: array.sum(axis=1, dtype=int).tolist() for name, array in codes.items()},
        "scales": {
            name: exact(array)
            for name, array in constants.items()
            if array.dtype.kind == "f" and (".weight_scal" in name or ".weight_factor" in name)
        },
        "constants": {
            name: digest(f"{array.dtype}{array.shape}".encode() + array.tobytes())[:16]
            for name, array in constants.items()
        },
        "logits": logits,
    }


def too_far(found, recorded):
    """What differs by more than another machine's arithmetic explains."""
    for part, tolerance in (("amax", AMAX), ("scales", SCALES)):
        assert found[part].keys() == recorded[part].keys()
        for name, values in recorded[part].items():
            if not np.allclose(found[part][name], values, rtol=tolerance, atol=0):
                yield f"{part} of {name}: {found[part][name]}, recorded {values}"
    # sums of rows stand for the codes, so as to keep the file small; opposite steps in one row go unseen
    assert found["rows"].keys() == recorded["rows"].keys()
    pairs = [(np.array(found["rows"][name]), np.array(rows)) for name, rows in recorded["rows"].items()]
    steps = sum(int(np.abs(ours - theirs).sum()) for ours, theirs in pairs)
    if steps > CODES * recorded["size"]:
        yield f"codes: {steps} steps in {recorded['size']}"
    for stage, tolerance in LOGITS.items():
        for name, values in recorded["logits"][stage].items():
            limit = tolerance * np.abs(values).max()
            worst = np.abs(np.array(found["logits"][stage][name]) - values).max()
            if not worst <= limit:  # NaN too
                yield f"{stage} {name}: {worst:.2g} apart, at most {limit:.2g}"


def lines(value, depth=4):
    """JSON with a line for each name, so that a diff shows what moved."""
    if not isinstance(value, dict) or not depth:
        return json.dumps(value)
    inner = ",\n".join(f"{json.dumps(name)}: {lines(part, depth - 1)}" for name, part in value.items())
    return f"{{\n{inner}\n}}"


def record(recipe, found):
    """Put the numbers of one recipe into the file; those of another machine go."""
    kept = json.loads(RECORDED.read_text()) if RECORDED.is_file() else {}
    recipes = kept["recipes"] if kept.get("where") == where() else {}
    RECORDED.write_text(lines({"where": where(), "recipes": recipes | {recipe: found}}) + "\n")


@pytest.mark.parametrize("recipe", [OF_FINISHED_RUN, OTHER])
def test_numbers_are_as_recorded(recipe, sst2, tmp_path, qdqbench, request):
    if recipe == OF_FINISHED_RUN:
        folder = request.getfixturevalue("finished_run")
    else:
        folder = tmp_path / "run"
        for stage in EVALUATED:
            fine(qdqbench("run", recipe, *sst2.options, "--out", folder, "--until", stage))
    found = measured(folder, sst2.model)
    if os.environ.get("RECORD_GOLDEN"):
        record(recipe, found)
        pytest.skip(f"recorded {recipe} in {RECORDED}")
    recorded = json.loads(RECORDED.read_text())
    if recorded["where"] == where():
        assert found == recorded["recipes"][recipe]
    else:
        assert list(too_far(found, recorded["recipes"][recipe])) == []


@pytest.mark.parametrize("recipe", [OF_FINISHED_RUN, OTHER])
def test_a_changed_amax_is_seen(recipe):
    recorded = json.loads(RECORDED.read_text())["recipes"][recipe]
    for name, values in recorded["amax"].items():
        found = copy.deepcopy(recorded)
        found["amax"][name][-1] = 1.01 * values[-1]
        assert [line.partition(":")[0] for line in too_far(found, recorded)] == [f"amax of {name}"]
    assert list(too_far(recorded, recorded)) == []
