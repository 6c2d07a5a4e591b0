"""The deployed folder as libraries read it."""

import filecmp
import json
import shutil

import numpy as np
import onnxruntime as ort
import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer

from qdqbench.eval.runs.results import read_results
from qdqbench.quantize.deployment.hub import describe_card, describe_config
from qdqbench.quantize.pipeline.session import Session, read_config

from ..support.families import HIDDEN, write_model
from ..support.hub_stub import TOKEN
from ..support.long import mark_long
from ..support.tiny_embedder import MEAN, expected, write_modules, write_sentence_folder
from .tiny import ended, entries, fine, listing, results, sentences

WIDTH = 12
PROMPTS = {"prompts": {"query": "query: "}, "default_prompt_name": None, "similarity_fn_name": "cosine"}


def read(folder, name):
    return json.loads((folder / name).read_text())


def infinity_picks(folder):
    """The file on a CPU, by `get_onnx_files` of infinity_emb."""
    found = [path for path in folder.glob("**/*") if path.match("**.onnx")]
    return ([path for path in found if "quantize" in path.name] or found)[-1]


def tei_picks(folder):
    """The file and the kind of model, by OrtBackend::new and get_backend_model_type of TEI."""
    root, config = folder / "model.onnx", read(folder, "config.json")
    assert {"hidden_size", "num_hidden_layers", "max_position_embeddings", "model_type"} <= config.keys()
    assert (folder / "tokenizer.json").is_file()
    file = root if root.is_file() else folder / "onnx" / "model.onnx"
    if any(name.endswith("Classification") for name in config["architectures"]):
        assert {*config["id2label"].values()} == {*config["label2id"]}
        return file, "classifier" if len(config["id2label"]) > 1 else "reranker"
    pooling = read(folder, "1_Pooling/config.json")
    flags = [
        f"pooling_mode_{name}" for name in ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    ]
    assert [type(pooling[flag]) for flag in flags] == [bool] * 4
    return file, flags[[pooling[flag] for flag in flags].index(True)]


def ask(path, folder, texts):
    """All outputs of a graph by ONNX Runtime, and the mask."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    batch = dict(AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="np"))
    feeds = {each.name: batch[each.name] for each in session.get_inputs()}
    names = [each.name for each in session.get_outputs()]
    assert {each.type for each in session.get_outputs()} == {"tensor(float)"}  # which TEI asks for
    return dict(zip(names, session.run(None, feeds), strict=True)), feeds["attention_mask"]


def test_a_classifier(finished_run):
    folder, found = finished_run / "deploy", results(finished_run)
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["BertForSequenceClassification"]
    assert [*config.id2label.values()] == read(folder, "model.json")["labels"]
    assert config.problem_type == "single_label_classification"
    longest = read(folder, "model.json")["max_length"]
    assert AutoTokenizer.from_pretrained(folder).model_max_length == longest
    assert read(folder, "sentence_bert_config.json")["max_seq_length"] == longest
    assert tei_picks(folder) == (folder / "model.onnx", "classifier")
    assert infinity_picks(folder) == folder / "onnx" / "model_quantized.onnx"
    assert filecmp.cmp(folder / "onnx" / "model_quantized.onnx", folder / "model.onnx", shallow=False)
    made, _ = ask(folder / "model.onnx", folder, ["a good film", "dull"])
    assert made["logits"].shape == (2, 2)
    card = ModelCard.load(folder / "README.md").data
    assert (card.pipeline_tag, card.library_name) == ("text-classification", "transformers.js")
    assert card.tags == ["onnx", "openvino", "int8", "qdqbench"]
    (result,) = card.eval_results
    assert result.metric_value == found["stages"]["onnxruntime"]["metrics"]["accuracy"]
    assert (result.metric_type, result.dataset_name) == ("accuracy", "sst2")
    assert result.metric_name == "accuracy of onnxruntime, n = 96"
    assert card.base_model is None  # a folder is no model of the Hub


def test_a_card_and_a_config_name_what_is_known_of_the_hub(finished_run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # nothing waits for it
    session, found = Session(read_config(finished_run), finished_run), read_results(finished_run)
    config = session.config.model_copy(update={"model": "owner/name", "revision": "0" * 40})
    data = {**found.data, "source": "hub", "revision": "1" * 40}
    named = Session(config, finished_run)
    text = describe_card(named, found.model_copy(update={"data": data}), title="model", openvino=False)
    card = ModelCard(f"---\n{text}---\n").data
    assert (card.base_model, card["base_model_relation"]) == ("owner/name", "quantized")
    assert card.datasets == ["nyu-mll/glue"]
    (result,) = card.eval_results
    assert (result.dataset_config, result.dataset_revision) == ("sst2", "1" * 40)
    assert describe_config(session, found, ["bad", "good"])["label2id"] == {"bad": 0, "good": 1}


def test_code_of_the_models_own_is_not_named(finished_run, tmp_path):
    config, found = read_config(finished_run), read_results(finished_run)
    folder = shutil.copytree(config.model, tmp_path / "model")
    about = read(folder, "config.json") | {"auto_map": {"AutoConfig": "evil--modeling.Config"}}
    (folder / "config.json").write_text(json.dumps(about))
    session = Session(config.model_copy(update={"model": str(folder)}), finished_run)
    assert "evil" not in json.dumps(describe_config(session, found, []))


def test_openvino_files_answer_as_the_graph(finished_run):
    ov = pytest.importorskip("openvino")
    folder = finished_run / "deploy"
    known, _ = ask(folder / "model.onnx", folder, ["a good film", "dull"])
    batch = dict(
        AutoTokenizer.from_pretrained(folder)(["a good film", "dull"], padding=True, return_tensors="np")
    )
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    model = ov.Core().compile_model(folder / "openvino" / "openvino_model.xml", "CPU", exact)
    np.testing.assert_allclose(model(batch)["logits"], known["logits"], atol=0.05)


def test_the_fp32_twin_is_there_where_it_is_asked_for(finished_run, tmp_path, qdqbench):
    fine(qdqbench("deploy", finished_run, "--out", tmp_path / "out", "--fp32"))
    twin = (tmp_path / "out" / "onnx" / "model.onnx").read_bytes()
    assert twin == (finished_run / "model.fp32.onnx").read_bytes()
    assert tei_picks(tmp_path / "out")[0] == tmp_path / "out" / "model.onnx"  # INT8
    assert "| `onnx/model.onnx` | the FP32 twin |" in (tmp_path / "out" / "README.md").read_text()


def test_push_uploads_what_deploy_writes(a_run, qdqbench, hub_server):
    done = ended(qdqbench("push", a_run, "me/int8", "--private", "--json"))
    url = f"{hub_server.url}/me/int8/commit/{'0' * 40}"
    assert json.loads(done.out) == {"repository": "me/int8", "url": url}
    assert sorted(hub_server.files) == listing(a_run / "deploy")
    for name, data in hub_server.files.items():
        assert data == (a_run / "deploy" / name).read_bytes()
    written = (path.read_bytes() for path in a_run.rglob("*") if path.is_file())
    assert not any(TOKEN.encode() in data for data in written)
    assert TOKEN not in done.out + done.err


@pytest.mark.parametrize("kind", mark_long(["plain", "dense"], ["plain"]))
def test_an_embedder_is_one_of_sentence_transformers(kind, tmp_path, qdqbench):
    model, data = tmp_path / "model", tmp_path / "lines.txt"
    if kind == "dense":
        write_sentence_folder(model, MEAN, dense={"width": WIDTH, "activation": "Tanh"})
    else:
        write_model(model, "xlm-roberta", entries())
        write_modules(model, MEAN)
    (model / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    data.write_text("\n".join(dict.fromkeys(sentences(120, 5)[0])) + "\n")
    given = ("--model", model, "--task", "embed", "--data", data, "--out", tmp_path / "run")
    prompts = {"plain": ("--prompt", "passage: "), "dense": ()}[kind]
    assert qdqbench("run", "int8-linears", *given, *prompts).code in (0, 2)  # random weights
    folder, texts = tmp_path / "run" / "deploy", sentences(4, 8)[0]
    made, mask = ask(folder / "model.onnx", folder, texts)
    before, _ = ask(tmp_path / "run" / "model.int8.onnx", folder, texts)
    assert [*made] == ["last_hidden_state", "sentence_embedding"]
    np.testing.assert_array_equal(made["sentence_embedding"], before["sentence_embedding"])
    pooled = expected(made["last_hidden_state"], mask, MEAN, normalize=False)
    listed = read(folder, "modules.json")
    if kind == "dense":
        weights = load_file(folder / "2_Dense" / "model.safetensors")
        pooled = np.tanh(pooled @ weights["linear.weight"].T + weights["linear.bias"])
        about = read(folder, "2_Dense/config.json")
        assert (about["out_features"], about["activation_function"]) == (
            WIDTH,
            "torch.nn.modules.activation.Tanh",
        )
    pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
    np.testing.assert_allclose(made["sentence_embedding"], pooled, atol=2e-3 if kind == "dense" else 1e-5)
    names = ["Transformer", "Pooling", *["Dense"] * (kind == "dense"), "Normalize"]
    assert [each["type"].rpartition(".")[2] for each in listed] == names
    assert [each["path"] for each in listed[1:]] == [f"{n}_{name}" for n, name in enumerate(names[1:], 1)]
    assert read(folder, "model.json")["prompt"] == "".join(prompts[1:])
    assert read(folder, "config_sentence_transformers.json") == PROMPTS
    assert tei_picks(folder) == (folder / "model.onnx", "pooling_mode_mean_tokens")
    assert infinity_picks(folder) == folder / "onnx" / "model_quantized.onnx"
    assert ModelCard.load(folder / "README.md").data.library_name == "sentence-transformers"
    if kind == "plain":
        assert read(folder, "1_Pooling/config.json")["word_embedding_dimension"] == HIDDEN
        assert AutoConfig.from_pretrained(folder).architectures == ["XLMRobertaModel"]
