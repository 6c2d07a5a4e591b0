"""An encoder with its pooling as one model, which gives sentence embeddings."""

import functools
import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils.generic import ModelOutput

from qdqbench.quantize.models.identity import FIELD, Pooling, find_model_file
from qdqbench.quantize.models.inputs import MASK, TOKENS
from qdqbench.quantize.utils.errors import UserError


@dataclass
class Embedded(ModelOutput):
    sentence_embedding: torch.Tensor | None = None  # float32 [B, width]
    hidden_states: tuple[torch.Tensor, ...] | None = None


class SentencePooling(nn.Module):
    """From the last hidden state to the embedding, as sentence-transformers defines it.

    It computes in FP32 whatever the encoder does: the norm's epsilon does not exist in FP16, and it costs one
    pass over the last hidden state.
    """

    def __init__(self, settings: Pooling, width: int) -> None:
        super().__init__()
        self.mode, self.normalize = settings.mode, settings.normalize
        dense = settings.dense
        self.dense = nn.Linear(width, dense.width, bias=dense.bias) if dense else None
        self.activation: nn.Module = getattr(nn, dense.activation)() if dense else nn.Identity()
        self.width = dense.width if dense else width

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the embedding float32 [B, width] of hidden states [B, L, H] and a mask [B, L]."""
        vectors = pool_tokens(hidden.float(), mask, self.mode)
        if self.dense is not None:
            vectors = self.activation(self.dense(vectors.to(self.dense.weight.dtype))).float()
        # as functional.normalize, whose expand_as would leave the width out of the graph
        return vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12) if self.normalize else vectors


def pool_tokens(hidden: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """Return one vector float32 [B, H] of the attended tokens [B, L, H].

    The mean is a sum of parts, not a sum that is divided: it cannot overflow where the hidden states do not.
    """
    if mode == "cls":
        return hidden[:, 0]
    kept = mask.to(hidden.dtype)
    if mode == "mean":
        weights = kept / kept.sum(dim=1, keepdim=True).clamp(min=1e-9)
    else:  # the last attended one, wherever the padding is
        places = torch.arange(mask.shape[1], device=mask.device, dtype=hidden.dtype) * kept
        weights = kept * (places == places.amax(dim=1, keepdim=True)).to(hidden.dtype)
    return (hidden * weights[..., None]).sum(dim=1)


@functools.cache
def make_embedder_class(config: type) -> type[PreTrainedModel]:
    """Return the class of the embedding models over the encoders of a configuration class.

    A child of the encoder's own base class, with the encoder under the name that it has in a classifier:
    weights, recipes and family descriptions then fit without change.
    """
    base = cast("Any", MODEL_MAPPING[config])
    parent = next(found for found in base.__mro__[1:] if issubclass(found, PreTrainedModel))
    signature = inspect.signature(base.forward)  # an embedding model takes what its encoder takes
    unused = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(base).parameters else {}

    class Embedder(parent):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            setattr(self, self.base_model_prefix, base(config, **unused))
            self.pooling = SentencePooling(Pooling.model_validate(getattr(config, FIELD)), config.hidden_size)
            self.post_init()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            asked = signature.bind(self, *args, **kwargs).arguments
            asked |= asked.pop("kwargs", {}) | {"return_dict": True}
            del asked["self"]
            made = getattr(self, self.base_model_prefix)(**asked)
            mask = asked.get(MASK)
            mask = torch.ones_like(asked[TOKENS]) if mask is None else mask
            embedding = self.pooling(made.last_hidden_state, mask)
            found = Embedded(sentence_embedding=embedding, hidden_states=made.hidden_states)
            return found if kwargs.get("return_dict", self.config.return_dict) else found.to_tuple()

        forward.__signature__ = signature  # type: ignore[attr-defined]  # what the exporter reads

    Embedder.__name__ = Embedder.__qualname__ = base.__name__.removesuffix("Model") + "SentenceEmbedding"
    return Embedder


def load_dense(model: PreTrainedModel, name: str, folder: str, commit: str | None) -> set[str]:
    """Read the weights of sentence-transformers' Dense into an embedding model, and return their names."""
    from safetensors.torch import load_file

    file = f"{folder}/model.safetensors"
    if (path := find_model_file(name, file, commit)) is None:
        raise UserError(f"model {name} has no {file}; save it again with sentence-transformers 3 or later")
    dense: Any = model.get_submodule("pooling.dense")
    weights = {key.removeprefix("linear."): value for key, value in load_file(path).items()}
    wanted = {key: tuple(value.shape) for key, value in dense.state_dict().items()}
    if (found := {key: tuple(value.shape) for key, value in weights.items()}) != wanted:
        raise UserError(f"{path} holds {found}, and the model needs {wanted}; save the model again")
    dense.load_state_dict(weights)
    return {f"pooling.dense.{key}" for key in weights}
