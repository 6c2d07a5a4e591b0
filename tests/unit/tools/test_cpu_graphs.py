"""Both runtimes run the graphs, and twins compute the same."""

import numpy as np
import pytest
from tools import cpu_graphs

from qdqbench.quantize.engine.cpu_runtimes import compile_model


def test_both_runtimes_tell_kernels_and_twins_compute_the_same(tmp_path, monkeypatch, capsys):
    pytest.importorskip("openvino", reason="needs openvino: pip install 'qdqbench[openvino]'")
    monkeypatch.setattr(cpu_graphs, "BLOCKS", 2)
    cpu_graphs.main([str(tmp_path), "--batch", "1", "--length", "8", "--threads", "1"])
    printed = capsys.readouterr().out
    assert [printed.count(f".onnx {name} ") for name in ("openvino", "onnxruntime")] == [7, 8]
    assert all(f" ms  {kind} " in printed for kind in ("MultiHeadAttention", "FastGelu", "BiasGelu"))
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 8, cpu_graphs.WIDTH)).astype(np.float32)}
    found = {}
    for name in ("attention", "attention-fused"):
        data = (tmp_path / f"{name}.onnx").read_bytes()
        (found[name],) = compile_model("onnxruntime", data, blob=False, compute="fp32").run(feeds).values()
    np.testing.assert_allclose(found["attention"], found["attention-fused"], rtol=1e-3, atol=1e-3)
