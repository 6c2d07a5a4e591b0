"""Folding of the biases of q, k and v, so that these come straight from their GEMMs.

Where the recipe gives key and value of an INT8 attention `weights: int8/per-tensor`, no kernel stands behind
their GEMMs (the-graph.md): the bias of k, which the softmax takes out, is dropped. That of v goes through
the output projection, as rows of P sum to 1; rows of their weights get about equal ranges
(Nagel et al. 2019, arXiv 1906.04721, section 4.1).
A row of v has the largest factor that neither its weights nor its values forbid.
Where query has it too, its bias becomes a shift d of what q, k and v read, made by the LayerNorm before and
taken out of the residual: W d is the bias, but for what the keys of the calibration data do not see (ridge
regression), which is dropped.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.calibration.fakequant.quantizers import hooked
from qdqbench.quantize.calibration.techniques import Change
from qdqbench.quantize.calibration.techniques.centering import (
    NormOutput,
    Shift,
    find_middle,
    make_shift,
    shift_edges,
)
from qdqbench.quantize.calibration.techniques.smoothing import (
    Ranges,
    Smoothing,
    apply_factors,
    column_ranges,
    get_weight,
)
from qdqbench.quantize.recipe import plan as plans
from qdqbench.quantize.recipe.plan import Plan, get_linears, list_bias_free_linears
from qdqbench.quantize.utils.arrays import Float64
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# mean square of an error of scores that is as bad as a shift of every channel by half its range
RIDGE_LAMBDA = 0.01
LARGEST_REST = 0.1  # of scores, root mean square: more is told


def list_changes(plan: Plan, centers: Collection[str], shifts: Mapping[str, Shift]) -> list[Change]:
    return [
        (
            "moved biases",
            len(list_bias_free_linears(plan).intersection(centers)),
            "linear",
            "The biases of {} of q, k and v are gone; k's changes no softmax, v's is added after the "
            "attention.",
        ),
        (
            "shifted inputs",
            sum(shift.rest is not None for shift in shifts.values()),
            "INT8 attention",
            "What q, k and v of {} read is shifted where it is made, which does what the bias of q did. What "
            "else that does is taken out after the attention.",
        ),
    ]


@dataclass
class _Seen:
    """Inputs of q, k and v of one attention; tensors of K channels on the model's device."""

    low: Any = None
    high: Any = None
    spread: Any = 0.0  # sum over samples of the covariance of their tokens, float64 [K, K]
    samples: int = 0

    def add(self, x: "torch.Tensor") -> None:
        flat = x.detach().flatten(0, -2)
        low, high = flat.amin(dim=0), flat.amax(dim=0)
        self.low = low if self.low is None else low.minimum(self.low)
        self.high = high if self.high is None else high.maximum(self.high)
        centered = (x - x.mean(dim=1, keepdim=True)).detach().flatten(0, -2)
        self.spread = self.spread + (centered.T @ centered).double() / x.shape[1]
        self.samples += len(x)


@contextmanager
def record_inputs(model: "PreTrainedModel", plan: Plan) -> Iterator[dict[str, _Seen]]:
    """Record what q, k and v read in each attention to be shifted, while calibration data go through."""
    makers = plans.folds_q_bias(plan)
    seen = {name: _Seen() for name in makers}
    attentions = {get_linears(plan, name, "query")[0]: name for name in makers}
    outputs: dict[str, Any] = {}

    def keep(maker: str, _: Any, __: Any, output: Any) -> None:
        outputs[maker] = output

    def read(query: str, _: Any, inputs: tuple[Any, ...]) -> None:
        name, x = attentions[query], inputs[0]
        output = outputs.pop(makers[name], None)
        # a family of a recipe's own may name a wrong module
        if output is None or output.shape != x.shape or not output.nan_to_num().equal(x.nan_to_num()):
            raise UserError(
                f"q, k and v of {name} do not read what {makers[name]} makes, so nothing can replace the "
                "bias of q; give their query weights: int8/per-channel, or fix model.layout of the "
                "recipe"
            )
        seen[name].add(x)

    with hooked(model, makers.values(), keep), hooked(model, attentions, read, before=True):
        yield seen


def choose_shifts(
    model: "PreTrainedModel", plan: Plan, seen: dict[str, _Seen], ranges: Ranges, *, centered: bool = False
) -> tuple[dict[str, Shift], list[str]]:
    """Choose the shifts for a model whose weights are its own yet; they change no answer.

    `ranges` of what q, k and v read become those of the shifted: near the middle if `centered`. Returns the
    shifts by attention whose q has a bias, and a warning where much of what one does is left out.
    """
    shifts: dict[str, Shift] = {}
    makers = plans.folds_q_bias(plan)
    for name, stats in seen.items():
        if not _needs_shift(model, plan, name, makers[name]):
            continue
        linears = get_linears(plan, name, *plans.QKV_ROLES)
        modules: list[Any] = [model.get_submodule(linear) for linear in linears]
        weights = [module.weight.detach().double().cpu().numpy() for module in modules]
        low, high = (edge.double().cpu().numpy() for edge in (stats.low, stats.high))
        bias = modules[0].bias.detach().double().cpu().numpy()
        size = int(getattr(model.get_submodule(name), plan.family.head_size))
        spread, edges = stats.spread.cpu().numpy() / stats.samples, np.stack([-low, high])
        start = -find_middle(edges) if centered else np.zeros_like(low)
        left = bias - weights[0] @ start
        values, rest = solve_shift(weights[0], weights[1], left, size, spread, (high - low) / 2)
        values = (start + values).astype(np.float32).astype(np.float64)
        (output,) = get_linears(plan, name, "output")
        tensor = NormOutput(makers[name], tuple(linears), output, plan.family.layer_of(name))
        shifts[name] = make_shift(model, tensor, values, rest)
        moved = shift_edges(edges, values)
        ranges.inputs |= {linear: moved for linear in linears if linear in ranges.inputs}
    rests = {name: shift.rest or 0.0 for name, shift in shifts.items()}
    lost = {name: rest for name, rest in rests.items() if rest > LARGEST_REST}
    warning = (
        f"the scores of {name_list(lost)} lose part of what the bias of q adds, up to a root mean "
        f"square of {max(lost.values(), default=0):.2f}; keep it with weights: int8/per-channel for their "
        "query"
    )
    return shifts, [warning] if lost else []


def _needs_shift(model: "PreTrainedModel", plan: Plan, attention: str, maker: str) -> bool:
    """Return whether q of an attention has a bias; all that a shift goes through must have one then."""
    through = [*get_linears(plan, attention, *plans.QKV_ROLES, "output"), maker]
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
    balanced, shared = plans.folds_q_bias(plan), plans.shares_qkv_scales(plan)
    for name in plans.folds_kv_bias(plan):
        query, key, value, output = get_linears(plan, name, *plans.QKV_ROLES, "output")
        linears = (query, key, value)
        of_query, of_key, of_value = (column_ranges(get_weight(model, linear).T) for linear in linears)
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
    dropped = [linear for name in plans.folds_kv_bias(plan) for linear in get_linears(plan, name, "key")]
    dropped += [linear for name in plans.folds_q_bias(plan) for linear in get_linears(plan, name, "query")]
    for linear in dropped:
        module: Any = model.get_submodule(linear)
        if module.bias is not None:
            added[linear] = (-module.bias.detach().float()).cpu().tolist()
    for name in plans.folds_kv_bias(plan):
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
    for name in plans.shares_qkv_scales(plan):
        yield [f"{linear}.weight_quantizer" for linear in get_linears(plan, name, *plans.QKV_ROLES)]
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
