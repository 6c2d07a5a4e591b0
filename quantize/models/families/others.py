"""Embedders and re-rankers that are asked for by name and are not supported: why, and the nearest that is."""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Other(NamedTuple):
    """Models that a value in config.json or the class of a module tells."""

    values: tuple[str, ...]
    models: str
    reason: str
    nearest: str


_CODE = "their layers are code of their own, which is never run"
OTHERS = (
    Other(
        ("new",),
        "gte-*-v1.5, gte-multilingual-*, arctic-embed-m-v2.0",
        _CODE,
        "gte-base, gte-large, gte-modernbert-base; to rank, bge-reranker-v2-m3",
    ),
    Other(
        ("alibi",),
        "jina-embeddings-v2, jina-reranker-v1",
        _CODE,
        "bge-base-en-v1.5, gte-modernbert-base; to rank, bge-reranker-base",
    ),
    Other(
        ("rotary",),
        "jina-embeddings-v3, jina-reranker-v2, jina-colbert-v2",
        _CODE,
        "multilingual-e5-*, bge-m3; to rank, bge-reranker-v2-m3",
    ),
    Other(
        ("nomic_bert",),
        "nomic-embed-text-*",
        "no recipe is shipped for their gated layers",
        "modernbert-embed-base",
    ),
    Other(
        ("qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text"),
        "Qwen3-Embedding, e5-mistral, embeddinggemma, bge-reranker-v2-gemma",
        "they are no encoders of the BERT class",
        "multilingual-e5-*, bge-m3; to rank, bge-reranker-v2-m3",
    ),
    Other(
        ("SpladePooling", "SparseEncoder"),
        "splade-*, opensearch-neural-sparse-*",
        "a text has a weight for each entry of the vocabulary",
        "qdqbench.quantize from Python (docs/how-to/quantize-bge-e5-gte.md)",
    ),
    Other(
        ("HF_ColBERT", "ColBERT", "MultiVectorMask", "pylate.models.Dense.Dense"),
        "colbertv2.0, answerai-colbert-small-v1, GTE-ModernColBERT-v1",
        "each token has a vector",
        "a copy without modules.json with --pooling mean, whose graph gives last_hidden_state",
    ),
    Other(
        ("CrossEncoder",),
        "ettin-reranker-*",
        "a head of modules is not read",
        "gte-reranker-modernbert-base, bge-reranker-*",
    ),
    Other(
        ("StaticEmbedding", "StaticModel", "model2vec"),
        "potion-*, static-retrieval-*",
        "they are tables without layers",
        "all-MiniLM-*, bge-small-*",
    ),
)


def explain_other(values: Iterable[Any]) -> str:
    """Return the end of a refusal: which models, why not, the nearest that works; empty for others."""
    there = [*values]
    found = next((other for other in OTHERS if any(value in there for value in other.values)), None)
    if found is None:
        return ""
    return f". This type includes {found.models}: {found.reason}. Nearest that works: {found.nearest}"
