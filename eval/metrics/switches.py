"""Quantizers and FP16 rounding that are switched on and off, tensor by tensor."""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch

from qdqbench.quantize.calibration.fakequant.quantizers import INT8_MAX, list_quantizers
from qdqbench.quantize.recipe.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERNORMS, EMBEDDINGS = "LayerNorm input", "embeddings"  # units that no recipe can put into INT8
IN_PLACE = "qdqbench_in_place"  # ModelOpt's name for the arithmetic below


class Switches:
    """What of a model is in INT8, unit by unit: linears, attention modules, LayerNorm inputs, embeddings.

    Scales come from unquantized tensors, so they are the same whatever is switched on. Weights are rounded
    once, here; a switch then only swaps them.
    """

    def __init__(self, model: "PreTrainedModel", plan: Plan, norms: dict[str, torch.Tensor]) -> None:
        """Take over a model that `ptq.calibrate` has calibrated with `plan`; everything starts in FP32.

        Args:
            model: changed in place.
            plan: what can be switched.
            norms: amax of the input of each LayerNorm, from `watch_norms`.
        """
        self.on: frozenset[str] = frozenset()
        self._weights: dict[str, list[tuple[Any, torch.Tensor, torch.Tensor]]] = {}
        self._activations: dict[str, list[Any]] = {LAYERNORMS: []}
        with torch.inference_mode():
            for name in plan.int8:
                linear: Any = model.get_submodule(name)
                rounded = linear.weight_quantizer(linear.weight.detach()).clone()
                self._weights[name] = [(linear.weight, linear.weight.detach(), rounded)]
                self._activations[name] = [linear.input_quantizer]
            tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
            plain = [(table.weight, table.weight.detach()) for table in tables]
            self._weights[EMBEDDINGS] = [(own, held, _round(held, held.abs().max())) for own, held in plain]
        for name in plan.attention:
            module = model.get_submodule(name)
            self._activations[name] = [getattr(module, f"{x}_bmm_quantizer") for x in "qkvp"]
        for name in plan.residual:
            residual: Any = model.get_submodule(name)
            self._activations[name] = [residual.residual_quantizer]
        for quantizer in list_quantizers(model).values():
            quantizer.disable()
        for name, amax in norms.items():
            norm: Any = model.get_submodule(name)
            norm.input_quantizer.amax = amax.to(model.device)
            self._activations[LAYERNORMS].append(norm.input_quantizer)
        if model.device.type == "cpu":
            _use_in_place(quantizer for group in self._activations.values() for quantizer in group)

    def set(self, on: Collection[str]) -> None:
        """Put exactly these units into INT8."""
        wanted = frozenset(on)
        for unit in wanted ^ self.on:
            for parameter, plain, rounded in self._weights.get(unit, ()):
                parameter.data = rounded if unit in wanted else plain
            for quantizer in self._activations.get(unit, ()):
                quantizer.enable() if unit in wanted else quantizer.disable()
        self.on = wanted


def _round(value: torch.Tensor, amax: torch.Tensor, lowest: int = -INT8_MAX) -> torch.Tensor:
    """ModelOpt's arithmetic step by step, bit for bit, without its copies: most of its time on a CPU."""
    scale = amax.new_tensor(INT8_MAX) / amax  # a plain number would be multiplied by 1 / amax
    return (value * scale).round_().clamp_(lowest, INT8_MAX).div_(scale)


def _use_in_place(quantizers: Iterator[Any]) -> None:
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    def quantize(inputs: torch.Tensor, quantizer: Any) -> torch.Tensor:
        return _round(inputs, quantizer.amax, -INT8_MAX - (not quantizer.narrow_range))

    if not tensor_quantizer.is_registered_quant_backend(IN_PLACE):
        tensor_quantizer.register_quant_backend(IN_PLACE, quantize)
    for quantizer in quantizers:
        quantizer.backend = IN_PLACE
