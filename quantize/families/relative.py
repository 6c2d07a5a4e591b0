"""Families whose attention is rewritten, as it adds a term for the distance of two tokens to their score.

MPNet: Song et al. 2020, arXiv 2004.09297. DeBERTa v2 and v3: He et al. 2020, arXiv 2006.03654, and He et al.
2021, arXiv 2111.09543.
"""

from dataclasses import replace

from qdqbench.quantize.families.bert import BERT
from qdqbench.quantize.families.family import Residual

MPNET = replace(
    BERT,
    name="mpnet",
    model_types=("mpnet",),
    linears={
        "attention.attn.q": "query",
        "attention.attn.k": "key",
        "attention.attn.v": "value",
        "attention.attn.o": "output",
        "intermediate.dense": "ffn-in",
        "output.dense": "ffn-out",
    },
    outside={"classifier.dense": "pooler", "classifier.out_proj": "classifier"},
    attention="attention.attn",
    residuals=(Residual("attention.sum", ("query", "key", "value")), BERT.residuals[1]),
    norms={"attention.LayerNorm": "attention", "output.LayerNorm": "ffn"},
    pooler=None,
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    inputs=("input_ids", "attention_mask"),
    positions_follow_padding=True,
    layers_return_tuples=True,
    rewritten_by="mpnet",
)
DEBERTA_V2 = replace(
    BERT,
    name="deberta-v2",
    model_types=("deberta-v2",),
    linears={
        "attention.self.query_proj": "query",
        "attention.self.key_proj": "key",
        "attention.self.value_proj": "value",
        "attention.output.dense": "output",
        "intermediate.dense": "ffn-in",
        "output.dense": "ffn-out",
    },
    outside={"embeddings.embed_proj": "embeddings", "pooler.dense": "pooler", "classifier": "classifier"},
    pooler=None,
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout", "cls_dropout"),
    inputs=("input_ids", "attention_mask"),
    layers_return_tuples=True,
    terms=("attention.self.c2p", "attention.self.p2c"),
    rewritten_by="deberta",
    # as in every published checkpoint but v2-xlarge and v2-xxlarge, which have a convolution
    needs={
        "relative_attention": (True,),
        "share_att_key": (True,),
        "type_vocab_size": (0,),
        "conv_kernel_size": (0, None),
    },
)
