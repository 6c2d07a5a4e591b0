"""Embedders and re-rankers that are asked for by name and are not supported: why, and the nearest that is."""

import inspect
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from qdqbench.quantize.utils.errors import UserError


@cache
def read_others() -> dict[str, Any]:
    """Return `others.yaml`: what is not supported by `models`, by `files` of a folder and by their `ends`."""
    text = Path(__file__).parents[1].joinpath("others.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def explain_other(values: Iterable[Any]) -> str:
    """Return the end of a refusal: which models, why not, the nearest that works; empty for others."""
    there = [*values]
    known = (other for other in read_others()["models"] if any(value in there for value in other["values"]))
    text = ". This type includes {models}: {reason}. Nearest that works: {nearest}"
    return next((text.format_map(other) for other in known), "")


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
