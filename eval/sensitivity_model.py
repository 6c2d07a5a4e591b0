"""A calibrated model whose tensors go between FP32 and INT8 one by one, and which runs from any layer on."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from qdqbench.eval.data import Batch
from qdqbench.quantize import ptq
from qdqbench.quantize.matching import Plan
from qdqbench.quantize.recipe import Calibration

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERNORMS, EMBEDDINGS = "LayerNorm input", "embeddings"  # units that no recipe can put into INT8
IN_PLACE = "qdqbench_in_place"  # ModelOpt's name for the arithmetic below
Floats = npt.NDArray[np.float32]


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
            self._weights[EMBEDDINGS] = [(t.weight, t.weight.detach(), _rounded(t.weight)) for t in tables]
        for name in plan.attention:
            module = model.get_submodule(name)
            self._activations[name] = [getattr(module, f"{x}_bmm_quantizer") for x in "qkvp"]
        for name in plan.residual:
            residual: Any = model.get_submodule(name)
            self._activations[name] = [residual.residual_quantizer]
        for quantizer in ptq.enabled_quantizers(model).values():
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


@dataclass(frozen=True)
class Held:
    """One batch at the input of an encoder layer."""

    rows: npt.NDArray[np.int64]  # of the draw, [B]
    hidden: torch.Tensor  # [B, L, hidden]
    rest: tuple[Any, ...]  # the layer's other arguments: the mask
    keywords: dict[str, Any]


class Suffixes:
    """Logits of a BERT classifier over a draw, computed from the input of any encoder layer on."""

    def __init__(self, model: "PreTrainedModel", batches: list[Batch], samples: int) -> None:
        """`batches` are those of `eval.data.sorted_batches`; `model` computes [CLS] alone where that is all.

        The pooler reads the first token only, so behind the attention of the last layer the others are not
        computed. What the first token gets is not changed by it.
        """
        self.model, self.batches, self.samples = model, batches, samples
        base: Any = model.base_model
        self.layers: list[Any] = list(base.encoder.layer)
        self.layers[-1].attention.output.register_forward_pre_hook(
            lambda _, inputs: tuple(tensor[:, :1] for tensor in inputs)
        )

    def start(self) -> tuple[list[Held], Floats]:
        """States at the input of the first layer, and logits, in whatever precision the model is now."""
        states: list[Held] = []

        def keep(_: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states.append(Held(np.empty(0, np.int64), inputs[0], inputs[1:], keywords))

        hook = self.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
        try:
            logits = self.full()
        finally:
            hook.remove()
        rows = [rows for rows, _ in self.batches]
        return [replace(state, rows=of) for state, of in zip(states, rows, strict=True)], logits

    def full(self) -> Floats:
        """Logits [n, num_labels] of the whole model."""
        return self._gather((rows, ptq.forward(self.model, batch)) for rows, batch in self.batches)

    def suffix(self, states: list[Held], layer: int) -> Floats:
        """Logits [n, num_labels] from states at the input of `layer`; its number may be that of the head."""
        base: Any = self.model.base_model
        head: Any = self.model

        def logits() -> Iterator[tuple[npt.NDArray[np.int64], torch.Tensor]]:
            for state in states:
                hidden = state.hidden
                for module in self.layers[layer:]:
                    hidden = _run(module, replace(state, hidden=hidden))
                yield state.rows, head.classifier(head.dropout(base.pooler(hidden)))

        with torch.inference_mode():
            return self._gather(logits())

    def advance(self, states: list[Held], layer: int) -> list[Held]:
        """States behind `layer`."""
        with torch.inference_mode():
            return [replace(state, hidden=_run(self.layers[layer], state)) for state in states]

    def _gather(self, parts: Iterator[tuple[npt.NDArray[np.int64], torch.Tensor]]) -> Floats:
        logits = np.empty((self.samples, int(self.model.config.num_labels or 0)), dtype=np.float32)
        for rows, values in parts:
            logits[rows] = values.float().cpu().numpy()
        return logits


@contextmanager
def watch_norms(model: "PreTrainedModel", settings: Calibration) -> Iterator[Callable[[], dict[str, Any]]]:
    """Watch the input of every LayerNorm of the encoder while the model is calibrated around it.

    Yields:
        Function that gives the amax of each by the method of the calibration section, float32 scalars.
    """
    ptq.import_modelopt()  # first, for it keeps ModelOpt's warnings from the user
    from modelopt.torch.quantization.calib import MaxCalibrator

    from qdqbench.quantize.calibrators import ActivationCalibrator

    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.LayerNorm) and ".layer." in name
    }
    by_max = settings.method == "max"
    seen: dict[str, Any] = {
        name: MaxCalibrator(num_bits=8, axis=None) if by_max else ActivationCalibrator(settings.method)
        for name in norms
    }

    def hook(name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        return lambda _, inputs: seen[name].collect(inputs[0].detach())

    hooks = [module.register_forward_pre_hook(hook(name)) for name, module in norms.items()]
    try:
        yield lambda: {name: calibrator.compute_amax() for name, calibrator in seen.items()}
    finally:
        for handle in hooks:
            handle.remove()


def _run(layer: Any, state: Held) -> torch.Tensor:
    output = layer(state.hidden, *state.rest, **state.keywords)
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """A table in INT8 with one scale, as floats."""
    return _round(weight.detach(), weight.detach().abs().max())


def _round(value: torch.Tensor, amax: torch.Tensor, lowest: int = -ptq.INT8_MAX) -> torch.Tensor:
    """ModelOpt's arithmetic step by step, bit for bit, without its copies: most of its time on a CPU."""
    scale = amax.new_tensor(ptq.INT8_MAX) / amax  # a plain number would be multiplied by 1 / amax
    return (value * scale).round_().clamp_(lowest, ptq.INT8_MAX).div_(scale)


def _use_in_place(quantizers: Iterator[Any]) -> None:
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    def quantize(inputs: torch.Tensor, quantizer: Any) -> torch.Tensor:
        return _round(inputs, quantizer.amax, -ptq.INT8_MAX - (not quantizer.narrow_range))

    if not tensor_quantizer.is_registered_quant_backend(IN_PLACE):
        tensor_quantizer.register_quant_backend(IN_PLACE, quantize)
    for quantizer in quantizers:
        quantizer.backend = IN_PLACE
