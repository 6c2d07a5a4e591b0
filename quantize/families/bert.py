"""BERT (Devlin et al. 2018, arXiv 1810.04805)."""

from qdqbench.quantize.families.family import Family, Residual

BERT = Family(
    name="bert",
    model_types=("bert",),
    layers="encoder.layer",
    linears={
        "attention.self.query": "query",
        "attention.self.key": "key",
        "attention.self.value": "value",
        "attention.output.dense": "output",
        "intermediate.dense": "ffn-in",
        "output.dense": "ffn-out",
    },
    outside={"pooler.dense": "pooler", "classifier": "classifier"},
    attention="attention.self",
    residuals=(
        Residual("attention.output", ("query", "key", "value")),
        Residual("output", ("ffn-in",)),
    ),
    norms={"attention.output.LayerNorm": "attention", "output.LayerNorm": "ffn"},
    embeddings="embeddings",
    embeddings_norm="embeddings.LayerNorm",
    pooler="pooler",
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
    activation="hidden_act",
    intermediate="intermediate_size",
    inputs=("input_ids", "attention_mask", "token_type_ids"),
)
