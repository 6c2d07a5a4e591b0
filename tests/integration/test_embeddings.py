"""XLM-R embedding models down the whole path: texts without labels, pairs with a score, QAT, sensitivity."""

import json
import re
from dataclasses import replace

import numpy as np
import onnx
import pytest

from ..support.families import HIDDEN
from .cases import edited
from .tiny import ended, results, write_data


@pytest.fixture
def folder(whole_run):
    """Run directory of texts without labels."""
    return whole_run("embed")


pytestmark = pytest.mark.slow


def test_a_run_without_labels(folder):
    found = results(folder)
    assert found["data"]["evaluation"] == {"validation": 176}
    assert found["data"]["calibration"]["samples"] == 64
    assert "8 of 260 texts of" in " ".join(found["warnings"])
    assert "12 of 260 texts of" in " ".join(found["warnings"])
    assert found["task"]["metrics"] == ["cosine", "cosine_p1", "neighbors"]
    assert {round(value, 9) for value in found["stages"]["fp32"]["metrics"].values()} == {1.0}
    for stage in ("fake_quant", "onnxruntime"):
        made = found["stages"][stage]
        assert 0.98 < made["metrics"]["cosine_p1"] <= made["metrics"]["cosine"] < 1
        assert 0.3 < made["metrics"]["neighbors"] < 1
        assert made["stderr"]["neighbors"] > 0
        assert made["vs_fp32"]["delta"]["cosine"] == pytest.approx(made["metrics"]["cosine"] - 1)
        agreed = made["vs_fp32"]["agreement"]
        assert agreed["values"] == pytest.approx(made["metrics"])
        assert sum(agreed["cosine_counts"]) == sum(agreed["neighbor_counts"]) == agreed["n"] == 176
    graph = onnx.load(folder / "model.int8.onnx").graph
    widths = [(v.name, v.type.tensor_type.shape.dim[1].dim_value) for v in graph.output]
    assert widths == [("sentence_embedding", HIDDEN)]
    html = (folder / "report.html").read_text()
    assert "How near the embeddings of each stage are to those of FP32" in html
    text = (folder / "report.md").read_text()
    assert "### Embeddings against those of FP32" in text
    kept = found["stages"]["onnxruntime"]["metrics"]["neighbors"]
    assert re.search(r"embed cosine to FP32 [\d.]+ ± .{6} in ONNX Runtime", text)
    assert f"**Neighbors**: {'? ' if kept < 0.93 else ''}{kept:.4f} ±" in text


def test_check_holds_the_file_to_the_recipe(qdqbench, folder):
    ended(qdqbench("check", folder / "model.int8.onnx", "--recipe", "roberta-int8-attention"))


@pytest.mark.long
def test_sensitivity_measures_embeddings(qdqbench, given, tmp_path):
    recipe = edited(tmp_path / "short.yaml", {"calibration": {"samples": 32}}, "roberta-int8-linears")
    done = qdqbench("sensitivity", recipe, *given("embed").options, "--samples", 32, "--out", tmp_path / "s")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "s" / "sensitivity.json").read_text())
    assert found["metric"] == "cosine"
    assert all((row["only"]["sqnr_db"] or 99) > 10 for row in found["rows"] if row["only"])


@pytest.mark.long
def test_pairs_are_embedded_text_by_text_and_qat_learns_from_fp32(qdqbench, given, tmp_path):
    write_data(tmp_path, "stsb")
    changed = {  # without a correction QAT has something to win
        "calibration": {"samples": 64, "bias_correction": False},
        "qat": {"max_steps": 12, "learning_rate": 1e-5},
        "reconstruction": None,
    }
    recipe = edited(tmp_path / "short.yaml", changed, "roberta-int8-attention-qat")
    options = replace(given("embed"), task="stsb", data=tmp_path).options
    ended(qdqbench("run", recipe, *options, "--out", tmp_path / "run", "--until", "fake_quant"))
    with np.load(tmp_path / "run" / "logits" / "fake_quant.npz") as arrays:
        made = arrays["validation.logits"]
    assert made.shape == (2 * 96, HIDDEN)
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, atol=1e-5)
    training = json.loads((tmp_path / "run" / "qat" / "training.json").read_text())
    before, *_, after = (row for row in training["log"] if row["values"])
    assert after["values"]["score_db"] > before["values"]["score_db"]
    assert {"spearman", "pearson"} <= set(after["values"])
    task = json.loads((tmp_path / "run" / "run.json").read_text())["task"]
    assert task["metrics"] == ["spearman", "pearson"]
