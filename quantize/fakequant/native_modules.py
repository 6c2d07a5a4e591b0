"""What runs in place of ModelOpt's quantizers and modules while a model is trained: `native_quant.py`.

The range is ModelOpt's and the engine's: codes -128 to 127 unless the quantizer asks for the narrow one,
round half to even, zero point 0. The kernels compute in FP32 whatever the tensor's type, and give back the
type that they got; so under autocast to BF16 activations arrive and leave as BF16. A code times its scale
has more than the 8 significant bits of BF16, and moves by up to 2^-9 of itself: a quarter of a step at code
127, a hundredth at code 5. The matmul that reads the value would round it like this anyway, so FP32 in
between would double the traffic and change no bit. Weights are quantized from their FP32 masters, before
autocast rounds them.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from qdqbench.quantize.encoders.family import residual_readers
from qdqbench.quantize.fakequant import residual
from qdqbench.quantize.fakequant.quantizers import INT8_MAX, enabled_quantizers, import_modelopt

import_modelopt()

from modelopt.torch.quantization.nn import QuantModule, TensorQuantizer  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fake_quantize(inputs: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """ModelOpt quant backend: `inputs` on the grid of the quantizer's scales, in their type; no host sync.

    Against ModelOpt's arithmetic, codes are equal where value / scale is further than 2^-15 from a tie, and
    values of equal codes to 2^-22 of themselves. NaN becomes a code, as in any engine: find it before.
    """
    if (learnt := quantizer.__dict__.get("learnt")) is not None:
        return learnt.quantized(inputs)  # type: ignore[no-any-return]
    scale = prepared(quantizer)
    if scale.per_channel is None or scale.zero is None:
        return torch.fake_quantize_per_tensor_affine(inputs, scale.per_tensor, 0, scale.low, INT8_MAX)
    return torch.fake_quantize_per_channel_affine(
        inputs, scale.per_channel, scale.zero, scale.axis, scale.low, INT8_MAX
    )


@dataclass
class _Scale:
    """Scales of a quantizer as the kernels want them, and the amax that they were made from."""

    amax: torch.Tensor
    version: int
    low: int
    axis: int = 0
    per_tensor: float = 0.0  # a number, so that a kernel reads nothing from memory
    per_channel: torch.Tensor | None = None
    zero: torch.Tensor | None = None  # FP32: the host would look at integers at every call


def prepared(quantizer: Any) -> _Scale:
    """The quantizer's scales; computed where its amax is another than before."""
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
    scales = amax.float() / INT8_MAX
    found = _Scale(amax, amax._version, lowest_code(quantizer))
    if quantizer.axis is None:
        found.per_tensor = float(scales)
    else:
        found.axis, found.per_channel = int(quantizer.axis), scales.flatten()
        found.zero = torch.zeros_like(found.per_channel)
    return found


def lowest_code(quantizer: Any) -> int:
    """-128, or -127 in the narrow range."""
    return -INT8_MAX if quantizer.narrow_range else -INT8_MAX - 1


class Quantizer(TensorQuantizer):  # type: ignore[misc]
    """TensorQuantizer with a short way through `forward`."""

    shared: "Shared | None" = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Fake-quantized `inputs`; ModelOpt's own way while it calibrates."""
        if self._if_calib or not self._if_quant:
            return super().forward(inputs)  # type: ignore[no-any-return]
        if self.shared is not None and not self._disabled:
            return self.shared.quantized(inputs, self)
        return self.quantized(inputs)

    def quantized(self, inputs: torch.Tensor) -> torch.Tensor:
        """`inputs` times the factors of smoothing, fake-quantized unless disabled."""
        factors = self._buffers.get("_pre_quant_scale")
        if factors is not None and self._enable_pre_quant_scale:
            inputs = inputs * factors
        return inputs if self._disabled else fake_quantize(inputs, self)

    def _amax_setter_helper(self, value: torch.Tensor) -> None:
        super()._amax_setter_helper(value)
        self._quantizer_cache = None  # set through `.data`, which leaves no trace on the tensor


class Linear(nn.Linear):
    """A linear whose input and weight are quantized."""

    input_quantizer: TensorQuantizer
    weight_quantizer: TensorQuantizer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Output of the linear."""
        return functional.linear(self.input_quantizer(inputs), self.weight_quantizer(self.weight), self.bias)


@functools.cache
def _residual_class(original: type[nn.Module]) -> type[nn.Module]:
    """A module that adds a residual, and quantizes it before."""

    def forward(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> Any:
        rounded = residual.fake_quantized(self.residual_quantizer, input_tensor)
        return original.forward(self, hidden_states, rounded)

    return type(f"Native{original.__name__}", (original,), {"forward": forward})


class Shared:
    """Quantizes a tensor once for several quantizers of equal scale, as an engine does.

    It saves their kernels, and the copies that they would keep for the backward pass.
    """

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.served: set[int] = set()
        self.inputs: torch.Tensor | None = None
        self.output: torch.Tensor | None = None
        self.state: Any = None

    def quantized(self, inputs: torch.Tensor, quantizer: Any) -> torch.Tensor:
        """What `quantizer` makes of `inputs`; for another reader of the tensor, the same tensor again."""
        if torch.compiler.is_compiling() or inputs.is_inference():
            return quantizer.quantized(inputs)  # type: ignore[no-any-return]
        learnt = quantizer.__dict__.get("learnt")
        scale = prepared(quantizer).version if learnt is None else learnt.seen
        state = (inputs._version, torch.is_grad_enabled(), scale)
        if inputs is not self.inputs or state != self.state or id(quantizer) in self.served:
            self.inputs, self.state, self.served = inputs, state, set()
            self.output = quantizer.quantized(inputs)
        output = self.output
        self.served.add(id(quantizer))
        if len(self.served) == self.readers:
            self.inputs = self.output = None  # not held for longer than needed
        return output  # type: ignore[return-value]


def shorten(module: nn.Module) -> None:
    """Give a module the shortest class that does what it does now."""
    short: type[nn.Module] | None = None
    if type(module) is TensorQuantizer:
        short = Quantizer
    elif isinstance(module, QuantModule):
        quantizers = {n: m for n, m in module.named_children() if isinstance(m, TensorQuantizer)}
        active = {name for name, quantizer in quantizers.items() if quantizer.is_enabled}
        original = module.get_original_cls_by_level(level=0)
        scaled = any(quantizer.pre_quant_scale is not None for quantizer in quantizers.values())
        if not active and not scaled:
            short = original
        elif original is nn.Linear and active <= {"input_quantizer", "weight_quantizer"}:
            short = Linear
        elif active == {residual.QUANTIZER}:
            short = _residual_class(original)
    if short is not None:
        module.__dict__["_modelopt_class"] = type(module)
        module.__class__ = short


def lengthen(module: nn.Module) -> None:
    """Undo `shorten`."""
    original = module.__dict__.pop("_modelopt_class", None)
    if original is not None:
        module.__class__ = original
    if isinstance(module, TensorQuantizer):
        module._quantizer_cache = None
        module.__dict__.pop("shared", None)


def readers_of_one_tensor(model: "PreTrainedModel") -> Iterator[list[Any]]:
    """Quantizers of one tensor that have equal scales and factors: of q, k, v, and of an INT8 residual."""
    found = enabled_quantizers(model)
    for name, _ in model.named_modules():
        readers = [f"{linear}.input_quantizer" for linear in residual_readers(name)]
        group = [found[key] for key in (*readers, f"{name}.{residual.QUANTIZER}") if key in found]
        if len(group) > 1 and set(readers) <= set(found) and all(_equal(group[0], q) for q in group[1:]):
            yield group


def _equal(one: Any, other: Any) -> bool:
    pairs = [(one._amax, other._amax), (one.pre_quant_scale, other.pre_quant_scale)]
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)
