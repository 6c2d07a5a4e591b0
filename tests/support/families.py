"""A tiny random classifier of every model type, with its tokenizer, as a user would bring it."""

from pathlib import Path

import yaml

from qdqbench.quantize.utils.system.quiet import quiet

from .tiny_bert import VOCABULARY, widen

LAYERS, HIDDEN, HEADS, INTERMEDIATE, POSITIONS = 2, 32, 2, 64, 128
CONFIGS = yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text(encoding="utf-8"))
SIZES = CONFIGS["families"]  # a new family adds its model types


def new_model(model_type, *, labels=2, entries: int = len(VOCABULARY), seed=0, **changes):
    """A classifier with wide random weights; `changes` are fields of its configuration."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    fields = SIZES.get(model_type) or CONFIGS["without recipes"][model_type]
    sizes = {"vocab_size": entries, "num_labels": labels, **fields, **changes}
    config = AutoConfig.for_model(model_type, **sizes)
    return widen(AutoModelForSequenceClassification.from_config(config).eval(), seed)


def new_tokenizer(pad_id, vocabulary=VOCABULARY):
    """WordPiece over a vocabulary that starts with [PAD], which gets the id that a model has it at."""
    from transformers import BertTokenizer

    pad, *others = vocabulary
    entries = [*others[:pad_id], pad, *others[pad_id:]]
    return BertTokenizer(vocab={word: i for i, word in enumerate(entries)}, model_max_length=POSITIONS)


def write_model(folder, model_type, vocabulary=VOCABULARY, **given):
    """Save a new model and its tokenizer."""
    model = new_model(model_type, entries=len(vocabulary), **given)
    with quiet("transformers"):
        model.save_pretrained(folder)
    new_tokenizer(model.config.pad_token_id, vocabulary).save_pretrained(folder)
    return folder
