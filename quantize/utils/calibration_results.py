"""What `results.json` holds of the data: what calibration found in it, and the lengths of its rows."""

from typing import Literal

from qdqbench.quantize.utils.schema import Strict


class QuantizerRow(Strict):
    """One calibrated quantizer."""

    name: str
    """Path of the quantizer."""
    module: str
    """Path of the layer that it belongs to."""
    kind: Literal["weight", "input", "query", "key", "value", "softmax", "residual"]
    """Kind of tensor; `query`, `key`, `value` and `softmax` of an INT8 attention, `residual` of an INT8
    residual stream."""
    axis: int | None
    """Channel axis; null when one scale serves the whole tensor."""
    amax: float
    """Largest magnitude that is representable (the scale is amax / 127); the largest of all channels."""
    amax_min: float
    """Smallest amax of all channels; equal to `amax` per tensor."""
    amax_over_rms: float | None
    """Outlier measure of an activation: amax / root mean square; null when not measured."""
    calibrated_amax: float | None = None
    """Amax from calibration if the recipe overrides it (`calibration.amax`); else null."""


class SoftmaxRow(Strict):
    """What INT8 costs the softmax of an attention on calibration samples of some lengths, alone in INT8."""

    module: str
    """Path of the attention."""
    length: int
    """Longest sample of this row in tokens; shorter ones have rows of their own."""
    amax: float
    """Amax of the softmax output; the scale is amax / 127."""
    centered: bool
    """Whether values are mean-centered: a row of the attention that loses mass gets their mean instead."""
    zeroed: float
    """Share of the attention that rounds to zero."""
    clipped: float
    """Share of the attention above the amax."""
    error: float
    """Relative error of the attention's output: norm of the difference over the norm in FP32."""


class LengthBucket(Strict):
    """Rows that are padded to the same length."""

    length: int
    """Length in tokens that its rows are padded to."""
    rows: int
    """Number of rows."""
    tokens: int
    """Tokens of its rows without padding."""


class Lengths(Strict):
    """Lengths of the evaluation data, and what an engine with `shapes: auto` makes of them."""

    splits: list[str]
    """Evaluation splits whose rows were counted."""
    rows: int
    """Rows of all splits; of questions the windows."""
    tokens: int
    """Tokens of all rows, without padding."""
    shortest: int
    """Tokens of the shortest row."""
    longest: int
    """Tokens of the longest row."""
    median: float
    """Median tokens of a row."""
    p90: int
    """90th percentile of the tokens of a row."""
    histogram: list[tuple[int, int]]
    """Pairs of tokens and the number of rows that have so many."""
    buckets: list[LengthBucket]
    """Lengths that rows are padded to; empty for a CPU, whose kernels take every length."""
    padding: float
    """Share of the tokens of the engine's batches that is padding."""
    longest_padding: float
    """Share of padding if all rows were padded to the longest."""
    profiles: list[str]
    """Optimization profiles of the engine, each [min, opt, max]."""
