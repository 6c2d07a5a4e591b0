"""Embedding models: names of the encoder, numbers of sentence-transformers, refusals in one sentence."""

import json
import re

import numpy as np
import onnx
import pytest

from qdqbench._options import RunOptions
from qdqbench.quantize.models.identity import (
    Pooling,
    choose_prompts,
    embedding_notes,
    has_pooling,
    model_fingerprint,
)
from qdqbench.quantize.models.load import load_model, load_tokenizer
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.tasks.types.embedding import PAIRS
from qdqbench.quantize.tasks.types.reranking import RERANKING
from qdqbench.quantize.utils.errors import UserError

from ...support import tiny_embedder
from ...support.tiny_bert import HIDDEN, INT8, LINEARS, padded_batch, plan_of, recipe_with, run_onnx
from ...support.tiny_embedder import CLS, KINDS, LAST, MEAN, expected, hidden_states, write_sentence_folder

SHORT = {MEAN: "mean", CLS: "cls", LAST: "last"}


def embed(model, batch):
    import torch

    with torch.inference_mode():
        return model(**{n: torch.from_numpy(a) for n, a in batch.items()}).sentence_embedding.numpy()


@pytest.mark.parametrize("mode", [MEAN, CLS, LAST])
@pytest.mark.parametrize("normalize", [True, False])
def test_embeddings_are_those_of_sentence_transformers(tmp_path, mode, normalize):
    folder = write_sentence_folder(tmp_path, mode, normalize=normalize)
    model = load_model(str(folder), kind=PAIRS)
    for lengths in ((9, 4, 16), (1, 128), (3,), (7, 7)):
        batch = padded_batch(lengths)
        wanted = expected(hidden_states(folder, batch), batch["attention_mask"], mode, normalize=normalize)
        np.testing.assert_allclose(embed(model, batch), wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("mode", ["mean", "last"])
def test_padding_in_front_counts_no_more_than_behind(mode):
    import torch

    from qdqbench.quantize.models.embedder import pool_tokens

    hidden = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]])
    kept = [hidden[0, 2:], hidden[1, :3], hidden[2, 7:]]
    wanted = torch.stack([rows.mean(dim=0) if mode == "mean" else rows[-1] for rows in kept])
    torch.testing.assert_close(pool_tokens(hidden, mask, mode), wanted)


def test_half_precision_neither_overflows_nor_loses_the_mask():
    """The sum of these 512 hidden states is beyond FP16, and so is the square of any of them."""
    import torch

    from qdqbench.quantize.models.embedder import SentencePooling

    generator = torch.Generator().manual_seed(0)
    hidden = (400 + 100 * torch.randn(2, 512, 16, generator=generator)).half()
    mask = torch.ones(2, 512, dtype=torch.long)
    mask[1, 100:] = 0
    hidden[1, 100:] = 6e4  # padding, as large as FP16 can hold
    made = SentencePooling(Pooling(mode="mean", normalize=True), 16).half()(hidden, mask)
    wanted = expected(hidden.double().numpy(), mask.numpy(), MEAN)
    np.testing.assert_allclose(made.numpy(), wanted, atol=1e-6, rtol=0)


def test_an_embedding_of_zeros_stays_zero():
    import torch

    from qdqbench.quantize.models.embedder import SentencePooling

    zeros = SentencePooling(Pooling(mode="mean", normalize=True), 4)(torch.zeros(1, 3, 4), torch.ones(1, 3))
    assert zeros.tolist() == [[0, 0, 0, 0]]


def test_modules_are_called_as_in_a_classifier(tmp_path):
    model = load_model(str(write_sentence_folder(tmp_path)), kind=PAIRS)
    assert [name for name, info in module_table(model).items() if info.kind == "Linear"] == LINEARS
    assert type(model).__name__ == "BertSentenceEmbedding"
    assert not any("pooler" in name for name, _ in model.named_parameters())  # nothing unused is exported


def test_a_dense_is_between_pooling_and_normalization(tmp_path):
    import torch

    folder = write_sentence_folder(tmp_path, dense={"width": 8, "activation": "Tanh"})
    model = load_model(str(folder), kind=PAIRS)
    batch = padded_batch()
    mean = expected(hidden_states(folder, batch), batch["attention_mask"], MEAN, normalize=False)
    dense = model.pooling.dense
    assert dense.weight.std() > 0.9  # those of the file, not newly made ones
    with torch.inference_mode():
        wanted = torch.tanh(dense(torch.from_numpy(mean).float()))
    wanted = wanted / wanted.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(embed(model, batch), wanted.numpy(), atol=2e-6, rtol=0)
    assert plan_of(recipe_with(), model).high == ("pooling.dense",)  # a recipe may quantize it


def test_a_dropout_changes_nothing(tmp_path):
    folder = write_sentence_folder(tmp_path)
    plain = embed(load_model(str(folder), kind=PAIRS), padded_batch())
    listed = json.loads((folder / "modules.json").read_text())
    listed.insert(1, {"type": f"{KINDS}.Dropout", "path": "1_Dropout"})
    (folder / "modules.json").write_text(json.dumps(listed))
    np.testing.assert_array_equal(embed(load_model(str(folder), kind=PAIRS), padded_batch()), plain)


@pytest.mark.parametrize("dense", [None, {"width": 8, "activation": "Identity"}])
def test_saved_it_is_loaded_without_being_told_how(tmp_path, dense):
    model = load_model(str(write_sentence_folder(tmp_path / "a", LAST, dense=dense)), kind=PAIRS)
    model.save_pretrained(tmp_path / "b")
    again = load_model(str(tmp_path / "b"), kind=PAIRS)
    np.testing.assert_array_equal(embed(again, padded_batch()), embed(model, padded_batch()))


def test_an_older_folder_has_its_encoder_inside(tmp_path):
    old = write_sentence_folder(tmp_path / "old", inside="0_Transformer")
    new = write_sentence_folder(tmp_path / "new")
    batch = padded_batch()
    made = (embed(load_model(str(folder), kind=PAIRS), batch) for folder in (old, new))
    np.testing.assert_array_equal(*made)
    assert load_tokenizer(str(old), kind=PAIRS).get_vocab() == load_tokenizer(str(new)).get_vocab()


@pytest.mark.parametrize("file", ["modules.json", "1_Pooling/config.json", "0_Transformer/model.safetensors"])
def test_the_fingerprint_covers(tmp_path, file):
    folder = write_sentence_folder(tmp_path, inside="0_Transformer")
    before = model_fingerprint(str(folder))
    with (folder / file).open("ab") as stream:
        stream.write(b" ")
    assert model_fingerprint(str(folder)) != before


@pytest.mark.parametrize("mode", [MEAN, CLS, LAST])
def test_a_plain_encoder_is_told_how(tmp_path, mode):
    folder, batch = tiny_embedder.plain_encoder(write_sentence_folder(tmp_path)), padded_batch()
    model = load_model(str(folder), kind=PAIRS, pooling=Pooling(mode=SHORT[mode], normalize=True))
    wanted = expected(hidden_states(folder, batch), batch["attention_mask"], mode)
    np.testing.assert_allclose(embed(model, batch), wanted, atol=2e-6, rtol=0)


def refusal(folder, pooling=None):
    with pytest.raises(UserError) as error:
        load_model(str(folder), kind=PAIRS, pooling=pooling)
    assert "\n" not in str(error.value)
    return str(error.value)


class TestRefused:
    def test_a_plain_encoder_untold_or_contradicted(self, tmp_path):
        message = refusal(tiny_embedder.plain_encoder(write_sentence_folder(tmp_path)))
        assert "does not say how it pools tokens" in message
        assert "give --pooling mean, cls or last" in message
        message = refusal(write_sentence_folder(tmp_path), Pooling(mode="cls", normalize=True))
        assert "says itself that it pools by mean, with normalization; drop --pooling" in message
        load_model(str(tmp_path), kind=PAIRS, pooling=Pooling(mode="mean", normalize=True))

    @pytest.mark.parametrize("modules", [("LSTM", "WeightedLayerPooling"), ("Dense",), ("Normalize",)])
    def test_modules(self, tmp_path, modules):
        message = refusal(write_sentence_folder(tmp_path, modules=modules))
        assert f"is made of Transformer, Pooling, Normalize, {', '.join(modules)} (modules.json)" in message
        assert "supported here: a Transformer, a Pooling (mean, cls or last token), a Dense and a" in message

    @pytest.mark.parametrize(
        ("says", "nearest"),
        [("CrossEncoder", "bge-reranker"), ("SparseEncoder", "from Python"), ("Strange", "not supported")],
    )
    def test_what_the_folder_says_that_it_is(self, tmp_path, says, nearest):
        folder = write_sentence_folder(tmp_path)
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": says}))
        message = refusal(folder)
        assert f"is a {says} (config_sentence_transformers.json)" in message
        assert nearest in message
        with pytest.raises(UserError, match=says):
            has_pooling(str(folder))

    def test_a_cross_encoder_of_one_module_is_a_classifier(self, tmp_path):
        folder = write_sentence_folder(tmp_path)
        (folder / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
        modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
        (folder / "modules.json").write_text(json.dumps(modules))
        assert not has_pooling(str(folder))

    @pytest.mark.parametrize(
        ("kinds", "said"),
        [
            (["Transformer"], "copy that without modules.json"),
            (["BoW"], "made of BoW .* supported here"),
            (["WordEmbeddings", "Pooling"], "made of WordEmbeddings, Pooling "),
            (["StaticEmbedding", "Normalize"], "made of StaticEmbedding, Normalize .* without layers"),
            (["CLIPModel"], "made of CLIPModel "),
            (["Router"], "made of Router "),
            (["MLMTransformer", "SpladePooling"], "made of MLMTransformer, SpladePooling .* splade"),
            (["Transformer", "Pooling", "Dense", "LayerNorm", "Dense"], "Dense, LayerNorm, Dense "),
            (["custom_st.Transformer", "Pooling"], "made of custom_st.Transformer, Pooling"),
            ([{"idx": 0}], "is no list of modules"),
        ],
    )
    def test_folders_of_other_modules(self, tmp_path, kinds, said):
        folder = write_sentence_folder(tmp_path)
        listed = [
            each if isinstance(each, dict) else {"type": each if "." in each else f"{KINDS}.{each}"}
            for each in kinds
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        assert re.search(said, refusal(folder))

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            ({MEAN: False}, "nothing"),
            ({CLS: True}, f"{MEAN}, {CLS}"),
            ({MEAN: False, "pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
            ({MEAN: False, "pooling_mode": "weightedmean"}, "weightedmean"),
            ({MEAN: False, "pooling_mode": ["cls", "mean"]}, "cls, mean"),
        ],
    )
    def test_ways_of_pooling(self, tmp_path, flags, named):
        folder = write_sentence_folder(tmp_path)
        path = folder / "1_Pooling" / "config.json"
        path.write_text(json.dumps(dict.fromkeys((MEAN, CLS), False) | {MEAN: True} | flags))
        assert f"pools by {named}; supported here is one of mean, cls and last token" in refusal(folder)

    def test_a_task_that_needs_a_head(self, tmp_path):
        with pytest.raises(UserError, match=r"is an embedder \(modules.json\) without a head for re-ranking"):
            load_model(str(write_sentence_folder(tmp_path)), kind=RERANKING)

    def test_a_dense_that_cannot_be_read(self, tmp_path):
        message = refusal(write_sentence_folder(tmp_path, dense={"width": 8, "activation": "SiLU"}))
        assert "has the activation 'SiLU' after its Dense (2_Dense/config.json)" in message
        folder = write_sentence_folder(tmp_path / "sizes", dense={"width": 8, "activation": "Tanh"})
        path = folder / "2_Dense" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"out_features": 16}))
        assert f"'weight': (8, {HIDDEN})" in refusal(folder)
        folder = write_sentence_folder(tmp_path / "pickled", dense={"width": 8, "activation": "Tanh"})
        (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
        assert "has no 2_Dense/model.safetensors" in refusal(folder)

    @pytest.mark.parametrize("text", ["{", "{}", '[{"path": ""}]', "[1]"])
    def test_a_broken_list_of_modules(self, tmp_path, text):
        folder = write_sentence_folder(tmp_path)
        (folder / "modules.json").write_text(text)
        assert str(folder) in refusal(folder)


@pytest.mark.parametrize("named", [{"pooling_mode": "mean"}, {"pooling_mode": ["mean"]}])
def test_newer_files_name_the_mode(tmp_path, named):
    folder = write_sentence_folder(tmp_path)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": HIDDEN, **named}))
    assert load_model(str(folder), kind=PAIRS).config.sentence_embedding["mode"] == "mean"


def test_the_graph_pools_in_fp32_and_gives_the_embedding(tmp_path):
    """A hidden state of 300 has a square that FP16 does not hold."""
    import torch

    from qdqbench.quantize.graph import export

    model = load_model(str(write_sentence_folder(tmp_path)), kind=PAIRS)
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
    import qdqbench

    folder = write_sentence_folder(tmp_path / "model", dense={"width": 8, "activation": "Tanh"})
    rules = [*recipe_with().rules, {"match": "pooling.dense", **INT8}]
    samples = [padded_batch((7, 7), seed=seed) for seed in range(3)]
    model = qdqbench.load_embedder(folder)
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
        folder = str(write_sentence_folder(tmp_path))
        assert choose_prompts(folder, None, (), 2) == ()
        assert choose_prompts(folder, None, ["query: ", "passage: "], 2) == ("query: ", "passage: ")
        about = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(about))
        assert choose_prompts(folder, None, (), 2) == ("query: ", "query: ")
        assert choose_prompts(folder, None, ["query", "document"], 2) == ("query: ", "")
        assert choose_prompts(folder, None, [""], 1) == ()
        told = "the model has prompts (query); --prompt puts one before each text"
        assert told in embedding_notes(folder, None, 8, ())
        assert embedding_notes(folder, None, 8, ("query: ",)) == []

    @pytest.mark.parametrize(
        ("asked", "told"),
        [
            (
                ["querry"],
                "has no prompt named 'querry'; it has query. End a prompt's own text with a space or a colon",
            ),
            (["query", "query"], "2 prompts are too many; give one for each text of a sample, 1"),
            (["query"], "does not pool the tokens of a prompt (1_Pooling/config.json, key include_prompt)"),
        ],
    )
    def test_others_are_refused(self, asked, told, tmp_path):
        folder = write_sentence_folder(tmp_path, include_prompt=False)
        about = {"prompts": {"query": "query: "}}
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(about))
        with pytest.raises(UserError) as error:
            choose_prompts(str(folder), None, asked, 1)
        assert told in str(error.value)

    def test_a_classifier_has_none(self):
        with pytest.raises(UserError, match="--prompt is of embedding models; drop it"):
            RunOptions(prompt=["query: "]).config(recipe_with())
