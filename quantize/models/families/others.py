"""Embedders and re-rankers that are asked for by name and are not supported: why, and the nearest that is."""

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

from qdqbench.quantize.utils.errors import UserError


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


# inputs other than tokens, which a text alone does not have; models without them answer, and poorly
PLACES = {
    "bbox": "the place of each word on a page",
    "xpath_tags_seq": "the place of each word in a web page",
    "input_shape_ids": "the shape and the sound of each character",
}


def require_encoder(config: Any, model: str) -> None:
    """Refuse what transformers itself says is no encoder of text, before any of it is made or loaded."""
    if what := _find_other_kind(config):
        raise UserError(
            f"{f'model {model}' if model else 'the model'} is a {config.model_type!r}, {what}; only encoders "
            f"of text are supported{explain_other([config.model_type])}"
        )


def _find_other_kind(config: Any) -> str:
    """Return what a model is by its type; empty for an encoder of text, or for what a forward pass shows."""
    from transformers.models.auto import modeling_auto as names

    kind = config.model_type
    if config.is_encoder_decoder or kind in names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "an encoder with a decoder"
    both_ways = getattr(config, "use_bidirectional_attention", False) or hasattr(config, "is_decoder")
    masked = kind in names.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if kind in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not (masked or both_ways):
        return "a causal language model"
    if type(config) not in names.MODEL_MAPPING:
        return ""
    found: Any = names.MODEL_MAPPING[type(config)]
    base = found[0] if isinstance(found, (list, tuple)) else found
    reads = inspect.signature(base.forward).parameters
    given = getattr(base, "input_modalities", "text")
    senses = [given] if isinstance(given, str) else [*given]
    if senses != ["text"]:
        return f"a model of {' and '.join(senses)}"
    if base.main_input_name not in {"input_ids", *reads} or "input_ids" not in reads:
        other = "" if base.main_input_name == "input_ids" else f"{base.main_input_name} and "
        return f"which reads {other}no input_ids"
    return next((f"which reads {name}, {what}" for name, what in PLACES.items() if name in reads), "")
