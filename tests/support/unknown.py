"""Configurations of tiny models of types that have no recipes here."""

from qdqbench.quantize.utils.system.quiet import quiet

from .families import CONFIGS, new_tokenizer
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


def write_unknown(folder, model_type, vocabulary):
    """A classifier with random weights wide enough that every layer matters, and its tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_config(config_for(model_type, len(vocabulary)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.copy_(0.2 * torch.randn(value.shape, generator=generator))
    with quiet("transformers"):
        model.save_pretrained(folder)
    new_tokenizer(model.config.pad_token_id, vocabulary).save_pretrained(folder)
    return folder
