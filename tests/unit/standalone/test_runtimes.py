"""The runtimes of a deployed folder."""

import hashlib
import subprocess
import sys
from functools import partial
from types import FunctionType

import numpy as np
import pytest

from qdqbench.quantize.standalone import runtimes
from qdqbench.quantize.standalone.runtimes import Streams, open_openvino

from ...support.tiny_bert import exported, padded_batch

SOURCE = """
import sys
from qdqbench.quantize.standalone.runtimes import load_openvino
load_openvino().Core()
print([name for name in sys.modules if name.startswith("openvino_telemetry")])
"""


def test_openvino_is_loaded_without_its_telemetry():
    pytest.importorskip("openvino")
    told = subprocess.run(
        [sys.executable, "-c", SOURCE], capture_output=True, text=True, check=True, timeout=100
    )
    assert told.stdout.split() == ["[]"]


def test_a_deployed_folder_answers_in_streams_as_in_one(tmp_path, tiny_bert, monkeypatch):
    pytest.importorskip("openvino")
    data = exported(tiny_bert, compute="fp32").SerializeToString()
    (tmp_path / "model.onnx").write_bytes(data)
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(data).hexdigest()}  model.onnx\n")
    told = {"openvino": {"INFERENCE_PRECISION_HINT": "f32"}, "outputs": {"logits": "float32"}}
    single = open_openvino(tmp_path, told | {"streams": 1})
    batches = [padded_batch(seed=seed) for seed in range(4)]
    expected = [single(batch) for batch in batches]
    for cores, kind in ((1, FunctionType), (2, Streams)):
        monkeypatch.setattr(runtimes, "count_cores", lambda cores=cores: cores)
        opened = open_openvino(tmp_path, told | {"streams": 8})
        assert isinstance(opened, kind)
    assert opened.streams == 2
    answers = [each.result() for each in [opened.submit(batch) for batch in batches]]
    assert all(map(partial(np.allclose, atol=1e-4), answers, expected))
    assert np.allclose(opened(batches[0]), expected[0], atol=1e-4)
