"""Batches of any shape as an engine of certain shapes takes them."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from qdqbench.quantize.engine.profiles import Profile, fit
from qdqbench.quantize.engine.runtime.tensors import Arrays
from qdqbench.quantize.models.inputs import widened
from qdqbench.quantize.utils.arrays import Int64


def fitted(
    batch: Mapping[str, Int64], profiles: Sequence[Profile], inputs: Iterable[str], pad_id: int, step: int
) -> Arrays:
    """Inputs by name, padded with masked positions, and with copies of the last row.

    Args:
        batch: int64 [B, L] arrays.
        step: lengths are rounded up to multiples of this, where the profile allows.

    Raises:
        CheckFailed: it is larger than every profile.
    """
    rows, length = next(iter(batch.values())).shape
    _, to_rows, to_length = fit(profiles, rows, length, step)
    wide, missing = widened(batch, to_length - length, pad_id), ((0, to_rows - rows), (0, 0))
    return {name: np.pad(wide[name], missing, mode="edge") for name in inputs}
