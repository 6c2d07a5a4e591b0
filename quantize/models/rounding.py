"""A constant in front of a quantized weight: what rounding of the weight makes of it, kept out of FP32.

The hook and the value are part of a linear, since FP32 and INT8 of one model are compared by disabling its
quantizers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ROUNDING = "rounding_of_constant"  # buffer of a linear, [N]; None while it is in the bias


def set_rounding(linear: Any, values: list[float]) -> None:
    """Add values [N] to what a linear makes, wherever its input is quantized."""
    if not hasattr(linear, ROUNDING):
        linear.register_forward_hook(_add_where_quantized)
    linear.register_buffer(ROUNDING, linear.bias.detach().new_tensor(values), persistent=False)


def _add_where_quantized(linear: Any, _: Any, output: "torch.Tensor") -> "torch.Tensor":
    rounding = getattr(linear, ROUNDING)
    return output + rounding if rounding is not None and linear.input_quantizer.is_enabled else output


@contextmanager
def fold_rounding(model: "PreTrainedModel") -> Iterator[None]:
    """Move it into the biases while a graph of the quantized model is traced."""
    import torch

    linears: list[Any] = [each for each in model.modules() if getattr(each, ROUNDING, None) is not None]
    before = [(linear.bias.detach().clone(), getattr(linear, ROUNDING)) for linear in linears]
    try:
        with torch.no_grad():
            for linear in linears:
                linear.bias += getattr(linear, ROUNDING)
                setattr(linear, ROUNDING, None)
        yield
    finally:
        with torch.no_grad():
            for linear, (bias, rounding) in zip(linears, before, strict=True):
                linear.bias.copy_(bias)
                setattr(linear, ROUNDING, rounding)
