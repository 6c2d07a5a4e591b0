"""BERT, and families whose layers are BERT's.

BERT: Devlin et al. 2018, arXiv 1810.04805. RoBERTa (Liu et al. 2019, arXiv 1907.11692), XLM-R (1911.02116)
and CamemBERT (1911.03894) have no token types, and count their positions behind the padding index. ELECTRA
(Clark et al. 2020, arXiv 2003.10555) may have embeddings narrower than its layers. Only BERT has a pooler.
"""

from dataclasses import replace

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

ROBERTA = replace(
    BERT,
    name="roberta",
    model_types=("roberta", "xlm-roberta", "camembert"),
    outside={"classifier.dense": "pooler", "classifier.out_proj": "classifier"},
    pooler=None,
    inputs=("input_ids", "attention_mask"),
    positions_follow_padding=True,
)

ELECTRA = replace(
    BERT,
    name="electra",
    model_types=("electra",),
    outside={
        "embeddings_project": "embeddings",
        "classifier.dense": "pooler",
        "classifier.out_proj": "classifier",
    },
    embeddings_linear="embeddings_project",  # of models whose embeddings are narrower than their layers
    pooler=None,
)
