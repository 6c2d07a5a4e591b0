"""Loading a classifier and its tokenizer: what they are, and what does not fit is one sentence."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

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

from ...support import tiny_bert as bert
from ...support.families import write_model
from ...support.refusals import edit_json, refusal
from ...support.tiny_modernbert import new_modernbert


@pytest.fixture
def folder(tiny_bert, tmp_path):
    """A copy to break."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "model"))


def test_the_model_is_fp32_whatever_its_weights_are_and_does_not_train(tmp_path):
    model = load_model(str(bert.write_tiny_bert(tmp_path, bert.new_bert().half())))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())


def test_description(tiny_bert, tmp_path):
    info = describe_model(str(tiny_bert), load_model(str(tiny_bert)))
    assert (info["architecture"], info["num_labels"]) == ("BertForSequenceClassification", 3)
    assert info["problem_type"] is None
    assert info["label_names"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert info["sha256"] == model_fingerprint(str(tiny_bert))
    bert.write_tiny_bert(tmp_path, bert.new_bert(labels=1))
    assert describe_model(str(tmp_path), load_model(str(tmp_path)))["problem_type"] == "regression"


def test_the_tokenizer(tiny_bert):
    tokenizer = load_tokenizer(str(tiny_bert))
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("ab. c")["input_ids"])
    assert tokens == ["[CLS]", "a", "##b", ".", "c", "[SEP]"]
    assert len(tokenizer) == len(bert.VOCABULARY)


class TestTanhGelu:
    def test_every_layer_computes_the_tanh_form_and_nothing_else_changes(self, tiny_bert):
        exact, model = load_model(str(tiny_bert)), load_model(str(tiny_bert))
        use_tanh_gelu(model, "tiny")
        x = torch.linspace(-6, 6, 1001)
        wanted = torch.nn.functional.gelu(x, approximate="tanh")
        assert (wanted - torch.nn.functional.gelu(x)).abs().max() > 4e-4
        for layer in model.bert.encoder.layer:
            torch.testing.assert_close(layer.intermediate.intermediate_act_fn(x), wanted)
        pairs = zip(model.named_modules(), exact.named_modules(), strict=True)
        changed = [name for (name, ours), (_, theirs) in pairs if type(ours) is not type(theirs)]
        activation = "bert.encoder.layer.{}.intermediate.intermediate_act_fn"
        assert changed == [activation.format(layer) for layer in range(bert.LAYERS)]
        assert module_table(model) == module_table(exact)  # so a recipe's plan is the same
        batch = bert.padded_batch()
        before = forward(model, batch)
        assert 0 < (before - forward(exact, batch)).abs().max() < 0.01
        use_tanh_gelu(model, "tiny")
        np.testing.assert_array_equal(forward(model, batch), before)

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
    def test_a_missing_folder(self, tmp_path):
        for load in (load_model, load_tokenizer):
            assert "no such folder here" in refusal(load, tmp_path / "nowhere" / "at" / "all")

    def test_no_classifier_head(self, folder):
        bert.new_bert().bert.save_pretrained(folder)
        message = refusal(load_model, folder)
        assert "lacks weights for classifier.bias, classifier.weight; fine-tune it" in message

    def test_a_tokenizer_that_is_not_there_or_cannot_pad(self, folder):
        edit_json(folder / "tokenizer_config.json", pad_token=None)
        assert "has no pad token; name one in tokenizer_config.json" in refusal(load_tokenizer, folder)
        for path in folder.glob("*token*"):
            path.unlink()
        assert "tokenizer" in refusal(load_tokenizer, folder)

    def test_padding_that_is_not_what_positions_are_counted_by(self, tmp_path):
        load_matching_tokenizer(str(write_model(tmp_path, "roberta")))
        edit_json(tmp_path / "config.json", pad_token_id=0)
        told = "pads with id 1, but the model counts its positions by pad_token_id 0"
        assert told in refusal(load_matching_tokenizer, tmp_path)

    def test_a_tokenizer_of_a_larger_model(self, folder):
        tokenizer = load_matching_tokenizer(str(folder))
        entries = tokenizer.vocab_size
        tokenizer.add_tokens(["euro"])
        tokenizer.save_pretrained(folder)
        assert "adds euro beyond the model's" in refusal(load_matching_tokenizer, folder)
        edit_json(folder / "config.json", vocab_size=entries - 1)
        told = f"has {entries} entries and the model {entries - 1}, so it is another model's"
        assert told in refusal(load_matching_tokenizer, folder)

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
    assert "code of its own (evil.C" in refusal(load_model, folder)
    load_tokenizer(str(folder))
    edit_json(folder / "config.json", model_type="evil")
    refusal(load_model, folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "asked", [{"output_attentions": True}, {"output_hidden_states": True}, {"return_dict": False}], ids=str
)
def test_a_graph_has_the_answers_alone_whatever_a_configuration_asks_for(asked, folder):
    edit_json(folder / "config.json", **asked)
    model = load_model(str(folder))
    assert [output.name for output in trace(model, 20).graph.output] == ["logits"]
    assert forward(model, bert.padded_batch()).shape == (3, 3)
