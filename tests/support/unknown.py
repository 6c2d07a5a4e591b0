"""Configurations of tiny models of types that have no recipes here."""

from qdqbench.quantize.utils.system.quiet import quiet

from .families import HIDDEN, SIZES, new_tokenizer
from .tiny_bert import VOCABULARY

LIKE_BERT, LIKE_ROBERTA = SIZES["bert"], SIZES["roberta"]
UNKNOWN = {
    "ernie": LIKE_BERT,
    "megatron-bert": LIKE_BERT,
    "data2vec-text": LIKE_ROBERTA,
    "xlm-roberta-xl": LIKE_ROBERTA,
    "roberta-prelayernorm": LIKE_ROBERTA,
    "roformer": LIKE_BERT | {"embedding_size": 16},
    "rembert": LIKE_BERT | {"input_embedding_size": 16, "bos_token_id": 2, "eos_token_id": 3},
    "bert-generation": LIKE_BERT,
    "layoutlm": LIKE_BERT,
    "nomic_bert": LIKE_BERT,
    "xmod": LIKE_ROBERTA | {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
    "nystromformer": LIKE_BERT | {"segment_means_seq_len": 64, "num_landmarks": 64},
    "mobilebert": {
        **LIKE_BERT, "embedding_size": HIDDEN, "intra_bottleneck_size": HIDDEN, "true_hidden_size": HIDDEN,
        "num_feedforward_networks": 2,
    },
    "convbert": LIKE_BERT | {"embedding_size": HIDDEN, "head_ratio": 1},
    "squeezebert": LIKE_BERT | {"embedding_size": HIDDEN},
    "funnel": {"block_sizes": [1, 1, 1], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64},
    "fnet": LIKE_BERT,
    "big_bird": LIKE_BERT | {"sep_token_id": 3},
    "esm": LIKE_BERT | {"pad_token_id": 1, "mask_token_id": 4},
    "longformer": LIKE_ROBERTA | {"attention_window": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 2, "eos_token_id": 3},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
}  # fmt: skip


def config_for(model_type, entries: int = len(VOCABULARY)):
    """A tiny configuration."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, vocab_size=entries, num_labels=2, **UNKNOWN[model_type])


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
