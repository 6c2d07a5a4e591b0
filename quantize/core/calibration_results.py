"""Tables of results.json on what calibration found."""

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


class SoftmaxRow(Strict):
    """What INT8 costs the softmax of an attention on calibration samples of some lengths, alone in INT8."""

    module: str  # the attention
    length: int  # tokens of the longest samples of this row; shorter ones have a row of their own
    amax: float
    centered: bool  # the values are centred, so that what is lost is near to nothing
    zeroed: float  # part of the attention that rounds to zero
    clipped: float  # part of it above the amax
    error: float  # of the attention's output: ||P_int8 v - P v|| / ||P v||
