"""Embedding models: names of the encoder, numbers of sentence-transformers, refusals in one sentence."""

import json
import re

import numpy as np
import onnx
import pytest
import torch

import qdqbench
from qdqbench._options import RunOptions
from qdqbench.quantize.graph import export
from qdqbench.quantize.models import identity
from qdqbench.quantize.models.embedder import SentencePooling, pool_tokens
from qdqbench.quantize.models.identity import Pooling
from qdqbench.quantize.models.load import load_model, load_tokenizer
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.tasks.kinds.embedding import PAIRS
from qdqbench.quantize.tasks.kinds.reranking import RERANKING
from qdqbench.quantize.utils.errors import UserError

from ...support.refusals import edit_json, refusal
from ...support.tiny_bert import HIDDEN, INT8, LINEARS, padded_batch, plan_of, recipe_with, run_onnx
from ...support.tiny_embedder import CLS, KINDS, LAST, MEAN, expected, hidden_states, plain_encoder
from ...support.tiny_embedder import write_sentence_folder as write

TANH = {"width": 8, "activation": "Tanh"}
ABOUT = "config_sentence_transformers.json"


def load(folder, **options):
    return load_model(str(folder), kind=PAIRS, **options)


def embed(model, batch):
    with torch.inference_mode():
        return model(**{n: torch.from_numpy(a) for n, a in batch.items()}).sentence_embedding.numpy()


def assert_pooled(model, folder, mode, *, normalize=True):
    for lengths in ((9, 4, 16), (1, 128), (3,), (7, 7)):
        batch = padded_batch(lengths)
        wanted = expected(hidden_states(folder, batch), batch["attention_mask"], mode, normalize=normalize)
        np.testing.assert_allclose(embed(model, batch), wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("mode", [MEAN, CLS, LAST])
@pytest.mark.parametrize("normalize", [True, False])
def test_embeddings_are_those_of_sentence_transformers(tmp_path, mode, normalize):
    folder = write(tmp_path, mode, normalize=normalize)
    assert_pooled(load(folder), folder, mode, normalize=normalize)


@pytest.mark.parametrize(("mode", "short"), [(MEAN, "mean"), (CLS, "cls"), (LAST, "last")])
def test_a_plain_encoder_is_told_how(tmp_path, mode, short):
    folder = plain_encoder(write(tmp_path))
    assert_pooled(load(folder, pooling=Pooling(mode=short, normalize=True)), folder, mode)


@pytest.mark.parametrize("mode", ["mean", "last"])
def test_padding_in_front_counts_no_more_than_behind(mode):
    hidden = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]])
    kept = [hidden[0, 2:], hidden[1, :3], hidden[2, 7:]]
    wanted = torch.stack([rows.mean(dim=0) if mode == "mean" else rows[-1] for rows in kept])
    torch.testing.assert_close(pool_tokens(hidden, mask, mode), wanted)


def test_half_precision_neither_overflows_nor_loses_the_mask_and_zeros_stay():
    """The sum of these 512 hidden states is beyond FP16, and so is the square of any of them."""
    generator = torch.Generator().manual_seed(0)
    hidden = (400 + 100 * torch.randn(2, 512, 16, generator=generator)).half()
    mask = torch.ones(2, 512, dtype=torch.long)
    mask[1, 100:] = 0
    hidden[1, 100:] = 6e4  # padding, as large as FP16 can hold
    pooling = SentencePooling(Pooling(mode="mean", normalize=True), 16).half()
    wanted = expected(hidden.double().numpy(), mask.numpy(), MEAN)
    np.testing.assert_allclose(pooling(hidden, mask).numpy(), wanted, atol=1e-6, rtol=0)
    assert not pooling(torch.zeros(1, 3, 16), torch.ones(1, 3)).any()


def test_modules_are_called_as_in_a_classifier(tmp_path):
    model = load(write(tmp_path))
    assert [name for name, info in module_table(model).items() if info.kind == "Linear"] == LINEARS
    assert type(model).__name__ == "BertSentenceEmbedding"
    assert not any("pooler" in name for name, _ in model.named_parameters())  # nothing unused is exported


def test_a_dense_is_between_pooling_and_normalization(tmp_path):
    folder = write(tmp_path, dense=TANH)
    model = load(folder)
    batch = padded_batch()
    mean = expected(hidden_states(folder, batch), batch["attention_mask"], MEAN, normalize=False)
    dense = model.pooling.dense
    assert dense.weight.std() > 0.9  # those of the file, not newly made ones
    with torch.inference_mode():
        wanted = torch.tanh(dense(torch.from_numpy(mean).float()))
    wanted = wanted / wanted.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(embed(model, batch), wanted.numpy(), atol=2e-6, rtol=0)
    assert plan_of(recipe_with(), model).high == ("pooling.dense",)  # a recipe may quantize it


def with_dropout(folder):
    listed = json.loads((folder / "modules.json").read_text())
    listed.insert(1, {"type": f"{KINDS}.Dropout", "path": "1_Dropout"})
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def saved_again(folder):
    load(folder).save_pretrained(folder / "again")
    return folder / "again"


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({}, with_dropout),
        ({}, lambda folder: write(folder / "older", inside="0_Transformer")),
        ({"mode": LAST}, saved_again),
        ({"dense": {"width": 8, "activation": "Identity"}}, saved_again),
    ],
)
def test_other_forms_of_a_folder_give_the_same_embeddings(tmp_path, given, same):
    folder = write(tmp_path, **given)
    plain = embed(load(folder), padded_batch())
    np.testing.assert_array_equal(embed(load(same(folder)), padded_batch()), plain)


def test_an_older_folder_has_its_tokenizer_inside(tmp_path):
    old, new = write(tmp_path / "old", inside="0_Transformer"), write(tmp_path / "new")
    assert load_tokenizer(str(old), kind=PAIRS).get_vocab() == load_tokenizer(str(new)).get_vocab()


OF_ENCODER = [f"0_Transformer/{name}" for name in ("config.json", "model.safetensors")]


@pytest.mark.parametrize("file", ["modules.json", "tokenizer.json", "1_Pooling/config.json", *OF_ENCODER])
def test_the_fingerprint_covers(tmp_path, file):
    folder = write(tmp_path, inside="0_Transformer")
    (folder / "tokenizer.json").touch()
    before = identity.model_fingerprint(str(folder))
    assert identity.model_fingerprint(str(folder)) == before
    with (folder / file).open("ab") as stream:
        stream.write(b" ")
    assert identity.model_fingerprint(str(folder)) != before


def of_modules(*kinds):
    listed = [{"type": each if "." in each else f"{KINDS}.{each}"} for each in kinds]
    return lambda folder: (folder / "modules.json").write_text(json.dumps(listed))


def pooling_by(**flags):
    settings = dict.fromkeys((MEAN, CLS), False) | {MEAN: True} | flags
    return lambda folder: (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


def listing(text):
    return lambda folder: (folder / "modules.json").write_text(text)


def saying(says):
    return lambda folder: (folder / ABOUT).write_text(json.dumps({"model_type": says}))


OTHERS = r" \(modules\.json\); supported here: a Transformer, a Pooling \(mean, cls or last token\), a Dense"
MADE = "is made of Transformer, Pooling, Normalize, "
POOLS = "; supported here is one of mean, cls and last token"
OTHER_DENSE = r"the activation 'SiLU' after its Dense \(2_Dense/config\.json\)"


@pytest.mark.parametrize(
    ("given", "edit", "said"),
    [
        ({}, plain_encoder, "does not say how it pools tokens .*; give --pooling mean, cls or last"),
        ({"modules": ("LSTM", "WeightedLayerPooling")}, None, f"{MADE}LSTM, WeightedLayerPooling{OTHERS}"),
        ({"modules": ("Dense",)}, None, f"{MADE}Dense{OTHERS}"),
        ({"modules": ("Normalize",)}, None, f"{MADE}Normalize{OTHERS}"),
        ({}, of_modules("Transformer"), "copy that without modules.json"),
        ({}, of_modules("BoW"), "made of BoW .* supported here"),
        ({}, of_modules("WordEmbeddings", "Pooling"), "made of WordEmbeddings, Pooling "),
        ({}, of_modules("StaticEmbedding", "Normalize"), "of StaticEmbedding, Normalize .* without layers"),
        ({}, of_modules("CLIPModel"), "made of CLIPModel "),
        ({}, of_modules("Router"), "made of Router "),
        ({}, of_modules("MLMTransformer", "SpladePooling"), "of MLMTransformer, SpladePooling .* splade"),
        ({}, of_modules("Transformer", "Pooling", "Dense", "LayerNorm", "Dense"), "Dense, LayerNorm, Dense "),
        ({}, of_modules("custom_st.Transformer", "Pooling"), "made of custom_st.Transformer, Pooling"),
        ({}, listing('[{"idx": 0}]'), "is no list of modules"),
        *[({}, listing(text), "") for text in ("{", "{}", '[{"path": ""}]', "[1]")],
        ({}, pooling_by(**{MEAN: False}), f"pools by nothing{POOLS}"),
        ({}, pooling_by(**{CLS: True}), f"pools by {MEAN}, {CLS}{POOLS}"),
        ({}, pooling_by(**{MEAN: False}, pooling_mode_max_tokens=True), "by pooling_mode_max_tokens;"),
        ({}, pooling_by(**{MEAN: False}, pooling_mode="weightedmean"), f"pools by weightedmean{POOLS}"),
        ({}, pooling_by(**{MEAN: False}, pooling_mode=["cls", "mean"]), f"pools by cls, mean{POOLS}"),
        ({}, saying("CrossEncoder"), rf"is a CrossEncoder \({ABOUT}\).*bge-reranker"),
        ({}, saying("SparseEncoder"), rf"is a SparseEncoder \({ABOUT}\).*from Python"),
        ({}, saying("Strange"), rf"is a Strange \({ABOUT}\).*not supported"),
        ({"dense": {"width": 8, "activation": "SiLU"}}, None, OTHER_DENSE),
        (
            {"dense": TANH},
            lambda folder: edit_json(folder / "2_Dense" / "config.json", out_features=16),
            rf"'weight': \(8, {HIDDEN}\)",
        ),
        (
            {"dense": TANH},
            lambda folder: (folder / "2_Dense" / "model.safetensors").unlink(),
            "has no 2_Dense/model.safetensors",
        ),
    ],
)
def test_what_is_no_such_embedder_is_refused(tmp_path, given, edit, said):
    folder = write(tmp_path, **given)
    if edit:
        edit(folder)
    assert re.search(said, refusal(load, folder))


def test_a_pooling_that_the_folder_contradicts(tmp_path):
    folder = write(tmp_path)
    message = refusal(load, folder, pooling=Pooling(mode="cls", normalize=True))
    assert "says itself that it pools by mean, with normalization; drop --pooling" in message
    load(folder, pooling=Pooling(mode="mean", normalize=True))


def test_a_folder_says_whether_it_pools_or_what_else_it_is(tmp_path):
    folder = write(tmp_path)
    assert identity.has_pooling(str(folder))
    (folder / ABOUT).write_text('{"model_type": "CrossEncoder"}')
    with pytest.raises(UserError, match="CrossEncoder"):
        identity.has_pooling(str(folder))
    (folder / "modules.json").write_text(json.dumps([{"type": f"{KINDS}.Transformer", "path": ""}]))
    assert not identity.has_pooling(str(folder))  # a classifier


def test_a_task_that_needs_a_head(tmp_path):
    with pytest.raises(UserError, match=r"is an embedder \(modules.json\) without a head for re-ranking"):
        load_model(str(write(tmp_path)), kind=RERANKING)


@pytest.mark.parametrize("named", [{"pooling_mode": "mean"}, {"pooling_mode": ["mean"]}])
def test_newer_files_name_the_mode(tmp_path, named):
    folder = write(tmp_path)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": HIDDEN, **named}))
    assert load(folder).config.sentence_embedding["mode"] == "mean"


def test_the_graph_pools_in_fp32_and_gives_the_embedding(tmp_path):
    """A hidden state of 300 has a square that FP16 does not hold."""
    model = load(write(tmp_path))
    with torch.no_grad():
        for parameter in model.bert.encoder.layer[-1].output.LayerNorm.parameters():
            parameter.mul_(300)
    traced = export.trace(model, 20, {"sentence_embedding": ("batch", "width")})
    plan = plan_of(recipe_with(), model)
    graph = export.finish_graph(traced, plan, export.ExportSettings(20, "fp16", "channel"))
    batch = padded_batch((16, 3, 9))
    named = {value.name: value.type.tensor_type.elem_type for value in graph.graph.output}
    assert named == {"sentence_embedding": onnx.TensorProto.FLOAT}
    made = run_onnx(graph, batch)
    assert made.shape == (3, HIDDEN)
    np.testing.assert_allclose(made, embed(model, batch), atol=2e-3, rtol=0)
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, atol=1e-6)  # FP16 would leave 1e-3


def test_a_model_in_memory_is_quantized_and_exported_with_its_dense(tmp_path):
    rules = [*recipe_with().rules, {"match": "pooling.dense", **INT8}]
    samples = [padded_batch((7, 7), seed=seed) for seed in range(3)]
    model = qdqbench.load_embedder(write(tmp_path / "model", dense=TANH))
    quantized = qdqbench.quantize(model, samples, recipe_with(rules=rules))
    exported = qdqbench.export(quantized, tmp_path / "model.onnx")
    assert "pooling.dense" in quantized.plan.int8
    batch = padded_batch()
    made = run_onnx(onnx.load(exported.path), batch)
    assert made.shape == (3, 8)
    np.testing.assert_allclose(made, embed(quantized.model, batch), atol=0.05, rtol=0)
    assert (made != embed(model, batch)).any()
    assert qdqbench.check(exported.path).findings == []


class TestPrompts:
    def test_they_are_chosen_by_name_or_given(self, tmp_path):
        folder = str(write(tmp_path))
        assert identity.choose_prompts(folder, None, (), 2) == ()
        assert identity.choose_prompts(folder, None, ["query: ", "passage: "], 2) == ("query: ", "passage: ")
        about = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
        (tmp_path / ABOUT).write_text(json.dumps(about))
        assert identity.choose_prompts(folder, None, (), 2) == ("query: ", "query: ")
        assert identity.choose_prompts(folder, None, ["query", "document"], 2) == ("query: ", "")
        assert identity.choose_prompts(folder, None, [""], 1) == ()
        told = "the model has prompts (query); --prompt puts one before each text"
        assert told in identity.embedding_notes(folder, None, 8, ())
        assert identity.embedding_notes(folder, None, 8, ("query: ",)) == []

    @pytest.mark.parametrize(
        ("asked", "told"),
        [
            (["querry"], "no prompt named 'querry'; it has query. End a prompt's own text with a space or a"),
            (["query", "query"], "2 prompts are too many; give one for each text of a sample, 1"),
            (["query"], r"not pool the tokens of a prompt \(1_Pooling/config\.json, key include_prompt\)"),
        ],
    )
    def test_others_are_refused(self, asked, told, tmp_path):
        folder = write(tmp_path, include_prompt=False)
        (folder / ABOUT).write_text(json.dumps({"prompts": {"query": "query: "}}))
        with pytest.raises(UserError, match=told):
            identity.choose_prompts(str(folder), None, asked, 1)

    def test_a_classifier_has_none(self):
        with pytest.raises(UserError, match="--prompt is of embedding models; drop it"):
            RunOptions(prompt=["query: "]).config(recipe_with())
