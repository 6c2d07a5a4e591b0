"""What is recognized in models of types that are known, and of types that are not."""

import logging

import pytest
import torch
from torch import nn

from qdqbench.quantize.models import attention
from qdqbench.quantize.models.detection import detect_layout as layouts
from qdqbench.quantize.models.detection.detect_layout import detect_layout, list_modules
from qdqbench.quantize.models.families.known import BERT, FAMILIES
from qdqbench.quantize.models.load import create_untrained
from qdqbench.quantize.utils.errors import UserError

from ....support.families import SIZES
from ....support.unknown import config_for

KNOWN = [each for family in FAMILIES if not family.shared_layers for each in family.model_types]


def recognized(model_type, **changes):
    return detect_layout(create_untrained("tiny", config_for(model_type, **changes)))


def linears_of(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("model_type", KNOWN)
def test_a_known_family_is_recognized_as_it_is_described(model_type):
    """Names say nothing to the one, and all to the other."""
    described = next(family for family in FAMILIES if model_type in family.model_types)
    model = create_untrained("tiny", config_for(model_type, **SIZES[model_type]))
    found = detect_layout(model)
    names = linears_of(model)
    assert {n: found.family.role(n) for n in names} == {n: described.role(n) for n in names}
    assert found.left == {}
    assert found.attention == described.attention
    for name in (
        *("layers", "norms", "embeddings", "embeddings_norm", "embeddings_linear", "pooler", "activation"),
        *("intermediate", "head_size", "layers_return_tuples", "positions_follow_padding"),
    ):
        assert getattr(found.family, name) == getattr(described, name), name
    assert set(found.family.dropouts) >= {*model.config.to_dict()}.intersection(described.dropouts)
    assert set(found.family.inputs) >= set(described.inputs)
    assert found.gated == described.gated


SAME = ["ernie", "megatron-bert", "data2vec-text", "xlm-roberta-xl", "roberta-prelayernorm", "roformer"]
SAME += ["rembert", "bert-generation"]


@pytest.mark.parametrize("model_type", SAME)
def test_layers_that_are_like_those_of_bert(model_type):
    found = recognized(model_type)
    assert found.family.linears == BERT.linears
    assert found.left == {}
    own = model_type in ("megatron-bert", "roformer", "rembert")
    assert found.family.attention == (None if own else BERT.attention)
    before = model_type in ("megatron-bert", "xlm-roberta-xl", "roberta-prelayernorm")
    norms = {"attention input", "ffn input"} if before else {"attention", "ffn"}
    assert set(found.family.norms.values()) == norms
    assert len(found.family.residuals) == (0 if before else 2)
    counted = model_type in ("data2vec-text", "xlm-roberta-xl", "roberta-prelayernorm")
    assert found.family.positions_follow_padding == counted
    assert found.family.head_size == "attention_head_size"
    assert (found.head_size, found.gated) == (16, False)


def test_a_gated_feed_forward_of_two_linears():
    found = recognized("nomic_bert")
    ends = {path.rpartition(".")[2]: role for path, role in found.family.linears.items()}
    roles = ["ffn-in", "ffn-in", "ffn-out", "query", "key", "value", "output"]
    names = ["gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    assert ends == dict(zip(names, roles, strict=True))
    assert found.gated
    assert found.family.attention is None  # it rotates q and k


SECOND = "a feed-forward alongside the widest, or last, of its layer"
STRANGE = "by what it reads it belongs to neither attention nor feed-forward"
CONVOLUTION = "a convolution; only linears become INT8"


@pytest.mark.parametrize(
    ("model_type", "left"),
    [
        (
            "mobilebert",
            {
                "output.bottleneck.dense": STRANGE,
                "bottleneck.input.dense": STRANGE,
                "bottleneck.attention.dense": STRANGE,
                "ffn.0.intermediate.dense": SECOND,
                "ffn.0.output.dense": SECOND,
            },
        ),
        (
            "xmod",
            {
                f"output.adapter_modules.{linear}": SECOND
                for linear in ("en_XX.dense1", "en_XX.dense2", "de_DE.dense1", "de_DE.dense2")
            },
        ),
        (
            "convbert",
            {
                "attention.self.conv_kernel_layer": STRANGE,
                "attention.self.conv_out_layer": STRANGE,
                "attention.self.key_conv_attn_layer.depthwise": CONVOLUTION,
                "attention.self.key_conv_attn_layer.pointwise": CONVOLUTION,
            },
        ),
        ("nystromformer", {"attention.self.conv": CONVOLUTION}),
    ],
)
def test_what_is_not_recognized_is_named_with_a_reason(model_type, left, monkeypatch):
    monkeypatch.setattr(layouts, "_answers_padded_alike", lambda *_: True)  # for three of them it changes
    model = create_untrained("tiny", config_for(model_type))
    found = detect_layout(model)
    assert {name.removeprefix("encoder.layer.*."): why for name, why in found.left.items()} == left
    others = {path for path, role in found.family.linears.items() if role == "other"}
    assert others == {path for path, why in left.items() if why != CONVOLUTION}
    assert {path: role for path, role in found.family.linears.items() if role != "other"} == BERT.linears
    rows = list_modules(model, found)
    assert {row.module for row in rows if row.module in found.left} == set(found.left)
    assert not [row for row in rows if row.module in found.left and row.becomes != "FP16"]
    assert sum(row.number for row in rows if row.becomes == "INT8") == 2 * len(BERT.linears)
    assert sum(row.number for row in rows if row.class_name == "Linear") == len(linears_of(model))


FEW_KEYS = SIZES["bert"] | {"num_attention_heads": 4, "num_key_value_heads": 2}
FEW_KEYS |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}


@pytest.mark.parametrize(
    ("model_type", "changes", "why"),
    [
        ("gpt2", {}, r"model tiny is a 'gpt2', a causal language model; only encoders of text"),
        ("layoutlm", {}, r"is a 'layoutlm', which reads bbox, the place of each word on a page"),
        ("convbert", {}, r"a 'convbert' gives a text other logits when it is padded"),
        ("mobilebert", {}, r"a 'mobilebert' gives a text other logits when it is padded"),
        ("t5", {}, r"model tiny is a 't5', an encoder with a decoder"),
        ("squeezebert", {}, r"no attention .* 'squeezebert', .*\.\*\.attention\.query: a convolution"),
        ("big_bird", {}, r"replaces its own modules .*layer\.0\.attention\.self, .* \"original_full\" of"),
        ("fnet", {}, r"no attention was recognized in a 'fnet'"),
        ("funnel", {}, r"layers of a 'funnel' stand in several lists \(funnel\.encoder\.blocks\.0, "),
        ("longformer", {}, r"no linears of a 'longformer' .* as query: .*query: it is key and query"),
        ("esm", {}, r"the configuration of a 'esm' has no field for activation of its feed-forward"),
        (
            "bert-generation",
            {"is_decoder": True},
            r"'bert-generation' is a decoder, as no token sees those a",
        ),
        ("dpr", SIZES["bert"], r"its encoder in 'question_encoder', of class DPREncoder; save"),
        (  # weights that are shared between layers
            "albert",
            SIZES["albert"] | {"num_hidden_groups": 1},
            r"layers of a 'albert' share weights: albert\..*dense runs several",
        ),
        (
            "nystromformer",
            {"segment_means_seq_len": 64, "num_landmarks": 8},
            r"a 'nystromformer' of this .* not run on a sample .*\(RuntimeError",
        ),
        (
            "eurobert",
            FEW_KEYS,
            r"more heads of queries than of keys \(4 and 2\), as no kernel .*; give another",
        ),
    ],
)
def test_what_cannot_be_described(model_type, changes, why):
    with pytest.raises(UserError, match=why):
        recognized(model_type, **changes)


def test_other_logits_with_the_attention_and_mask_of_this_program(monkeypatch):
    torch.manual_seed(0)  # of some random weights padding changes next to nothing
    monkeypatch.setattr(attention, "MASK_FILL", 0.0)
    with pytest.raises(UserError, match="gives other logits with the attention and the mask"):
        recognized("ernie")


def test_libraries_are_silent_while_a_model_runs(monkeypatch):
    def seen(model):
        raise RuntimeError(f"level {logging.getLogger('transformers').level}")

    monkeypatch.setattr(layouts, "trace_flow", seen)
    with pytest.raises(UserError, match=rf"level {logging.ERROR}\)"):
        recognized("ernie")


def test_no_hooks_are_left_behind():
    """PyTorch warns of global hooks whenever a compiled module runs; warnings are errors."""
    recognized("ernie")
    torch.compile(torch.nn.Identity(), backend="eager")(torch.ones(1))
