"""What `results.json` holds of the data: what calibration found in it, and the lengths of its rows."""

from typing import Literal

from qdqbench.quantize.core.strict import Strict


class QuantizerRow(Strict):
    """One calibrated quantizer."""

    name: str
    module: str
    kind: Literal["weight", "input", "query", "key", "value", "softmax", "residual"]
    axis: int | None
    amax: float  # the largest, when per-channel
    amax_min: float
    amax_over_rms: float | None  # outlier measure of an activation: amax / root mean square
    amax_found: float | None = None  # by calibration, where the recipe gives another


class SoftmaxRow(Strict):
    """What INT8 costs the softmax of an attention on calibration samples of some lengths, alone in INT8."""

    module: str  # the attention
    length: int  # tokens of the longest samples of this row; shorter ones have a row of their own
    amax: float
    centered: bool  # the values are centred, so that what is lost is near to nothing
    zeroed: float  # part of the attention that rounds to zero
    clipped: float  # part of it above the amax
    error: float  # of the attention's output: ||P_int8 v - P v|| / ||P v||


class LengthBucket(Strict):
    """Rows that are padded to the same length."""

    length: int  # tokens, that rows are padded to
    rows: int
    tokens: int  # without padding


class Lengths(Strict):
    """Lengths of the evaluation data, and what an engine with `shapes: auto` makes of them."""

    splits: list[str]  # whose rows were counted
    rows: int
    tokens: int  # without padding
    shortest: int  # tokens of a row
    longest: int
    median: float
    p90: int  # nine of ten rows have no more tokens
    histogram: list[tuple[int, int]]  # tokens, rows
    buckets: list[LengthBucket]  # none where the kernels take every length (a CPU)
    padding: float  # share of the tokens of the padded batches
    longest_padding: float  # the same, were all rows padded to the longest
    profiles: list[str]  # of the engine
