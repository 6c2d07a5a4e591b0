"""Centering: INT8 codes are symmetric, and many activations are not (`calibration.centering`).

Both forms are exact before quantization and cost no kernel:

- the bias of a LayerNorm loses the middle of each channel's range. The biases of the linears that read it
  make up for that, and so does that of the linear to which the residual is added (Wei et al. 2023, "Outlier
  Suppression+", arXiv 2304.09145, section 4.1);
- GELU gives nothing under -0.17: a constant is subtracted from the input of the second feed-forward linear
  before its Q. The bias of this linear has the constant times the sums of its weight's rows: of the rounded
  weight where it is quantized. Zero has a code of its own, as with zero points (Jacob et al. 2018, arXiv
  1712.05877, section 2.1). Most values are near zero, and would share an error of either kind.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qdqbench.quantize.calibration.fakequant.quantizers import INT8_MAX, round_weight
from qdqbench.quantize.calibration.techniques import Change
from qdqbench.quantize.calibration.techniques.bias_correction import apply_biases
from qdqbench.quantize.calibration.techniques.smoothing import Ranges
from qdqbench.quantize.models.rounding import set_rounding
from qdqbench.quantize.recipe.plan import QKV_ROLES, Plan, list_bias_free_linears
from qdqbench.quantize.utils.arrays import Float64
from qdqbench.quantize.utils.schema import Strict

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LIKE = 8  # channels that may reach further than the range that is centered: splitting takes care of these
LEAST_GAIN = 0.9  # of the range, that is left where a constant is worth its subtraction


class Shift(Strict):
    """A shift of what a LayerNorm makes, which biases behind it take out again."""

    maker: str  # module whose bias makes the shift
    state: int | None = None  # number of the hidden state that is shifted; None: inside a layer
    added: dict[str, list[float]]  # module -> what is added to its bias before all else, float32 values
    # root mean square of what a folded bias of q did to scores and the shift does not; None: none is folded
    rest: float | None = None


class Centering(Strict):
    """Constants that are subtracted from the inputs of linears before their Q."""

    inputs: dict[str, float] = {}  # linear -> constant, exact in FP16
    biases: dict[str, list[float]] = {}  # linear -> what its bias has for it, float32 values
    rounding: dict[str, list[float]] = {}  # linear -> what it adds to this where its input is quantized


def list_changes(centering: Centering, shifts: Mapping[str, Shift]) -> list[Change]:
    return [
        (
            "centered inputs",
            sum(shift.rest is None for shift in shifts.values()),
            "LayerNorm",
            "The channels that {} make are moved by the middles of their ranges, which biases behind undo.",
        ),
        (
            "centered activations",
            len(centering.inputs),
            "linear",
            "A constant is subtracted from the inputs of {} before their Q; their biases make up for it.",
        ),
    ]


class NormOutput(NamedTuple):
    """A tensor that linears of one layer and its residual read, and nothing else."""

    maker: str
    readers: tuple[str, ...]
    adder: str  # linear whose output it is added to
    state: int | None


def list_centered(model: "PreTrainedModel", plan: Plan) -> dict[str, NormOutput]:
    """List what can be centered in front of INT8 linears, by the first linear that reads it.

    Not where a module has no bias to take the shift, nor where it goes to several runs of a layer or is not
    known. The input of q, k and v without biases is left to `qkv_bias_folding`.
    """
    family, linears = plan.family, [*plan.int8, *plan.high]
    tensors: list[NormOutput] = []
    for output in linears if family.layer_end else ():
        place, role = family.place(output), family.role(output)
        if place is None or role not in {"output", "ffn-out"}:
            continue
        if role == "output":
            if family.terms:  # of scores, which go through the linears of q and k with their biases
                continue
            readers = [family.made_by(output, each).linear for each in QKV_ROLES]
            maker, state = family.read_by(output, linears), place.number
        else:
            readers, state = [family.require_beside(output, "ffn-in")], None
            norm = next((path for path, what in family.norms.items() if what == "attention"), None)
            maker = norm and f"{place.layers}.{place.number}.{norm}"
        if maker:
            tensors.append(NormOutput(maker, tuple(dict.fromkeys(readers)), output, state))
    free = list_bias_free_linears(plan)
    return {
        tensor.readers[0]: tensor
        for tensor in tensors
        if free.isdisjoint(tensor.readers)
        and not {*tensor.readers}.isdisjoint(plan.int8)
        and all(_has_bias(model, name) for name in (tensor.maker, *tensor.readers, tensor.adder))
    }


def _has_bias(model: "PreTrainedModel", name: str) -> bool:
    return getattr(model.get_submodule(name), "bias", None) is not None


def make_shift(
    model: "PreTrainedModel", tensor: NormOutput, values: Float64, rest: float | None = None
) -> Shift:
    """Return the shift of a tensor by `values` [channels], for a model whose weights are its own yet."""
    values = values.astype(np.float32).astype(np.float64)
    added = {tensor.maker: values, tensor.adder: -values}
    for name in tensor.readers:
        weight: Any = model.get_submodule(name).weight
        added[name] = -(weight.detach().double().cpu().numpy() @ values)
    as_lists = {module: delta.astype(np.float32).tolist() for module, delta in added.items()}
    return Shift(maker=tensor.maker, state=tensor.state, added=as_lists, rest=rest)


def shift_edges(edges: Float64, values: Float64 | float) -> Float64:
    """Return minus the smallest and the largest value, [2, channels], of what is shifted by `values`."""
    moved: Float64 = edges + np.array([[-1.0], [1.0]]) * values
    return moved


def find_middle(edges: Float64) -> Float64:
    middle: Float64 = (edges[1] - edges[0]) / 2
    return middle


def center_norms(
    model: "PreTrainedModel", tensors: Mapping[str, NormOutput], ranges: Ranges
) -> dict[str, Shift]:
    """Choose the shifts that center tensors, by their first reader; `ranges` become those of the shifted."""
    shifts = {}
    for name, tensor in tensors.items():
        values = -find_middle(ranges.inputs[name])
        shifts[name] = make_shift(model, tensor, values)
        for reader in tensor.readers:
            if reader in ranges.inputs:
                ranges.inputs[reader] = shift_edges(ranges.inputs[reader], values)
    return shifts


def choose_constants(model: "PreTrainedModel", linears: Iterable[str], ranges: Ranges) -> dict[str, float]:
    """Choose what is subtracted from the inputs of INT8 linears; `ranges` become those of the centered."""
    chosen = {}
    for name in linears:
        if not _has_bias(model, name):
            continue
        low, high = (float(np.sort(edge)[-min(LIKE + 1, len(edge))]) for edge in ranges.inputs[name])
        constant = float(np.float16((high - low) / 2))
        if (high + low) / 2 < LEAST_GAIN * max(high, low):
            chosen[name] = constant
            ranges.inputs[name] = shift_edges(ranges.inputs[name], -constant)
    return chosen


def compute_biases(model: "PreTrainedModel", constants: Mapping[str, float]) -> Centering:
    """Compute what makes up for the constants, after all that changes the weights and factors of linears."""
    linears: dict[str, Any] = {name: model.get_submodule(name) for name in constants}
    biases = {name: _weigh(each, constants[name], each.weight.detach()) for name, each in linears.items()}
    return Centering(inputs=dict(constants), biases=biases)


def _weigh(linear: Any, constant: float, weight: "torch.Tensor") -> list[float]:
    """Return what a weight [N, K] makes of a constant in all K channels of its input, float32 values [N]."""
    weight, factors = weight.double(), linear.input_quantizer.pre_quant_scale
    sums = weight.sum(dim=1) if factors is None else weight @ factors.double().flatten()
    values: list[float] = (constant * sums).float().cpu().tolist()
    return values


def give_zero_a_code(model: "PreTrainedModel", centering: Centering) -> None:
    """Enlarge the amax behind each constant until the constant is a whole number of steps."""
    for name, constant in centering.inputs.items():
        quantizer: Any = model.get_submodule(name).input_quantizer
        steps = (abs(constant) * INT8_MAX / quantizer.amax).floor().clamp_(min=1)
        quantizer.amax = (abs(constant) * INT8_MAX / steps).maximum(quantizer.amax)


def add_rounding(model: "PreTrainedModel", centering: Centering) -> Centering:
    """Add what rounding of the weights makes of the constants, for weights whose amax is known; in place."""
    rounding = {}
    for name, constant in centering.inputs.items():
        linear: Any = model.get_submodule(name)
        weight = linear.weight.detach()
        rounding[name] = _weigh(linear, constant, round_weight(weight, linear.weight_quantizer) - weight)
        set_rounding(linear, rounding[name])
    return centering.model_copy(update={"rounding": rounding})


def apply_centering(model: "PreTrainedModel", centering: Centering) -> None:
    """Subtract the constants in front of the linears, and give these their biases, in place."""
    for name, constant in centering.inputs.items():
        model.get_submodule(name).register_forward_pre_hook(partial(_subtract, constant))
    apply_biases(model, centering.biases)
    for name, values in centering.rounding.items():
        set_rounding(model.get_submodule(name), values)


def _subtract(constant: float, _: Any, inputs: "tuple[torch.Tensor, ...]") -> "tuple[torch.Tensor, ...]":
    return (inputs[0] - constant, *inputs[1:])


def take_out_biases(
    model: "PreTrainedModel", centering: Centering, weights: "dict[str, torch.Tensor]"
) -> "dict[str, torch.Tensor]":
    """Return a state dict whose biases lack those of centering, of a model that may have been trained.

    The model's own biases become what `apply_centering` makes of these, which may differ in the last bit.
    """
    plain = dict(weights)
    for name, added in centering.biases.items():
        bias: Any = model.get_submodule(name).bias
        step = bias.new_tensor(added)
        plain[f"{name}.bias"] = bias.data - step
        bias.data.copy_(plain[f"{name}.bias"] + step)
    return plain
