"""Public reports that were never tried before, as their reporters would: served, or refused by name."""

import json
import shutil
from types import SimpleNamespace

import pytest
from onnxruntime.quantization import QuantType

from ..support import zoo
from ..support.foreign_layer import write_static
from ..support.tiny_embedder import write_sentence_folder
from .tiny import call_alone as call
from .tiny import refused

pytestmark = pytest.mark.slow
INT8 = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return zoo.write_data(tmp_path_factory.mktemp("data"))


def test_the_tokenizer_of_another_family(data, tmp_path):
    """huggingface/optimum#1758: BERT with XLM-R's tokenizer, labels of words, CJK and emoji."""
    zoo.write_model(tmp_path / "model", "bert", "tokens")
    zoo.write_unigram(tmp_path / "model", ["東京 is fine 😀", "the film in 北京 was bad"] * 8)
    shutil.copytree(data / "ner", tmp_path / "ner")
    for path in (tmp_path / "ner").iterdir():
        rows = [json.loads(text) for text in path.read_text().splitlines()]
        rows[0]["tokens"][0], rows[1]["tokens"][0] = "東京", "😀"
        path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    options = ("--model", tmp_path / "model", "--task", "tokens", "--data", tmp_path / "ner", *zoo.SMALL)
    done = call("run", *options, "--backend", "onnxruntime", "--until", "export", "--out", tmp_path / "run")
    assert done.code == 0, done
    graph = tmp_path / "run" / "model.fp32.onnx"
    assert zoo.gap(tmp_path / "model", graph, "tokens", [(3,), (5, 9)]) < 1e-3


def test_a_deployed_tokenizer_cuts_by_itself(tmp_path):
    """knights-analytics/hugot#73: readers of tokenizer.json alone send more tokens than a model takes."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    from qdqbench.quantize.deployment.hub import save_tokenizer

    zoo.write_tokenizer(tmp_path, 0)
    session = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(tmp_path))
    alone = Tokenizer.from_str(save_tokenizer(session, 32)["tokenizer.json"].decode())
    assert len(alone.encode("a film " * 5000).ids) == 32


def test_the_classifier_of_setfit(data, tmp_path):
    """huggingface/setfit#78: the body is an embedder, and the classifier is a pickle."""
    model = write_sentence_folder(tmp_path / "model")
    (model / "model_head.pkl").write_bytes(b"pickle")
    done = call("run", "--model", model, "--data", data / "rows", "--out", tmp_path / "run")
    refused(done, "labels one text", "classifier of SetFit", "--task embed")


@pytest.mark.parametrize(
    ("report", "options"),
    [
        ("microsoft/onnxruntime#25223: activations of 16 bits", INT8 | {"activation_type": QuantType.QInt16}),
        (
            "huggingface/optimum#85: all operators",
            {**INT8, "extra_options": {"ForceQuantizeNoInputCheck": True}},
        ),
    ],
)
def test_a_quantized_file(report, options, tmp_path):
    """`fix` makes each of them a file whose linears are all in INT8."""
    path = write_static(tmp_path, "quantized.onnx", **options)
    assert call("check", path).code == 2, report
    done = call("fix", path, "-o", tmp_path / "fixed.onnx", "--no-engine")
    assert (done.code, done.err) == (0, ""), report
    assert "5 of 5" in done.out
    assert call("check", tmp_path / "fixed.onnx").code == 0
