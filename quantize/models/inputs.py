"""The inputs of an encoder: the arrays that its family takes, and their padding."""

from collections.abc import Mapping
from typing import Any

from qdqbench.quantize.models.families.known import family_of

TOKENS, MASK = "input_ids", "attention_mask"


def select_inputs(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    while not hasattr(model, "config"):
        model = model.module  # wrapped for several processes
    taken = family_of(model.config).inputs
    return {name: value for name, value in batch.items() if name in taken}
