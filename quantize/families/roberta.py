"""RoBERTa (Liu et al. 2019, arXiv 1907.11692), XLM-R (1911.02116) and CamemBERT (1911.03894).

One architecture: BERT without token types, with positions that are counted behind the padding index.
"""

from dataclasses import replace

from qdqbench.quantize.families.bert import BERT

ROBERTA = replace(
    BERT,
    name="roberta",
    model_types=("roberta", "xlm-roberta", "camembert"),
    outside={"classifier.dense": "pooler", "classifier.out_proj": "classifier"},
    pooler=None,
    inputs=("input_ids", "attention_mask"),
    positions_follow_padding=True,
)
