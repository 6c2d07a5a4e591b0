"""Exact scale migration: move the range of outlier channels from activations into weights.

SmoothQuant (Xiao et al. 2023, arXiv 2211.10438, equation 4) divides input channel j of a linear by
s_j = max|x_j|^alpha / max|w_j|^(1 - alpha) and multiplies column j of its weight by it. Where s comes from:

- LayerNorm and GELU outputs: the division is a Mul before the Q, which an engine fuses into the kernel that
  makes the tensor. LayerNorm outputs also feed the residual stream, so their own gain cannot absorb it. An
  INT8 residual takes the same factors, and is multiplied back behind its Q/DQ.
- attention outputs: the division goes into the rows of the value projection, and costs nothing.
- "gain": s_j is the gain of the LayerNorm before (Wei et al. 2022, "Outlier Suppression", arXiv 2209.13325).

In an INT8 attention channel d of q is multiplied by t_d and that of k divided by it, which leaves every score
as it was; t_d makes their largest magnitudes equal, as in Nagel et al. 2019 (arXiv 1906.04721, section 4.1)
for two layers. Rotary positions mix two channels of a head, which then share one t.

Linears that read the same tensor share one s, so that their GEMMs can still be merged. Every s is a power of
two: the model's outputs stay the same bit for bit until something is quantized.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.calibration.fakequant.quantizers import RESIDUAL_QUANTIZER, quantizers_off
from qdqbench.quantize.calibration.record import Smoothing
from qdqbench.quantize.models.families.family import Family, LinearRows
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.utils.arrays import Float64
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.names import name_list

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass
class Ranges:
    """Largest magnitude of each channel, float64 [channels], by module."""

    inputs: dict[str, Float64]
    outputs: dict[str, Float64]


def record_ranges(
    model: "PreTrainedModel",
    inputs: Sequence[str],
    outputs: Sequence[str],
    run: Callable[["PreTrainedModel"], None],
    *,
    always: bool = False,
) -> Ranges:
    """Record ranges of what modules read and make, by full name; quantizers are off meanwhile.

    `run` passes the calibration data through the model once; not called where there is nothing to measure,
    or `always`, where others watch meanwhile.
    """
    if not (inputs or outputs or always):
        return Ranges({}, {})
    ranges: dict[str, dict[str, Any]] = {"inputs": {}, "outputs": {}}

    def keep(side: str, name: str, value: "torch.Tensor") -> None:
        largest = value.detach().abs().flatten(0, -2).amax(dim=0)
        before = ranges[side].get(name)
        ranges[side][name] = largest if before is None else largest.maximum(before)

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
        for side, values in ranges.items()
    }
    return Ranges(**sides)


LARGEST_FACTOR = 2.0**8  # of one channel against the others; keeps what is divided inside FP16


def smooth(model: "PreTrainedModel", plan: Plan, ranges: "Ranges", left: Collection[str] = ()) -> Smoothing:
    """Choose the factors from what `measure_ranges` saw, and apply them to a model with quantizers, in place.

    Args:
        left: attentions whose q and k stay as they are.

    Raises:
        UserError: "gain" for linears whose input is not the output of a LayerNorm.
    """
    wanted, heads = _smoothed(plan, plan.int8), _smoothed(plan, plan.attention)
    if not (wanted or heads):
        return Smoothing()
    sources = _sources(model, list(wanted))
    lost = [name for name, how in wanted.items() if how == "gain" and name not in sources.gains]
    if lost:
        raise UserError(
            f"smoothing: gain needs a LayerNorm before the linear, which {name_list(lost)} do not have; give "
            "an alpha such as 0.5 or none for them"
        )
    rows = _move_into_rows(model, plan, wanted, ranges)
    for name in (name for name in heads if name not in left):
        query, key = _scored(plan, name)
        size = int(getattr(model.get_submodule(name), plan.family.head_size))
        ours, theirs = (_head_ranges(ranges, made, size, plan.family) for made in (query, key))
        balance = _power_of_two(np.sqrt(_ratio(theirs, ours)))
        _scale_rows(rows, model, query, balance)
        _scale_rows(rows, model, key, 1 / balance)
    apply_factors(model, rows)
    left = {name: how for name, how in wanted.items() if name not in rows.columns}
    inputs = _move_from_inputs(model, left, sources, ranges)
    apply_factors(model, inputs)
    return Smoothing(inputs=inputs.inputs, columns=rows.columns | inputs.columns, rows=rows.rows)


def _smoothed(plan: Plan, names: Iterable[str]) -> dict[str, Any]:
    """Return the smoothing of each of these that has one."""
    found = {name: plan.scaling_of(name).smoothing for name in names}
    return {name: how for name, how in found.items() if how != "none"}


def _scored(plan: Plan, attention: str) -> tuple[LinearRows, LinearRows]:
    """Return the makers of q and k of an attention."""
    return plan.family.made_by(attention, "query"), plan.family.made_by(attention, "key")


def _head_ranges(ranges: "Ranges", made: LinearRows, size: int, family: Family) -> Float64:
    """Return the largest magnitude of each channel of q or k; equal for a pair that is rotated together."""
    found: Float64 = ranges.outputs[made.linear].reshape(made.parts, -1)[made.part]
    if family.rotary:
        pairs = found.reshape(-1, 2, size // 2)
        found = np.broadcast_to(pairs.max(axis=1, keepdims=True), pairs.shape).ravel()
    return found


def _scale_rows(found: Smoothing, model: "PreTrainedModel", made: LinearRows, factors: Float64) -> None:
    """Add factors of q, k or v to those of the linear that makes it."""
    before = found.rows.get(made.linear) or [1.0] * len(_weight(model, made.linear))
    parts = np.reshape(np.array(before), (made.parts, -1))
    parts[made.part] *= factors
    found.rows[made.linear] = parts.ravel().tolist()


def _move_into_rows(
    model: "PreTrainedModel", plan: Plan, wanted: dict[str, Any], ranges: "Ranges"
) -> Smoothing:
    """Return the factors of output projections that go into the rows of the value projections."""
    moved = Smoothing()
    for name, how in wanted.items():
        if plan.family.role(name) == "output" and how != "gain":
            scale = _scales([_weight(model, name)], ranges.inputs[name], float(how))
            moved.columns[name] = scale.tolist()
            _scale_rows(moved, model, plan.family.made_by(name, "value"), 1 / scale)
    return moved


def _move_from_inputs(
    model: "PreTrainedModel", wanted: dict[str, Any], sources: "_RangeSources", ranges: "Ranges"
) -> Smoothing:
    """Return the factors of linears whose input is divided before its Q; one for all readers of a tensor."""
    moved = Smoothing()
    for readers in sources.readers:
        members = [name for name in readers if name in wanted]
        for how in dict.fromkeys(wanted[name] for name in members):
            same = [name for name in members if wanted[name] == how]
            if how == "gain":
                scale = sources.gains[same[0]]
            else:
                scale = _scales([_weight(model, name) for name in same], ranges.inputs[same[0]], float(how))
            for name in same:
                moved.inputs[name], moved.columns[name] = (1 / scale).tolist(), scale.tolist()
    return moved


def apply_factors(model: "PreTrainedModel", smoothing: Smoothing) -> None:
    """Multiply weights, and set the factors of inputs (ModelOpt's `pre_quant_scale`), in place."""
    import torch

    with torch.no_grad():
        for name, factors in smoothing.rows.items():
            linear: Any = model.get_submodule(name)
            linear.weight.mul_(linear.weight.new_tensor(factors)[:, None])
            if linear.bias is not None:
                linear.bias.mul_(linear.bias.new_tensor(factors))
        for name, factors in smoothing.columns.items():
            weight = _weight(model, name)
            weight.mul_(weight.new_tensor(factors))
        for name, factors in smoothing.inputs.items():
            linear = model.get_submodule(name)
            linear.input_quantizer.pre_quant_scale = linear.weight.new_tensor(factors)
            copy_factors(model, name, linear.weight.new_tensor(factors))


def remove_factors(model: "PreTrainedModel", smoothing: Smoothing) -> "dict[str, torch.Tensor]":
    """Return the weights of a fake-quant model without factors: a state dict that needs no quantizers.

    Without quantizers both compute the same, and `apply_factors` on these gives the model's own back bit for
    bit: every factor is a power of two. Tensors without factors are not copied.

    Args:
        model: fake-quant model, trained since `apply_factors` or not; left as it is.
        smoothing: factors that are in its weights.

    Raises:
        CheckFailed: values so near to zero that FP32 cannot hold them divided; names every linear.
    """
    weights = {
        name: value.detach()
        for name, value in model.state_dict().items()
        if not any(part.endswith("_quantizer") for part in name.split("."))
    }
    lost = []
    for name in dict.fromkeys((*smoothing.rows, *smoothing.columns)):
        for key in (f"{name}.weight", f"{name}.bias"):
            if key not in weights:
                continue
            factor = _product(smoothing, name, weights[key])
            plain = weights[key] / factor
            lost += [] if (plain * factor).equal(weights[key]) else [key]
            weights[key] = plain
    if lost:
        raise CheckFailed(
            f"the smoothing factors cannot be taken out of {name_list(lost)} (NaN, or too near to zero); "
            "look at the training that made them"
        )
    return weights


def _product(smoothing: Smoothing, name: str, value: "torch.Tensor") -> "torch.Tensor":
    """Return the product of factors in a weight [N, K] or a bias [N]; broadcasts against it."""
    rows, columns = smoothing.rows.get(name), smoothing.columns.get(name)
    factor = value.new_ones(1) if rows is None else value.new_tensor(rows)
    if value.ndim == 1:
        return factor
    return factor[:, None] if columns is None else factor[:, None] * value.new_tensor(columns)


def _scales(weights: Iterable["torch.Tensor"], ranges: Float64, alpha: float) -> Float64:
    """Return the factor of each input channel, powers of two [K]; 1 for channels that are always zero."""
    largest = np.max([column_ranges(weight) for weight in weights], axis=0)
    return _power_of_two(_ratio(ranges**alpha, largest ** (1 - alpha)))


def column_ranges(weight: "torch.Tensor") -> Float64:
    """Return the largest magnitude of each column of a weight [N, K], float64 [K]."""
    ranges: Float64 = weight.detach().abs().amax(dim=0).double().cpu().numpy()
    return ranges


def _ratio(above: Float64, below: Float64) -> Float64:
    """Return the quotient, and 0 where either is 0: a channel that is always zero."""
    return np.divide(above, below, out=np.zeros_like(above), where=(above > 0) & (below > 0))


def _power_of_two(raw: Float64) -> Float64:
    """Return the nearest powers of two, 1 for 0, of geometric mean 1, as a common factor changes nothing."""
    alive = raw > 0
    if not alive.any():
        return np.ones_like(raw)
    exponents = np.log2(np.where(alive, raw, 1.0))
    exponents = np.where(alive, exponents - exponents[alive].mean(), 0.0)
    limit = np.log2(LARGEST_FACTOR)
    scales: Float64 = np.exp2(np.clip(np.rint(exponents), -limit, limit))
    return scales


def measure_ranges(
    model: "PreTrainedModel",
    plan: Plan,
    run: Callable[["PreTrainedModel"], None],
    also: Iterable[str] = (),
    *,
    always: bool = False,
) -> Ranges:
    """Measure the inputs of linears that the plan smooths and `also`, and q and k of its attentions.

    The data go through the model where there is something to measure, or `always`.
    """
    inputs = [*_smoothed(plan, plan.int8), *also]
    outputs = [made.linear for name in _smoothed(plan, plan.attention) for made in _scored(plan, name)]
    return record_ranges(model, inputs, list(dict.fromkeys(outputs)), run, always=always)


@dataclass
class _RangeSources:
    """Where linears read from."""

    readers: list[list[str]]  # linears that read the same tensor
    gains: dict[str, Float64]  # of the LayerNorm that made a linear's input, as powers of two


def _sources(model: "PreTrainedModel", names: list[str]) -> _RangeSources:
    import torch
    from torch import nn

    readers: dict[int, list[str]] = defaultdict(list)
    norms: dict[int, nn.LayerNorm] = {}
    alive: list[torch.Tensor] = []  # storage that is freed would be used again, and taken for the same tensor

    def made(module: Any, _: Any, output: torch.Tensor) -> None:
        alive.append(output)
        norms[output.data_ptr()] = module

    def read(name: str, _: Any, inputs: tuple[Any, ...]) -> None:
        alive.append(inputs[0])
        readers[inputs[0].data_ptr()].append(name)

    with ExitStack() as hooks, quantizers_off(model), torch.inference_mode():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                hooks.enter_context(module.register_forward_hook(made))
        for name in names:
            reader = model.get_submodule(name)
            hooks.enter_context(reader.register_forward_pre_hook(partial(read, name)))
        model(torch.ones(1, 8, dtype=torch.long, device=model.device))
    gains: dict[str, Float64] = {}
    for pointer, members in readers.items():
        if pointer in norms:
            gain = norms[pointer].weight.detach().abs().double().cpu().numpy()
            gains |= dict.fromkeys(members, _power_of_two(gain))
    return _RangeSources(list(readers.values()), gains)


def _weight(model: "PreTrainedModel", name: str) -> Any:
    return model.get_submodule(name).weight


def copy_factors(model: "PreTrainedModel", linear: str, factors: "torch.Tensor") -> None:
    """Give the residual that reads the same tensor as a linear the factors of its input, in place."""
    name = family_of(model.config).residual_read_by(linear)
    quantizer: Any = getattr(model.get_submodule(name), RESIDUAL_QUANTIZER, None) if name else None
    if quantizer is not None and quantizer.is_enabled:
        quantizer.pre_quant_scale = factors
