"""Outlier channels before calibration: move their range into weights, exactly, or split it over copies.

SmoothQuant (Xiao et al. 2023, arXiv 2211.10438, equation 4) divides input channel j of a linear by s_j =
max|x_j|^alpha / max|w_j|^(1 - alpha) and multiplies column j of its weight by it. "gain" takes the gain of
the LayerNorm before (Wei et al. 2022, arXiv 2209.13325). The division is a Mul before the Q, as outputs of
a LayerNorm also feed the residual, or goes into the rows of the value projection. In an INT8 attention
channel d of q is multiplied by t_d and that of k divided by it, for equal ranges (Nagel et al. 2019, arXiv
1906.04721, section 4.1); channels that rotary positions mix share one t. Linears that read the same tensor
share one s, so that their GEMMs can be merged. All are powers of two: outputs stay bit for bit until
something is quantized.

One or two channels of a feed-forward carry a massive activation (Sun et al. 2024, arXiv 2402.17762) and
meet a weight of like size (Yu et al. 2024, arXiv 2411.07191), so that no factor helps. Zhao et al. 2019
(arXiv 1901.09504) split such a channel: n copies of it, each with 1/n of the product, n a power of two. The
copies are rows of the first linear (and of its gate) and columns of the second. Each divides its activation
a little more than the one before, and its weight less (`SPREAD`), or all would be rounded in the same
direction. Weights are divided only where they have one scale for all rows.

Where the recipe gives key and value of an INT8 attention `weights: int8/per-tensor`, no kernel stands behind
their GEMMs (the-graph.md): the bias of k, which the softmax takes out, is dropped. That of v goes through
the output projection, as rows of P sum to 1; rows of their weights get about equal ranges (Nagel, as above).
A row of v has the largest factor that neither its weights nor its values forbid.
Where query has it too, its bias becomes a shift d of what q, k and v read, made by the LayerNorm before and
taken out of the residual: W d is the bias, but for what the keys of the calibration data do not see (ridge
regression), which is dropped.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.calibration.fakequant.quantizers import RESIDUAL_QUANTIZER, quantizers_off
from qdqbench.quantize.calibration.record import ChannelSplit, Shift, Smoothing
from qdqbench.quantize.models.families.family import Family, LinearRows, Role
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.recipe.plan import Plan, folds_kv_bias, folds_q_bias, get_linears, shares_qkv_scales
from qdqbench.quantize.utils.arrays import Float64, Int64
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.names import name_list

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LARGEST_FACTOR = 2.0**8  # of one channel against the others; keeps what is divided inside FP16
LIKE = 8  # a channel is an outlier against the range that this many others reach
SPREAD = 1 / 16  # of the copies of a channel: the last divides its activation by so much more than the first
FP16_STEPS = 1024
ROLES: tuple[Role, ...] = ("query", "key", "value")
# mean square of an error of scores that is as bad as a shift of every channel by half its range
RIDGE_LAMBDA = 0.01
LARGEST_REST = 0.1  # of scores, root mean square: more is told


@dataclass
class Ranges:
    """Ranges of each channel, float64, by module."""

    inputs: dict[str, Float64]  # largest magnitude, [channels]
    outputs: dict[str, Float64]  # minus the smallest and the largest value, [2, channels]


def measure_ranges(
    model: "PreTrainedModel",
    plan: Plan,
    run: Callable[["PreTrainedModel"], None],
    also: Iterable[str] = (),
    *,
    always: bool = False,
) -> Ranges:
    """Measure the inputs of linears that the plan smooths and `also`, and q, k and v where factors need them.

    `run` passes the calibration data through the model once, without quantization; not called where there is
    nothing to measure, unless `always`, where others watch meanwhile.
    """
    import torch

    inputs = [*_smoothed(plan, plan.int8), *also]
    outputs = {made.linear for name in _smoothed(plan, plan.attention) for made in _made_scores(plan, name)}
    outputs |= {linear for name in folds_kv_bias(plan) for linear in get_linears(plan, name, *ROLES)}
    if not (inputs or outputs or always):
        return Ranges({}, {})
    ranges: dict[str, dict[str, Any]] = {"inputs": {}, "outputs": {}}

    def keep(side: str, name: str, largest: "torch.Tensor") -> None:
        before = ranges[side].get(name)
        ranges[side][name] = largest if before is None else largest.maximum(before)

    def before(name: str, _: Any, values: tuple[Any, ...]) -> None:
        keep("inputs", name, values[0].detach().flatten(0, -2).abs().amax(dim=0))

    def after(name: str, _: Any, __: Any, output: "torch.Tensor") -> None:
        flat = output.detach().flatten(0, -2)
        keep("outputs", name, torch.stack([-flat.amin(dim=0), flat.amax(dim=0)]))

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


def smooth(model: "PreTrainedModel", plan: Plan, ranges: Ranges, left: Collection[str] = ()) -> Smoothing:
    """Choose the factors from what `measure_ranges` saw, and apply them to a model with quantizers, in place.

    The q and k of attentions in `left` stay as they are. UserError: "gain" without a LayerNorm before.
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
    for name in (name for name in heads if name not in left):
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
    before = moved.rows.get(made.linear) or [1.0] * len(_weight(model, made.linear))
    parts = np.reshape(np.array(before), (made.parts, -1))
    parts[made.part] *= factors
    moved.rows[made.linear] = parts.ravel().tolist()


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
            if residual := family_of(model.config).residual_read_by(name):  # of the same tensor
                quantizer: Any = getattr(model.get_submodule(residual), RESIDUAL_QUANTIZER, None)
                if quantizer is not None and quantizer.is_enabled:
                    quantizer.pre_quant_scale = linear.weight.new_tensor(factors)


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
    largest = np.max([column_ranges(_weight(model, name)) for name in names], axis=0)
    return _power_of_two(_ratio(ranges.inputs[names[0]] ** float(alpha), largest ** (1 - float(alpha))))


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

    def note_norm(module: Any, _: Any, output: torch.Tensor) -> None:
        alive.append(output)
        norms[output.data_ptr()] = module

    def note_reader(name: str, _: Any, inputs: tuple[Any, ...]) -> None:
        alive.append(inputs[0])
        readers[inputs[0].data_ptr()].append(name)

    with ExitStack() as hooks, quantizers_off(model), torch.inference_mode():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                hooks.enter_context(module.register_forward_hook(note_norm))
        for name in names:
            reader = model.get_submodule(name)
            hooks.enter_context(reader.register_forward_pre_hook(partial(note_reader, name)))
        model(torch.ones(1, 8, dtype=torch.long, device=model.device))
    gains: dict[str, Float64] = {}
    for pointer, members in readers.items():
        if pointer in norms:
            gain = norms[pointer].weight.detach().abs().double().cpu().numpy()
            gains |= dict.fromkeys(members, _power_of_two(gain))
    return list(readers.values()), gains


def _weight(model: "PreTrainedModel", name: str) -> Any:
    return model.get_submodule(name).weight


def choose_channels(activations: Float64, weights: Float64, extra: int) -> ChannelSplit:
    """Halve what stands out most, again and again, while its copies fit into `extra` channels.

    Both ranges are the largest magnitudes of the K channels: in the activation, and in the weight's columns,
    or all equal where columns are not to be divided.
    Extra channels that no outlier needs are filled with zero columns.
    """
    by_input, by_weight = np.ones(len(activations), dtype=np.int64), np.ones(len(weights), dtype=np.int64)
    room = extra
    while True:
        tops = [(_outlier(activations / by_input), by_input), (_outlier(weights / by_weight), by_weight)]
        fitting = [
            (ratio, channel, parts)
            for (ratio, channel), parts in tops
            if ratio > 1 and by_input[channel] * by_weight[channel] <= room
        ]
        if not fitting:
            break
        _, channel, parts = max(fitting, key=lambda top: top[0])
        room -= int(by_input[channel] * by_weight[channel])
        parts[channel] *= 2
    outliers = np.flatnonzero(by_input * by_weight > 1).tolist()
    return ChannelSplit(extra=extra, outliers={n: (int(by_input[n]), int(by_weight[n])) for n in outliers})


def _outlier(ranges: Float64) -> tuple[float, int]:
    order = np.argsort(-ranges, kind="stable")
    largest, like = float(ranges[order[0]]), float(ranges[order[min(LIKE, len(order) - 1)]])
    return (largest / like if like > 0 else 1.0), int(order[0])


def apply_copies(model: "PreTrainedModel", splits: dict[str, ChannelSplit]) -> None:
    import torch
    from torch import nn

    family = family_of(model.config)
    for name, split in splits.items():
        first, second = _linears(model, name)
        layout, device = make_split_layout(split, second.in_features), second.weight.device
        index = torch.from_numpy(layout.channels).to(device)
        rows = torch.from_numpy(_list_rows(layout.channels, second.in_features, family)).to(device)
        with torch.no_grad():
            first.weight = nn.Parameter(first.weight[rows])
            if first.bias is not None:
                first.bias = nn.Parameter(first.bias[rows])
            second.weight = nn.Parameter(second.weight[:, index] * second.weight.new_tensor(layout.columns))
        first.out_features, second.in_features = len(rows), len(index)
        second.input_quantizer.pre_quant_scale = second.weight.new_tensor(layout.inputs)
    if len(splits) == len(family.layer_names(model)):
        setattr(model.config, family.intermediate, len(index))  # so that it can be saved, and loaded again


def keep_equal(model: "PreTrainedModel", splits: dict[str, ChannelSplit]) -> Callable[[], None]:
    """Let copies follow their original bit for bit; call it after each step of a training."""
    import torch

    ties, family = [], family_of(model.config)
    for name, split in splits.items():
        first, second = _linears(model, name)
        wide, device = second.in_features, second.weight.device
        width = wide - split.extra
        layout = make_split_layout(split, width)
        index = torch.from_numpy(layout.channels[width:]).to(device)
        copies = torch.from_numpy(_list_rows(np.arange(width, wide), wide, family)).to(device)
        own = torch.from_numpy(_list_rows(layout.channels[width:], wide, family)).to(device)
        # a power of two lies between the two, so this product has the bits of that in `apply_copies`
        columns = layout.columns[width:] / layout.columns[layout.channels[width:]]
        ties.append((first, second, (copies, own), (width, index), second.weight.new_tensor(columns)))

    def tie() -> None:
        with torch.no_grad():
            for first, second, (copies, own), (width, index), columns in ties:
                first.weight[copies] = first.weight[own]
                if first.bias is not None:
                    first.bias[copies] = first.bias[own]
                second.weight[:, width:] = second.weight[:, index] * columns

    return tie


def remove_copies(
    weights: "dict[str, torch.Tensor]", splits: dict[str, ChannelSplit], family: Family
) -> "dict[str, torch.Tensor]":
    """Return a state dict without copies; `apply_copies` makes them again bit for bit if kept equal."""
    merged = dict(weights)
    for name, split in splits.items():
        key = f"{name}.weight"
        wide = weights[key].shape[1]
        width = wide - split.extra
        rows = _list_rows(np.arange(width), wide, family)
        columns = make_split_layout(split, width).columns[:width]
        merged[key] = weights[key][:, :width] / weights[key].new_tensor(columns)  # powers of two
        for part in ("weight", "bias"):
            if (key := f"{family.require_beside(name, 'ffn-in')}.{part}") in weights:
                merged[key] = weights[key][rows]
    return merged


def _list_rows(channels: Int64, width: int, family: Family) -> Int64:
    """Return the rows of the first linear, gates included, that make these of `width` channels."""
    return np.concatenate([channels + half * width for half in range(1 + family.gated)])


@dataclass(frozen=True)
class SplitLayout:
    """The channels of a feed-forward with copies: its own, then copies, then filling. All [K + extra]."""

    channels: Int64  # which one each is; filling is the first one, with a column of zeros
    inputs: Float64  # what multiplies the activation before its Q; fits FP16
    columns: Float64  # what multiplies the column of the weight; powers of two for the first K


def make_split_layout(split: ChannelSplit, width: int) -> SplitLayout:
    channels, spread = list(range(width)), [0.0] * width
    inputs, columns = np.ones(width), np.ones(width)
    for channel, (by_input, by_weight) in split.outliers.items():
        copies = by_input * by_weight
        channels += [channel] * (copies - 1)
        spread += [np.rint(SPREAD * n / copies * FP16_STEPS) / FP16_STEPS for n in range(1, copies)]
        inputs[channel], columns[channel] = 1 / by_input, 1 / by_weight
    filling = width + split.extra - len(channels)
    kept = np.array([1.0] * len(channels) + [0.0] * filling)
    less = 1 - np.array([*spread, *[0.0] * filling])
    index = np.array([*channels, *[0] * filling], dtype=np.int64)
    return SplitLayout(index, inputs[index] * less, columns[index] * kept / less)


def _linears(model: "PreTrainedModel", name: str) -> tuple[Any, Any]:
    first = family_of(model.config).require_beside(name, "ffn-in")
    return model.get_submodule(first), model.get_submodule(name)


@dataclass
class _Seen:
    """Inputs of q, k and v of one attention; tensors of K channels on the model's device."""

    low: Any = np.inf
    high: Any = -np.inf
    spread: Any = 0.0  # sum over samples of the covariance of their tokens, float64 [K, K]
    samples: int = 0

    def add(self, x: "torch.Tensor") -> None:
        import torch

        flat = x.detach().flatten(0, -2)
        self.low = torch.minimum(torch.as_tensor(self.low).to(flat), flat.amin(dim=0))
        self.high = torch.maximum(torch.as_tensor(self.high).to(flat), flat.amax(dim=0))
        centered = (x - x.mean(dim=1, keepdim=True)).detach().flatten(0, -2)
        self.spread = self.spread + (centered.T @ centered).double() / x.shape[1]
        self.samples += len(x)


@contextmanager
def record_inputs(model: "PreTrainedModel", plan: Plan) -> Iterator[dict[str, _Seen]]:
    """Record what q, k and v read in each attention to be shifted, while calibration data go through."""
    makers = folds_q_bias(plan)
    seen = {name: _Seen() for name in makers}
    outputs: dict[str, Any] = {}

    def keep(name: str, _: Any, __: Any, output: Any) -> None:
        outputs[name] = output

    def read(name: str, _: Any, inputs: tuple[Any, ...]) -> None:
        output, x = outputs.pop(name, None), inputs[0]
        # a family of a recipe's own may name a wrong module
        if output is None or output.shape != x.shape or not output.nan_to_num().equal(x.nan_to_num()):
            raise UserError(
                f"q, k and v of {name} do not read what {makers[name]} makes, so nothing can replace the "
                "bias of q; give their query weights: int8/per-channel, or fix model.layout of the "
                "recipe"
            )
        seen[name].add(x)

    with ExitStack() as hooks:
        for name, maker in makers.items():
            (query,) = get_linears(plan, name, "query")
            hooks.enter_context(model.get_submodule(maker).register_forward_hook(partial(keep, name)))
            hooks.enter_context(model.get_submodule(query).register_forward_pre_hook(partial(read, name)))
        yield seen


def choose_shifts(
    model: "PreTrainedModel", plan: Plan, seen: dict[str, _Seen], ranges: Ranges
) -> tuple[dict[str, Shift], list[str]]:
    """Choose the shifts for a model whose weights are its own yet; they change no answer.

    `ranges` of what q, k and v read become those of the shifted. Returns the shifts by attention whose q has
    a bias, and a warning where much of what one does is left out.
    """
    import torch

    shifts: dict[str, Shift] = {}
    makers = folds_q_bias(plan)
    for name, stats in seen.items():
        if not _needs_shift(model, plan, name, makers[name]):
            continue
        linears = get_linears(plan, name, *ROLES)
        modules: list[Any] = [model.get_submodule(linear) for linear in linears]
        weights = [module.weight.detach().double().cpu().numpy() for module in modules]
        low, high = (edge.double().cpu().numpy() for edge in (stats.low, stats.high))
        bias = modules[0].bias.detach().double().cpu().numpy()
        size = int(getattr(model.get_submodule(name), plan.family.head_size))
        spread = stats.spread.cpu().numpy() / stats.samples
        values, rest = solve_shift(weights[0], weights[1], bias, size, spread, (high - low) / 2)
        values = values.astype(np.float32).astype(np.float64)
        added = {makers[name]: values} | {
            linear: -weight @ values for linear, weight in zip(linears, weights, strict=True)
        }
        added |= dict.fromkeys(get_linears(plan, name, "output"), -values)
        as_lists = {module: torch.from_numpy(delta).float().tolist() for module, delta in added.items()}
        shifts[name] = Shift(added=as_lists, rest=rest)
        largest = np.maximum(np.abs(low + values), np.abs(high + values))
        ranges.inputs |= {linear: largest for linear in linears if linear in ranges.inputs}
    lost = {name: shift.rest for name, shift in shifts.items() if shift.rest > LARGEST_REST}
    warning = (
        f"the scores of {name_list(lost)} lose part of what the bias of q adds, up to a root mean "
        f"square of {max(lost.values(), default=0):.2f}; keep it with weights: int8/per-channel for their "
        "query"
    )
    return shifts, [warning] if lost else []


def _needs_shift(model: "PreTrainedModel", plan: Plan, attention: str, maker: str) -> bool:
    """Return whether q of an attention has a bias; all that a shift goes through must have one then."""
    through = [*get_linears(plan, attention, *ROLES, "output"), maker]
    without = [name for name in through if getattr(model.get_submodule(name), "bias", None) is None]
    if through[0] in without:
        return False
    if without:
        raise UserError(
            f"the bias of {through[0]} cannot go elsewhere, as {name_list(without)} have none; give their "
            "query weights: int8/per-channel"
        )
    return True


def solve_shift(  # noqa: PLR0913, PLR0917
    query: Float64, key: Float64, bias: Float64, size: int, spread: Float64, half: Float64
) -> tuple[Float64, float]:
    """Return the shift d [K] of x that best does what the bias b [N] of q does, and the rest in scores.

    d minimizes the mean square of ((b - W d) k) / sqrt(D), over heads and differences of keys k of a
    sample, plus `RIDGE_LAMBDA` times the mean square of d / half. The rest is a root mean
    square.

    Args:
        query: weight [N, K]; so is `key`.
        size: D, channels of one head.
        spread: covariance of x over the tokens of a sample, [K, K].
        half: half of the range of each channel of x, [K].
    """
    by_head = key.reshape(-1, size, key.shape[1])
    seen = by_head @ spread @ by_head.transpose(0, 2, 1) / size  # covariance of the keys, [heads, D, D]
    weighted = (seen @ query.reshape(by_head.shape)).reshape(query.shape) * half / len(seen)
    system = (query * half).T @ weighted + RIDGE_LAMBDA / len(half) * np.eye(len(half))
    values: Float64 = half * np.linalg.solve(system, weighted.T @ bias)
    rest = (bias - query @ values).reshape(-1, size)
    return values, float(np.sqrt(max(np.einsum("hi,hij,hj->h", rest, seen, rest).mean(), 0.0)))


def equalize(model: "PreTrainedModel", plan: Plan, moved: Smoothing, ranges: Ranges) -> Smoothing:
    """Equalize rows of q and k, or of k alone, and then those of v; return all factors.

    The size of a row of v is the larger of two ratios to a range: its weights, and its values without bias.
    Where q, k and v share their amax, both ranges are those of q and k, and no row of v exceeds them.
    Elsewhere they are the mean ranges of v, and its rows get about equal sizes.
    """
    rows: dict[str, list[float]] = {}
    columns: dict[str, list[float]] = {}
    balanced, shared = folds_q_bias(plan), shares_qkv_scales(plan)
    for name in folds_kv_bias(plan):
        query, key, value, output = get_linears(plan, name, *ROLES, "output")
        linears = (query, key, value)
        of_query, of_key, of_value = (column_ranges(_weight(model, linear).T) for linear in linears)
        queries, keys, values = (_remove_bias(model, linear, moved, ranges) for linear in linears)
        goal: Float64 | float = np.sqrt(of_query * of_key) if name in balanced else _mean(of_key)
        for_key = _towards(goal, of_key)
        if name in shared:
            weight = max(np.max(of_query / for_key), np.max(of_key * for_key))
            result = max(np.max(queries / for_key), np.max(keys * for_key))
            for_value = _towards(weight * result, np.maximum(of_value * result, values * weight), np.floor)
        else:
            sizes = np.maximum(of_value * _mean(values), values * _mean(of_value))
            for_value = _towards(_mean(sizes), sizes)
        rows |= {key: for_key.tolist(), query: (1 / for_key).tolist(), value: for_value.tolist()}
        columns[output] = (1 / for_value).tolist()
    apply_factors(model, Smoothing(rows=rows, columns=columns))
    return Smoothing(
        inputs=moved.inputs, columns=_times(moved.columns, columns), rows=_times(moved.rows, rows)
    )


def _remove_bias(model: "PreTrainedModel", name: str, moved: Smoothing, ranges: Ranges) -> Float64:
    """Return the largest magnitude of each output of a linear, without the bias that it has now, [N]."""
    edges = ranges.outputs[name] * np.array(moved.rows.get(name, 1.0))
    bias = getattr(model.get_submodule(name), "bias", None)
    if bias is not None:
        edges += np.array([[1.0], [-1.0]]) * bias.detach().double().cpu().numpy()
    largest: Float64 = edges.max(axis=0)
    return largest


def compute_moved_biases(model: "PreTrainedModel", plan: Plan) -> dict[str, list[float]]:
    """Return what takes the biases out of q, k and v, and v's into the output projection; float32."""
    added: dict[str, list[float]] = {}
    dropped = [linear for name in folds_kv_bias(plan) for linear in get_linears(plan, name, "key")]
    dropped += [linear for name in folds_q_bias(plan) for linear in get_linears(plan, name, "query")]
    for linear in dropped:
        module: Any = model.get_submodule(linear)
        if module.bias is not None:
            added[linear] = (-module.bias.detach().float()).cpu().tolist()
    for name in folds_kv_bias(plan):
        value, output = get_linears(plan, name, "value", "output")
        modules: dict[str, Any] = {linear: model.get_submodule(linear) for linear in (value, output)}
        if modules[value].bias is not None and modules[output].bias is not None:
            bias = modules[value].bias.detach()
            moved = modules[output].weight.detach().double() @ bias.double()
            added |= {value: (-bias.float()).cpu().tolist(), output: moved.float().cpu().tolist()}
    return added


def share_scales(plan: Plan, quantizers: dict[str, Any]) -> None:
    """Give q, k and v that are merged one amax for weights and one for results, the largest."""
    for group in group_shared_scales(plan):
        largest = max(quantizers[name].amax.max() for name in group)
        for name in group:
            quantizers[name].amax = largest.clone()


def group_shared_scales(plan: Plan) -> Iterator[list[str]]:
    """Group the quantizers that have one amax, so that an engine makes one GEMM of q, k and v."""
    for name in shares_qkv_scales(plan):
        yield [f"{linear}.weight_quantizer" for linear in get_linears(plan, name, *ROLES)]
        yield [f"{name}.{x}_bmm_quantizer" for x in "qkv"]


def _mean(ranges: Float64) -> float:
    alive = ranges[ranges > 0]
    return float(np.exp2(np.log2(alive).mean())) if len(alive) else 1.0


def _towards(
    goal: Float64 | float, ranges: Float64, to_whole: Callable[[Float64], Float64] = np.rint
) -> Float64:
    """Return powers of two that bring ranges near a goal, or below it; 1 where either is zero."""
    goals = np.broadcast_to(goal, ranges.shape)
    alive = (ranges > 0) & (goals > 0)
    exponents = np.log2(np.where(alive, goals, 1.0)) - np.log2(np.where(alive, ranges, 1.0))
    factors: Float64 = np.exp2(np.clip(to_whole(exponents), -8, 8))
    return factors


def _times(one: dict[str, list[float]], other: dict[str, list[float]]) -> dict[str, list[float]]:
    both = {name: (np.array(one[name]) * other[name]).tolist() for name in one.keys() & other.keys()}
    return one | other | both
