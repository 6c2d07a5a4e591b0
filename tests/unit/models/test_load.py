"""Loading a classifier: our attention is transformers' own, and what cannot be loaded is one sentence."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from qdqbench.quantize.calibration.fakequant.quantizers import forward
from qdqbench.quantize.graph.export import trace
from qdqbench.quantize.models.identity import describe_model, model_fingerprint
from qdqbench.quantize.models.load import (
    load_config,
    load_matching_tokenizer,
    load_model,
    load_tokenizer,
    prepare_model,
    use_tanh_gelu,
)
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.pipeline.session import require_fit
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.quiet import quiet

from ...support import tiny_bert as bert
from ...support.families import write_model
from ...support.tiny_modernbert import new_modernbert


@pytest.fixture
def folder(tiny_bert, tmp_path):
    """A copy to break."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "model"))


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def failure(load, folder):
    with pytest.raises(UserError) as error:
        load(str(folder))
    message = str(error.value)
    assert str(folder) in message
    assert "\n" not in message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize("lengths", [(9, 4, 16), (7, 7), (1, 128), (3,)])
def test_the_attention_is_that_of_transformers(tiny_bert, lengths):
    import torch
    from transformers import BertForSequenceClassification

    with quiet("transformers"):
        theirs = BertForSequenceClassification.from_pretrained(tiny_bert, attn_implementation="eager").eval()
    batch = bert.padded_batch(lengths)
    ours = load_model(str(tiny_bert))
    inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
    with torch.inference_mode():
        mine, other = (model(**inputs, output_hidden_states=True) for model in (ours, theirs))
    torch.testing.assert_close(mine.logits, other.logits, atol=1e-6, rtol=0)
    seen = batch["attention_mask"] == 1
    for a, b in zip(mine.hidden_states, other.hidden_states, strict=True):
        np.testing.assert_allclose(a.numpy()[seen], b.numpy()[seen], atol=5e-6, rtol=0)


def test_padding_changes_nothing(tiny_bert):
    model = load_model(str(tiny_bert))
    batch = bert.padded_batch((9, 4, 16))
    together = forward(model, batch)
    for row, length in enumerate((9, 4, 16)):
        alone = forward(model, {name: array[row : row + 1, :length] for name, array in batch.items()})
        np.testing.assert_allclose(together[row], alone[0], atol=1e-6, rtol=0)


def test_the_model_is_fp32_whatever_its_weights_are_and_does_not_train(tmp_path):
    import torch

    model = load_model(str(bert.write_tiny_bert(tmp_path, bert.new_bert().half())))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())


def test_the_module_table(tiny_bert):
    table = module_table(load_model(str(tiny_bert)))

    def names(kind):
        return [name for name, info in table.items() if info.kind == kind]

    assert names("Linear") == [*bert.LINEARS, "bert.pooler.dense", "classifier"]
    assert names("Attention") == bert.ATTENTIONS
    assert [table[name].head_size for name in bert.ATTENTIONS] == [16, 16]
    assert names("Softmax") == [f"{name}.softmax" for name in bert.ATTENTIONS]
    assert len(names("LayerNorm")) == 5
    assert len(names("Embedding")) == 3
    assert table["bert.encoder.layer.0"].kind == "other"


def test_description(tiny_bert):
    info = describe_model(str(tiny_bert), load_model(str(tiny_bert)))
    assert (info["architecture"], info["num_labels"]) == ("BertForSequenceClassification", 3)
    assert info["problem_type"] is None
    assert info["label_names"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert info["sha256"] == model_fingerprint(str(tiny_bert))


def test_one_output_is_a_regression(tmp_path):
    bert.write_tiny_bert(tmp_path, bert.new_bert(labels=1))
    assert describe_model(str(tmp_path), load_model(str(tmp_path)))["problem_type"] == "regression"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_the_fingerprint_covers(folder, name):
    before = model_fingerprint(str(folder))
    assert model_fingerprint(str(folder)) == before
    with (folder / name).open("ab") as stream:
        stream.write(b" ")
    assert model_fingerprint(str(folder)) != before


def test_the_tokenizer(tiny_bert):
    tokenizer = load_tokenizer(str(tiny_bert))
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("ab. c")["input_ids"])
    assert tokens == ["[CLS]", "a", "##b", ".", "c", "[SEP]"]
    assert len(tokenizer) == len(bert.VOCABULARY)


class TestTanhGelu:
    def test_every_layer_computes_the_tanh_form(self, tiny_bert):
        import torch

        model = load_model(str(tiny_bert))
        use_tanh_gelu(model, "tiny")
        x = torch.linspace(-6, 6, 1001)
        wanted = torch.nn.functional.gelu(x, approximate="tanh")
        assert (wanted - torch.nn.functional.gelu(x)).abs().max() > 4e-4
        for layer in model.bert.encoder.layer:
            torch.testing.assert_close(layer.intermediate.intermediate_act_fn(x), wanted)

    def test_only_the_activations_change(self, tiny_bert):
        exact, model = load_model(str(tiny_bert)), load_model(str(tiny_bert))
        use_tanh_gelu(model, "tiny")
        pairs = zip(model.named_modules(), exact.named_modules(), strict=True)
        changed = [name for (name, ours), (_, theirs) in pairs if type(ours) is not type(theirs)]
        activation = "bert.encoder.layer.{}.intermediate.intermediate_act_fn"
        assert changed == [activation.format(layer) for layer in range(bert.LAYERS)]
        assert module_table(model) == module_table(exact)  # so a recipe's plan is the same
        batch = bert.padded_batch()
        difference = (forward(model, batch) - forward(exact, batch)).abs().max()
        assert 0 < difference < 0.01
        again = forward(model, batch)
        use_tanh_gelu(model, "tiny")
        np.testing.assert_array_equal(forward(model, batch), again)

    def test_the_gelu_of_a_head_stays(self):
        model = prepare_model(new_modernbert())
        use_tanh_gelu(model, "tiny")
        found = {n: type(module).__name__ for n, module in model.named_modules() if n.endswith(".act")}
        assert found.pop("head.act") == "GELUActivation"
        assert {*found.values()} == {"GELUTanh"}

    def test_the_tanh_form_in_steps_becomes_one_operator(self, folder):
        edit_json(folder / "config.json", hidden_act="gelu_new")
        model = load_model(str(folder))
        before = forward(model, bert.padded_batch())
        use_tanh_gelu(model, "tiny")
        np.testing.assert_allclose(forward(model, bert.padded_batch()), before, atol=1e-5)
        assert model.config.hidden_act == "gelu_pytorch_tanh"
        assert not any(type(module).__name__ == "NewGELUActivation" for module in model.modules())

    @pytest.mark.parametrize("activation", ["relu", "silu"])
    def test_another_activation_is_refused(self, folder, activation):
        edit_json(folder / "config.json", hidden_act=activation)
        model = load_model(str(folder))
        before = forward(model, bert.padded_batch())
        with pytest.raises(UserError, match=rf"mine computes '{activation}'; set export\.gelu to exact"):
            use_tanh_gelu(model, "mine")
        np.testing.assert_array_equal(forward(model, bert.padded_batch()), before)


class TestRefused:
    def test_another_architecture(self, folder):
        edit_json(folder / "config.json", model_type="mobilebert")
        message = failure(load_model, folder)
        assert "is a 'mobilebert'; supported here: bert, " in message
        assert "(config.json, key model_type)" in message

    @pytest.mark.parametrize("model_type", ["nonesuch", None])
    def test_an_unknown_architecture(self, folder, model_type):
        edit_json(folder / "config.json", model_type=model_type, auto_map={"AutoConfig": "evil.C"})
        message = failure(load_model, folder)
        assert f"is a {model_type!r} (config.json, key model_type), which transformers" in message
        assert "update transformers" in message

    def test_a_missing_or_empty_folder(self, tmp_path):
        for load in (load_model, load_tokenizer):
            assert "no such folder here" in failure(load, tmp_path / "nowhere" / "at" / "all")
        assert "has no config.json, so it is no model; it holds nothing" in failure(load_model, tmp_path)

    def test_no_classifier_head(self, folder):
        with quiet("transformers"):
            bert.new_bert().bert.save_pretrained(folder)
        message = failure(load_model, folder)
        assert "lacks weights for classifier.bias, classifier.weight; fine-tune it" in message

    def test_another_number_of_labels(self, folder):
        config = json.loads((folder / "config.json").read_text())
        config["id2label"] = {str(i): str(i) for i in range(5)}
        config["label2id"] = {str(i): i for i in range(5)}
        (folder / "config.json").write_text(json.dumps(config))
        assert "2 weights of another shape" in failure(load_model, folder)

    @pytest.mark.parametrize("keep", [0, 7, 1000, -1])
    def test_truncated_weights(self, folder, keep):
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:keep])
        assert "cannot load model" in failure(load_model, folder)
        weights.unlink()
        assert "cannot load model" in failure(load_model, folder)

    def test_pickled_weights_are_never_read(self, folder):
        import torch

        (folder / "model.safetensors").unlink()
        torch.save(bert.new_bert().state_dict(), folder / "pytorch_model.bin")
        assert "safetensors" in failure(load_model, folder)

    def test_broken_files(self, folder):
        (folder / "config.json").write_text("{")
        assert "cannot load model" in failure(load_model, folder)
        (folder / "tokenizer.json").write_text("{")
        assert "cannot load tokenizer" in failure(load_tokenizer, folder)

    def test_a_tokenizer_that_is_not_there_or_cannot_pad(self, folder):
        edit_json(folder / "tokenizer_config.json", pad_token=None)
        assert "has no pad token; name one in tokenizer_config.json" in failure(load_tokenizer, folder)
        for path in folder.glob("*token*"):
            path.unlink()
        assert "tokenizer" in failure(load_tokenizer, folder)

    def test_padding_that_is_not_what_positions_are_counted_by(self, tmp_path):
        write_model(tmp_path, "roberta")
        load_matching_tokenizer(str(tmp_path))
        edit_json(tmp_path / "config.json", pad_token_id=0)
        told = "pads with id 1, but the model counts its positions by pad_token_id 0"
        assert told in failure(load_matching_tokenizer, tmp_path)

    def test_a_tokenizer_of_a_larger_model(self, tmp_path):
        entries = load_matching_tokenizer(str(write_model(tmp_path, "bert"))).vocab_size
        edit_json(tmp_path / "config.json", vocab_size=entries - 1)
        told = f"has {entries} entries and the model {entries - 1}, so it is another model's"
        assert told in failure(load_matching_tokenizer, tmp_path)

    def test_an_added_token_beyond_the_table(self, tmp_path):
        tokenizer = load_matching_tokenizer(str(write_model(tmp_path, "bert")))
        tokenizer.add_tokens(["euro"])
        tokenizer.save_pretrained(tmp_path)
        told = "adds euro beyond the model's"
        assert told in failure(load_matching_tokenizer, tmp_path)

    def test_positions_behind_the_padding_are_fewer(self, tmp_path):
        config = load_config(str(write_model(tmp_path, "camembert")))
        recipe = load_recipe("roberta-int8-linears")
        require_fit(recipe, "mine", config)
        config.max_position_embeddings -= 1
        with pytest.raises(UserError, match="max_length is 128, but model mine has 127 positions"):
            require_fit(recipe, "mine", config)


def test_code_in_the_repository_never_runs(folder):
    marker = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: pass\n")
    auto = dict.fromkeys(("AutoConfig", "AutoModelForSequenceClassification"), "evil.C")
    edit_json(folder / "config.json", auto_map=auto)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.C", "evil.C"]})
    assert "code of its own (evil.C" in failure(load_model, folder)
    load_tokenizer(str(folder))
    edit_json(folder / "config.json", model_type="evil")
    failure(load_model, folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "asked", [{"output_attentions": True}, {"output_hidden_states": True}, {"return_dict": False}], ids=str
)
def test_a_graph_has_the_answers_alone_whatever_a_configuration_asks_for(asked, folder):
    edit_json(folder / "config.json", **asked)
    model = load_model(str(folder))
    assert [output.name for output in trace(model, 20).graph.output] == ["logits"]
    assert forward(model, bert.padded_batch()).shape == (3, 3)
