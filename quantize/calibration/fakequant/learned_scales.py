"""Learned scales: LSQ (Esser et al. 2020, arXiv 1902.08153) on the ratio of a scale to its calibrated one.

With v the input, s the scale and [low, high] the codes, equation 3 of the paper gives the gradient of the
output to s: `round(v / s) - v / s` inside the range, and low or high where v is clipped. Both are (output -
v * inside) / s, so a product and a sum with the incoming gradient make it; for a ratio r it is times s / r.
It is multiplied by 1 / sqrt(N * high) (section 2.2 of the paper). N is the number of values that share the
scale in a weight, and of the features of one token in an activation: not of the batch, so that nothing
depends on how a batch is spread over devices. Rounding a weight's scale up is passed straight through.

torch's own `_fake_quantize_learnable_per_tensor_affine` reads scale and zero point on the host at every call.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qdqbench.quantize.calibration.fakequant.modelopt import get_stored_amax
from qdqbench.quantize.calibration.fakequant.quantizers import FP16_BITS, INT8_MAX

DROPPED_BITS = 24 - FP16_BITS  # of FP32's significant bits
LOWEST_RATIO = 2.0**-7  # one code of the calibrated scale


def round_up(scale: torch.Tensor) -> torch.Tensor:
    """Round positive FP32 scales up, in place, to 11 significant bits, as `ptq.round_weight_scales` does.

    A carry out of the mantissa goes into the exponent, as it should.
    """
    low = (1 << DROPPED_BITS) - 1
    scale.view(torch.int32).add_(low).bitwise_and_(~low)
    return scale


@torch.inference_mode(False)
def _make_constant(value: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((1,), value, dtype=dtype, device=device)


_known_constant = functools.cache(_make_constant)


def _constant(value: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor [1], made once for each device."""
    make = _make_constant if torch.compiler.is_compiling() else _known_constant
    return make(value, dtype, device)


class _LearnedQuantize(torch.autograd.Function):
    """Fake quantization with a gradient to the input and to the ratio of the scale."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917  (tensors first, and no objects: torch.compile)
        ctx: Any,
        inputs: torch.Tensor,
        ratio: torch.Tensor,
        scale: torch.Tensor,
        gain: torch.Tensor,
        axis: int | None,
        low: int,
    ) -> torch.Tensor:
        if axis is None:
            zero = _constant(0, torch.int32, scale.device)
            on = _constant(1, torch.int64, scale.device)
            output, inside = torch._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
                inputs, scale, zero, on, low, INT8_MAX
            )
        else:  # an integer zero point is checked by the host
            zero = _constant(0, torch.float32, scale.device).expand_as(scale)
            output, inside = torch.ops.aten.fake_quantize_per_channel_affine_cachemask(
                inputs, scale, zero, axis, low, INT8_MAX
            )
        ctx.save_for_backward(inputs, output, inside, gain)
        ctx.axis = axis
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        inputs, output, inside, gain = ctx.saved_tensors
        to_inputs = gradient * inside if ctx.needs_input_grad[0] else None
        to_ratio = None
        if ctx.needs_input_grad[1]:
            terms = gradient * torch.addcmul(output, inputs, inside, value=-1)
            if ctx.axis is None:
                total = terms.sum(dtype=torch.float32)
            else:
                others = [axis for axis in range(terms.ndim) if axis != ctx.axis]
                total = terms.sum(dim=others, dtype=torch.float32)
            to_ratio = total * gain
        return to_inputs, to_ratio, None, None, None, None


_quantize: Any = _LearnedQuantize.apply


@dataclass(eq=False)
class Learned:
    """One learned ratio, of a quantizer or of several that must stay equal."""

    ratio: nn.Parameter  # () or [channels]
    quantizer: Any  # that holds the calibrated amax
    rounded: bool  # a weight's
    low: int
    axis: int | None
    count: int  # N of the paper
    table: "ScaleTable" = None  # type: ignore[assignment]
    place: int = 0

    @property
    def amax(self) -> torch.Tensor:
        """As calibrated, of the ratio's shape."""
        return get_stored_amax(self.quantizer).float().reshape(self.ratio.shape)

    def quantized(self, inputs: torch.Tensor) -> torch.Tensor:
        """Fake-quantize `inputs`, in their own type."""
        scale, gain = self.table.current(self)
        output: torch.Tensor = _quantize(inputs, self.ratio, scale, gain, self.axis, self.low)
        return output

    @property
    def factor(self) -> float:
        """The paper's gradient scale."""
        return float((self.count * INT8_MAX) ** -0.5)

    @property
    def seen(self) -> tuple[int, int]:
        """Changes when the ratio is loaded, moved or stepped; a fused optimizer leaves no trace, though."""
        return self.ratio._version, self.ratio.data_ptr()


class ScaleTable:
    """Scales of every learned ratio, computed together: a few kernels for each step of the optimizer."""

    def __init__(self, items: list[Learned]) -> None:
        self.items = sorted(items, key=lambda item: item.rounded)
        for place, item in enumerate(self.items):
            item.table, item.place = self, place
        self.sizes = [item.ratio.numel() for item in self.items]
        self.exact = sum(size for size, item in zip(self.sizes, self.items, strict=True) if not item.rounded)
        pairs = zip(self.sizes, self.items, strict=True)
        self.factors = torch.cat([torch.full((size,), item.factor) for size, item in pairs])
        self.scales: tuple[torch.Tensor, ...] = ()
        self.gains: tuple[torch.Tensor, ...] = ()
        self.seen: list[tuple[int, int]] = []

    def expire(self, *_: Any) -> None:
        """Note, as a forward pre-hook of the model, that the optimizer may have made a step."""
        self.seen = []

    def current(self, item: Learned) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale and gain of an item: scalars or [channels]."""
        if torch.compiler.is_compiling():
            scale = item.ratio.detach() * item.amax / INT8_MAX
            return (round_up(scale) if item.rounded else scale), item.factor / item.ratio.detach()
        if not self.seen or self.seen[item.place] != item.seen:
            self._refresh()
        return self.scales[item.place], self.gains[item.place]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _refresh(self) -> None:
        ratios = torch.cat([item.ratio.flatten() for item in self.items])
        scales = ratios * torch.cat([item.amax.flatten() for item in self.items]) / INT8_MAX
        round_up(scales[self.exact :])
        if self.factors.device != ratios.device:
            self.factors = self.factors.to(ratios.device)
        gains = self.factors / ratios
        shaped = [item.ratio.shape for item in self.items]
        self.scales, self.gains = (
            tuple(
                part.view(shape) for part, shape in zip(torch.split(values, self.sizes), shaped, strict=True)
            )
            for values in (scales, gains)
        )
        self.seen = [item.seen for item in self.items]
