"""Modules that run in place of ModelOpt's while a model is trained: `native.py`."""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from qdqbench.quantize.fakequant import residual
from qdqbench.quantize.fakequant.modelopt import ShortQuantizer, forget_scale, prepared
from qdqbench.quantize.fakequant.quantizers import enabled_quantizers, import_modelopt
from qdqbench.quantize.families.known import family_of

import_modelopt()

from modelopt.torch.quantization.nn import QuantModule, TensorQuantizer  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


class _Last:
    """The tensor that was quantized last."""

    inputs: torch.Tensor | None = None
    output: torch.Tensor | None = None
    state: Any = None
    served: frozenset[int] = frozenset()

    def __deepcopy__(self, _: Any) -> "_Last":
        """A copy of a model has quantized nothing yet."""
        return _Last()


class SharedQuantizer:
    """Quantizes a tensor once for several quantizers of equal scale, as an engine does.

    It saves their kernels, and the copies that they would keep for the backward pass.
    """

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.last = _Last()

    def quantized(self, inputs: torch.Tensor, quantizer: Any) -> torch.Tensor:
        """What `quantizer` makes of `inputs`; for another reader of the tensor, the same tensor again."""
        if torch.compiler.is_compiling():
            return quantizer.quantized(inputs)  # type: ignore[no-any-return]
        learnt, last = quantizer.__dict__.get("learnt"), self.last
        scale = prepared(quantizer).version if learnt is None else learnt.seen
        version = None if inputs.is_inference() else inputs._version  # which inference tensors do not count
        state = (version, torch.is_grad_enabled(), scale)
        if inputs is not last.inputs or state != last.state or id(quantizer) in last.served:
            last.inputs, last.state, last.served = inputs, state, frozenset()
            last.output = quantizer.quantized(inputs)
        output = last.output
        last.served |= {id(quantizer)}
        if len(last.served) == self.readers:
            last.inputs = last.output = None  # not held for longer than needed
        return output  # type: ignore[return-value]


def shorten(module: nn.Module) -> None:
    """Give a module the shortest class that does what it does now."""
    short: type[nn.Module] | None = None
    if type(module) is TensorQuantizer:
        short = ShortQuantizer
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
        module.__class__ = short  # as ModelOpt itself made it what it is


def lengthen(module: nn.Module) -> None:
    """Undo `shorten`."""
    original = module.__dict__.pop("_modelopt_class", None)
    if original is not None:
        module.__class__ = original
    if isinstance(module, TensorQuantizer):
        forget_scale(module)
        module.__dict__.pop("shared", None)
        module.__dict__.pop("exact", None)


def readers_of_one_tensor(model: "PreTrainedModel") -> Iterator[list[Any]]:
    """Quantizers of one tensor that have equal scales and factors: of q, k, v, and of an INT8 residual."""
    found, family = enabled_quantizers(model), family_of(model.config)
    for name, _ in model.named_modules():
        readers = [f"{linear}.input_quantizer" for linear in family.residual_readers(name)]
        group = [found[key] for key in (*readers, f"{name}.{residual.QUANTIZER}") if key in found]
        if len(group) > 1 and set(readers) <= set(found) and all(_equal(group[0], q) for q in group[1:]):
            yield group


def _equal(one: Any, other: Any) -> bool:
    pairs = [(one.amax, other.amax), (one.pre_quant_scale, other.pre_quant_scale)]
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)
