"""The inputs of an encoder: the arrays that its family takes, and their padding."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.utils.arrays import Batch

if TYPE_CHECKING:
    import torch

TOKENS, MASK = "input_ids", "attention_mask"


def select_inputs(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    while not hasattr(model, "config"):
        model = model.module  # wrapped for several processes
    taken = family_of(model.config).inputs
    return {name: value for name, value in batch.items() if name in taken}


def to_device(batch: Batch, device: "torch.device") -> "dict[str, torch.Tensor]":
    import torch

    return {name: torch.from_numpy(array).to(device) for name, array in batch.items()}
