"""Published sizes of encoders, for models with random weights."""

from typing import Any

_BASE = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_BEHIND_PADDING = {"max_position_embeddings": 514, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_ROBERTA = {**_BASE, **_BEHIND_PADDING, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
# Fields of config.json that differ from the defaults of the model type. BERT: Devlin et al. 2019, "BERT",
# section 3; the others: the config.json that their authors published under about this name.
MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "bert-base": {"model_type": "bert", **_BASE},
    "bert-large": {
        "model_type": "bert",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "minilm": {  # Wang et al. 2020, arXiv 2002.10957: 6 layers of 384
        "model_type": "bert",
        "num_hidden_layers": 6,
        "hidden_size": 384,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "roberta-base": {"model_type": "roberta", **_ROBERTA, "vocab_size": 50265},
    "xlm-roberta-base": {"model_type": "xlm-roberta", **_ROBERTA, "vocab_size": 250002},
    "camembert-base": {"model_type": "camembert", **_ROBERTA, "vocab_size": 32005},
    "distilbert-base": {"model_type": "distilbert", "n_layers": 6, "dim": 768, "n_heads": 12},
    "electra-base": {"model_type": "electra", **_BASE, "embedding_size": 768},
    "mpnet-base": {"model_type": "mpnet", **_BASE, **_BEHIND_PADDING, "layer_norm_eps": 1e-5},
    "albert-base": {"model_type": "albert", **_BASE},
    "deberta-v3-base": {
        "model_type": "deberta-v2",
        **_BASE,
        "relative_attention": True,
        "position_buckets": 256,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "modernbert-base": {"model_type": "modernbert"},
}
