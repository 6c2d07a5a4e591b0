"""How far one tensor is from the reference, padding left out."""

import numpy as np

from qdqbench.eval.verify.checks import BlockSums
from qdqbench.quantize.core.arrays import Array
from qdqbench.quantize.core.strict import Strict

SYSTEMATIC_LIMIT = 0.01  # of what one offset and factor per channel explain of the error: not rounding


class TensorError(Strict):
    """How far a tensor is from the reference, ||engine - reference|| / ||reference||; None: not finite."""

    tensor: str
    error: float | None
    limit: float
    systematic: float = 0.0  # the part that one offset and factor per channel explain
    systematic_limit: float = float("inf")

    @property
    def holds(self) -> bool:
        """Finite and within the limit."""
        within = self.error is not None and self.error <= self.limit
        return within and self.systematic <= self.systematic_limit


def compare_tensors(tensor: str, got: Array, expected: Array, mask: Array, limit: float) -> TensorError:
    """Relative error of one tensor; padded positions of [batch, length, ...] tensors are left out."""
    made, truth = (kept_positions(array, mask) for array in (got, expected))
    made, truth = (values.reshape(len(values), -1) for values in (made, truth))
    sums = BlockSums(tensor)
    sums.add(made, truth, truth, mask)
    found = sums.check()
    if found.error is None or found.systematic_error is None:
        return TensorError(tensor=tensor, error=None, limit=limit)
    return TensorError(
        tensor=tensor,
        error=found.error,
        limit=limit,
        systematic=found.systematic_error,
        systematic_limit=max(SYSTEMATIC_LIMIT, found.systematic_limit),
    )


def kept_positions(array: Array, mask: Array) -> Array:
    """float64 values of the positions that are not padding.

    Handles [B, L, ...], [L, B, ...], attention tensors [B, heads, L, ...], and anything else as a whole.
    Scores of masked keys are left out: they are about -1e4, which would hide everything else.
    """
    values = array.astype(np.float64)
    batch, length = mask.shape
    if values.ndim >= 3 and values.shape[:2] == (batch, length):
        return values[mask]
    if values.ndim >= 3 and values.shape[:2] == (length, batch):
        return values[mask.T]
    if values.ndim == 4 and values.shape[0] == batch and values.shape[2] == length:
        rows = np.moveaxis(values, 1, 2)
        if values.shape[3] == length:
            both = mask[:, :, None, None] & mask[:, None, None, :]
            return rows[np.broadcast_to(both, rows.shape)]
        return rows[mask]
    return values
