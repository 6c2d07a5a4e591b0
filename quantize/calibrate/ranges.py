"""Largest magnitude of every channel of activations, over the calibration data."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.core.arrays import Float64
from qdqbench.quantize.fakequant.quantizers import quantizers_off

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass
class Ranges:
    """Largest magnitude of each channel, float64 [channels], by module."""

    inputs: dict[str, Float64]
    outputs: dict[str, Float64]


def largest_of(
    model: "PreTrainedModel",
    inputs: Sequence[str],
    outputs: Sequence[str],
    run: Callable[["PreTrainedModel"], None],
    *,
    always: bool = False,
) -> Ranges:
    """Ranges of what modules read and of what they make, by full name; quantizers are off meanwhile.

    `run` passes the calibration data through the model once; not called where there is nothing to measure,
    or `always`, where others watch meanwhile.
    """
    if not (inputs or outputs or always):
        return Ranges({}, {})
    found: dict[str, dict[str, Any]] = {"inputs": {}, "outputs": {}}

    def keep(side: str, name: str, value: "torch.Tensor") -> None:
        largest = value.detach().abs().flatten(0, -2).amax(dim=0)
        before = found[side].get(name)
        found[side][name] = largest if before is None else largest.maximum(before)

    def before(name: str, _: Any, values: tuple[Any, ...]) -> None:
        keep("inputs", name, values[0])

    def after(name: str, _: Any, __: Any, output: "torch.Tensor") -> None:
        keep("outputs", name, output)

    with ExitStack() as hooks, quantizers_off(model):
        for name in inputs:
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(partial(before, name)))
        for name in outputs:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(after, name)))
        run(model)
    sides = {
        side: {name: value.double().cpu().numpy() for name, value in values.items()}
        for side, values in found.items()
    }
    return Ranges(**sides)
