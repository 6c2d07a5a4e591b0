"""The inputs of an encoder: the arrays that its family takes, and their padding."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.utils.arrays import Array

TOKENS, MASK = "input_ids", "attention_mask"


def select_inputs(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    while not hasattr(model, "config"):
        model = model.module  # wrapped for several processes
    taken = family_of(model.config).inputs
    return {name: value for name, value in batch.items() if name in taken}


def pad_columns(batch: Mapping[str, Array], columns: int, pad_id: int) -> dict[str, Array]:
    """Pad int arrays [B, L] with masked positions to [B, L + columns]."""
    places, fill = ((0, 0), (0, columns)), {TOKENS: pad_id}  # all else is 0 there, the mask above all
    return {name: np.pad(array, places, constant_values=fill.get(name, 0)) for name, array in batch.items()}
