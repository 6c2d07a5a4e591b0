"""ALBERT (Lan et al. 2019, arXiv 1909.11942): the weights of a group are those of several layers."""

from qdqbench.quantize.families.family import Family

ALBERT = Family(
    name="albert",
    model_types=("albert",),
    layers="encoder.albert_layer_groups",
    linears={
        "albert_layers.0.attention.query": "query",
        "albert_layers.0.attention.key": "key",
        "albert_layers.0.attention.value": "value",
        "albert_layers.0.attention.dense": "output",
        "albert_layers.0.ffn": "ffn-in",
        "albert_layers.0.ffn_output": "ffn-out",
    },
    outside={
        "embedding_hidden_mapping_in": "embeddings",
        "albert.pooler": "pooler",
        "classifier": "classifier",
    },
    attention="albert_layers.0.attention",
    residuals=(),  # added inside of the attention, where a quantizer has no place
    norms={
        "albert_layers.0.attention.LayerNorm": "attention",
        "albert_layers.0.full_layer_layer_norm": "ffn",
    },
    embeddings="embeddings",
    embeddings_norm="embeddings.LayerNorm",
    embeddings_linear="encoder.embedding_hidden_mapping_in",
    pooler="pooler",
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"),
    activation="hidden_act",
    intermediate="intermediate_size",
    inputs=("input_ids", "attention_mask", "token_type_ids"),
    shared_layers=True,
)
