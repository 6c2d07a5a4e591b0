"""The modules of a model by class and place: the table that recipes match."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.pooling import POOLING_CLASS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModuleInfo:
    # Linear, LayerNorm, Embedding, Attention, Softmax (virtual, one per attention), Residual (what adds one
    # before its LayerNorm), Pooling (from the last hidden state to a sentence embedding) or other
    kind: str
    head_size: int | None = None  # of an Attention


def module_table(model: "PreTrainedModel") -> dict[str, ModuleInfo]:
    """Return every module by name with its class, or its place in the family."""
    from torch import nn

    family = family_of(model.config)
    table: dict[str, ModuleInfo] = {}
    for name, module in model.named_modules():
        plain = [each for each in (nn.Linear, nn.LayerNorm, nn.Embedding) if isinstance(module, each)]
        if plain:
            kind = plain[0].__name__
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
