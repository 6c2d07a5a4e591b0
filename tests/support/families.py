"""A tiny random classifier of every model type, with its tokenizer, as a user would bring it.

A new family adds its model types to `SIZES`: what its configuration calls otherwise than BERT's.
"""

from qdqbench.quantize.utils.system.quiet import quiet

from .tiny_bert import VOCABULARY, widen

LAYERS, HIDDEN, HEADS, INTERMEDIATE, POSITIONS = 2, 32, 2, 64, 128
_NARROW = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_NARROW |= {"intermediate_size": INTERMEDIATE, "max_position_embeddings": POSITIONS}
_BEHIND_PADDING = _NARROW | {"max_position_embeddings": POSITIONS + 2}  # as the padding index is 1
SIZES = {
    "bert": _NARROW,
    "roberta": _BEHIND_PADDING,
    "xlm-roberta": _BEHIND_PADDING,
    "camembert": _BEHIND_PADDING,
    "electra": _NARROW | {"embedding_size": 16},
    "albert": _NARROW | {"num_hidden_layers": 2 * LAYERS, "num_hidden_groups": LAYERS, "embedding_size": 16},
    "distilbert": {
        "dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": INTERMEDIATE,
        "max_position_embeddings": POSITIONS,
    },
    "modernbert": _NARROW | {
        "local_attention": 8, "classifier_pooling": "mean", "pad_token_id": 0, "cls_token_id": 2,
        "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3,
    },
    "mpnet": _BEHIND_PADDING,
    "deberta-v2": _NARROW | {
        "relative_attention": True, "position_buckets": 16, "pos_att_type": "p2c|c2p", "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    },
}  # fmt: skip


def new_model(model_type, *, labels=2, entries: int = len(VOCABULARY), seed=0, **changes):
    """A classifier with wide random weights; `changes` are fields of its configuration."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {"vocab_size": entries, "num_labels": labels, **SIZES[model_type], **changes}
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
