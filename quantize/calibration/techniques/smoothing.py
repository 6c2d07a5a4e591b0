"""Smoothing: move the range of outlier channels into weights, exactly (`calibration.smoothing`).

SmoothQuant (Xiao et al. 2023, arXiv 2211.10438, equation 4) divides input channel j of a linear by s_j =
max|x_j|^alpha / max|w_j|^(1 - alpha) and multiplies column j of its weight by it. "gain" takes the gain of
the LayerNorm before (Wei et al. 2022, arXiv 2209.13325). The division is a Mul before the Q, as outputs of
a LayerNorm also feed the residual, or goes into the rows of the value projection. In an INT8 attention
channel d of q is multiplied by t_d and that of k divided by it, for equal ranges (Nagel et al. 2019, arXiv
1906.04721, section 4.1); channels that rotary positions mix share one t. Linears that read the same tensor
share one s, so that their GEMMs can be merged. All are powers of two: outputs stay bit for bit until
something is quantized.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.calibration.fakequant.quantizers import RESIDUAL_QUANTIZER, hooked, quantizers_off
from qdqbench.quantize.calibration.techniques import Change
from qdqbench.quantize.models.families.family import Family, LinearRows
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.recipe.plan import QKV_ROLES, Plan, folds_kv_bias, get_linears
from qdqbench.quantize.utils.arrays import Float64
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.schema import Strict

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ALPHA = 0.65  # of SmoothQuant, that comparisons try where the recipe does not smooth
SEARCHED = ("none", "gain", "0.3", "0.5", "0.65", "0.8")
LARGEST_FACTOR = 2.0**8  # of one channel against the others; keeps what is divided inside FP16


class Smoothing(Strict):
    """Factors that move the range of activations into weights; together they change no output.

    Powers of two, so that every product with them is exact, in FP16 too.
    """

    inputs: dict[str, list[float]] = {}  # linear -> factor of each input channel, applied before its Q
    columns: dict[str, list[float]] = {}  # linear -> factor of each weight column
    rows: dict[str, list[float]] = {}  # linear -> factor of each weight row and bias element


def list_changes(smoothing: Smoothing) -> list[Change]:
    return [
        (
            "smoothing",
            len(smoothing.inputs),
            "linear",
            "The input channels of {} are multiplied by powers of two, which their weights undo "
            "(SmoothQuant).",
        ),
        (
            "scaled rows",
            len(smoothing.rows),
            "linear",
            "The rows of {} (q, k, v) are scaled by powers of two, undone in scores or after the attention.",
        ),
    ]


@dataclass
class Ranges:
    """Minus the smallest and the largest value of each channel, float64 [2, channels], by linear."""

    inputs: dict[str, Float64]
    outputs: dict[str, Float64]


def measure_ranges(
    model: "PreTrainedModel",
    plan: Plan,
    run: Callable[["PreTrainedModel"], None],
    also: Iterable[str] = (),
) -> Ranges:
    """Measure the inputs of linears that the plan smooths and `also`, and q, k and v where factors need them.

    `run` passes the calibration data through the model once, without quantization; not called where there is
    nothing to measure.
    """
    import torch

    inputs = dict.fromkeys([*_smoothed(plan, plan.int8), *also])
    outputs = {made.linear for name in _smoothed(plan, plan.attention) for made in _made_scores(plan, name)}
    outputs |= {linear for name in folds_kv_bias(plan) for linear in get_linears(plan, name, *QKV_ROLES)}
    if not (inputs or outputs):
        return Ranges({}, {})
    read: dict[str, torch.Tensor] = {}
    made: dict[str, torch.Tensor] = {}

    def widen(edges: "dict[str, torch.Tensor]", name: str, _: Any, *passed: Any) -> None:
        value = passed[-1][0] if edges is read else passed[-1]
        flat = value.detach().flatten(0, -2)
        seen = torch.stack([-flat.amin(dim=0), flat.amax(dim=0)])
        edges[name] = seen.maximum(edges.get(name, seen))

    before, behind = partial(widen, read), partial(widen, made)
    with hooked(model, inputs, before, before=True), hooked(model, outputs, behind), quantizers_off(model):
        run(model)
    sides = ({name: edges.double().cpu().numpy() for name, edges in side.items()} for side in (read, made))
    return Ranges(*sides)


def smooth(model: "PreTrainedModel", plan: Plan, ranges: Ranges) -> Smoothing:
    """Choose the factors from what `measure_ranges` saw, and apply them to a model with quantizers, in place.

    q and k of attentions that fold biases stay as they are. UserError: "gain" without a LayerNorm before.
    """
    wanted, heads = _smoothed(plan, plan.int8), _smoothed(plan, plan.attention)
    if not (wanted or heads):
        return Smoothing()
    readers, gains = _trace_inputs(model, list(wanted))
    lost = [name for name, how in wanted.items() if how == "gain" and name not in gains]
    if lost:
        raise UserError(
            f"smoothing: gain needs a LayerNorm before the linear, which {name_list(lost)} do not have; give "
            "an alpha such as 0.5 or none for them"
        )
    moved = Smoothing()
    for name, how in wanted.items():  # of output projections into the rows of the value projections
        if plan.family.role(name) == "output" and how != "gain":
            scale = _choose_scales(model, [name], ranges, how)
            moved.columns[name] = scale.tolist()
            _scale_rows(moved, model, plan.family.made_by(name, "value"), 1 / scale)
    folded = folds_kv_bias(plan)
    for name in (name for name in heads if name not in folded):
        query, key = _made_scores(plan, name)
        size = int(getattr(model.get_submodule(name), plan.family.head_size))
        ours, theirs = (_head_ranges(ranges, made, size, plan.family) for made in (query, key))
        balance = _power_of_two(np.sqrt(_ratio(theirs, ours)))
        _scale_rows(moved, model, query, balance)
        _scale_rows(moved, model, key, 1 / balance)
    apply_factors(model, moved)
    divided = Smoothing()  # inputs divided before their Q; one factor for all readers of a tensor
    for group in readers:
        members = [name for name in group if name not in moved.columns]
        for how in dict.fromkeys(wanted[name] for name in members):
            same = [name for name in members if wanted[name] == how]
            scale = gains[same[0]] if how == "gain" else _choose_scales(model, same, ranges, how)
            divided.inputs |= dict.fromkeys(same, (1 / scale).tolist())
            divided.columns |= dict.fromkeys(same, scale.tolist())
    apply_factors(model, divided)
    return Smoothing(inputs=divided.inputs, columns=moved.columns | divided.columns, rows=moved.rows)


def _smoothed(plan: Plan, names: Iterable[str]) -> dict[str, Any]:
    by_name = {name: plan.scaling_of(name).smoothing for name in names}
    return {name: how for name, how in by_name.items() if how != "none"}


def _made_scores(plan: Plan, attention: str) -> tuple[LinearRows, LinearRows]:
    return plan.family.made_by(attention, "query"), plan.family.made_by(attention, "key")


def _head_ranges(ranges: Ranges, made: LinearRows, size: int, family: Family) -> Float64:
    """Return the largest magnitude of each channel of q or k; equal for a pair that is rotated together."""
    largest: Float64 = ranges.outputs[made.linear].max(axis=0).reshape(made.parts, -1)[made.part]
    if family.rotary:
        pairs = largest.reshape(-1, 2, size // 2)
        largest = np.broadcast_to(pairs.max(axis=1, keepdims=True), pairs.shape).ravel()
    return largest


def _scale_rows(moved: Smoothing, model: "PreTrainedModel", made: LinearRows, factors: Float64) -> None:
    before = moved.rows.get(made.linear) or [1.0] * len(get_weight(model, made.linear))
    parts = np.reshape(np.array(before), (made.parts, -1))
    parts[made.part] *= factors
    moved.rows[made.linear] = parts.ravel().tolist()


def apply_factors(model: "PreTrainedModel", smoothing: Smoothing) -> None:
    """Multiply weights, and set the factors of inputs (ModelOpt's `pre_quant_scale`), in place."""
    linears: dict[str, Any] = dict(model.named_modules())
    for name, factors in smoothing.rows.items():
        linear = linears[name]
        linear.weight.data *= linear.weight.new_tensor(factors)[:, None]
        if linear.bias is not None:
            linear.bias.data *= linear.bias.new_tensor(factors)
    for name, factors in smoothing.columns.items():
        weight = linears[name].weight
        weight.data *= weight.new_tensor(factors)
    for name, factors in smoothing.inputs.items():
        quantizers = [linears[name].input_quantizer]
        if residual := family_of(model.config).residual_read_by(name):  # of the same tensor
            quantizer = linears.get(f"{residual}.{RESIDUAL_QUANTIZER}")
            quantizers += [quantizer] if quantizer is not None and quantizer.is_enabled else []
        for quantizer in quantizers:
            quantizer.pre_quant_scale = linears[name].weight.new_tensor(factors)


def remove_factors(model: "PreTrainedModel", smoothing: Smoothing) -> "dict[str, torch.Tensor]":
    """Return the weights of a fake-quant model without factors: a state dict that needs no quantizers.

    Without quantizers both compute the same, and `apply_factors` on these gives the model's own back bit for
    bit: every factor is a power of two. Tensors without factors are not copied.
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


def _choose_scales(model: "PreTrainedModel", names: list[str], ranges: Ranges, alpha: float | str) -> Float64:
    """Return powers of two [K] for the input that linears share; 1 for channels that are always zero."""
    largest = np.max([column_ranges(get_weight(model, name)) for name in names], axis=0)
    inputs = ranges.inputs[names[0]].max(axis=0)
    return _power_of_two(_ratio(inputs ** float(alpha), largest ** (1 - float(alpha))))


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


def _trace_inputs(model: "PreTrainedModel", names: list[str]) -> tuple[list[list[str]], dict[str, Float64]]:
    """Return the linears that read each tensor, and by linear the LayerNorm's gain before, powers of two."""
    import torch
    from torch import nn

    readers: dict[int, list[str]] = defaultdict(list)
    norms: dict[int, nn.LayerNorm] = {}
    alive: list[torch.Tensor] = []  # storage that is freed would be used again, and taken for the same tensor

    def note_norm(_: str, module: Any, __: Any, output: torch.Tensor) -> None:
        alive.append(output)
        norms[output.data_ptr()] = module

    def note_reader(name: str, _: Any, inputs: tuple[Any, ...]) -> None:
        alive.append(inputs[0])
        readers[inputs[0].data_ptr()].append(name)

    every = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    behind, before = hooked(model, every, note_norm), hooked(model, names, note_reader, before=True)
    with behind, before, quantizers_off(model), torch.inference_mode():
        model(torch.ones(1, 8, dtype=torch.long, device=model.device))
    gains: dict[str, Float64] = {}
    for pointer, members in readers.items():
        if pointer in norms:
            gain = norms[pointer].weight.detach().abs().double().cpu().numpy()
            gains |= dict.fromkeys(members, _power_of_two(gain))
    return list(readers.values()), gains


def get_weight(model: "PreTrainedModel", name: str) -> Any:
    return model.get_submodule(name).weight
