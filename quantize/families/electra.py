"""ELECTRA (Clark et al. 2020, arXiv 2003.10555): BERT with narrower embeddings and no pooler."""

from dataclasses import replace

from qdqbench.quantize.families.bert import BERT

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
