"""What makes a deployed model one of sentence-transformers, and what its card says."""

import json
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest
from safetensors.numpy import load, load_file

from qdqbench.quantize.deployment.hub import add_hidden_state, describe_sentences, find_base, find_license
from qdqbench.quantize.graph.export import save, trace
from qdqbench.quantize.models.identity import Pooling
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.tasks.kinds.embedding import TEXTS_ALONE

from ...support.tiny_bert import HIDDEN
from ...support.tiny_embedder import CLS, LAST, MEAN, expected, hidden_states, write_sentence_folder

BATCH = {
    "input_ids": np.array([[2, 7, 8, 9, 3], [2, 9, 3, 0, 0]]),
    "attention_mask": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    "token_type_ids": np.zeros((2, 5), dtype=np.int64),
}


@pytest.mark.parametrize("mode", [MEAN, CLS, LAST])
def test_the_hidden_state_is_what_the_pooling_reads(mode, tmp_path):
    folder = write_sentence_folder(tmp_path / "model", mode)
    save(
        trace(load_model(str(folder), kind=TEXTS_ALONE), 20, TEXTS_ALONE.outputs), tmp_path / "plain.onnx", ""
    )
    path = add_hidden_state(tmp_path / "plain.onnx", tmp_path / "both.onnx", "", HIDDEN)
    hidden, embedding = ort.InferenceSession(path).run(None, BATCH)
    (known,) = ort.InferenceSession(tmp_path / "plain.onnx").run(None, BATCH)
    np.testing.assert_array_equal(embedding, known)
    kept = BATCH["attention_mask"].astype(bool)
    np.testing.assert_allclose(hidden[kept], hidden_states(folder, BATCH)[kept], atol=1e-5)
    np.testing.assert_allclose(embedding, expected(hidden, BATCH["attention_mask"], mode), atol=1e-5)


@pytest.mark.parametrize("trained", [False, True])
def test_the_dense_layer_is_that_of_the_model(trained, tmp_path):
    folder = write_sentence_folder(tmp_path / "model", dense={"width": 12, "activation": "Identity"})
    model = load_model(str(folder), kind=TEXTS_ALONE)
    if trained:
        model.pooling.dense.weight.data += 1
        model.save_pretrained(tmp_path / "run" / "qat" / "model")
    session = SimpleNamespace(
        model_name=str(folder),
        folder=tmp_path / "run",
        config=SimpleNamespace(revision=None, task=SimpleNamespace(prompts=("query: ", "passage: "))),
        recipe=SimpleNamespace(trainings=("qat",) if trained else ()),
    )
    pooling = Pooling.model_validate(model.config.sentence_embedding)
    content = describe_sentences(session, pooling)
    evaluated = {"query": "query: ", "document": "passage: "}
    assert json.loads(content["config_sentence_transformers.json"]) == {"prompts": evaluated}
    made = load(content["2_Dense/model.safetensors"])
    before = load_file(folder / "2_Dense" / "model.safetensors")
    np.testing.assert_allclose(made["linear.weight"], before["linear.weight"] + trained, atol=1e-6)
    np.testing.assert_array_equal(made["linear.bias"], before["linear.bias"])


@pytest.mark.parametrize(
    ("card", "license_name"),
    [
        ("---\nlicense: mit\nlanguage: en\n---\n# Model\n", "mit"),
        ("---\nlicense: other\nlicense_name: my  own\n---\n", "my own"),
        ("---\nlanguage: en\n---\nlicense: mit\n", None),
        ("# Model\nlicense: mit\n", None),
        ("---\ntags: [a]\nlicense: 'apache-2.0'  # of the weights\n---\n", "apache-2.0"),
        ("---\ndate: 2023-02-30\nx: !!int ''\ny: " + "[" * 9000 + "\nlicense: mit\n---\n", "mit"),
        ("---\na: &a [x]\nlicense: &b [*a, *a]\n---\n", None),
        ("---\nlicense:\n- mit\n---\n", None),
        ("---\nlicense: " + "1" * 5000 + "\n---\n", None),
        ("---\nlicense: [\n---\n", None),
        ("---\n- license\n---\n", None),
        (b"\xff\xfe\x00", None),
        (None, None),
    ],
)
def test_the_head_of_the_card(tmp_path, card, license_name):
    if card is not None:
        (tmp_path / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    assert find_license(str(tmp_path), None) == license_name


@pytest.mark.parametrize(
    ("card", "saved_as", "base"),
    [
        ("base_model: owner/name", "", "owner/name"),
        ("base_model:\n- 'owner/name'\n- other/name", "x/y", "owner/name"),
        ("language: en", "intfloat/e5-small", "intfloat/e5-small"),
        ("language: en", "models/all-mpnet-base-v2", None),  # a folder of whoever saved it
        ("base_model: &a [x]", "/root/.cache/model", None),
    ],
)
def test_the_base_of_a_folder(tmp_path, card, saved_as, base):
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": saved_as}))
    assert find_base(str(tmp_path)) == ({"base_model": base} if base else {})
