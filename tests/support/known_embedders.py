"""Published embedders and re-rankers, with tiny random weights: only sizes and the vocabulary are smaller."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from qdqbench.quantize.utils.system.quiet import quiet

from .families import HEADS, HIDDEN, INTERMEDIATE, LAYERS, new_tokenizer
from .tiny_bert import VOCABULARY
from .tiny_embedder import write_dense, write_modules

SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
SIZES |= {"intermediate_size": INTERMEDIATE, "vocab_size": len(VOCABULARY)}


class Known(NamedTuple):
    """A published model."""

    config: dict[str, Any]
    mode: str = ""  # of pooling; empty: it re-ranks
    dense: bool = False
    pad_id: int = 0  # of the tokenizer


PUBLISHED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
KNOWN = {name: Known(**fields) for name, fields in PUBLISHED.items()}


def write_known(folder, name):
    """The folder of a model as it is published, with weights as its class saves them."""
    import torch
    import transformers

    known = KNOWN[name]
    about = known.config | SIZES
    config = transformers.AutoConfig.for_model(**about)
    generator = torch.Generator().manual_seed(0)
    with quiet("transformers"):
        model = getattr(transformers, about["architectures"][0])(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(about))
    new_tokenizer(known.pad_id).save_pretrained(folder)
    if known.mode:
        write_modules(folder, known.mode, dense=known.dense)
    if known.dense:
        write_dense(folder, HIDDEN, "Tanh", generator)
    return folder
