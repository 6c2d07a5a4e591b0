"""ModernBERT (Warner et al. 2024, arXiv 2412.13663)."""

from qdqbench.quantize.families.family import Family

MODERNBERT = Family(
    name="modernbert",
    model_types=("modernbert",),
    layers="layers",
    linears={
        "attn.Wqkv": "query, key, value",
        "attn.Wo": "output",
        "mlp.Wi": "ffn-in",
        "mlp.Wo": "ffn-out",
    },
    outside={"head.dense": "pooler", "classifier": "classifier"},
    attention="attn",
    residuals=(),  # pre-norm: what a layer adds is read by LayerNorms and by no linear
    norms={"attn_norm": "attention input", "mlp_norm": "ffn input"},
    embeddings="embeddings",
    embeddings_norm="embeddings.norm",
    pooler=None,
    dropouts=("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout"),
    activation="hidden_activation",
    intermediate="intermediate_size",
    inputs=("input_ids", "attention_mask"),
    head_size="head_dim",
    gated=True,
    rotary=True,
    windows=True,
)
