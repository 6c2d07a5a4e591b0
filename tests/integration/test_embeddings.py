"""XLM-R embedding models down the whole path: texts without labels, pairs with a score, QAT, sensitivity."""

import json
import re

import numpy as np
import onnx
import pytest

from ..support.families import HIDDEN
from .tiny import results, write_data


@pytest.fixture
def folder(whole_run):
    """Run directory of texts without labels."""
    return whole_run("embed")


@pytest.mark.slow
class TestTexts:
    def test_a_run_without_labels(self, folder):
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

    def test_check_holds_the_file_to_the_recipe(self, qdqbench, folder):
        done = qdqbench("check", folder / "model.int8.onnx", "--recipe", "roberta-int8-attention")
        assert done.code == 0, done.err

    @pytest.mark.long
    def test_sensitivity_measures_embeddings(self, qdqbench, given, tmp_path):
        recipe = tmp_path / "short.yaml"
        text = qdqbench("recipes", "show", "roberta-int8-linears").out
        recipe.write_text(text.replace("samples: 512", "samples: 32"))
        done = qdqbench(
            "sensitivity", recipe, *given("embed").options, "--samples", 32, "--out", tmp_path / "s"
        )
        assert done.code == 0, done.err
        found = json.loads((tmp_path / "s" / "sensitivity.json").read_text())
        assert found["metric"] == "cosine"
        assert all((row["only"]["sqnr_db"] or 99) > 10 for row in found["rows"] if row["only"])


@pytest.mark.long
@pytest.mark.slow
def test_pairs_are_embedded_text_by_text_and_qat_learns_from_fp32(qdqbench, given, tmp_path):
    write_data(tmp_path, "stsb")
    recipe = tmp_path / "short.yaml"
    text = qdqbench("recipes", "show", "roberta-int8-attention-qat").out
    text = text.replace("samples: 512", "samples: 64").replace("max_steps: 1000", "max_steps: 6")
    text = text.replace("bias_correction: true", "bias_correction: false")  # leaves QAT something to win
    text = text.replace("learning_rate: auto", "learning_rate: 1.0e-4").replace("reconstruction: {}", "")
    recipe.write_text(text.replace("num_evals: 10", "num_evals: 2"))
    options = (
        "--model",
        given("embed").model,
        "--task",
        "stsb",
        "--data",
        tmp_path,
        "--out",
        tmp_path / "run",
    )
    done = qdqbench("run", recipe, *options, "--until", "fake_quant")
    assert done.code == 0, done.err
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
