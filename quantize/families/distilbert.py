"""DistilBERT (Sanh et al. 2019, arXiv 1910.01108)."""

from qdqbench.quantize.families.family import Family, Residual

DISTILBERT = Family(
    name="distilbert",
    model_types=("distilbert",),
    layers="transformer.layer",
    linears={
        "attention.q_lin": "query",
        "attention.k_lin": "key",
        "attention.v_lin": "value",
        "attention.out_lin": "output",
        "ffn.lin1": "ffn-in",
        "ffn.lin2": "ffn-out",
    },
    outside={"pre_classifier": "pooler", "classifier": "classifier"},
    attention="attention",
    residuals=(
        Residual("attention_sum", ("query", "key", "value")),
        Residual("ffn_sum", ("ffn-in",)),
    ),
    norms={"sa_layer_norm": "attention", "output_layer_norm": "ffn"},
    embeddings="embeddings",
    embeddings_norm="embeddings.LayerNorm",
    pooler=None,
    dropouts=("dropout", "attention_dropout", "seq_classif_dropout", "qa_dropout"),
    activation="activation",
    intermediate="hidden_dim",
    inputs=("input_ids", "attention_mask"),
    given_sums=True,
)
