"""Copy a BERT sentence-transformers model into XLM-RoBERTa's layout, with the same embeddings.

So the path of an XLM-R embedding model is measured on weights with real outliers and a known quality:

    python tests/port_xlmr.py all-MiniLM-L6-v2 minilm-as-xlmr

Token types become part of the positions, which move behind the padding index, and [PAD] becomes token 1. The
weights are stored in FP16 where that loses less than the check allows.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, BertModel, XLMRobertaConfig, XLMRobertaModel

PAD = 1  # of XLM-R; BERT's is 0, so the two tokens change places
TEXTS = ["a gripping, funny film", "dull and far too long, with nothing to say about its subject"]


def port(source: Path, out: Path) -> None:
    """Write the copy, tokenizer and pooling too, and hold its hidden states to those of the source."""
    bert: Any = BertModel.from_pretrained(source, dtype=torch.float32, add_pooling_layer=False)
    shared = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act")
    known = {name: getattr(bert.config, name) for name in (*shared, "vocab_size", "layer_norm_eps")}
    positions = bert.config.max_position_embeddings + PAD + 1
    config = XLMRobertaConfig(**known, type_vocab_size=1, max_position_embeddings=positions, pad_token_id=PAD)
    copy: Any = XLMRobertaModel(config, add_pooling_layer=False)
    weights, made = bert.state_dict(), copy.state_dict()
    words = weights["embeddings.word_embeddings.weight"].clone()
    words[[0, PAD]] = words[[PAD, 0]]
    moved = torch.zeros_like(made["embeddings.position_embeddings.weight"])
    types = weights["embeddings.token_type_embeddings.weight"]
    moved[PAD + 1 :] = weights["embeddings.position_embeddings.weight"] + types[0]
    weights |= {
        "embeddings.word_embeddings.weight": words,
        "embeddings.position_embeddings.weight": moved,
        "embeddings.token_type_embeddings.weight": torch.zeros_like(types[:1]),
    }
    copy.load_state_dict({name: weights[name] for name in made})
    copy.half().save_pretrained(out)
    _port_tokenizer(source, out, bert.config.max_position_embeddings)
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling"):
        (shutil.copytree if (source / name).is_dir() else shutil.copy)(source / name, out / name)
    print(f"largest difference of hidden states: {_difference(source, out):.1e}")


def _port_tokenizer(source: Path, out: Path, positions: int) -> None:
    made = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = made["model"]["vocab"]
    other = next(token for token, number in vocabulary.items() if number == PAD)
    vocabulary["[PAD]"], vocabulary[other] = PAD, 0
    for token in made["added_tokens"]:
        if token["content"] == "[PAD]":
            token["id"] = PAD
    made["padding"] = made["truncation"] = None
    (out / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions, **names}
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    (out / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _difference(source: Path, out: Path) -> float:
    """Largest difference of the hidden states of two texts, one padded."""
    states = []
    for folder in (source, out):
        batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
        model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False)
        with torch.no_grad():
            hidden = model.eval()(**batch).last_hidden_state
        states.append(hidden * batch["attention_mask"][..., None])
    return float((states[0] - states[1]).abs().max())


if __name__ == "__main__":
    port(Path(sys.argv[1]), Path(sys.argv[2]))
