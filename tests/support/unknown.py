"""Configurations of tiny models of types that have no recipes here."""

from qdqbench.quantize.utils.system.quiet import quiet

from .families import CONFIGS
from .tiny_bert import VOCABULARY

UNKNOWN = CONFIGS["without recipes"]


def config_for(model_type, entries: int = len(VOCABULARY), **changes):
    """A tiny configuration."""
    from transformers import AutoConfig

    fields = UNKNOWN.get(model_type, {}) | changes
    return AutoConfig.for_model(model_type, vocab_size=entries, num_labels=2, **fields)


def write_config(folder, model_type):
    """A model folder with a configuration and nothing more."""
    with quiet("transformers"):
        config_for(model_type).save_pretrained(folder)
    return folder
