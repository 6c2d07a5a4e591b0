"""Published embedders and re-rankers: they load as they are, or a refusal names the nearest that does."""

import json

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, BertConfig

import qdqbench
from qdqbench.quantize.calibration.fakequant.quantizers import forward
from qdqbench.quantize.graph import export
from qdqbench.quantize.models.load import load_matching_tokenizer, load_model
from qdqbench.quantize.tasks.kinds.embedding import PAIRS
from qdqbench.quantize.tasks.kinds.reranking import RERANKING

from ...support.known_embedders import KNOWN, write_known
from ...support.refusals import edit_json, refusal
from ...support.tiny_bert import VOCABULARY, calibration_batches, padded_batch, plan_of, recipe_with, run_onnx
from ...support.tiny_embedder import expected, hidden_states, write_sentence_folder

OWN = "their layers are code of their own, which is never run"


@pytest.mark.parametrize("name", KNOWN)
def test_it_answers_as_its_own_library_does(name, tmp_path):
    known, folder = KNOWN[name], write_known(tmp_path, name)
    kind = PAIRS if known.mode else RERANKING
    model = load_model(str(folder), kind=kind)
    tokenizer = load_matching_tokenizer(str(folder), kind=kind)
    assert tokenizer.pad_token_id == known.pad_id
    given = tokenizer(["a query", "b"], ["a passage", "c"], padding=True, return_token_type_ids=False)
    batch = {key: np.array(value) for key, value in given.items()}
    with torch.inference_mode():
        made = model(**{key: torch.from_numpy(value) for key, value in batch.items()})[0].numpy()
    if not known.mode:
        theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        np.testing.assert_allclose(made, forward(theirs, batch), atol=2e-6)
        return
    states, mask = hidden_states(folder, batch), batch["attention_mask"]
    wanted = expected(states, mask, known.mode, normalize=not known.dense)
    if known.dense:
        weights = load_file(folder / "2_Dense" / "model.safetensors")
        wanted = np.tanh(wanted @ weights["linear.weight"].T + weights["linear.bias"])
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(made, wanted, atol=5e-6)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"model_type": "new", "architectures": ["NewModel"], "position_embedding_type": "rope"},
            f"arctic-embed-m-v2.0: {OWN}. Nearest that works: gte-base, gte-large, gte-modernbert-base",
        ),
        (
            {"architectures": ["JinaBertForMaskedLM"], "position_embedding_type": "alibi"},
            f"jina-reranker-v1: {OWN}. Nearest that works: bge-base-en-v1.5",
        ),
        (
            {"model_type": "xlm-roberta", "position_embedding_type": "rotary"},
            f"jina-colbert-v2: {OWN}. Nearest that works: multilingual-e5-*, bge-m3",
        ),
        ({"model_type": "nomic_bert"}, "for other encoders `qdqbench recipes new --model"),
        (
            {"model_type": "qwen3"},
            "embeddinggemma, bge-reranker-v2-gemma: they are no encoders of the BERT class",
        ),
        ({"position_embedding_type": "relative_key"}, "only models with position_embedding_type 'absolute'"),
        ({"is_decoder": True}, "has is_decoder True in config.json"),  # whose tokens see none behind them
    ],
)
def test_a_model_that_would_answer_something_else_is_refused(changes, told, tmp_path):
    edit_json(write_sentence_folder(tmp_path) / "config.json", **changes)
    assert told in refusal(load_model, tmp_path, kind=PAIRS)


SPARSE = "sentence_transformers.sparse_encoder.models"


@pytest.mark.parametrize(
    ("types", "told"),
    [
        (
            (f"{SPARSE}.MLMTransformer.MLMTransformer", f"{SPARSE}.SpladePooling.SpladePooling"),
            "a weight for each entry of the vocabulary. Nearest that works: qdqbench.quantize from Python",
        ),
        (
            ("sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"),
            "each token has a vector. Nearest that works: a copy without modules.json with --pooling mean",
        ),
        ((), "GTE-ModernColBERT-v1: each token has a vector"),  # of Stanford's library: no modules.json
    ],
)
def test_sparse_and_multi_vector_models_are_refused_by_name(types, told, tmp_path):
    folder = write_sentence_folder(tmp_path)
    (folder / "modules.json").unlink()
    if types:
        listed = [{"path": f"{n}" * (n > 0), "type": each} for n, each in enumerate(types)]
        (folder / "modules.json").write_text(json.dumps(listed))
    else:
        edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    assert told in refusal(load_model, folder, kind=PAIRS)


def test_a_splade_model_is_quantized_from_python(tmp_path):
    config = BertConfig(**{**KNOWN["bge-small-en-v1.5"].config, "hidden_size": 32, "num_hidden_layers": 1})
    config.num_attention_heads, config.intermediate_size, config.vocab_size = 2, 64, len(VOCABULARY)
    model = AutoModelForMaskedLM.from_config(config).eval()
    quantized = qdqbench.quantize(model, calibration_batches(), "bert-int8-linears")
    path = quantized.export(tmp_path / "model.onnx").path
    batch = padded_batch()
    made = run_onnx(onnx.load(path), batch)
    np.testing.assert_allclose(made, forward(model, batch), atol=0.05)
    assert (len(quantized.plan.int8), made.shape) == (6, (*batch["input_ids"].shape, len(VOCABULARY)))


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_word_embeddings_are_fp16_where_a_graph_would_be_too_large(compute, tmp_path, monkeypatch):
    """As of bge-m3, bge-reranker-v2-m3 and multilingual-e5-large, whose FP32 weights exceed 2 GiB."""
    folder = write_known(tmp_path, "bge-reranker-v2-m3")
    monkeypatch.setattr("qdqbench.quantize.models.load.LARGEST", 0)
    model = load_model(str(folder), kind=RERANKING)
    plan = plan_of(recipe_with("roberta-int8-linears"), model)
    graph = export.finish_graph(export.trace(model, 20), plan, export.ExportSettings(20, compute, "channel"))
    table = next(item for item in graph.graph.initializer if item.dims[:1] == [len(VOCABULARY)])
    assert table.data_type == onnx.TensorProto.FLOAT16
    export.save(graph, tmp_path / "model.onnx", "")
    batch = {name: array for name, array in padded_batch().items() if name != "token_type_ids"}
    np.testing.assert_allclose(
        run_onnx(graph, batch), forward(model, batch), atol=1e-5 if compute == "fp32" else 2e-2
    )
