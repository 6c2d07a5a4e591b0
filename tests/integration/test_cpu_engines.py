"""The whole path with engines for the CPU at hand: built, proven, verified, run."""

import json

import pytest

from .tiny import results

pytest.importorskip("openvino", reason="needs openvino: pip install 'qdqbench[openvino]'")


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_an_engine_for_the_cpu_is_proven_verified_and_run(backend, sst2, tmp_path, qdqbench):
    out = tmp_path / "run"
    done = qdqbench("run", "int8-linears", *sst2.options, "--backend", backend, "--out", out)
    assert (done.code, done.err) == (0, ""), done.err
    found = results(out)
    engine = found["engine"]
    assert (engine["backend"], engine["int8_gemms"], engine["not_int8"]) == (backend, 12, [])
    assert not engine["ahead_of_time"]
    assert found["gpu_engine"] is None
    assert found["stages"]["engine"]["status"] == "done"
    assert found["verification"]["passed"]
    assert len(found["verification"]["blocks"]) == 4


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_int8_attention_on_a_cpu(backend, sst2, tmp_path, qdqbench):
    out = tmp_path / "run"
    done = qdqbench(
        "run", "int8-attention", *sst2.options, "--backend", backend, "--out", out, "--until", "build"
    )
    assert (done.code, done.err) == (0, ""), done.err
    engine = json.loads((out / "build.json").read_text())
    assert (engine["int8_gemms"], engine["not_int8"], engine["attention_int8"]) == (16, [], 2)
