"""Which module of a model is what: the table that recipes match."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.core.arrays import Array
from qdqbench.quantize.encoders.pooling import POOLING_CLASS
from qdqbench.quantize.families.known import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModuleInfo:
    """What matching needs to know of one module."""

    # Linear, LayerNorm, Embedding, Attention, Softmax (virtual, one per attention), Residual (what adds one
    # before its LayerNorm), Pooling (from the last hidden state to a sentence embedding) or other
    kind: str
    head_size: int | None = None  # of an Attention


def module_table(model: "PreTrainedModel") -> dict[str, ModuleInfo]:
    """Every module by name with its class, as recipes match it: its class, or its place in the family.

    Raises:
        UserError: the model's family is not supported.
    """
    from torch import nn

    family = family_of(model.config)
    table: dict[str, ModuleInfo] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            kind = "Linear"
        elif isinstance(module, nn.LayerNorm):
            kind = "LayerNorm"
        elif isinstance(module, nn.Embedding):
            kind = "Embedding"
        elif family.is_attention(name):
            table[name] = ModuleInfo("Attention", head_size=int(getattr(module, family.head_size)))
            table[f"{name}.softmax"] = ModuleInfo("Softmax")
            continue
        elif family.adds_residual(name):
            kind = "Residual"
        elif type(module).__name__ == POOLING_CLASS:
            kind = "Pooling"
        else:
            kind = "other"
        table[name] = ModuleInfo(kind)
    return table


TOKENS, MASK = "input_ids", "attention_mask"


def inputs_of(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays or tensors of a batch that a transformers model takes.

    Raises:
        UserError: the model's family is not supported.
    """
    while not hasattr(model, "config"):
        model = model.module  # wrapped for several processes
    taken = family_of(model.config).inputs
    return {name: value for name, value in batch.items() if name in taken}


def widened(batch: Mapping[str, Array], columns: int, pad_id: int) -> dict[str, Array]:
    """Int arrays [B, L] with masked positions added behind, to [B, L + columns]."""
    fill = {TOKENS: pad_id}  # all else is 0 there, the mask above all
    return {
        name: np.pad(array, ((0, 0), (0, columns)), constant_values=fill.get(name, 0))
        for name, array in batch.items()
    }
