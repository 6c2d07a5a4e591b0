"""The whole path with engines for the CPU at hand: built, proven, verified, run."""

import json

import pytest

from qdqbench.eval.bench import engines
from qdqbench.eval.search import confirm, trials
from qdqbench.eval.search.results import read_search
from qdqbench.quantize.recipe.schema import dump_recipe, load_recipe

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


def test_a_search_measures_engines_of_this_cpu(sst2, tmp_path, qdqbench, monkeypatch):
    monkeypatch.setattr(confirm, "shipped_recipes", lambda: ["bert-int8-ffn"])
    monkeypatch.setattr(engines, "SECONDS", 0.05)
    monkeypatch.setattr(trials, "rank", lambda work, file: (work.space, "model order"))
    recipe = load_recipe("bert-int8-linears")
    section = recipe.calibration.model_copy(update={"samples": 64, "bias_correction": False})
    gate = recipe.gate.model_copy(update={"max_drop": 0.2})
    path, out = tmp_path / "mine.yaml", tmp_path / "out"
    path.write_text(
        dump_recipe(recipe.model_copy(update={"name": "mine", "calibration": section, "gate": gate}))
    )
    options = [path, *sst2.options, "--backend", "openvino", "--out", out, "--trials", 2, "--samples", 64]
    done = qdqbench("search", *options, "--batch", 2, "--length", 16)
    assert (done.code, done.err) == (0, ""), done.err
    found = read_search(out / "search.json")
    assert (found.source.mode, found.source.gpu, found.source.backend) == ("engine", None, "openvino")
    assert found.source.cpu in found.source.label
    assert f"over {found.source.twin}" in (out / "search.md").read_text()
    for timed in [trial.latency for trial in found.trials] + [row.latency for row in found.confirmed]:
        assert timed.ms > 0
        assert timed.low <= timed.speedup <= timed.high
        assert timed.int8_gemms == timed.expected_int8_gemms > 0
    chosen = found.confirmed[0]
    assert chosen.engine["validation"].n == chosen.fake_quant["validation"].n
    assert not list((out / "work").glob("engines-*"))
