"""Rewrite a BERT into another family's layout, so that the family is measured on weights with real outliers.

    python tools/port_family.py my-bert roberta my-roberta
    python tools/port_family.py all-MiniLM-L6-v2 xlm-roberta minilm-as-xlmr

A classifier becomes a classifier, a sentence-transformers folder one as well. RoBERTa, XLM-R, CamemBERT and
MPNet give the same logits for single texts: token types become part of the positions, which move behind the
padding index. ELECTRA and DistilBERT give the same hidden states; their heads have another activation. The
others are starts for `qdqbench finetune`: ALBERT with BERT's first layer in the place of all, DeBERTa v2 with
all but relative embeddings, ModernBERT with the word embeddings alone. What BERT does not have is random.
"""

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

TEXTS = ["a gripping, funny film", "dull and far too long, with nothing to say about its subject"]
HIDDEN, LOGITS = "hidden states", "logits"
NEAR = 1e-4  # hidden states and logits that differ by no more are the same
FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
FIELDS += ("hidden_act", "layer_norm_eps", "num_labels", "id2label", "label2id", "problem_type")
NEUTRAL = ("token_type_embeddings", "relative_attention_bias", "embedding_hidden_mapping_in.bias")


@dataclass(frozen=True)
class Layout:
    """What a family calls otherwise than BERT, and what else it needs."""

    names: dict[str, str]  # parts of parameters' names, replaced in this order
    config: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)  # of the configuration
    padding: int = 0  # index of [PAD], which positions stand behind; BERT has it at 0 and does not move them
    same: tuple[str, ...] = ()  # of `_outputs`: what is as BERT has it


DENSE_HEAD = {"classifier.": "classifier.out_proj.", "pooler.": "classifier."}
ROBERTA = Layout(DENSE_HEAD, {"type_vocab_size": 1}, padding=1, same=(HIDDEN, LOGITS))
LAYOUTS = {
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "mpnet": Layout(
        DENSE_HEAD
        | {f"attention.self.{name}": f"attention.attn.{name[0]}" for name in ("query", "key", "value")}
        | {"attention.output.dense": "attention.attn.o", "attention.output.LayerNorm": "attention.LayerNorm"},
        padding=1,
        same=(HIDDEN, LOGITS),
    ),
    "electra": Layout(DENSE_HEAD, fields={"hidden_size": "embedding_size"}, same=(HIDDEN,)),
    "distilbert": Layout(
        {f"attention.self.{name}": f"attention.{name[0]}_lin" for name in ("query", "key", "value")}
        | {"attention.output.dense": "attention.out_lin", "attention.output.LayerNorm": "sa_layer_norm"}
        | {"intermediate.dense": "ffn.lin1", "output.dense": "ffn.lin2"}
        | {"output.LayerNorm": "output_layer_norm"}
        | {"encoder.layer": "transformer.layer", "pooler.dense": "pre_classifier"},
        fields={"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        | {"intermediate_size": "hidden_dim", "hidden_act": "activation"},
        same=(HIDDEN,),
    ),
    "albert": Layout(
        {"encoder.layer.0.": "encoder.albert_layer_groups.0.albert_layers.0.", "attention.self": "attention"}
        | {"attention.output": "attention", "intermediate.dense": "ffn", "output.dense": "ffn_output"}
        | {"output.LayerNorm": "full_layer_layer_norm", "pooler.dense": "pooler"},
        fields={"hidden_size": "embedding_size"},
    ),
    "deberta-v2": Layout(
        {f"self.{name}": f"self.{name}_proj" for name in ("query", "key", "value")},
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
        | {"position_buckets": 256, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0},
    ),
    "modernbert": Layout(
        {"word_embeddings": "tok_embeddings"},
        {"classifier_pooling": "mean", "local_attention": 32},
        fields={"hidden_act": "hidden_activation"},
    ),
}


def port(source: Path, family: str, out: Path) -> None:
    """Write the copy and its tokenizer, and hold what should be the same to the source.

    Raises:
        SystemExit: it is not the same.
    """
    sentences, layout = (source / "modules.json").is_file(), LAYOUTS[family]
    made = AutoModel if sentences else AutoModelForSequenceClassification
    bert: Any = made.from_pretrained(source, dtype=torch.float32)
    positions = bert.config.max_position_embeddings
    ids = _write_tokenizer(source, out, layout, positions)
    known = {layout.fields.get(name, name): getattr(bert.config, name) for name in FIELDS}
    known |= {"hidden_size": bert.config.hidden_size, **layout.config, **ids}
    known["max_position_embeddings"] = positions + (layout.padding + 1 if layout.padding else 0)
    torch.manual_seed(0)
    copy: Any = made.from_config(AutoConfig.for_model(family, **known))
    if sentences and hasattr(copy, "pooler"):
        copy.pooler = None
    new = _take_over(bert, copy, layout)
    copy.save_pretrained(out)
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling") if sentences else ():
        (shutil.copytree if (source / name).is_dir() else shutil.copy)(source / name, out / name)
    if new:
        print(f"not of BERT: {len(new)} parameters, such as {', '.join(new[:3])}")
    there, here = _outputs(source, made), _outputs(out, made)
    for name in layout.same:
        difference = float((there[name] - here[name]).abs().max())
        print(f"largest difference of {name}: {difference:.1e}")
        if difference > NEAR:
            sys.exit(f"{name} are not those of {source}")


def _take_over(bert: Any, copy: Any, layout: Layout) -> list[str]:
    """Give a copy what of BERT's weights fits, in place; returns the names of what stays random."""
    found = {name.removeprefix("bert."): value for name, value in bert.state_dict().items()}
    words, places, types = (
        found[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    )
    if getattr(copy.config, "type_vocab_size", 0) != len(types):
        found["embeddings.position_embeddings.weight"] = places = places + types[0]
    if pad := layout.padding:
        order = [pad, *range(1, pad), 0, *range(pad + 1, len(words))]
        found["embeddings.word_embeddings.weight"] = words[order]
        found["embeddings.position_embeddings.weight"] = torch.cat([places[:1].expand(pad + 1, -1), places])
    for old, new in layout.names.items():
        found = {name.replace(old, new): value for name, value in found.items()}
    random = []
    with torch.no_grad():
        for name, value in copy.state_dict().items():
            inside = name.removeprefix(f"{copy.base_model_prefix}.")
            if inside in found and found[inside].shape == value.shape:
                value.copy_(found[inside])
            elif name.endswith("embedding_hidden_mapping_in.weight"):
                value.copy_(torch.eye(len(value)))
            elif name.rpartition(".")[0].endswith(NEUTRAL) or name.endswith(NEUTRAL):
                value.zero_()
            else:
                random.append(name)
    return random


def _write_tokenizer(source: Path, out: Path, layout: Layout, positions: int) -> dict[str, int]:
    """Write BERT's tokenizer with [PAD] where the family has it; returns the ids of special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    words = made["model"]["vocab"]
    other = next(token for token, number in words.items() if number == layout.padding)
    words["[PAD]"], words[other] = layout.padding, words["[PAD]"]
    for token in made["added_tokens"]:
        token["id"] = words[token["content"]]
    made["padding"] = made["truncation"] = None
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions, **names}
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    (out / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokens = {"pad": "pad", "bos": "cls", "eos": "sep", "cls": "cls", "sep": "sep"}
    return {f"{name}_token_id": words[names[f"{token}_token"]] for name, token in tokens.items()}


def _outputs(folder: Path, made: Any) -> dict[str, torch.Tensor]:
    """Of two texts, one padded: the hidden states [2, length, width], 0 at padding, and logits if any."""
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        found = made.from_pretrained(folder, dtype=torch.float32).eval()(**batch, output_hidden_states=True)
    hidden = found.hidden_states[-1] * batch["attention_mask"][..., None]
    return {HIDDEN: hidden, LOGITS: found.get("logits", hidden)}


if __name__ == "__main__":
    port(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
