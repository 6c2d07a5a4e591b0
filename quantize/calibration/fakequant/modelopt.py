"""The only code that uses ModelOpt's private names; its test lists them.

The range is ModelOpt's and the engine's: codes -128 to 127, from -127 for a narrow range, or 0 to 255
of an unsigned quantizer; round half to even, zero point 0. The kernels compute in FP32 and return the type
of their input. Under autocast to BF16 a code times its scale is rounded as the matmul that reads it would
round it anyway; weights are quantized from their FP32 masters.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from qdqbench.quantize.calibration.fakequant.quantizers import INT8_MAX, UINT8_MAX, import_modelopt

import_modelopt()

from modelopt.torch.quantization.calib import HistogramCalibrator  # noqa: E402
from modelopt.torch.quantization.model_calib import _mse_quant_func  # noqa: E402
from modelopt.torch.quantization.nn import TensorQuantizer  # noqa: E402
from modelopt.torch.quantization.nn.modules import tensor_quantizer  # noqa: E402


def get_calibrator(quantizer: Any) -> Any:
    return quantizer._calibrator


def set_calibrator(quantizer: Any, calibrator: Any) -> None:
    quantizer._calibrator = calibrator


def set_histogram(calibrator: HistogramCalibrator, counts: torch.Tensor, edges: torch.Tensor) -> None:
    """Give a calibrator counts [bins] and edges [bins + 1] of |x| that it did not collect itself."""
    calibrator._calib_hist, calibrator._calib_bin_edges = counts, edges


def quantize_with(quantizer: Any, value: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    return _mse_quant_func(value, amax, quantizer)  # type: ignore[no-any-return]


def get_stored_amax(quantizer: Any) -> torch.Tensor:
    """Return the buffer itself, without the property's questions."""
    return quantizer._buffers["_amax"]  # type: ignore[no-any-return]


def forget_scale(quantizer: Any) -> None:
    quantizer._quantizer_cache = None


def fake_quantize(inputs: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Round `inputs` to the grid of the quantizer's scales, in their type, for ModelOpt; no host sync.

    Against ModelOpt's arithmetic, codes are equal where value / scale is further than 2^-15 from a tie, and
    values of equal codes to 2^-22 of themselves. NaN becomes a code, as in any engine: find it before.
    """
    if (learned := quantizer.__dict__.get("learned")) is not None:
        return learned.quantized(inputs)  # type: ignore[no-any-return]
    scale = prepare_scales(quantizer)
    if scale.per_channel is None or scale.zero is None:
        return torch.fake_quantize_per_tensor_affine(inputs, scale.per_tensor, 0, scale.low, scale.high)
    return torch.fake_quantize_per_channel_affine(
        inputs, scale.per_channel, scale.zero, scale.axis, scale.low, scale.high
    )


def use_backend(
    name: str, function: Callable[[torch.Tensor, Any], torch.Tensor], quantizers: Iterable[Any]
) -> None:
    """Let quantizers compute by a function of inputs and quantizer, which ModelOpt knows by a name."""
    if not tensor_quantizer.is_registered_quant_backend(name):
        tensor_quantizer.register_quant_backend(name, function)
    for quantizer in quantizers:
        quantizer.backend = name


def quantize_exactly(inputs: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Compute ModelOpt's FP32 arithmetic to the bit, without gradients; in place it is faster on a CPU."""
    scale = prepare_scales(quantizer)
    values = inputs.contiguous() * scale.steps
    return values.round_().clamp_(scale.low, scale.high).div_(scale.divisors)


@dataclass
class _Scale:
    amax: torch.Tensor
    version: int
    low: int
    high: int
    steps: torch.Tensor  # codes of 1, shaped as the amax; 0 where the amax is 0 to FP16, as ModelOpt has it
    divisors: torch.Tensor  # the same, and 1 there
    axis: int = 0
    per_tensor: float = 0.0  # a number, so that a kernel reads nothing from memory
    per_channel: torch.Tensor | None = None
    zero: torch.Tensor | None = None  # FP32: the host would look at integers at every call


def prepare_scales(quantizer: Any) -> _Scale:
    """Return the quantizer's scales; compute them where its amax is another than before."""
    scale = quantizer._quantizer_cache
    if torch.compiler.is_compiling() and scale is not None:
        return scale  # type: ignore[no-any-return]
    amax = quantizer._buffers["_amax"]
    if scale is None or scale.amax is not amax or scale.version != amax._version:
        scale = quantizer._quantizer_cache = _prepare(quantizer)
    return scale  # type: ignore[no-any-return]


@torch.inference_mode(False)
@torch.no_grad()
def _prepare(quantizer: Any) -> _Scale:
    if quantizer._amax.is_inference():
        quantizer._buffers["_amax"] = quantizer._amax.clone()
    amax = quantizer._amax
    low, high = get_lowest_code(quantizer), UINT8_MAX if quantizer.unsigned else INT8_MAX
    scales = amax.float() / high
    steps = torch.tensor(float(high), device=amax.device) / amax.float()
    nothing = amax <= 2**-24
    steps, divisors = steps.masked_fill(nothing, 0.0), steps.masked_fill(nothing, 1.0)
    scale = _Scale(amax, amax._version, low, high, steps, divisors)
    if quantizer.axis is None:
        scale.per_tensor = float(scales)
    else:
        scale.axis, scale.per_channel = int(quantizer.axis), scales.flatten()
        scale.zero = torch.zeros_like(scale.per_channel)
    return scale


def get_lowest_code(quantizer: Any) -> int:
    if quantizer.unsigned:
        return 0
    return -INT8_MAX if quantizer.narrow_range else -INT8_MAX - 1


class ShortQuantizer(TensorQuantizer):  # type: ignore[misc]
    shared: Any = None  # quantizes once for several quantizers: `native.SharedQuantizer`
    exact: bool = False  # without gradients

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._if_calib or not self._if_quant:
            return super().forward(inputs)  # type: ignore[no-any-return]
        if self.shared is not None and not self._disabled:
            return self.shared.quantized(inputs, self)  # type: ignore[no-any-return]
        return self.quantized(inputs)

    def quantized(self, inputs: torch.Tensor) -> torch.Tensor:
        """Fake-quantize `inputs` times the factors of smoothing, unless disabled."""
        factors = self._buffers.get("_pre_quant_scale")
        if factors is not None and self._enable_pre_quant_scale:
            inputs = inputs * factors
        if self._disabled:
            return inputs
        return quantize_exactly(inputs, self) if self.exact else fake_quantize(inputs, self)

    def _amax_setter_helper(self, value: torch.Tensor) -> None:
        super()._amax_setter_helper(value)
        self._quantizer_cache = None  # set through `.data`, which leaves no trace on the tensor
