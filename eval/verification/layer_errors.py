"""What INT8 costs each layer: the fake-quant model against FP32, linear by linear and block by block.

Alone: both sides get the input that the fake-quant model has there, so that the error is of this linear's or
this block's own rounding. Accumulated: each model goes its own way from the tokens on.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.eval.verification.blocks import HEAD, block_name, reference_blocks
from qdqbench.eval.verification.checks import kept_positions
from qdqbench.quantize.calibration.fakequant.quantizers import forward, smooth_input
from qdqbench.quantize.models.attention import UNROUNDED
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.runs import get_hidden
from qdqbench.quantize.utils.arrays import Array, Batch
from qdqbench.quantize.utils.comparison import LayerError, LayerErrors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class _Sums:
    """Squared norms of differences and of FP32's values, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, name: str, made: Array, exact: Array, mask: Array) -> None:
        """Both [B, L, ...], or [B, ...]; padding is left out."""
        ours, theirs = kept_positions(made, mask), kept_positions(exact, mask)
        self.sums[name][0] += float(np.square(ours - theirs).sum())
        self.sums[name][1] += float(np.square(theirs).sum())

    def error(self, name: str) -> float | None:
        """Relative; None where FP32's values are zero, or one side is not finite."""
        noise, power = self.sums[name]
        return float(np.sqrt(noise / power)) if power and np.isfinite([noise, power]).all() else None


def layer_errors(  # noqa: PLR0913, PLR0917
    model: "PreTrainedModel",
    fp32: "PreTrainedModel",
    linears: Sequence[str],
    batches: Iterable[Batch],
    corrections: Mapping[str, list[float]],
    moved: Mapping[int, list[float]] | None = None,
) -> LayerErrors:
    """Relative errors of the outputs of INT8 linears and of blocks, in the order of the model.

    Args:
        model: the fake-quant model, `frozen`.
        fp32: the model that it was made from, with its shifts.
        linears: in INT8, full names.
        batches: int64 [B, L] arrays; padding is left out.
        corrections: what bias correction added, by linear; it is part of what is judged.
        moved: what shifts add to hidden states, by their number; errors are relative to FP32's own values.
    """
    alone, far, n = _Sums(), _Sums(), 0
    own = {block_name(number): np.asarray(values, np.float32) for number, values in (moved or {}).items()}
    for batch in batches:
        mask = batch["attention_mask"].astype(bool)
        n += len(mask)
        with ExitStack() as hooks:
            for name in linears:
                watch = partial(_beside, name, alone, mask, corrections.get(name))
                hooks.enter_context(model.get_submodule(name).register_forward_hook(watch))
            blocks = reference_blocks(model, fp32, batch, half=False)
        exact = _states(fp32, batch)
        for name, block in blocks.items():
            back = own.get(name, 0.0)
            alone.add(name, block.output - back, block.unquantized - back, mask)
            if name in exact:
                far.add(name, block.output - back, exact[name] - back, mask)
    rows = [
        LayerError(name=name, what="linear", alone=error, accumulated=None)
        for name in linears
        if (error := alone.error(name)) is not None
    ]
    for name in [name for name in alone.sums if name not in linears]:
        if (error := alone.error(name)) is not None:
            reached = far.error(name) if name in far.sums else None
            rows.append(LayerError(name=name, what="block", alone=error, accumulated=reached))
    return LayerErrors(n=n, rows=rows)


def _beside(  # noqa: PLR0913, PLR0917
    name: str,
    sums: _Sums,
    mask: Array,
    correction: list[float] | None,
    linear: Any,
    args: "tuple[torch.Tensor, ...]",
    output: "torch.Tensor",
) -> None:
    """What a linear made, beside what it would make of the same input unrounded."""
    from torch.nn import functional

    bias = linear.bias
    if correction is not None:
        bias = bias - bias.new_tensor(correction)
    weight = linear.__dict__.get(UNROUNDED, linear.weight)
    exact = functional.linear(smooth_input(linear.input_quantizer, args[0]), weight, bias)
    sums.add(name, _array(output), _array(exact), mask)


def _states(model: "PreTrainedModel", batch: Batch) -> dict[str, Array]:
    """Hidden states behind the layers of a model, and its answers, by block."""
    found: dict[str, Array] = {}

    def keep(_: Any, __: Any, output: Any) -> None:
        found[f"layer.{len(found)}"] = _array(get_hidden(output))

    with ExitStack() as hooks:
        for path in dict.fromkeys(family_of(model.config).runs(model)):
            hooks.enter_context(model.get_submodule(path).register_forward_hook(keep))
        answers = forward(model, batch)
    return found | {HEAD: _array(answers)}


def _array(value: "torch.Tensor") -> Array:
    return value.detach().float().cpu().numpy()
