"""The supported families, and the lookup of a model's family."""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

from qdqbench.quantize.models.families.family import Family, Residual, Role
from qdqbench.quantize.models.families.others import explain_other, require_encoder
from qdqbench.quantize.utils.errors import UserError

TYPES = "token_type_ids"


def _linears(
    attention: str,
    qkv: str,
    output: str = "attention.output.dense",
    ffn_in: str = "intermediate.dense",
    ffn_out: str = "output.dense",
) -> dict[str, Role]:
    paths = [*(f"{attention}.{name}" for name in qkv.split()), output, ffn_in, ffn_out]
    roles: list[Role] = ["query", "key", "value", "output", "ffn-in", "ffn-out"]
    return dict(zip(paths, roles, strict=True))


BERT = Family(
    name="bert",
    model_types=("bert",),
    layers="encoder.layer",
    linears=_linears("attention.self", "query key value"),
    outside={"pooler.dense": "pooler", "classifier": "classifier"},
    attention="attention.self",
    residuals=(Residual("attention.output", ("query", "key", "value")), Residual("output", ("ffn-in",))),
    norms={"attention.output.LayerNorm": "attention", "output.LayerNorm": "ffn"},
    embeddings="embeddings",
    embeddings_norm="embeddings.LayerNorm",
    pooler="pooler",
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
    activation="hidden_act",
    intermediate="intermediate_size",
    inputs=("input_ids", "attention_mask", TYPES),
    # transformers would compute these whatever the configuration says
    needs={"position_embedding_type": ("absolute", None)},
)
_LIKE_BERT = replace(BERT, pooler=None, inputs=BERT.inputs[:2])
_DENSE_HEAD: dict[str, Role] = {"classifier.dense": "pooler", "classifier.out_proj": "classifier"}

ROBERTA = replace(
    _LIKE_BERT,
    name="roberta",
    model_types=("roberta", "xlm-roberta", "camembert"),
    outside=_DENSE_HEAD,
    positions_follow_padding=True,
)

ELECTRA = replace(
    BERT,
    name="electra",
    model_types=("electra",),
    outside={"embeddings_project": "embeddings", **_DENSE_HEAD},
    embeddings_linear="embeddings_project",  # of models whose embeddings are narrower than their layers
    pooler=None,
)

_GROUP = "albert_layers.0"
ALBERT = replace(
    BERT,
    name="albert",
    model_types=("albert",),
    layers="encoder.albert_layer_groups",
    linears=_linears(
        *(f"{_GROUP}.attention", "query key value"),
        *(f"{_GROUP}.{linear}" for linear in ("attention.dense", "ffn", "ffn_output")),
    ),
    outside={
        "embedding_hidden_mapping_in": "embeddings",
        "albert.pooler": "pooler",
        "classifier": "classifier",
    },
    attention=f"{_GROUP}.attention",
    residuals=(),  # added inside of the attention, where a quantizer has no place
    norms={f"{_GROUP}.attention.LayerNorm": "attention", f"{_GROUP}.full_layer_layer_norm": "ffn"},
    embeddings_linear="encoder.embedding_hidden_mapping_in",
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"),
    shared_layers=True,
)

DISTILBERT = replace(
    _LIKE_BERT,
    name="distilbert",
    model_types=("distilbert",),
    layers="transformer.layer",
    linears=_linears("attention", "q_lin k_lin v_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2"),
    outside={"pre_classifier": "pooler", "classifier": "classifier"},
    attention="attention",
    residuals=(Residual("attention_sum", ("query", "key", "value")), Residual("ffn_sum", ("ffn-in",))),
    norms={"sa_layer_norm": "attention", "output_layer_norm": "ffn"},
    dropouts=("dropout", "attention_dropout", "seq_classif_dropout", "qa_dropout"),
    activation="activation",
    intermediate="hidden_dim",
    given_sums=True,
)

MODERNBERT = replace(
    _LIKE_BERT,
    name="modernbert",
    model_types=("modernbert",),
    layers="layers",
    linears={"attn.Wqkv": "query, key, value", "attn.Wo": "output", "mlp.Wi": "ffn-in", "mlp.Wo": "ffn-out"},
    outside={"head.dense": "pooler", "classifier": "classifier"},
    attention="attn",
    residuals=(),  # pre-norm: what a layer adds is read by LayerNorms and by no linear
    norms={"attn_norm": "attention input", "mlp_norm": "ffn input"},
    embeddings_norm="embeddings.norm",
    dropouts=("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout"),
    activation="hidden_activation",
    head_size="head_dim",
    feed_forward_share="about half",
    gated=True,
    rotary=True,
    windows=True,
)

MPNET = replace(
    _LIKE_BERT,
    name="mpnet",
    model_types=("mpnet",),
    linears=_linears("attention.attn", "q k v", "attention.attn.o"),
    outside=_DENSE_HEAD,
    attention="attention.attn",
    residuals=(Residual("attention.sum", ("query", "key", "value")), BERT.residuals[1]),
    norms={"attention.LayerNorm": "attention", "output.LayerNorm": "ffn"},
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    positions_follow_padding=True,
    layers_return_tuples=True,
    rewritten=True,
)

DEBERTA_V2 = replace(
    _LIKE_BERT,
    name="deberta-v2",
    model_types=("deberta-v2",),
    linears=_linears("attention.self", "query_proj key_proj value_proj"),
    outside={"embeddings.embed_proj": "embeddings", "pooler.dense": "pooler", "classifier": "classifier"},
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout", "cls_dropout"),
    layers_return_tuples=True,
    terms=("attention.self.c2p", "attention.self.p2c"),
    rewritten=True,
    # as in every published checkpoint but v2-xlarge and v2-xxlarge, which have a convolution
    needs={
        "relative_attention": (True,),
        "share_att_key": (True,),
        "type_vocab_size": (0,),
        "conv_kernel_size": (0, None),
    },
)

# whose whole path is tested
FAMILIES = (BERT, ROBERTA, ELECTRA, DISTILBERT, MPNET, ALBERT, DEBERTA_V2, MODERNBERT)
# Families that recipes with a layout describe, by model type. A recipe enters its own when it is read, and
# again when it meets a model: the whole program asks for the family of a model by its type alone.
_DESCRIBED: dict[str, Family] = {}


def family_of(of: Any, model: str = "") -> Family:
    """Return the family of a model type such as "bert", or of a transformers configuration."""
    model_type = of if isinstance(of, str) else of.model_type
    if found := known_family(model_type) or _DESCRIBED.get(model_type):
        return found
    if not isinstance(of, str):
        require_encoder(of, model)
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    others = explain_other([model_type])
    new = "; for other encoders `qdqbench recipes new --model " + f"{model or 'DIR'}` writes a recipe"
    named = getattr(of, "architectures", None) or ()
    if any(re.search("ForCausalLM$|(?<!With)LMHeadModel$", name) for name in named):
        new = "; it is a decoder, and qdqbench quantizes encoders"
    raise UserError(
        f"{f'model {model}' if model else 'the model'} is a {model_type!r}; supported here: {known} "
        f"(config.json, key model_type){others or new}"
    )


def known_family(model_type: str) -> Family | None:
    """Return the family of a model type that needs no description by a recipe."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def register_family(family: Family) -> None:
    """Let models of this process be of a family that a recipe describes; of two the last counts."""
    _DESCRIBED.update(dict.fromkeys(family.model_types, family))


def family_named(name: str) -> Family:
    """Return the family that a recipe names; the schema has refused all other names."""
    return next(family for family in (*FAMILIES, *_DESCRIBED.values()) if family.name == name)


def require_family(recipe: str, family: str, model: str, config: Any) -> Family:
    actual = family_of(config, model)
    if actual.name != family:
        raise UserError(
            f"recipe {recipe} is for model family {family!r}, but model {model} is a {config.model_type!r}; "
            f"take a recipe of family {actual.name}"
        )
    return actual


ANY_LAYER = re.compile(r"(?:^|[/._])layers?[./](\d+)(?=[/.]|$)")
RUN = re.compile(r"@(\d+)(?=[^/]*$)")  # in names of what runs several times with the same weights
ANY_HEAD = re.compile(
    r"(?:^|/)(?:pooler|pooling|classifier|cls|head|score|qa_outputs|logits)(?=[/_.]|$)", re.IGNORECASE
)
ANY_EMBEDDINGS = re.compile(r"(?:^|[/.])embeddings?(?=[/.]|$)")
ANY_QKV = re.compile(r"(?:query|key|value|[qkv])(?:_proj|_lin)?")  # the last part of a linear's name
ANY_MERGED_QKV = re.compile(r"w?qkv(?:_proj)?|in_proj|query_key_value", re.IGNORECASE)
ACTIVATION = re.compile(r"(?:\w+_)?act_fn|act|activation")  # the module of an activation
SILENT = ("self", "dense")  # parts of a name that say nothing
# of a layer, in the order of computation
PARTS = ("query", "key", "value", "query, key, value", "attention", "output", "ffn-in", "ffn-out")
_PART: dict[str, str] = {family.attention: "attention" for family in FAMILIES if family.attention}
_PART |= {path: role for family in FAMILIES for path, role in family.linears.items()}


def part_of(module: str) -> tuple[int, str, str] | None:
    """Return layer or run, part (one of `PARTS`, or "") and path of a module; None outside of layers."""
    name, _, run = module.partition("@")
    found = re.match(r"(?:.*?\.)?(\d+)\.(.+)$", name)
    return (int(run or found[1]), _PART.get(found[2], ""), found[2]) if found else None


def layer_of_node(node: str) -> int | None:
    """Return the encoder layer of an ONNX node, or which run of one; None outside of the encoder."""
    found = (RUN.search(node) if ANY_LAYER.search(node) else None) or ANY_LAYER.search(node)
    return int(found[1]) if found else None


def first_feed_forwards(linears: Iterable[str]) -> str | None:
    """Return the pattern of a rule for the first feed-forward linears; None where no family has them."""
    for name, family in product(linears, FAMILIES):
        place = family.place(name)
        if place and family.linears.get(place.path) == "ffn-in":
            return f"{family.layers}.*.{place.path.rpartition('.')[0]}.*"
    return None


def adds_behind_attention(module: str) -> bool:
    """Return whether the residual that a module adds is that of the attention, in any family."""
    return any(family.behind_attention(module) for family in FAMILIES)


def _size(model_type: str, layers: int = 12, hidden: int = 768, heads: int = 12) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }


_BEHIND_PADDING = {"max_position_embeddings": 514, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_ROBERTA = {**_BEHIND_PADDING, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
# Fields of config.json that differ from the defaults of the model type. BERT: Devlin et al. 2019, "BERT",
# section 3; the others: the config.json that their authors published under about this name.
MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "bert-base": _size("bert"),
    "bert-large": _size("bert", 24, 1024, 16),
    "minilm": _size("bert", 6, 384, 12),  # Wang et al. 2020, arXiv 2002.10957: 6 layers of 384
    "roberta-base": {**_size("roberta"), **_ROBERTA, "vocab_size": 50265},
    "xlm-roberta-base": {**_size("xlm-roberta"), **_ROBERTA, "vocab_size": 250002},
    "camembert-base": {**_size("camembert"), **_ROBERTA, "vocab_size": 32005},
    "distilbert-base": {"model_type": "distilbert", "n_layers": 6, "dim": 768, "n_heads": 12},
    "electra-base": {**_size("electra"), "embedding_size": 768},
    "mpnet-base": {**_size("mpnet"), **_BEHIND_PADDING, "layer_norm_eps": 1e-5},
    "albert-base": _size("albert"),
    "deberta-v3-base": {
        **_size("deberta-v2"),
        "relative_attention": True,
        "position_buckets": 256,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "modernbert-base": {"model_type": "modernbert"},
}
